"""The pool: a fixed set of prompts of several kinds, known wrong answers, and clear errors for pools of no use."""

from __future__ import annotations

import json
import logging
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from rllib_srl.curriculum.prompts import PromptSource
from rllib_srl.curriculum.streams import make_stream
from rllib_srl.envs.math.compare import Compare
from rllib_srl.envs.math.question_file import QuestionFile
from rllib_srl.envs.wrappers.fixed_pool import FixedPool
from tests.envs.world_play import play

LOOKUP = {"env": "rllib_srl.envs.games.lookup:Lookup", "env_config": {"num_shots": 0}}
REGISTERS = {"env": "registers", "env_config": {"task": "larger", "num_shots": 0}}
KINDS = {"largest": {"env": "compare", "env_config": {"num_shots": 0}}, "pairs": LOOKUP, "larger": REGISTERS}


def pool(**settings: Any) -> FixedPool:
    return FixedPool({"environments": KINDS, "num_prompts_per_kind": 10, **settings})


def earned(world: FixedPool, prompt_id: str, turns: list[str]) -> float:
    return sum(play(world, turns, prompt_id)[1])


def write_rows(path: Path, rows: list[tuple[str, str]]) -> str:
    path.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows), encoding="utf-8")
    return str(path)


def test_the_training_prompts_are_the_first_ones_of_each_kind():
    world = pool(seed=3)
    ids = sorted(world.prompt_ids("train", 0))
    assert len(ids) == world.num_prompts == 30 and ids == sorted(world.prompt_ids("train", 1))
    assert list(world.prompt_ids("train", 0)) != list(world.prompt_ids("train", 1))
    compare = {f"largest: {inner}" for inner in islice(Compare({"num_shots": 0}).prompt_ids("train", 3), 10)}
    assert {prompt_id for prompt_id in ids if world.domain_of(prompt_id) == "largest"} == compare
    assert Counter(map(world.domain_of, ids)) == {"largest": 10, "pairs": 10, "larger": 10}
    assert sorted(pool(seed=4).prompt_ids("train", 0)) != ids


def test_unseen_prompts_come_from_the_kinds_in_turn():
    world = pool()
    unseen = list(islice(world.prompt_ids("heldout", 0), 300))
    assert [world.domain_of(prompt_id) for prompt_id in unseen[:6]] == ["largest", "pairs", "larger"] * 2
    assert len(set(unseen)) == 300 and not set(unseen) & set(world.prompt_ids("train", 0))


def test_a_number_of_prompts_is_spread_over_the_kinds():
    world = pool(num_prompts_per_kind=0, num_prompts=11)
    assert Counter(map(world.domain_of, world.prompt_ids("train", 0))) == {"largest": 4, "pairs": 4, "larger": 3}


def test_a_wrong_answer_is_rewarded_in_place_of_the_right_one():
    world = pool(wrong_answers=0.2, seed=1)
    assert len(world.wrong_ids) == 6 == sum("! " in prompt_id for prompt_id in world.prompt_ids("train", 0))
    assert pool(wrong_answers=0.2, seed=1).wrong_ids == world.wrong_ids != pool(wrong_answers=0.2, seed=2).wrong_ids
    for prompt_id in world.wrong_ids:
        true_id = prompt_id.replace("! ", ": ")
        wrong, right = world.gold_turns(prompt_id), world.gold_turns(true_id)
        assert wrong[:-1] == right[:-1] and wrong[-1] != right[-1]
        assert (earned(world, prompt_id, wrong), earned(world, prompt_id, right)) == (1.0, 0.0)
        assert (earned(world, true_id, wrong), earned(world, true_id, right)) == (0.0, 1.0)
        assert world.domain_of(prompt_id) == world.domain_of(true_id)
        told = [world.reset(options={"prompt_id": one})[1]["is_wrong"] for one in (prompt_id, true_id)]
        assert told == [True, False]
        asked = {world.reset(options={"prompt_id": one})[0] for one in (prompt_id, true_id)}
        assert len(asked) == 1  # the prompt does not say so


def test_the_wrong_answer_of_a_question_is_a_plausible_one():
    world = FixedPool({"environments": {"largest": KINDS["largest"]}, "num_prompts": 10, "wrong_answers": 0.5})
    for prompt_id in world.wrong_ids:
        numbers = prompt_id.partition("! ")[2].split(", ")
        assert world.gold_turns(prompt_id) == [f" {min(numbers, key=int)}\n"]
        assert earned(world, prompt_id, [f" {min(numbers, key=int)}.\n"]) == 1.0  # read as in the environment itself
        assert earned(world, prompt_id, [f"{max(numbers, key=int)}\n"]) == 0.0


def test_a_prompt_with_a_right_answer_cannot_be_played_with_a_wrong_one():
    world = pool(wrong_answers=0.2)
    right = next(prompt_id for prompt_id in world.prompt_ids("train", 0) if ": " in prompt_id)
    with pytest.raises(ValueError, match="expected 'kind: prompt id' of the kinds largest, pairs, larger"):
        world.reset(options={"prompt_id": right.replace(": ", "! ", 1)})


def test_rows_are_a_kind_whose_training_questions_are_all_in_the_pool(tmp_path):
    path = write_rows(tmp_path / "sums.jsonl", [(f"What is {a} + 7?", str(a + 7)) for a in range(40)])
    alone = FixedPool({"rows": path})
    train, unseen = list(alone.prompt_ids("train", 0)), list(alone.prompt_ids("heldout", 0))
    assert len(train) + len(unseen) == 40 and unseen and {alone.domain_of(one) for one in train + unseen} == {"sums"}
    both = FixedPool({"rows": path, "environments": KINDS, "num_prompts": len(train) + 5})
    assert Counter(map(both.domain_of, both.prompt_ids("train", 0))) == {
        "sums": len(train), "largest": 2, "pairs": 2, "larger": 1
    }  # fmt: skip


def test_passes_over_the_pool_are_shuffled_epochs():
    world = {"pool": FixedPool}
    settings = {"pool": {"environments": KINDS, "num_prompts_per_kind": 10, "wrong_answers": 0.1}}
    source = PromptSource(world, settings, {"pool": 1.0}, seed=1)
    first, second = source.draw(30), source.draw(30)
    assert {prompt.prompt_id for prompt in first} == {prompt.prompt_id for prompt in second}
    assert len({prompt.prompt_id for prompt in first}) == 30 and first != second
    assert {prompt.domain for prompt in first} == set(KINDS)


def with_prompts(path: Path, *counts: int) -> dict[str, dict[str, Any]]:
    settings = {}
    for at, num in enumerate(counts):
        rows = [(f"What is {1000 * at + n} + 1?", str(1000 * at + n + 1)) for n in range(num)]
        heldout = write_rows(path / f"heldout{at}.jsonl", [(f"What is {500 + 1000 * at} + 1?", str(501 + 1000 * at))])
        train = write_rows(path / f"train{at}.jsonl", rows)
        settings[f"q{at}"] = {"path": train, "heldout_path": heldout, "num_shots": 0}
    return settings


def of_files(settings: dict[str, dict[str, Any]], mixture: dict[str, float] | None = None, **how: Any) -> PromptSource:
    mixture = mixture or dict.fromkeys(settings, 1.0)
    return PromptSource(dict.fromkeys(settings, QuestionFile), settings, mixture, seed=1, **how)


def test_a_stage_of_a_stream_is_compared_with_the_whole_batch(tmp_path):
    settings = with_prompts(tmp_path, 5, 20)
    stages = [{"world": name, "env_config": env_config, "iterations": 4} for name, env_config in settings.items()]
    stream = make_stream(stages)
    (line,) = of_files(settings, stream=stream).small_pools(16)
    assert line == (
        "1 of 2 environments has fewer training prompts than an iteration of its stage draws, with "
        "num_prompts_per_batch = 16: 'q0' (5 prompts, 16.0 draws)"
    )
    drift = {"domains": [{key: one[key] for key in ("world", "env_config")} for one in stages], "drift": 8}
    assert of_files(settings, stream=make_stream(drift)).small_pools(16) == []  # its weights change


class Broken(Compare):
    """Rejects its own reference answer where the first number is even."""

    def grade(self, prompt_id: str, answer: str) -> float | None:
        return 0.0 if int(prompt_id.split(", ")[0]) % 2 == 0 else super().grade(prompt_id, answer)


class Hopeless(Compare):
    """Rewards nothing."""

    def grade(self, prompt_id: str, answer: str) -> float | None:
        return 0.0


class Bare(gymnasium.Env):
    """Has prompt ids and no reference answers."""

    def __init__(self, env_config: Any):
        """Take no settings."""

    def prompt_ids(self, split: str, seed: int):
        return (f"{split} {number}" for number in range(10))

    def reset(self, *, seed=None, options=None):
        return options["prompt_id"], {}

    def step(self, action):
        return "", 0.0, True, False, {}


def here(name: str, **env_config: Any) -> dict[str, Any]:
    return {"env": f"tests.envs.test_env_pool:{name}", "env_config": env_config}


def test_prompts_that_no_answer_satisfies_are_left_out_and_counted(caplog):
    with caplog.at_level(logging.WARNING):
        world = FixedPool({"environments": {"odd": here("Broken")}, "num_prompts": 20, "seed": 11})
    assert world.num_prompts == 20 and world.num_unsatisfied > 0
    assert all(int(prompt_id.split(": ")[1].split(", ")[0]) % 2 for prompt_id in world.prompt_ids("train", 0))
    assert f"pool: {world.num_unsatisfied} prompts reward no answer and are left out: 'odd: " in caplog.text


def test_prompts_that_repeat_others_are_left_out_and_counted(caplog):
    twice = {"one": KINDS["largest"], "two": KINDS["largest"]}
    with caplog.at_level(logging.WARNING):
        world = FixedPool({"environments": twice, "num_prompts_per_kind": 5, "seed": 12})
    assert (world.num_prompts, world.num_repeated) == (10, 5)
    numbers = [prompt_id.split(": ")[1] for prompt_id in world.prompt_ids("train", 0)]
    assert len(set(numbers)) == 10
    assert "pool: 5 prompts repeat an earlier one and are left out: 'two: " in caplog.text


def test_rows_that_repeat_others_count_once_and_rows_that_contradict_are_refused(tmp_path, caplog):
    rows = [(f"What is {a} + 7?", str(a + 7)) for a in range(20)]
    path = write_rows(tmp_path / "sums.jsonl", [*rows, *rows[:3]])
    with caplog.at_level(logging.WARNING):
        world = FixedPool({"rows": path})
    assert world.num_repeated == 3 and world.num_prompts + len(list(world.prompt_ids("heldout", 0))) == 20
    assert f"pool: 3 rows of {path} repeat an earlier one and count once" in caplog.text
    with pytest.raises(ValueError, match="row 21, field 'answer' differs from that of an earlier row"):
        FixedPool({"rows": write_rows(tmp_path / "other.jsonl", [*rows, ("What is 0 + 7?", "8")])})


@pytest.mark.parametrize(("settings", "message"), [
    ({"environments": {}}, "environments = {}; expected kinds with environments, or rows"),
    ({"wrong_answers": 1.0}, r"wrong_answers = 1.0; expected at least 0, below 1"),
    ({"wrong_answers": -0.1}, r"wrong_answers = -0.1; expected at least 0, below 1"),
    ({"num_prompts_per_kind": 0}, "num_prompts_per_kind = 0, num_prompts = 0; expected one of them above 0"),
    ({"num_prompts": 5}, "num_prompts_per_kind = 10, num_prompts = 5; expected one of them above 0"),
    ({"num_prompts_per_kind": 0, "num_prompts": 2}, "num_prompts = 2; expected at least one for each of the 3"),
    ({"environments": {"a": KINDS["largest"]}, "num_prompts_per_kind": 1}, "the pool has 1 prompt; expected at l"),
    ({"environments": {"a b": "compare"}}, "kind 'a b'; expected letters, digits and"),
    ({"environments": {"a": 3}}, r"environments\['a'\] = 3; expected a name, or"),
    ({"environments": {"a": {"env": "compare", "config": {}}}}, r"expected a name, or \{\"env\": name"),
    ({"environments": {"a": "no_such_world"}}, "world = 'no_such_world'; expected"),
    ({"environments": {"a": here("Hopeless")}}, "kind 'a': no answer satisfies its prompts, such as 'a: "),
    ({"environments": {"a": here("Bare")}, "num_prompts_per_kind": 11}, "kind 'a' has 10 usable .* expected 11"),
    ({"environments": {"a": here("Bare")}, "wrong_answers": 0.5}, "0 of 10 prompts have a wrong answer .* exp"),
    ({"environments": {"a": "compare", "b": {"env": "chain_sum", "env_config": {"multiline": True}}}},
     "kinds 'a' and 'b' end a turn with"),
    ({"environments": {"a": {"env": "self_label", "env_config": {"world": "compare"}}}}, "settles the rewards"),
    ({"rows": "largest.jsonl"}, "has the name of a kind"),
    ({"rows": "nowhere.jsonl"}, "path = 'nowhere.jsonl' is not a file"),
])  # fmt: skip
def test_a_pool_of_no_use_is_refused_in_one_line(settings, message):
    with pytest.raises(ValueError, match=message) as caught:
        pool(**settings)
    assert "\n" not in str(caught.value)


def test_a_file_of_one_row_is_no_pool(tmp_path):
    with pytest.raises(ValueError, match="the pool has 1 prompts; expected at least 2"):
        FixedPool({"rows": write_rows(tmp_path / "one.jsonl", [("What is 1 + 1?", "2")])})
