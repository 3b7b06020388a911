"""ExIt's growth: histories by hand, draws by their frequencies, a grown prompt that is played, and a real run."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_srl.contrib.growth import Growth
from rllib_srl.types import Prompt
from tests.replay.groups import a_group
from tests.small_memory import go, memory_config

PROMPT = Prompt("env", "q", "sums")


def generator(seed=0):
    return np.random.default_rng(seed)


def played(*turns_G, can_iterate=False, prompt=PROMPT):
    """Return a group with these texts; each turn is five tokens after a reply of two."""
    group = a_group(0, 1, num_turns=max(map(len, turns_G), default=1), rewards=(0.0,) * max(1, len(turns_G)))
    return replace(group, prompt=prompt, extra={"turns": [list(one) for one in turns_G], "can_iterate": can_iterate})


def histories(group, seed=0, room=None, **parameters):
    return [prompt.history for prompt in Growth(**parameters)(group, room, generator(seed))]


def test_partial_and_whole_histories_by_hand():
    grown = list(Growth()(played(["a", "b", "c"]), None, generator()))
    assert [prompt.history for prompt in grown] == [("a",), ("a", "b")]  # after the last turn there is nothing to play
    assert {(prompt.step, prompt.prompt_id, prompt.domain) for prompt in grown} == {("", "q", "sums")}
    assert histories(played(["a"])) == [] == histories(played([])) == histories(replace(played(["a"]), extra={}))
    (first,) = Growth(p_div=0.0)(played(["y0"], can_iterate=True), None, generator())
    assert first == replace(PROMPT, history=("y0",), step="improve")
    (second,) = Growth(p_div=1.0)(played(["y1"], can_iterate=True, prompt=first), None, generator())
    assert (second.history, second.step) == (("y0", "y1"), "diverge")
    # The environment has said that this was the last step: more answers would be no turns to continue either.
    assert histories(played(["y1", "y2"], prompt=first)) == []
    steps = Counter(
        next(iter(Growth()(played(["y0"], can_iterate=True), None, generator(seed)))).step for seed in range(600)
    )
    assert abs(steps["diverge"] - 120) < 40  # four deviations of 9.8


def test_which_episode_is_drawn_is_uniform_and_two_numbers_are_drawn_a_group():
    group = played(["a", "x"], ["b", "x"], [], ["c", "x"])
    drawn = Counter(histories(group, seed)[0][0] for seed in range(600))
    assert sorted(drawn) == ["a", "b", "c"] and min(drawn.values()) > 150  # 200 each, standard deviation 12
    after = []
    for one in (played(["a"]), played([]), played(["a", "b"], ["c"] * 9, can_iterate=True)):
        numbers = generator()
        list(Growth()(one, None, numbers))
        after.append(numbers.random())
    assert after == [generator().random(3)[2]] * 3


def test_deep_and_long_histories_are_left_out():
    group = played(["a", "b", "c", "d"], can_iterate=True, prompt=replace(PROMPT, history=("z",), step="improve"))
    assert histories(group, depth=3) == [("z", "a"), ("z", "a", "b")] and histories(group, depth=0) == []
    ends = np.flatnonzero(np.diff(group.loss_mask_N[: group.offsets[1]].astype(int), append=0) == -1) + 1
    assert len(histories(group, room=int(ends[1]))) == 2 and len(histories(group, room=int(ends[1]) - 1)) == 1


turns = st.lists(st.sampled_from(["", "a", "b"]), max_size=5)


@given(st.lists(turns, min_size=1, max_size=4), st.booleans(), st.integers(0, 9))
def test_grown_prompts_are_distinct_deeper_and_extend_their_parent(turns_G, can_iterate, seed):
    grown = histories(played(*turns_G, can_iterate=can_iterate), seed)
    assert [len(history) for history in grown] == list(range(1, len(grown) + 1))
    assert all(any(history == tuple(one[: len(history)]) for one in turns_G) for history in grown)


@pytest.mark.slow
def test_a_run_plays_what_grew_and_goes_deeper(random_llama_dir, tmp_path, ray_here, build):
    config = memory_config(random_llama_dir, tmp_path, revisit_fraction=0.5, on_group="contrib.growth")
    config.environment("rllib_srl.envs.wrappers.self_iteration:SelfIteration")
    config.env_config = {"env": "tests.small_envs:Even", "env_config": {"num_prompts": 400}, "num_steps": 4}
    iterations = go(build(config.env_runners(max_episode_tokens=512)), 5)
    asked = [group.prompt for one in iterations for group in one.played if group.prompt.history]
    assert {prompt.step for prompt in asked} <= {"improve", "diverge"} and asked
    assert max(len(prompt.history) for prompt in asked) > 1
    assert sum(visit.num_grown for one in iterations for visit in one.visits.values()) > len(asked)
