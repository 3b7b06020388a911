"""Settings of environments: every range is kept, names and types are known, and all errors come at once."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Optional, get_args, get_type_hints

import pytest

from rllib_srl.common.environments import resolve
from rllib_srl.envs.math import reasoning_gym_data
from rllib_srl.envs.question import QuestionSettings
from rllib_srl.envs.settings import OneOf, Settings, Within, read_settings
from tests.envs.table import entry_points


def every_class(base: type[Settings] = Settings) -> Iterator[type[Settings]]:
    for one in base.__subclasses__():
        yield from (one, *every_class(one))


def outside(allowed: Within | OneOf) -> list[Any]:
    if isinstance(allowed, OneOf):
        return ["no such name"]
    above = [] if allowed.most == float("inf") else [allowed.most + 1]
    return [allowed.least - 1, *above, *([allowed.least] if allowed.is_open else [])]


def test_every_range_of_every_environment_is_kept() -> None:
    for path in entry_points().values():
        resolve(path)  # imported, its settings are known
    num_checked = 0
    for settings_class in every_class():
        for name, hint in get_type_hints(settings_class, include_extras=True).items():
            for allowed in get_args(hint)[1:]:
                for value in outside(allowed) if isinstance(allowed, (Within, OneOf)) else ():
                    said = re.escape(f"env_config of X: {name} = {value!r}; expected {allowed}")
                    with pytest.raises(ValueError, match=said + "$"):
                        read_settings(settings_class, {name: value}, "X")
                    num_checked += 1
    assert num_checked > 100


# environment -> settings, and what is said
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "agent": [
        ({}, "expected one of the two"), ({"agent": "a:b", "agent_command": ["x"]}, "expected one of the two"),
        ({"agent": "run"}, "expected 'my_module:run'"), ({"agent_command": [1]}, "expected a list of texts"),
        ({"agent": "no_such_module_here:run"}, "agent = 'no_such_module_here:run': there is no module"),
        ({"agent": "json:loads", "path": "no-such.jsonl"}, "no-such.jsonl"),
        ({"agent": "json:loads", "heldout_path": "x.jsonl"}, "heldout_path is given without path"),
    ],
    "bfcl": [({"forgiven_turns": 1}, "forgiven_turns = 1; expected 0")],
    "compare": [
        ({"lowest": 50, "highest": 50}, "lowest = 50, highest = 50; expected 0 <= lowest < highest"),
        ({"lowest": 10, "highest": 12}, "lowest to highest are 3 numbers; too few"),
    ],
    "function_call": [
        ({"bfcl": "multiple", "path": "x", "call_format": "tags"}, "call_format = 'tags'.*expected one of the two"),
        ({"num_calls": 3, "num_tools": 2}, "num_calls = 3; expected at most num_tools = 2"),
        ({"path": "/nowhere"}, "cannot be read"),
    ],
    "question_file": [
        ({}, "path is not set; expected a file that ends in .jsonl"),
        ({"path": "nowhere.jsonl"}, "path = 'nowhere.jsonl' does not exist"),
        ({"path": "x", "format_weight": 0.5}, "answer_format = 'any' fits every answer; expected one of boxed, tags"),
        ({"path": "x", "prompt_template": "Q:"}, r"prompt_template = 'Q:': \{question\} is not in it; expected text"),
        ({"path": "x", "prompt_template": "{question} }"}, "Single '}' encountered.*; write a literal brace twice; .*"),
        ({"path": "x", "prompt_template": "{} {question}"}, r"\{\} is not a plain field name"),
        ({"path": "x", "prompt_template": "{question.upper}"}, r"\{question.upper\} is not a plain field name"),
        ({"path": "x", "prompt_template": "{question} {Answer}"}, r"names \{Answer\}, which reveals the answer"),
        ({"path": "x", "prompt_template": "{question} {a}", "answer_field": "a"}, r"names \{a\}, which reveals"),
        ({"path": "x", "instruction": 3, "system_prompt": None}, "instruction = 3; .*system_prompt = None; expected"),
    ],
    "reasoning_gym": [
        ({}, "dataset is not set"), ({"dataset": "composite"}, "refused: its settings are not JSON"),
        ({"dataset": "chainsum"}, "dataset = 'chainsum'; expected one of reasoning-gym's .*chain_sum"),
        ({"dataset": "chain_sum", "config": {"terms": 2}}, "dataset 'chain_sum' has no 'terms'; expected .*max_terms"),
        ({"dataset": "chain_sum", "config": {"min_terms": 9}}, "is refused: max_terms must be >= min_terms"),
        ({"dataset": "chain_sum", "config": {"seed": 1, "size": 3}}, "config has seed; .*config has size"),
        ({"dataset": "chain_sum", "level": 99}, r"level = 99; expected 0 to \d+ for dataset 'chain_sum'"),
        ({"dataset": "sudoku"}, "answers of several lines; set multiline = True"),
        *(({"dataset": name}, f"dataset = '{name}' is refused: it") for name in reasoning_gym_data.REFUSED),
    ],
    "recall": [
        ({"num_facts": 500, "num_stages": 5}, "= 500 x 5 . 0; expected at most 2340 names"),
        ({"stage": 6}, r"stage = 6; expected -1 \(all\) to 5"),
    ],
    "retail": [
        ({"feedback_turns": 1, "num_shots": 2, "call_format": "tags"},
         "num_shots = 2; expected 0.*feedback_turns = 1; expected 0.*call_format = 'tags'"),
    ],
    "self_iteration": [
        ({}, r'env is not set; expected "package.module:Class" or one of .*compare'),
        ({"env": "no.module:Env"}, "env = 'no.module:Env' cannot be imported .ModuleNotFoundError"),
        ({"env": "self_label", "env_config": {"env": "compare"}}, "rewarded by its group; expected it around"),
        ({"env": "tests.envs.test_self_iteration:Foreign"}, "has no prompt_ids; expected an environment with pro"),
        ({"env": "self_iteration", "env_config": {"env": "compare"}}, "iterates already; expected the env"),
        ({"env": "compare", "env_config": 1}, "env_config = 1; expected dict$"),
    ],
    "self_label": [
        ({}, "env is not set; expected"),
        ({"env": "compare", "env_config": {"feedback_turns": 1}}, "feedback reveals the answer; expected 0"),
        ({"env": "self_iteration", "env_config": {"env": "compare", "env_config": {"feedback_turns": 1}}},
         "feedback reveals the answer; expected 0"),
        ({"env": "self_label", "env_config": {"env": "compare"}}, "labels its groups already"),
    ],
    "verifiers": [
        ({}, "load = ''; expected the id of a taskset"),
        ({"load": "x", "low": 1.0}, "low = 1 and high = 1; expected two numbers"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_do_not_fit_are_refused(name: str) -> None:
    for env_config, message in REFUSED[name]:
        with pytest.raises(ValueError, match=f"(?s){message}"):
            resolve(name)(env_config)


@dataclass(frozen=True)
class OwnSettings(QuestionSettings):
    """Settings of a user's environment, with types that none of the package's environments has."""

    names: list[str] | None = None
    mode: Literal["easy", "hard"] = "easy"
    weight: Optional[float] = None  # noqa: UP045


def test_settings_of_a_user_may_have_any_type() -> None:
    given = {"names": ["a"], "mode": "hard", "weight": 2}
    settings = read_settings(OwnSettings, given, "Own")
    assert {name: getattr(settings, name) for name in given} == given
    for wrong in ({"names": [1]}, {"names": "a"}, {"mode": "no"}, {"weight": "2"}, {"weight": True}):
        ((name, value),) = wrong.items()
        with pytest.raises(ValueError, match=f"env_config of Own: {name} = {re.escape(repr(value))}; expected "):
            read_settings(OwnSettings, wrong, "Own")


def test_all_errors_come_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        read_settings(OwnSettings, {"num_shots": 65, "mode": 3, "shots": 1, "retry_reward": -0.5}, "Own")
    for part in ("shots is not a setting; expected one of ", "num_shots = 65; ", "mode = 3; ", "retry_reward = -0.5; "):
        assert part in str(caught.value)
