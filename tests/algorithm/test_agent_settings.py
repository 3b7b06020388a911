"""Settings of agents: what `.environment(agent=...)` makes of them, and what is refused before an engine starts."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rllib_srl import SRLConfig
from rllib_srl.common.import_paths import functions_in

needs_openai = pytest.mark.skipif(find_spec("openai") is None, reason="openai is not installed")


def run(client: Any, task: dict[str, Any]) -> float:
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    return 1.0


def silent(client: Any, task: dict[str, Any]) -> float:
    return 1.0


def config(**settings: Any) -> SRLConfig:
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
    assert made.env_config["history"] == "refuse" and functions_in(made.world_configs()) == [f"{__name__}:run"]
    rows = [json.loads(line) for line in Path(made.env_config["path"]).read_text().splitlines()]
    assert rows == [{"a": 1}, {"a": 2}]
    assert SRLConfig().environment(agent="m:f", tasks="x.jsonl").env_config == {"agent": "m:f", "path": "x.jsonl"}


def test_a_command_is_kept_with_the_places_of_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "program.py").write_text("")
    (tmp_path / "python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    made = SRLConfig().environment(agent_command=["./python", "program.py", "--fast"])
    assert made.env_config == {"agent_command": [f"{tmp_path}/python", f"{tmp_path}/program.py", "--fast"]}
    worlds = {"agent": {"agent": "program.py:run", "path": "program.py"}}
    whole = {"agent": f"{tmp_path}/program.py:run", "path": f"{tmp_path}/program.py"}
    several = SRLConfig().environment(worlds=worlds)
    assert several.worlds == {"agent": whole} and functions_in(several.worlds) == [whole["agent"]]
    (named,) = functions_in(made.env_config)
    assert named.endswith(f"{tmp_path}/program.py --fast")


@pytest.mark.parametrize(("settings", "message"), [
    ({"agent": "a:b", "agent_command": ["x"]}, "expected one of the two"),
    ({"agent_command": "python agent.py"}, "expected a list"),
    ({"tasks": "x.jsonl"}, "tasks without an agent"),
    ({"agent": lambda client, task: 1.0}, "agent = function"),
    ({"agent": "a:b", "env": "compare"}, "agent and env; expected one of them"),
    ({"agent": "a:b", "tasks": [1]}, "row 1 is a int"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SRLConfig().environment(**settings)


@needs_openai
@pytest.mark.parametrize(("settings", "message"), [
    ({"agent": f"{__name__}:silent"}, "the agent ended without a request to the model"),
    ({"agent": f"{__name__}:no_such"}, "has no 'no_such'"),
    ({"agent_command": [sys.executable, "-c", "raise SystemExit('no key')"]}, "exit status 1: no key"),
    ({"agent": f"{__name__}:run", "history": "forget"}, "history = 'forget'"),
])  # fmt: skip
def test_an_agent_that_cannot_play_is_refused_before_the_run(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**settings).validate()
