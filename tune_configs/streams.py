"""The streams of domains that studies train on: one table, each stage a world, its settings and its length.

    STREAMS["cpu"]               six skills that a small model learns one after the other (docs/design/0006)
    STREAMS["cpu_heldout"]       other domains in another order, for confirming what was tuned on "cpu"
    scaled("cpu", iterations=4)  the same, each stage of another length

`.environment(stream=STREAMS["cpu"])` trains on one. The stages of the first two are what the tiny model half knows
(scripts/tiny_lessons.py), without shots: another model needs `num_shots` in every `env_config`. Every world here has
thousands of questions, so that a stage never repeats itself and held-out questions are really new.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

STAGE = 10  # iterations


def _stage(world: str, domain: str = "", **env_config: Any) -> dict[str, Any]:
    named = {"domain": domain} if domain else {}
    return {"world": world, **named, "env_config": {"num_shots": 0, **env_config}, "iterations": STAGE}


STREAMS: dict[str, Any] = {
    "cpu": [
        _stage("compare"),
        _stage("copy_words", num_words=3),
        _stage("compare", "compare_two", num_numbers=2),
        _stage("word_problem_tool", num_steps=1),
        _stage("registers"),
        _stage("registers", "registers_larger", task="larger"),
    ],
    "cpu_heldout": [
        _stage("registers", "registers_follow", task="follow"),
        _stage("compare", "compare_hundreds", num_numbers=2, lowest=100, highest=999),
        _stage("word_problem_tool", "word_problem_large", num_steps=1, lowest=21, highest=99),
        _stage("registers", "registers_five", num_registers=5),
        _stage("copy_words", "copy_two", num_words=2),
        _stage("compare", "compare_four", num_numbers=4),
    ],
    # The same kinds of task without stages: the shares of three drift, each in front once in 30 iterations.
    "cpu_drift": {
        "domains": [{"world": "compare"}, {"world": "lookup"}, {"world": "registers"}],
        "drift": 3 * STAGE,
        "sharpness": 3.0,
    },
    # From one domain to another along a line.
    "cpu_blend": {
        "domains": [{"world": "compare"}, {"world": "lookup"}],
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
