"""Every setting of the memory acts on the buffer, and every bad value of one is named."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from rllib_srl.replay.buffer import SRLReplayBuffer
from rllib_srl.replay.diversity.embedders import NgramEmbedder
from rllib_srl.replay.selection import sampler
from rllib_srl.replay.settings import ReplaySettings
from tests.replay.groups import a_buffer, a_group, a_prompt, drawn_groups, rewards_of


def is_of_words(domain, candidates):
    """Say whether a domain is that of words: a filter that settings can name."""
    return domain == "words"


def finds_nothing(group, decode):
    """Refuse nothing: a hook that settings can name."""


class Words(NgramEmbedder):
    """Vectors of single tokens."""

    def __init__(self):
        super().__init__(orders=(1,))


def words(token_ids):
    return " ".join("AKIAQWERTYUIOPASDFGH" if token == 7 else f"w{token}" for token in token_ids)


def trace(**given):
    """Play nine iterations in which everything happens that a setting could mind; return what was to be seen."""
    buffer = a_buffer(decode=words, **{"capacity": 40, "admit": "secrets", **given})
    domains, seen = ("sums", "words", "maps"), []
    for now in range(1, 10):
        asked = buffer.draw_prompts(4, now)
        fresh = [a_prompt(100 * now + i, domains[min(now // 5, 2)]) for i in range(4)]
        history = [a_prompt("deep", history=("one", "two", "three")), a_prompt("step", history=("x",), step="improve")]
        again = [a_prompt("failing"), *(history if now < 3 else [])]
        prompts = list({prompt.key: prompt for prompt in [*asked, *fresh, *again]}.values())
        groups = [a_group(p, now, i, rewards_of(p, now), num_turns=2) for i, p in enumerate(prompts)]
        groups += [replace(odd, group_id=f"{now}.{90 + i}") for i, odd in enumerate(odd_groups(now))]
        visits = buffer.add(groups, now)
        reused = drawn_groups(buffer, 5, now)
        seen.append(
            (
                [vars(prompt) for prompt in asked],
                [vars(visit) for visit in visits],
                [(group.prompt.key, group.token_ids_N.tobytes(), group.loss_mask_N.tobytes()) for group in reused],
                {k: None if np.isnan(v) else v for k, v in buffer.stats(now).items()},
                buffer.tables.items[buffer.tables.slots()]["due"].tolist(),
            )
        )
    return seen


def odd_groups(now):
    """Return groups that one check or another would not take, and some of halves."""
    base = a_group("odd", 1, num_turns=8)
    failing = a_group("failing", now, rewards=(0.0,) * 4)
    loop = np.where(base.loss_mask_N, 5, base.token_ids_N).astype(np.int32)
    secret = base.token_ids_N.copy()
    secret[np.flatnonzero(base.loss_mask_N)[3]] = 7
    always = [failing, a_group(f"half{now}", now, rewards=(0.7, 0.3, 0.7, 1.0))]
    if now % 3 != 2:
        return always
    return [
        *always,
        replace(base, prompt=a_prompt(f"loop{now}"), token_ids_N=loop),
        replace(base, prompt=a_prompt(f"secret{now}"), token_ids_N=secret),
        replace(base, prompt=a_prompt(f"near{now}")),
        a_group(f"few{now}", now, rewards=(1.0, 0.0)),
    ]


# Field: a value in place of the default (or of the first, of two), and what else has to be set for it to matter.
ACTS = {
    "capacity": ({"capacity": 25}, {}),
    "groups_per_item": ({"groups_per_item": 1}, {}),
    "spacing": ({"spacing": "fixed"}, {}),
    "spacing_config": ({"spacing_config": {"interval": 9.0}}, {"spacing": "fixed"}),
    "desired_retention": ({"desired_retention": 0.5}, {}),
    "iterations_per_day": ({"iterations_per_day": 0.25}, {}),
    "min_recall_interval": ({"min_recall_interval": 4}, {}),
    "pass_reward": ({"pass_reward": 0.6}, {}),
    "min_graded": ({"min_graded": 3}, {}),
    "history_half_life": ({"history_half_life": 3.0}, {}),
    "selection": ({"selection": "recent"}, {}),
    "reuse_selection": ({"reuse_selection": "recent"}, {}),
    "selection_config": ({"selection_config": {"temperature": 0.0}}, {}),
    "reuse_selection_config": ({"reuse_selection_config": {"temperature": 0.0}}, {}),
    "domains": ({"domains": ["words"]}, {}),
    "max_age": ({"max_age": 1}, {}),
    "max_uses": ({"max_uses": 1}, {}),
    "diversity_coeff": ({"diversity_coeff": 5.0}, {}),
    "embedding": ({"embedding": f"{__name__}:Words"}, {}),
    "eviction": ({"eviction": "mastered_first"}, {"capacity": 20}),
    "max_episode_tokens": ({"max_episode_tokens": 30}, {}),
    "near_duplicate": ({"near_duplicate": 0.9}, {}),
    "degenerate_share": ({"degenerate_share": None}, {}),
    "admit": ({"admit": f"{__name__}:finds_nothing"}, {}),
    "on_group": ({"on_group": "contrib.growth"}, {}),
}


def test_every_setting_has_a_check_that_it_acts():
    """Those of the driver and the learners are checked in test_acting_settings."""
    from tests.algorithm.test_acting_settings import ACTS_ELSEWHERE

    apart = set(ACTS_ELSEWHERE)
    assert not apart & set(ACTS)
    assert set(ACTS) | apart == set(ReplaySettings.model_fields)


@pytest.mark.slow
@pytest.mark.parametrize("name", ACTS)
def test_every_setting_acts(name):
    change, beside = ACTS[name]
    assert trace(**{**beside, **change}) != cached_trace(tuple(beside.items()))


traces: dict = {}


def cached_trace(beside):
    if beside not in traces:
        traces[beside] = trace(**dict(beside))
    return traces[beside]


def test_domains_by_all_their_names():
    def drawn(domains):
        buffer = a_buffer(domains=domains)
        names = ("sums", "words", "maps")
        buffer.add([a_group(a_prompt(i, names[i // 4]), 1, i) for i in range(12)], 1)
        found = {p.domain for now in range(2, 6) for p in buffer.draw_prompts(4, now)}
        return found, {group.prompt.domain for now in range(2, 5) for group in drawn_groups(buffer, 4, now)}

    everywhere = {"sums", "words", "maps"}
    assert drawn("all") == (everywhere, everywhere)
    assert drawn("last") == ({"words"}, {"words"})  # the one before the newest
    assert drawn("earlier") == ({"sums", "words"}, everywhere)  # no prompt of the newest, which comes fresh
    assert drawn(["maps", "sums"]) == ({"maps", "sums"},) * 2
    assert drawn(f"{__name__}:is_of_words") == ({"words"}, {"words"})
    assert drawn(["none"]) == (set(), set())


BAD = [  # one of each kind; the ranges are rows of the settings' table
    ("revisit_fraction", 1.1),
    ("reuse_fraction", 1.0),
    ("capacity", 1.5),
    ("spacing", "never"),
    ("spacing_config", {"unknown": 1}),
    ("spacing_config", {"desired_retention": 2.0}),
    ("history_half_life", float("inf")),
    ("selection_config", {"temperature": -1.0}),
    ("domains", "no.such.module:thing"),
    ("domains", 3),
    ("retain", None),
    ("diversity_device", "cuda"),
    ("near_duplicate", 1.1),
    ("admit", ["secrets", 3]),
    ("admit", f"{__name__}:BAD"),
    ("on_group", "growth"),
    ("local_directory", "relative/path"),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_a_bad_value_is_named(name, value):
    faults = ReplaySettings.faults({name: value})
    assert len(faults) == 1, faults
    assert faults[0].startswith(f"{name} = ") or name in faults[0]
    assert "expected" in faults[0]
    assert ReplaySettings.faults({name: value}, "replay_")[0].startswith("replay_")


@pytest.mark.parametrize(
    "name, value, beside",
    [
        ("desired_retention", 0.8, {"spacing": "fsrs"}),
        ("iterations_per_day", 4.0, {"spacing": "fixed"}),
    ],
)
def test_a_parameter_of_a_part_that_is_off_is_refused(name, value, beside):
    (fault,) = ReplaySettings.faults({name: value})
    assert fault.startswith(f"{name} = {value!r} with spacing = 'none'; expected it only with ")
    assert ReplaySettings.faults({name: value, **beside}) == []


def test_all_faults_are_named_at_once_before_anything_is_opened(tmp_path):
    with pytest.raises(ValueError) as caught:
        SRLReplayBuffer(directory=tmp_path / "new", capacity=-5, spacing="never", max_uses=0)
    assert all(name in str(caught.value) for name in ("capacity = -5", "spacing = 'never'", "max_uses = 0"))
    assert not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match="capacity must be >= 1, got 0"):
        SRLReplayBuffer(capacity=0, revisit_fraction=0.0, reuse_fraction=0.0)


@pytest.mark.parametrize(("selection", "spacing"), [("uniform", "none"), ("uniform", "fsrs"), ("fifo", "none")])
def test_uniform_draws_are_uniform_beyond_the_pool_of_candidates(selection, spacing, monkeypatch):
    """Of 24 items a pool holds 6, visited in different iterations; `fifo` plays the one that waited longest."""
    monkeypatch.setattr(sampler, "MOST_CANDIDATES", 6)
    buffer = a_buffer(selection=selection, spacing=spacing)
    buffer.add([a_group(a_prompt(i, "sums"), 1, i) for i in range(24)], 1)
    for now in range(2, 8):
        prompts = buffer.draw_prompts(5, now)
        buffer.add([a_group(prompt, now, 30 * now + i) for i, prompt in enumerate(prompts)], now)
    slots = buffer.tables.slots()
    assert len(slots) == 24
    generator, counts = np.random.default_rng(0), Counter()
    for _ in range(1200):
        counts[int(buffer.draws.items(1, 40, generator)[0])] += 1
    if selection == "fifo":
        last = buffer.tables.items["last_review"][slots]
        assert {*counts} <= {*slots[last == last.min()].tolist()}
    else:
        assert len(counts) == 24 and max(abs(count - 50) for count in counts.values()) < 4 * 7  # each 1 / 24
