"""One contract for every installed text environment: setup.cfg names them, table.py says how to make each."""

import json
import math
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env

from rllib_srl.common.environments import check_environment
from rllib_srl.envs import text
from rllib_srl.rollout import replies
from rllib_srl.types import Prompt
from tests.envs import table
from tests.envs.play import first_ids

ROOT = Path(__file__).resolve().parents[2]
CASES = table.cases()
MOST_TURNS = 300  # more than the limit of any environment
MALFORMED = [
    "\x00", "\ud800", "\udfff\ud800", "🦊" * 50, "\u202e\u200b\ufeff", "\x1b[2J\x07\x08", "\r\r\r", "\n\n\n", "\t",
    "1" * 100_000, "x" * 1_000_000, "🦊 " * 250_000, "٣", "²", "nan", "-inf", "1e309", "[]", "{}", "[" * 5000,
    "(" * 5000, '{"a": ' * 2000, "<tool>" * 500, "</tool_call>", "Tool:", "Tool: (", "Answer:", "get", "answer ",
    "__import__('os').getcwd()", "'; DROP TABLE questions; --", "${jndi:ldap://x}", "None", "%s%n", "\\", "```",
    *(piece * (1_000_000 // len(piece)) for piece in ("\n", '{"a": ', "Tool:\n", "Answer:\n", "Tool: f()\n",
                                                      "<think></think>", "\\boxed{")),
]  # fmt: skip
PARAMETERS = [pytest.param(name, marks=[pytest.mark.slow] * row.is_slow) for name, (_, row) in CASES.items()]


@pytest.fixture(params=PARAMETERS, name="case")
def _case(request: pytest.FixtureRequest) -> Any:
    """Return name and row of an environment, and `make`, which makes it with changed settings."""
    path, row = CASES[request.param]
    if absent := table.missing(row):
        pytest.skip(f"{', '.join(absent)} not installed")
    return SimpleNamespace(name=request.param, row=row, make=lambda **new: table.made(path, row, **new))


@pytest.fixture(name="env")
def _env(case: Any) -> Iterator[Any]:
    env = case.make()
    yield env
    env.close()


def play(env: Any, prompt_id: str, turns: Sequence[str]) -> Any:
    """Play turns until they or the episode end, every reply checked as the runner checks it (`rollout.replies`)."""
    reply = replies.reset(env, Prompt("env", prompt_id))
    observations, rewards, is_over = [reply.observation], [], False
    for turn in turns:
        reply = replies.step(env, turn)
        observations.append(reply.observation)
        rewards.append(reply.reward)
        if is_over := reply.is_terminated or reply.is_truncated:
            break
    return SimpleNamespace(
        observations=observations, rewards=rewards, earned=sum(rewards), is_over=is_over, stop_reason=reply.stop_reason
    )


def question(case: Any, env: Any, prompt_id: str) -> str:
    """Return the text that makes a task what it is: what is asked and, where more is hidden, how the gold play goes."""
    asked = env.reset(options={"prompt_id": prompt_id})[0]
    if not case.row.is_hidden:
        return asked
    gold = env.gold_turns(prompt_id)
    return "".join([*play(env, prompt_id, gold).observations, *gold])


@pytest.mark.slow
def test_it_is_a_gymnasium_environment_of_text(case: Any, env: Any) -> None:
    assert isinstance(env, gymnasium.Env)
    check_environment(env, case.name)
    observation, info = env.reset(seed=1)
    assert observation and observation in env.observation_space and "" in env.action_space
    assert info["prompt_id"] not in first_ids(env, "heldout", count=100)
    assert isinstance(env.domain, str) and env.domain
    assert isinstance(env.stop_strings, tuple) and all(env.stop_strings)


def test_gymnasiums_own_checker_finds_nothing(case: Any, env: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        harmless = "spec|render_mode|Box|custom space|is not a known|is not fully supported"
        warnings.filterwarnings("ignore", message=f".*({harmless}).*")
        check_env(env, skip_render_check=True)


def test_a_seed_decides_the_prompt_and_no_more(case: Any, env: Any) -> None:
    drawn = [env.reset(seed=seed)[1]["prompt_id"] for seed in (5, 6, 5)]
    assert drawn[0] == drawn[2] != drawn[1]
    other = case.make()
    observation, info = other.reset(seed=5)
    assert (observation, info["prompt_id"]) == (env.reset(seed=5)[0], drawn[0])
    other.close()
    assert len({env.reset()[1]["prompt_id"] for _ in range(8)}) > 1  # without a seed the generator goes on


@pytest.mark.slow
def test_prompt_ids_are_each_task_once_in_an_order_of_their_seed(case: Any, env: Any) -> None:
    count = 15 * case.row.num_checked
    ids, other = first_ids(env, seed=3, count=count), case.make()
    assert ids == first_ids(other, seed=3, count=count)
    assert ids != first_ids(env, seed=4, count=count)
    assert len(set(ids)) == len(ids) >= 2
    checked = ids[: 5 * case.row.num_checked]
    assert len({question(case, env, prompt_id) for prompt_id in checked}) == len(checked)
    other.close()


@pytest.mark.slow
def test_the_splits_share_no_question_whatever_the_seeds(case: Any, env: Any) -> None:
    asked = {
        split: {
            question(case, env, prompt_id)
            for seed in (0, 1)
            for prompt_id in first_ids(env, split, seed, 5 * case.row.num_checked)
        }
        for split in text.SPLITS
    }
    assert asked["train"] and asked["heldout"]
    assert not asked["train"] & asked["heldout"]
    with pytest.raises(ValueError, match="split = 'test'; expected one of train, heldout"):
        next(iter(env.prompt_ids("test", 0)))


def test_the_gold_turns_earn_one_in_both_splits(case: Any, env: Any) -> None:
    for split in text.SPLITS:
        for prompt_id in first_ids(env, split, count=case.row.num_checked):
            played = play(env, prompt_id, env.gold_turns(prompt_id))
            assert played.earned == pytest.approx(1.0), prompt_id
            assert played.is_over and played.stop_reason is None, prompt_id
            assert len(played.rewards) == len(env.gold_turns(prompt_id))  # not over before the last


def test_empty_answers_earn_nothing(case: Any, env: Any) -> None:
    for prompt_id in first_ids(env, count=3):
        for turn in ("", "\n", "   "):
            played = play(env, prompt_id, [turn] * MOST_TURNS)
            assert played.is_over and played.earned == 0.0, (prompt_id, turn)


def test_a_malformed_answer_is_rewarded_and_never_crashes(case: Any, env: Any) -> None:
    (prompt_id,) = first_ids(env, count=1)
    for answer in MALFORMED:
        # `replies` refuses what is not a reward or a stop reason.
        played = play(env, prompt_id, [answer] * (3 if len(answer) < 1000 else 1))
        assert all(math.isfinite(reward) for reward in played.rewards), ascii(answer[:12])
        assert case.row.pays_any_text or played.earned == 0.0, ascii(answer[:12])
        assert all(len(said) < 100_000 for said in played.observations[1:]), ascii(answer[:12])  # no echo without end
    assert play(env, prompt_id, env.gold_turns(prompt_id)).earned == pytest.approx(1.0)  # unharmed


@pytest.mark.slow
def test_a_history_of_turns_is_replayed(case: Any, env: Any) -> None:
    if case.row.iterates:
        pytest.skip("its history is of answers to go on from: tests/envs/test_self_iteration.py")
    for prompt_id in first_ids(env, count=3):
        gold = env.gold_turns(prompt_id)
        whole = play(env, prompt_id, gold)
        for num in range(len(gold)):
            transcript = whole.observations[0] + "".join(
                turn + said for turn, said in zip(gold[:num], whole.observations[1:], strict=False)
            )
            other = case.make()
            observation, info = other.reset(options={"prompt_id": prompt_id, "history": gold[:num]})
            assert (observation, info["prompt_id"]) == (transcript, prompt_id)
            results = [other.step(turn) for turn in gold[num:]]
            assert sum(result[1] for result in results) == pytest.approx(1.0 - sum(whole.rewards[:num]))
            other.close()
        with pytest.raises(ValueError, match="ends the episode of prompt"):
            env.reset(options={"prompt_id": prompt_id, "history": gold})


def test_parallel_instances_share_nothing(case: Any, env: Any) -> None:
    first, second = first_ids(env, count=2)
    alone = [play(env, prompt_id, env.gold_turns(prompt_id)) for prompt_id in (first, second)]
    other = case.make()
    said: list[list[Any]] = [[each.reset(options={"prompt_id": i})[0]] for each, i in ((env, first), (other, second))]
    turns = [env.gold_turns(first), env.gold_turns(second)]
    for number in range(max(map(len, turns))):  # one turn each, in turns
        for which, each in enumerate((env, other)):
            if number < len(turns[which]):
                said[which].append(each.step(turns[which][number])[:2])
    for which, each in enumerate(alone):
        assert [said[which][0], *(reply[0] for reply in said[which][1:])] == each.observations
        assert [reply[1] for reply in said[which][1:]] == each.rewards
    other.close()


def test_stepping_out_of_turn_is_refused(case: Any, env: Any) -> None:
    with pytest.raises(ResetNeeded):
        env.step("x\n")
    (prompt_id,) = first_ids(env, count=1)
    play(env, prompt_id, env.gold_turns(prompt_id))
    with pytest.raises(ResetNeeded):
        env.step("x\n")
    env.reset(seed=0)
    with pytest.raises(TypeError, match="expected text"):
        env.step(7)


def test_what_reset_cannot_take_is_refused(env: Any) -> None:
    for prompt_id in ("", "no such prompt", "{}", "[]", "\x00", "x" * 100_000, 7):
        with pytest.raises(ValueError, match="prompt_id = .*; expected"):
            env.reset(options={"prompt_id": prompt_id})
    with pytest.raises(ValueError, match="'promptid' is unknown; expected prompt_id"):
        env.reset(options={"promptid": "17, 93"})
    with pytest.raises(ValueError, match="history without its prompt_id"):
        env.reset(options={"history": ["7\n"]})


def test_an_unknown_setting_is_refused(case: Any) -> None:
    with pytest.raises(ValueError, match="no_such_setting is not a setting; expected one of "):
        case.make(no_such_setting=1)


def test_playing_draws_nothing_from_the_global_generators(case: Any) -> None:
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()
    env = case.make()
    env.reset(seed=0)
    env.step("7\n")
    (prompt_id,) = first_ids(env, count=1)
    play(env, prompt_id, env.gold_turns(prompt_id))
    env.close()
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def seen_of(name: str) -> list[Any]:
    """Return what another process must see of an environment as well."""
    path, row = CASES[name]
    env = table.made(path, row)
    ids = first_ids(env, "heldout", seed=5, count=2)
    seen = [[i, env.gold_turns(i), play(env, i, env.gold_turns(i)).observations] for i in ids]
    env.close()
    return seen


@pytest.mark.slow
def test_another_process_plays_the_same() -> None:
    names = [name for name, (_, row) in CASES.items() if not row.is_slow and not table.missing(row)]
    script = f"import json, tests.envs.test_envs as t; print(json.dumps([t.seen_of(name) for name in {names!r}]))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    )  # fmt: skip
    theirs = json.loads(done.stdout.splitlines()[-1])
    assert dict(zip(names, theirs, strict=True)) == json.loads(json.dumps({name: seen_of(name) for name in names}))


def test_every_row_is_of_an_installed_environment() -> None:
    assert set(table.ROWS) <= set(table.entry_points())
