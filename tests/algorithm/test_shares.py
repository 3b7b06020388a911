"""Shares as they came to be, by hand."""

from dataclasses import replace

from rllib_srl.algorithm.metrics import counts_of, shares_of
from rllib_srl.types import GroupMeta
from tests.replay.groups import a_group

SIGNAL, NONE = (1.0, 0.0), (1.0, 1.0)


def a_meta(origin, rewards=SIGNAL, now=1, place=0, num_turns=1):
    group = a_group(place, now, place, rewards, num_turns)
    return replace(GroupMeta.of(group, group), origin=origin)


def test_groups_those_trained_and_tokens_are_counted_by_origin():
    # two episodes of 5 loss tokens a turn
    groups = [a_meta("fresh"), a_meta("fresh", NONE), a_meta("revisit", num_turns=2), a_meta("reuse", num_turns=3)]
    counts = counts_of(groups, [groups[0], *groups[2:]])
    whats = ("groups", "trained", "tokens", "generated")
    found = {what: [counts[f"num_{what}_{o}"] for o in ("fresh", "revisit", "reuse")] for what in whats}
    assert found == {"groups": [2, 1, 1], "trained": [1, 1, 1], "tokens": [10, 20, 30], "generated": [20, 20, 30]}
    shares = shares_of(counts)
    assert (shares["revisit_share_prompts"], shares["revisit_share_trained"]) == (1 / 3, 1 / 2)
    assert shares["revisit_share_tokens"] == 20 / 30
    assert (shares["reuse_share_prompts"], shares["reuse_share_trained"]) == (1 / 4, 1 / 3)
    assert shares["reuse_share_tokens"] == 30 / 60
