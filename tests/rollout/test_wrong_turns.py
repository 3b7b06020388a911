"""Wrong turns: what real environments mark, where the player finds it in the tokens, and what a group keeps of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rllib_srl.batch.layout import episodes_of, turns_of
from rllib_srl.batch.mixing import part_of
from rllib_srl.envs.games.registers import Registers
from rllib_srl.envs.math.compare import Compare
from rllib_srl.envs.tools.word_problem import WordProblem
from rllib_srl.rollout.groups import to_episodes, to_group
from rllib_srl.rollout.player import LiveEpisode
from rllib_srl.types import Prompt, StopReason
from tests.replay.groups import a_group
from tests.rollout.fakes import ScriptedEngine, World


@pytest.fixture
def played(play_with, tokenizer):
    """Return a function: environment, prompt id and turns of each episode -> their group, and the text of a span."""

    def play(world, prompt_id, *turns_G):
        prompt = Prompt("world", prompt_id)
        live = [LiveEpisode(prompt, "g", index) for index in range(len(turns_G))]

        def script(request_id, token_ids):
            _, g, turn = request_id.rsplit("/", 2)
            return tokenizer(turns_G[int(g)][int(turn)], add_special_tokens=False)["input_ids"]

        limits = {"max_turns": 6, "max_episode_tokens": 900}
        episodes = list(play_with(live, ScriptedEngine(tokenizer, script), {"world": world}, limits))
        group = to_group(prompt, "g", episodes, at_least=1)
        return group, lambda g: [tokenizer.decode(group.stream(g)[start:end]) for start, end in group.wrong_turns(g)]

    return play


def test_errors_are_wrong_whatever_follows_but_the_last_turn_never_is(played):
    """Registers: an unknown register and no action are errors; the last turn is none, as it decides the episode."""
    prompt_id = "p=17, c=40, k=93. larger p c"
    group, wrong = played(
        lambda: Registers({"num_shots": 0, "task": "larger"}),
        prompt_id,
        [" get z\n", " hm\n", " get c\n", " answer 40\n"],
        [" get p\n", " answer 17\n"],
        [" get p\n", " get p\n", " get p\n", " hm\n"],
    )
    assert group.rewards_G.tolist() == [1, 0, 0]
    assert wrong(0) == [" get z\n", " hm\n"] and wrong(1) == [] and wrong(2) == []
    assert set(group.extra["wrong_turns"]) == {"0"}


def test_a_wrong_answer_is_wrong_if_a_later_one_is_right(played):
    """Tries at 17, 93 or 40: wrong then right; wrong then wrong; unreadable then wrong; right at once."""
    group, wrong = played(
        lambda: Compare({"num_shots": 0, "feedback_turns": 2}),
        "17, 93, 40",
        [" 40\n", " 17\n", " 93\n"],
        [" 40\n", " 17\n", " 17\n"],
        [" hm\n", " 40\n", " 40\n"],
        [" 93\n"],
    )
    assert group.rewards_G.tolist() == [0.5, 0, 0, 1]
    assert [wrong(g) for g in range(4)] == [[" 40\n", " 17\n"], [], [" hm\n"], []]
    # The mask of the loss: the last turn alone, both wrong answers that nothing corrected, all but the unreadable one.
    episodes = episodes_of([group], [np.ones(4)])
    assert [int(turns_of(one, "right").loss_mask_T.sum()) for one in episodes] == [4, 12, 8, 4]
    assert [int(turns_of(one, "all").loss_mask_T.sum()) for one in episodes] == [12, 12, 12, 4]


def test_a_failed_call_is_an_error(played):
    world = WordProblem({"num_shots": 0, "forgiven_turns": 1})
    prompt_id = next(world.prompt_ids("train", 0))
    gold = world.gold_turns(prompt_id)
    turns = ["Tool: 1 / 0\n", "Tool: (\n", *gold]
    group, wrong = played(lambda: WordProblem({"num_shots": 0, "forgiven_turns": 1}), prompt_id, turns, gold)
    assert group.rewards_G.tolist() == [1, 1] and [wrong(0), wrong(1)] == [turns[:2], []]


def test_a_group_keeps_them_in_parts_and_over_the_way_to_episodes(played):
    group, wrong = played(
        lambda: Compare({"num_shots": 0, "feedback_turns": 1}), "17, 93, 40", [" 93\n"], [" 40\n", " 93\n"]
    )
    assert wrong(1) == [" 40\n"]
    part = part_of(group, [1])
    assert part.wrong_turns(0) == group.wrong_turns(1) and "wrong_turns" not in part_of(group, [0]).extra
    again = to_group(group.prompt, "g", to_episodes(group))
    assert again.extra == group.extra and np.array_equal(again.token_ids_N, group.token_ids_N)


class Marking(World):
    """Marks every turn with what it says."""

    def step(self, action):
        return "", 0.0, False, False, {"turn_fault": action.strip()}


def test_an_unknown_mark_ends_the_episode_as_a_fault_of_the_environment(play_with, tokenizer):
    ids = tokenizer("bad\n", add_special_tokens=False)["input_ids"]
    engine = ScriptedEngine(tokenizer, lambda request_id, token_ids: ids)
    live = [LiveEpisode(Prompt("world", "q1"), "g", 0)]
    (episode,) = play_with(live, engine, {"world": lambda: Marking(num_turns=3)})
    assert episode.custom_data["stop_reason"] is StopReason.ENV_CRASHED
    assert "info[\"turn_fault\"] = 'bad'; expected one of error, wrong" in episode.custom_data["error"]


_OUTSIDE = [{"0": [[0, 2]]}, {"0": [[2, 2]]}, {"0": [[3, 10**6]]}, {"0": [3]}, {"0": 3}, {"0": []}, {"7": []}, [1]]


@pytest.mark.parametrize("spans", _OUTSIDE)
def test_places_outside_of_an_episode_are_refused(spans):
    with pytest.raises(ValueError, match="wrong_turns"):
        replace(a_group(0, rewards=(1.0, 0.0)), extra={"wrong_turns": spans}).check_valid()
