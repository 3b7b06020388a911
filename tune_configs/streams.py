"""The streams of domains that studies train on: one table of stages, each an environment with settings and a length.

    STREAMS["cpu"]               two pairs of opposite skills, and one between, that a small model learns in turn
    STREAMS["cpu_turned"]        the same in another order, so that tuning does not depend on one order
    STREAMS["cpu_drawn"]         domains drawn by lot; held out until a confirmation was read, used for tuning since
    STREAMS["cpu_heldout"]       other domains, drawn by lot, to confirm what was tuned on the streams above
    STREAMS["cpu_heldout_2"]     others again, for the hypothesis that came from that confirmation
    STREAMS["skills"]            twenty skills, four of which cannot be learned, for few revisit slots
    STREAMS["facts"]             arbitrary facts in six stages
    STREAMS["cpu_pretrained"]    two of the pairs with shots, for a pretrained model of 135M
    scaled("cpu", iterations=4)  the same, each stage of another length

    Which is largest: 17, 93 or 40?  93        ... two stages of other kinds ...        Which is smallest: ...?  17

`.environment(stream=STREAMS["cpu"])` trains on one. In the first five, two stages teach skills whose opposites are
taught by two later stages, and one word of the prompt distinguishes the two. A policy that reinforces an answer while
ignoring the word unlearns the earlier skill with the later one. Without such pairs there is no forgetting to measure,
because learning one task improves a policy at all of them (docs/LOG.md).

The tiny model half masters the stages (scripts/tiny_lessons.py), without shots; another model needs `num_shots`
in every `env_config`. Every environment here has thousands of questions, so that a stage never repeats one and held-out
questions are new.

`cpu_drawn`, `cpu_heldout` and `cpu_heldout_2` were drawn by `random.Random(401)`, `(501)` and `(601)`, to exclude
choice by hand: one pair of `compare` and one of `registers`, each of a size that is in no lesson and no earlier stream
of this model; one skill between them; then the order of the five. A test repeats the draws.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from rllib_srl.tune_configs.kinds import DEVELOPMENT, KINDS, UNTRAINED

STAGE = 10  # iterations


def _stage(world: str, domain: str = "", **env_config: Any) -> dict[str, Any]:
    named = {"domain": domain} if domain else {}
    return {"world": world, **named, "env_config": {"num_shots": 0, **env_config}, "iterations": STAGE}


def skills() -> list[dict[str, Any]]:
    """Return twenty stages in an order drawn by lot: development kinds, two of pure chance, two never solved."""
    draw = random.Random(821)
    learnable = [kind for kind in DEVELOPMENT if UNTRAINED[kind][0] >= 0.05]
    known = [_stage(KINDS[kind]["env"], kind, **KINDS[kind]["env_config"]) for kind in draw.sample(learnable, 16)]
    # New facts at every prompt, hundreds to a stage: 1 / 3 and 1 / 2 of the answers are right, and nothing helps.
    by_chance = [
        _stage("recall", f"chance_{num}", num_facts=2000, num_stages=1, num_options=num, seed=num) for num in (2, 3)
    ]
    hopeless = [_stage("reasoning_gym", name, dataset=name, level=0, pool_size=4096) for name in ("gcd", "lcm")]
    stages = [*known, *by_chance, *hopeless]
    draw.shuffle(stages)
    return stages


STREAMS: dict[str, Any] = {
    "cpu": [
        _stage("compare"),
        _stage("registers", "registers_larger", task="larger"),
        _stage("word_problem_tool", num_steps=1),
        _stage("compare", "compare_smallest", ask="smallest"),
        _stage("registers", "registers_smaller", task="smaller"),
    ],
    "cpu_turned": [
        _stage("registers", "registers_larger", task="larger"),
        _stage("compare", "compare_smallest", ask="smallest"),
        _stage("word_problem_tool", num_steps=1),
        _stage("registers", "registers_smaller", task="smaller"),
        _stage("compare"),
    ],
    "cpu_drawn": [
        _stage("compare", "compare_five", num_numbers=5),
        _stage("registers", "registers_six", num_registers=6),
        _stage("compare", "compare_five_smallest", num_numbers=5, ask="smallest"),
        _stage("registers", "registers_two_smaller", num_registers=2, task="smaller"),
        _stage("registers", "registers_two_larger", num_registers=2, task="larger"),
    ],
    "cpu_heldout": [
        _stage("compare", "compare_six", num_numbers=6),
        _stage("compare", "compare_six_smallest", num_numbers=6, ask="smallest"),
        _stage("registers", "registers_seven_smaller", num_registers=7, task="smaller"),
        _stage("lookup", "lookup_three", num_pairs=3),
        _stage("registers", "registers_seven_larger", num_registers=7, task="larger"),
    ],
    "cpu_heldout_2": [
        _stage("registers", "registers_five_larger", num_registers=5, task="larger"),
        _stage("compare", "compare_two", num_numbers=2),
        _stage("compare", "compare_two_smallest", num_numbers=2, ask="smallest"),
        _stage("lookup", "lookup_two", num_pairs=2),
        _stage("registers", "registers_five_smaller", num_registers=5, task="smaller"),
    ],
    "cpu_pretrained": [
        _stage("compare", num_shots=4),
        _stage("registers", "registers_larger", task="larger", num_registers=2, num_turns=3, num_shots=4),
        _stage("compare", "compare_smallest", ask="smallest", num_shots=4),
        _stage("registers", "registers_smaller", task="smaller", num_registers=2, num_turns=3, num_shots=4),
    ],
    # More skills than revisit slots: sixteen that the tiny model half knows, and four that cannot be learned.
    "skills": skills(),
    # Arbitrary facts: each stage has its own, and only repetition keeps them.
    "facts": [_stage("recall", f"facts_{stage}", num_facts=64, num_stages=6, stage=stage) for stage in range(6)],
    # A linear transition from one domain to another.
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
