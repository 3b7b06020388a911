"""Filters over the memory: draws follow them, what each is given, and which ones are refused."""

from __future__ import annotations

import numpy as np
import pytest

from rllib_srl.common.rules import RuleError
from rllib_srl.replay.selection import sampler
from rllib_srl.replay.settings import ReplaySettings
from tests.replay.groups import a_buffer, a_group, a_prompt, drawn_groups


def failed(domain, candidates):
    """Keep what earned less than half."""
    return candidates.reward < 0.5


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


def test_a_filter_decides_what_is_drawn():
    even, everything = set(range(0, 12, 2)), set(range(12))
    assert drawn(filled()) == (everything, everything)
    assert drawn(filled(domains=f"{__name__}:failed")) == (even, even)
    assert drawn(filled(domains=failed)) == (even, even)
    assert drawn(filled(domains=lambda domain, c: (c.reward < 0.5) & (domain == "words"))) == ({4, 6}, {4, 6})
    assert drawn(filled(domains=lambda domain, candidates: domain == "words")) == ({4, 5, 6, 7},) * 2


@pytest.mark.parametrize("wanted", [[11], [0, 2, 4, 6, 8, 10]])
def test_what_lies_beyond_the_pool_of_candidates_is_found(wanted, monkeypatch):
    """Of 12 items a pool holds 6: those that are wanted are drawn all the same."""
    monkeypatch.setattr(sampler, "MOST_CANDIDATES", 6)
    buffer = filled(domains=lambda domain, candidates: np.isin(candidates.seq, wanted))
    assert {int(p.prompt_id[1:]) for p in buffer.draw_prompts(len(wanted), 9)} == {*wanted}
    assert {int(g.prompt.prompt_id[1:]) for g in drawn_groups(buffer, len(wanted), 9)} == {*wanted}


def test_a_filter_is_given_each_domain_with_its_candidates():
    seen = {}

    def watching(domain, candidates):
        seen[domain] = (candidates.are_groups, candidates.seq.tolist(), candidates.visits.tolist())
        return True

    buffer = filled(domains=watching)
    buffer.draw_prompts(1, 9)
    assert {name: (is_groups, sorted(seqs)) for name, (is_groups, seqs, _) in seen.items()} == {
        "sums": (False, [0, 1, 2, 3]),
        "words": (False, [4, 5, 6, 7]),
        "maps": (False, [8, 9, 10, 11]),
    }
    assert {visits for *_, each in seen.values() for visits in each} == {1}
    drawn_groups(buffer, 1, 9)
    assert all(are_groups for are_groups, *_ in seen.values())


def test_filters_that_do_not_fit_are_named():
    (fault,) = ReplaySettings.faults({"domains": str.isalpha})
    assert fault.endswith("expected a function of a domain and its candidates")
    buffer = filled(domains=lambda domain, candidates: candidates.prompt_id == "p1")
    with pytest.raises(RuleError, match="domains raised AttributeError: candidates have no column 'prompt_id'"):
        buffer.draw_prompts(1, 9)
    with pytest.raises(RuleError, match=r"domains returned object of shape \(\); expected True or False, or one for"):
        filled(domains=lambda domain, candidates: None).draw_prompts(1, 9)
