"""Predicates over the memory: what each argument holds, that draws follow them, and which ones are refused."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from rllib_srl.replay.selection.predicates import PREDICATES, Entry, domain_filter, sees_entries
from rllib_srl.replay.settings import ReplaySettings
from tests.replay.groups import a_buffer, a_group, a_prompt, drawn_groups

SEEN: list[Entry] = []


def failed(domain, entry):
    """Want what earned less than half."""
    return entry.reward < 0.5


def of_words(domain):
    """Want words: a predicate of one argument, as there were before there were two."""
    return domain == "words"


def never_asked(domain, entry, more):
    """Take an argument too many."""


def filled(**given):
    """Return a buffer of twelve items, of which the even ones earned .25 and the odd ones .75."""
    buffer = a_buffer(**given)
    rewards = ((1.0, 0.0, 0.0, 0.0), (1.0, 1.0, 1.0, 0.0))
    domains = ("sums", "words", "maps")
    buffer.add([a_group(a_prompt(i, domains[i // 4]), 1, i, rewards[i % 2]) for i in range(12)], 1)
    return buffer


def drawn(buffer):
    """Return the numbers of the items that are revisited, and of the groups that are reused, when all are asked for."""
    revisits = {int(prompt.prompt_id[1:]) for prompt in buffer.draw_prompts(12, 9)}
    return revisits, {int(group.prompt.prompt_id[1:]) for group in drawn_groups(buffer, 12, 9)}


def test_rewards_decide_what_is_drawn():
    even, everything = set(range(0, 12, 2)), set(range(12))
    assert drawn(filled()) == (everything, everything)
    assert drawn(filled(domains=f"{__name__}:failed")) == (even, even)
    assert drawn(filled(domains=failed)) == (even, even)
    assert drawn(filled(domains=lambda domain, entry: entry.reward < 0.5 and domain == "words")) == ({4, 6}, {4, 6})
    assert drawn(filled(domains=of_words)) == ({4, 5, 6, 7},) * 2
    assert drawn(filled(domains=lambda domain, least=3: len(domain) > least)) == (everything,) * 2


def test_what_lies_beyond_the_pool_of_candidates_is_found():
    """Of 12 items a pool holds 2: the six that are wanted are drawn all the same."""
    for wanted in ({11}, set(range(0, 12, 2))):
        buffer = filled(domains=lambda domain, entry, w=wanted: int(entry.prompt.prompt_id[1:]) in w)
        assert {int(p.prompt_id[1:]) for p in buffer.draw_prompts(len(wanted), 9)} == wanted
        assert {int(g.prompt.prompt_id[1:]) for g in drawn_groups(buffer, len(wanted), 9)} == wanted


def test_an_entry_tells_what_is_known():
    SEEN.clear()

    def watching(domain, entry):
        SEEN.append(entry)
        return domain == entry.prompt.domain

    buffer = a_buffer(domains=watching, pass_reward=0.9)
    buffer.add([a_group(a_prompt("a", "sums", history=("x",)), 3, 0, (1.0, 0.5, 0.0, 0.0))], 3)
    buffer.add([a_group(a_prompt("a", "sums", history=("x",)), 5, 0, (1.0, 1.0, 0.5, 0.0))], 5)
    SEEN.clear()
    buffer.draw_prompts(1, 9)
    items = [entry for entry in SEEN if not entry.is_group]
    item = items[-1]
    assert (item.prompt.env_id, item.prompt.prompt_id, item.prompt.history) == ("world", "pa", ("x",))
    assert (item.now, item.iteration, item.elapsed, item.visits, item.uses) == (9, 3, 4, 2, 0)
    assert (item.reward, item.pass_rate, item.variance) == (0.625, 0.5, pytest.approx(0.171875))
    # 1 of 4 is a lapse of nothing; then 2 of 4 is Hard: a success in a row.
    assert (item.lapses, item.streak, item.version) == (0, 1, 5)
    SEEN.clear()
    drawn_groups(buffer, 1, 9)
    drawn_groups(buffer, 2, 10)
    used = {entry.iteration: entry.uses for entry in SEEN}  # of the last draw: one of the two was reused before
    assert sorted(used.values()) == [0, 1]
    groups = {entry.iteration: entry for entry in SEEN if entry.now == 9}
    assert [groups[born].reward for born in (3, 5)] == [0.375, 0.625]
    assert [groups[born].elapsed for born in (3, 5)] == [6, 4] and all(one.is_group for one in SEEN)
    assert {(one.visits, one.pass_rate) for one in groups.values()} == {(2, 0.25), (2, 0.5)}


def test_a_registered_predicate_has_a_name(monkeypatch):
    monkeypatch.setitem(PREDICATES, "failed", failed)
    assert ReplaySettings.faults({"domains": "failed"}) == []
    assert sees_entries(domain_filter("failed")) and not sees_entries(domain_filter(of_words))
    (fault,) = ReplaySettings.faults({"domains": "faild"})
    assert fault.endswith("or the registered 'failed'")


@pytest.mark.parametrize(
    ("predicate", "sees"),
    [
        (str.isalpha, False),
        (lambda *arguments: True, False),
        (partial(never_asked, "sums"), True),
        (np.vectorize(len), False),
    ],
    ids=["in C", "any", "partial", "object"],
)
def test_what_a_predicate_is_given_is_what_it_must_be_given(predicate, sees):
    assert sees_entries(domain_filter(predicate)) is sees
