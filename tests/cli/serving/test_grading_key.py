"""Measurements of the model that was given are not used once its answers would be graded otherwise."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from rllib_srl.cli.serving.job import KeptDomain
from rllib_srl.cli.serving.trainer.grading_key import grading_key
from rllib_srl.cli.serving.trainer.trainer import answers_before
from rllib_srl.types import Prompt

MODULE = """
from rllib_srl.envs.math.compare import Compare

def grade(prompt, answer, row):
    return 1.0

class Strict(Compare):
    pass
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    path = tmp_path / "graded_otherwise.py"
    path.write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield path
    sys.modules.pop("graded_otherwise", None)


def key_of(world, limits=None, **env_config):
    return grading_key(KeptDomain(world, "it", env_config), limits or {"max_turns": 1})


def test_settings_and_limits_are_part_of_the_key():
    assert key_of("compare", num_shots=0) == key_of("compare", num_shots=0) != key_of("compare", num_shots=1)
    assert key_of("compare", num_shots=0) != key_of("compare", {"max_turns": 2}, num_shots=0)


def test_the_code_of_an_own_environment_is_part_of_the_key(module):
    before = key_of("graded_otherwise:Strict")
    assert key_of("graded_otherwise:Strict") == before
    module.write_text(MODULE.replace("1.0", "0.5"))
    assert key_of("graded_otherwise:Strict") != before


def test_rows_and_reward_functions_are_part_of_the_key(module, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "What is 1 + 1?", "answer": "2"}) + "\n")
    given = {"path": str(rows), "num_shots": 0, "reward": "graded_otherwise:grade"}
    keys = [key_of("question_file", **given)]
    rows.write_text(rows.read_text().replace('"2"', '"3"'))
    keys.append(key_of("question_file", **given))
    module.write_text(MODULE.replace("1.0", "0.5"))
    keys.append(key_of("question_file", **given))
    assert len(set(keys)) == 3 and key_of("question_file", **given) == keys[-1]


def test_old_measurements_are_used_only_under_the_same_grading(tmp_path):
    played, job = [], SimpleNamespace(model="m")

    def examiner(key):
        def answers(engine):
            played.append(key)
            return {"compare": {"a": key == "lax"}}

        return SimpleNamespace(prompts={"compare": [Prompt("compare", "1")]}, answers=answers, grading=lambda: key)

    for key, is_right in (("lax", True), ("lax", True), ("strict", False)):
        assert answers_before(job, examiner(key), None, tmp_path / "before.json") == {"compare": {"a": is_right}}
    assert played == ["lax", "strict"]
