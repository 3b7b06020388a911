"""The streams of domains that studies train on: one table of stages, each an environment with settings and a length.

    STREAMS["cpu"]               two pairs of opposite skills, and one between, that a small model learns in turn
    STREAMS["skills"]            twenty kinds of `kinds.py`, drawn by lot
    STREAMS["facts"]             arbitrary facts in six stages
    STREAMS["pretrained"]        two pairs of opposite skills with shots, for a pretrained model of 135M
    STREAMS["pretrained_shared"] four skills of one direction with shots, for the same
    STREAMS["cpu_blend"]         a linear transition from one domain to another
    scaled("cpu", iterations=4)  a stream of stages, each of another length

    Which is largest: 17, 93 or 40?  93        ... two stages of other kinds ...        Which is smallest: ...?  17

`.environment(stream=STREAMS["cpu"])` trains on one. In `cpu` two stages teach skills whose opposites are taught by two
later stages, and one word of the prompt distinguishes the two. A policy that reinforces an answer while ignoring the
word unlearns the earlier skill with the later one. Without such pairs there is no forgetting to measure, because
learning one task improves a policy at all of them (docs/LOG.md).

The tiny model half masters the stages, without shots; another model needs `num_shots`
in every `env_config`. Every environment here has thousands of questions, so that a stage never repeats one and held-out
questions are new. The streams of finished confirmations are in commit 9ffec21.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from rllib_srl.tune_configs.kinds import KINDS

STAGE = 10  # iterations


def _stage(env: str, domain: str = "", **env_config: Any) -> dict[str, Any]:
    named = {"domain": domain} if domain else {}
    return {"env": env, **named, "env_config": {"num_shots": 0, **env_config}, "iterations": STAGE}


def _kinds(num: int, seed: int) -> list[dict[str, Any]]:
    """Return stages of `num` kinds drawn by lot, in the order of the draw."""
    drawn = random.Random(seed).sample(sorted(KINDS), num)
    return [_stage(KINDS[kind]["env"], kind, **KINDS[kind]["env_config"]) for kind in drawn]


def _registers(task: str, num_registers: int) -> dict[str, Any]:
    domain = f"registers_{num_registers}_{task}"
    return _stage("registers", domain, task=task, num_registers=num_registers, num_turns=3, num_shots=4)


def _compare(ask: str, num_numbers: int) -> dict[str, Any]:
    return _stage("compare", f"compare_{num_numbers}_{ask}", ask=ask, num_numbers=num_numbers, num_shots=4)


STREAMS: dict[str, Any] = {
    "cpu": [
        _stage("compare"),
        _stage("registers", "registers_larger", task="larger"),
        _stage("word_problem_tool", num_steps=1),
        _stage("compare", "compare_smallest", ask="smallest"),
        _stage("registers", "registers_smaller", task="smaller"),
    ],
    "skills": _kinds(20, seed=822),
    "facts": [_stage("recall", f"facts_{stage}", num_facts=64, num_stages=6, stage=stage) for stage in range(6)],
    "pretrained": [
        _compare("largest", 3),
        _registers("larger", 2),
        _compare("smallest", 3),
        _registers("smaller", 2),
    ],
    "pretrained_shared": [
        _compare("largest", 3),
        _registers("larger", 2),
        _compare("largest", 4),
        _registers("larger", 3),
    ],
    # A linear transition from one domain to another.
    "cpu_blend": {
        "domains": [{"env": "compare"}, {"env": "lookup"}],
        "schedule": [[0, {"compare": 1}], [3 * STAGE, {"lookup": 1}]],
    },
}


def scaled(name: str, iterations: int | None = None, tokens: int | None = None) -> Sequence[dict[str, Any]]:
    """Return a stream of stages with every stage of another length.

    Args:
        name: a key of `STREAMS`.
        iterations: of a stage; or
        tokens: that the policy generates in a stage.

    Raises:
        ValueError: not exactly one length, an unknown name, or a stream without stages.
    """
    if name not in STREAMS or not isinstance(STREAMS[name], list):
        known = sorted(key for key, stream in STREAMS.items() if isinstance(stream, list))
        raise ValueError(f"stream = {name!r}; expected one of {', '.join(known)}")
    if (iterations is None) == (tokens is None):
        raise ValueError(f"iterations = {iterations}, tokens = {tokens}; expected one of them")
    length = {"iterations": iterations} if tokens is None else {"tokens": tokens}
    return [{**{key: stage[key] for key in stage if key != "iterations"}, **length} for stage in STREAMS[name]]
