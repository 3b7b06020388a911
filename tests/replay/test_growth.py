"""Growth: children, scores and replacement by hand; draws by their frequencies; what a group must keep for it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_srl.replay.selection.growth import (
    STEPS,
    Visited,
    children,
    choose_step,
    depth,
    random_prefix,
    replace_minimum,
    revisited,
    score_of,
)
from rllib_srl.types import Group, Prompt, StopReason

PROMPT = Prompt("world", "q", "sums")


def generator(seed=0):
    return np.random.default_rng(seed)


def visited(*turns_G, can_iterate=False, prompt=PROMPT, score=0.1875):
    ends = tuple(tuple(10 * (t + 1) for t in range(len(turns))) for turns in turns_G)
    return Visited(prompt, score, tuple(map(tuple, turns_G)), ends, can_iterate)


def histories(grown):
    return [child.prompt.history for child in grown.children]


def test_partial_histories_by_hand():
    grown = children(visited(["a", "b", "c"]), generator())
    assert histories(grown) == [("a",), ("a", "b")]  # after the last turn there is nothing to play
    assert {child.prompt.step for child in grown.children} == {""}
    assert (grown.num_known, grown.num_too_deep, grown.num_too_long) == (0, 0, 0)
    assert histories(children(visited(["a"]), generator())) == []


def test_a_world_that_iterates_adds_the_whole_answer():
    first = children(visited(["y0"], can_iterate=True), generator()).children
    assert [child.prompt for child in first] == [replace(PROMPT, history=("y0",), step="improve")]
    # The child is played, with either step, and its own child goes one deeper: m+ = (m, k + 1).
    for step in STEPS:
        parent = replace(first[0].prompt, step=step)
        (second,) = children(visited(["y1"], can_iterate=True, prompt=parent), generator()).children
        assert (second.prompt.history, second.prompt.step, depth(second.prompt)) == (("y0", "y1"), "improve", 2)
        assert (second.prompt.env_id, second.prompt.prompt_id, second.prompt.domain) == ("world", "q", "sums")
    # The world has said that this was the last step: more answers would be no turns to continue either.
    assert histories(children(visited(["y1", "y2"], prompt=first[0].prompt), generator())) == []


def test_every_child_inherits_the_score_of_its_parent():
    grown = children(visited(["a", "b", "c"], can_iterate=True, score=0.25), generator())
    assert [child.score for child in grown.children] == [0.25] * 3


def test_which_episode_is_drawn_is_uniform_and_seeded():
    group = visited(["a", "x"], ["b", "x"], [], ["c", "x"])
    drawn = Counter(histories(children(group, generator(seed)))[0][0] for seed in range(600))
    assert sorted(drawn) == ["a", "b", "c"]  # one without a turn leads nowhere
    assert min(drawn.values()) > 150  # 200 expected each, standard deviation 12
    assert children(group, generator(5)) == children(group, generator(5))


def test_a_call_draws_one_number_whatever_the_group():
    # So that one group more or less does not shift the draws of the next.
    after = []
    for group in (visited(), visited([]), visited(["a"]), visited(["a", "b"], ["c"] * 9, can_iterate=True)):
        one = generator()
        children(group, one)
        after.append(one.random())
    assert after == [after[0]] * 4 and after[0] == generator().random(2)[1]


def test_known_prompts_deep_and_long_ones_are_counted_and_left_out():
    group = visited(["a", "b", "c", "d"], can_iterate=True, prompt=replace(PROMPT, history=("z",), step="improve"))
    known = {replace(PROMPT, history=("z", "a")).key}  # its step does not make it another prompt
    grown = children(group, generator(), known=known)
    assert (histories(grown)[0], grown.num_known) == (("z", "a", "b"), 1)
    assert histories(children(group, generator(), max_depth=3)) == [("z", "a"), ("z", "a", "b")]
    assert children(group, generator(), max_depth=3).num_too_deep == 2
    assert children(group, generator(), max_depth=0).children == ()
    grown = children(group, generator(), max_prompt_tokens=20)  # the turns end at 10, 20, 30, 40
    assert (len(grown.children), grown.num_too_long) == (2, 2)
    with pytest.raises(ValueError, match="max_depth = -1; expected at least 0"):
        children(group, generator(), max_depth=-1)


turns = st.lists(st.sampled_from(["", "a", "b"]), max_size=5)


@given(st.lists(turns, max_size=4), st.booleans(), st.lists(st.sampled_from("ab"), max_size=2), st.integers(0, 9))
def test_children_are_distinct_deeper_and_extend_their_parent(turns_G, can_iterate, history, seed):
    parent = replace(PROMPT, history=tuple(history), step="improve" if can_iterate and history else "")
    grown = children(visited(*turns_G, can_iterate=can_iterate, prompt=parent), generator(seed))
    keys = [child.prompt.key for child in grown.children]
    assert len(set(keys)) == len(keys) and parent.key not in keys
    for t, child in enumerate(grown.children, start=1):
        assert depth(child.prompt) == depth(parent) + t
        assert any(child.prompt.history == (*parent.history, *turns[:t]) for turns in turns_G)
        assert bool(child.prompt.step) == can_iterate
    drawn_lengths = {len(turns) for turns in turns_G if turns}
    assert len(grown.children) in {length - (not can_iterate) for length in drawn_lengths or {int(not can_iterate)}}


def test_scores_by_hand():
    # p (1 - p) for rewards of 0 and 1: 2 of 8 pass, 1/4 * 3/4 = 0.1875
    assert score_of(np.array([1, 1, 0, 0, 0, 0, 0, 0], np.float32)) == 0.1875
    assert score_of(np.array([0.5, 0.5, 0, 1])) == 0.125
    assert score_of(np.array([-1, 3]), (-1, 3)) == 0.25
    assert score_of(np.full(7, 0.1)) == 0.0
    with pytest.raises(ValueError, match=r"reward_range = \(1, 1\); expected the lowest reward below the highest"):
        score_of(np.zeros(2), (1, 1))


# --- draws ----------------------------------------------------------------------------------------


def test_p_div_is_the_share_of_divergence():
    one = generator(3)
    drawn = Counter(choose_step(one, 0.2) for _ in range(5000))
    assert abs(drawn["diverge"] / 5000 - 0.2) < 0.025  # 4 standard deviations
    assert drawn["diverge"] + drawn["improve"] == 5000
    assert {choose_step(one, 0.0) for _ in range(500)} == {"improve"}
    assert {choose_step(one, 1.0) for _ in range(500)} == {"diverge"}
    for p_div in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="p_div = .*; expected 0 to 1"):
            choose_step(one, p_div)


def test_a_history_of_turns_is_cut_uniformly_and_never_to_nothing():
    prompt, one = replace(PROMPT, history=("a", "b", "c")), generator(1)
    drawn = Counter(random_prefix(prompt, one).history for _ in range(3000))
    assert set(drawn) == {("a",), ("a", "b"), ("a", "b", "c")}
    assert min(drawn.values()) > 900  # 1000 expected each, standard deviation 26
    assert random_prefix(PROMPT, one) is PROMPT


def test_answers_are_iterated_on_and_turns_are_cut():
    one = generator(2)
    answers = replace(PROMPT, history=("y0", "y1"), step="diverge")
    asked = [revisited(answers, one, 0.5) for _ in range(400)]
    assert {prompt.history for prompt in asked} == {("y0", "y1")}
    assert abs(sum(prompt.step == "diverge" for prompt in asked) - 200) < 50
    assert {prompt.key for prompt in asked} == {answers.key}
    cut = {revisited(replace(PROMPT, history=("a", "b")), one, 0.5) for _ in range(50)}
    assert cut == {replace(PROMPT, history=("a",)), replace(PROMPT, history=("a", "b"))}


def test_without_growth_nothing_is_drawn():
    """Base tasks are what plain GRPO plays: the same prompt, and the generator where it was."""
    one = generator(4)
    assert revisited(PROMPT, one, 0.5) is PROMPT
    assert one.random() == generator(4).random()


# --- the full buffer ------------------------------------------------------------------------------


def test_the_minimum_is_replaced_from_equal_upwards():
    assert replace_minimum([0.2, 0.1, 0.25], 0.15) == 1
    assert replace_minimum([0.2, 0.1, 0.25], 0.1) == 1  # a tie replaces
    assert replace_minimum([0.2, 0.1, 0.25], 0.0999) is None
    assert replace_minimum([0.1, 0.2, 0.1], 0.1) == 0  # the first of equal ones
    for scores, new_score in (([], 0.1), ([0.1, np.nan], 0.1), ([0.1], np.nan)):
        with pytest.raises(ValueError, match="expected at least one, and numbers only"):
            replace_minimum(scores, new_score)


@given(st.lists(st.integers(0, 5), max_size=30), st.integers(1, 6))
def test_a_full_buffer_keeps_the_best_and_its_capacity(arriving, capacity):
    scores: list[float] = []
    for score in arriving:
        if len(scores) < capacity:
            scores.append(score)
        elif (position := replace_minimum(scores, score)) is not None:
            scores[position] = score
    assert len(scores) == min(capacity, len(arriving))
    assert sorted(scores) == sorted(arriving)[-capacity:]


# --- from a group ---------------------------------------------------------------------------------


def group_of(mask, turns, **extra):
    mask_N = np.array(mask * 2, bool)
    return Group(
        group_id="g",
        prompt=PROMPT,
        token_ids_N=np.arange(len(mask_N), dtype=np.int32),
        loss_mask_N=mask_N,
        behaviour_logp_N=-mask_N.astype(np.float32),
        offsets=np.array([0, len(mask), 2 * len(mask)]),
        rewards_G=np.array([0, 1], np.float32),
        versions_G2=np.zeros((2, 2), np.int64),
        stop_reasons=(StopReason.TERMINATED,) * 2,
        extra={"turns": [turns, turns], **extra},
    )


def test_a_group_tells_its_turns_and_where_they_end():
    mask = [0, 0, 1, 1, 0, 1, 0, 0, 1]
    seen = Visited.of(group_of(mask, ["a", "b", "c"], can_iterate=True))
    assert seen == Visited(PROMPT, 0.25, (("a", "b", "c"),) * 2, ((4, 6, 9),) * 2, True)
    assert not Visited.of(group_of(mask, ["a", "b", "c"])).can_iterate
    # Two turns with nothing between them: only the whole stream bounds them both.
    assert Visited.of(group_of([0, 1, 1, 0], ["a", "b"])).turn_ends_G == ((4, 4), (4, 4))
    assert Visited.of(group_of([0, 1], []), (0.0, 2.0)).score == 0.0625


def test_a_group_that_kept_no_turns_cannot_grow():
    group = group_of([0, 1], ["a"])
    for extra in ({}, {"turns": [["a"]]}):
        with pytest.raises(ValueError, match="expected those of its 2: collect it with keep_turns=True"):
            Visited.of(replace(group, extra=extra))
