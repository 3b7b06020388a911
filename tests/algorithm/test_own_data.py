"""Data, rewards and agents of a user: settings made of files and functions, and what is refused before a run."""

import json
import sys
import types
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas
import pytest
import yaml

from rllib_srl import SRLConfig
from rllib_srl.algorithm.own_data import data_settings, reward_settings
from rllib_srl.cli.shared import runs
from rllib_srl.cli.shared.settings import SettingsError
from rllib_srl.common.loading import functions_in, import_path_of
from rllib_srl.envs.rewards.scoring import RewardError, Rewards
from rllib_srl.rollout.env_calls import RunEndedError
from tests.cli.test_script_settings import given

ROWS = [{"question": f"Which is largest: {n}, {n + 5} or {n + 9}?", "answer": str(n + 9)} for n in range(10, 60)]


def f(prompt, answer, row):
    return 1.0


class Holder:
    @staticmethod
    def g(prompt, answer, row):
        return 0.0


@pytest.mark.parametrize(("given", "settings", "expected"), [
    ("my.jsonl", {"heldout": "b.jsonl", "num_shots": 2}, {"path": "my.jsonl", "heldout_path": "b.jsonl"}),
    (Path("a.csv"), {"question": "q"}, {"path": "a.csv", "question_field": "q"}),
    ("openai/gsm8k", {}, {"hub_id": "openai/gsm8k", "path": "train"}),
    ("a/b", {"split": "c/d", "heldout": "c/e"}, {"hub_id": "a/b", "path": "c/d", "heldout_path": "c/e"}),
])  # fmt: skip
def test_data_becomes_the_settings_of_question_file(given, settings, expected) -> None:
    assert data_settings(given, **settings) == {"num_shots": settings.get("num_shots", 0), **expected}


@pytest.mark.parametrize("kind", [list, iter, pandas.DataFrame])
def test_the_rows_of_an_object_are_written_to_a_private_file(kind, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("RLLIB_SRL_CACHE", str(tmp_path))
    settings = data_settings(kind(ROWS))
    file = Path(settings["path"])
    assert [json.loads(line) for line in file.read_text().splitlines()] == ROWS
    assert file.stat().st_mode & 0o077 == 0 and settings["domain"] == "own_data"
    assert data_settings(ROWS) == settings  # named by its content


@pytest.mark.parametrize(("given", "settings", "error"), [
    (3, {}, "data is a int; expected a file, a hub id, or an object that yields rows"),
    ({"train": ROWS}, {}, "data has the parts train; expected one of them: data[...]"),
    ([], {}, "data has no rows; expected questions"),
    (["x"], {}, "data: row 1 is a str; expected a mapping of columns to values"),
    ([{"question": "2?", "image": object()}], {}, "data: row 1 is not JSON: Object of type object"),
    ("my.jsonl", {"split": "test"}, "split = 'test' with data = 'my.jsonl'; expected it only with a folder"),
])  # fmt: skip
def test_data_that_cannot_be_used_is_named(given, settings, error: str) -> None:
    with pytest.raises(ValueError) as caught:
        data_settings(given, **settings)
    assert error in str(caught.value)


def test_functions_become_import_paths() -> None:
    here = __name__
    assert reward_settings(f) == {"reward": f"{here}:f"}
    assert reward_settings(Holder.g)["reward"] == f"{here}:Holder.g"
    given = reward_settings([f, "m:g", {"function": "http://localhost/r", "name": "r"}], weights=[1, 2, 3])
    assert given["reward"] == [
        {"function": f"{here}:f", "weight": 1.0},
        {"function": "m:g", "weight": 2.0},
        {"function": "http://localhost/r", "name": "r", "weight": 3.0},
    ]
    one = reward_settings(f, form="trl", low=-1.0, timeout_s=3.0, on_error="drop")
    assert one["reward"] == [{"form": "trl", "low": -1.0, "function": f"{here}:f"}]
    assert (one["reward_timeout_s"], one["on_reward_error"]) == (3.0, "drop")


def test_a_function_of_the_running_program_is_named_by_its_file(tmp_path: Path, monkeypatch) -> None:
    program = types.ModuleType("__main__")
    program.__file__ = str(tmp_path / "train.py")
    Path(program.__file__).write_text("")
    program.own = types.FunctionType(f.__code__, vars(program), "own")
    program.own.__module__, program.own.__qualname__ = "__main__", "own"
    monkeypatch.setitem(sys.modules, "__main__", program)
    assert import_path_of(program.own) == f"{tmp_path}/train.py:own"
    Path(program.__file__).unlink()
    with pytest.raises(ValueError, match="reward = own is not in a file; expected a function of a file"):
        import_path_of(program.own)


def test_functions_without_an_import_path_are_refused() -> None:
    def inner(prompt, answer, row):
        return 1.0

    for function in (inner, lambda prompt, answer, row: 1.0):
        with pytest.raises(ValueError, match="expected a function with a name at the top level of a file"):
            SRLConfig().reward(function)
    with pytest.raises(ValueError, match="reward = a partial; expected a function"):
        SRLConfig().reward(partial(f, row={}))
    with pytest.raises(TypeError, match="unknown settings: timeout; expected some of weights, name, form"):
        SRLConfig().reward(f, timeout=3)
    with pytest.raises(ValueError, match=r"weights = \[1\]; expected 2 numbers"):
        SRLConfig().reward([f, Holder.g], weights=[1])
    with pytest.raises(ValueError, match="with env = 'compare'; expected .data"):
        SRLConfig().environment("compare").reward(f)


def test_a_program_that_runs_while_it_is_imported_for_its_function_is_named(tmp_path: Path) -> None:
    program = "from rllib_srl import SRLConfig\ndef own(prompt, answer, row): return 1.0\n"
    (tmp_path / "program.py").write_text(program + "SRLConfig().data('x.jsonl').reward(own)\n")
    with pytest.raises(RewardError) as caught:
        Rewards.load(f"{tmp_path}/program.py:own", timeout_s=1.0)
    assert "program.py starts a run while it is imported for its reward function; put what it runs" in str(caught.value)
    assert caught.value.ends_run


def test_data_and_reward_may_come_in_any_order() -> None:
    one = SRLConfig().data("my.jsonl", num_shots=1).reward(f, timeout_s=3.0)
    other = SRLConfig().reward(f, timeout_s=3.0).data("my.jsonl", num_shots=1)
    assert one.env_config == other.env_config and one.env == other.env == "question_file"
    assert one.data("other.jsonl").env_config["path"] == "other.jsonl" and "reward" in one.env_config


def test_a_reward_must_end_before_the_step(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    config = SRLConfig().data(str(tmp_path / "rows.jsonl")).reward(f, timeout_s=30.0)
    config.rl_module(model_config={"model": "tiny"}).env_runners(engine="transformers")
    with pytest.raises(ValueError, match="reward_timeout_s = 30; expected less than env_timeout_s = 10"):
        config.validate()
    config.env_runners(env_timeout_s=40.0, max_episode_tokens=96).validate()


def test_flags_stand_for_environment_and_settings(tmp_path: Path) -> None:
    values = given("--data", "my.jsonl", "--reward", "m:f", "--env_config", "num_shots=2", "--lr", "3e-5")
    env_config = {"path": "my.jsonl", "num_shots": 2, "reward": "m:f"}
    assert values == {"lr": 3e-5, "env": "question_file", "env_config": env_config}
    (tmp_path / "run.yaml").write_text("data: my.jsonl\nreward: [{function: m:f, weight: 2}, g.py:h]\n")
    reward = given("--config", str(tmp_path / "run.yaml"))["env_config"]["reward"]
    assert reward == [{"function": "m:f", "weight": 2}, {"function": "g.py:h"}]
    several = given("--data", "my.jsonl", "--reward", "[m:f, m:g]")["env_config"]["reward"]
    assert several == [{"function": "m:f"}, {"function": "m:g"}]
    with pytest.raises(SettingsError, match="expected data with it"):
        given("--reward", "m:f")


def test_a_settings_file_of_someone_else_names_no_code(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint_000001"
    checkpoint.mkdir()
    settings = {"env": "question_file", "env_config": {"path": "x.jsonl", "reward": [{"function": "evil.py:f"}]}}
    (tmp_path / runs.SETTINGS_FILE).write_text(yaml.safe_dump(settings))
    with pytest.raises(runs.RunError, match="names code that no checkpoint sealed with your key lists: evil.py:f"):
        runs.settings_of(checkpoint)
    assert runs.settings_of(checkpoint, trust=True)["env_config"] == settings["env_config"]
    settings["env_config"]["reward"] = "http://127.0.0.1:9/score"  # no code; envs/allowed.py has its rule
    (tmp_path / runs.SETTINGS_FILE).write_text(yaml.safe_dump(settings))
    assert runs.settings_of(checkpoint)["env_config"] == settings["env_config"]


REWARDS = """
def right(prompt, answer, row):
    return float(answer.strip() == row["answer"])

async def short(prompt, answer, row):
    return float(len(answer) <= 4)

def breaks(prompt, answer, row):
    return {}["gone"]
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch) -> Path:
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "own_rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def small(place: Path) -> SRLConfig:
    return (
        SRLConfig()
        .data("rows.jsonl")
        .rl_module(model_config={"model": "tiny"})
        .env_runners(engine="transformers", num_env_runners=0, max_turn_tokens=12, max_episode_tokens=96)
        .training(num_prompts_per_batch=4, group_size=4, lr=3e-4, compute_dtype="float32", checkpoint_every=0)
        .training(log_directory=str(place / "run"))
        .debugging(seed=1)
    )


def played_by(config: SRLConfig) -> dict:
    """Return what is known of the episodes of the first iteration of a run."""
    algo = config.build_algo()
    try:
        return algo.train()["env_runners"]
    finally:
        algo.stop()


@pytest.mark.slow
def test_a_run_reports_each_function_and_one_that_raises_ends_it(place: Path) -> None:
    played = played_by(small(place).reward(["own_rewards:right", "own_rewards.py:short"], weights=[0.75, 0.25]))
    total = 0.75 * played["reward/right"] + 0.25 * played["reward/short"]
    assert played["episode_return_mean"] == pytest.approx(total, abs=1e-6) and 0 < played["reward/short"] <= 1

    with pytest.raises(RunEndedError) as caught:
        played_by(small(place).training(log_directory=str(place / "two")).reward("own_rewards:breaks"))
    said = str(caught.value)
    file = place / "own_rewards.py"
    assert f"environment 'question_file': reward '{file}:breaks' raised KeyError: 'gone'; row {{" in said
    assert "on_reward_error = 'drop' leaves such episodes out" in said

    dropping = small(place).training(log_directory=str(place / "three")).reward("own_rewards:breaks", on_error="drop")
    played = played_by(dropping)
    assert played["stop_reason/env_crashed"] == played["num_episodes_lost"] == 16


def test_relative_paths_become_absolute(place: Path) -> None:
    """Runners start elsewhere; names that are no files here, and paths within a data set of the hub, stay."""
    Path("docs").mkdir()
    here = str(place.resolve())
    config = SRLConfig().environment("question_file", env_config={"path": "rows.jsonl", "domain": "docs"})
    config.reward(["own_rewards.py:right", {"function": "own_rewards.py:right", "weight": 2.0}, "math:sqrt"])
    assert config.env_config["path"] == f"{here}/rows.jsonl"
    assert config.env_config["domain"] == "docs"
    file = f"{here}/own_rewards.py:right"
    assert functions_in(config.env_config) == [file, "math:sqrt"]

    envs = SRLConfig().environment(envs={"search": {"corpus_path": "docs", "questions_path": "none.jsonl"}}).envs
    assert envs == {"search": {"corpus_path": f"{here}/docs", "questions_path": "none.jsonl"}}
    on_hub = {"hub_id": "openai/gsm8k", "path": "rows.jsonl"}
    assert SRLConfig().environment("question_file", env_config=on_hub).env_config == on_hub


needs_openai = pytest.mark.skipif(find_spec("openai") is None, reason="openai is not installed")


def run(client: Any, task: dict[str, Any]) -> float:
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    return 1.0


def silent(client: Any, task: dict[str, Any]) -> float:
    return 1.0


def of_agent(**settings: Any) -> SRLConfig:
    return (
        SRLConfig()
        .environment("rllib_srl.envs.agents.agent:Agent", env_config=settings)
        .rl_module(model_config={"model": "tiny"})
        .env_runners(engine="transformers", num_env_runners=0, max_turn_tokens=8, max_episode_tokens=64)
        .training(compute_dtype="float32")
    )


def test_a_function_becomes_its_import_path_and_tasks_a_file() -> None:
    made = SRLConfig().environment(agent=run, tasks=[{"a": 1}, {"a": 2}], env_config={"history": "refuse"})
    assert made.env == "agent" and made.env_config["agent"] == f"{__name__}:run"
    assert made.env_config["history"] == "refuse" and functions_in(made.env_configs()) == [f"{__name__}:run"]
    rows = [json.loads(line) for line in Path(made.env_config["path"]).read_text().splitlines()]
    assert rows == [{"a": 1}, {"a": 2}]
    assert SRLConfig().environment(agent="m:f", tasks="x.jsonl").env_config == {"agent": "m:f", "path": "x.jsonl"}


def test_a_command_is_kept_with_the_places_of_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "program.py").write_text("")
    (tmp_path / "python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    made = SRLConfig().environment(agent_command=["./python", "program.py", "--fast"])
    assert made.env_config == {"agent_command": [f"{tmp_path}/python", f"{tmp_path}/program.py", "--fast"]}
    envs = {"agent": {"agent": "program.py:run", "path": "program.py"}}
    whole = {"agent": f"{tmp_path}/program.py:run", "path": f"{tmp_path}/program.py"}
    several = SRLConfig().environment(envs=envs)
    assert several.envs == {"agent": whole} and functions_in(several.envs) == [whole["agent"]]
    (named,) = functions_in(made.env_config)
    assert named.endswith(f"{tmp_path}/program.py --fast")


@pytest.mark.parametrize(("settings", "message"), [
    ({"tasks": "x.jsonl"}, "tasks without an agent"),
    ({"agent": lambda client, task: 1.0}, "agent = function"),
    ({"agent": "a:b", "env": "compare"}, "agent and env; expected one of them"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SRLConfig().environment(**settings)


@needs_openai
@pytest.mark.parametrize(("settings", "message"), [
    ({"agent": f"{__name__}:silent"}, "the agent ended without a request to the model"),
    ({"agent": f"{__name__}:no_such"}, "has no 'no_such'"),
    ({"agent_command": [sys.executable, "-c", "raise SystemExit('no key')"]}, "exit status 1: no key"),
])  # fmt: skip
def test_an_agent_that_cannot_play_is_refused_before_the_run(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        of_agent(**settings).validate()
