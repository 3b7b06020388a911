"""Arms of the studies that confirm the memory on streams: the same methods with the same shares of revisit and reuse.

An endless stream has no passes to shuffle, so here the memory is held against other ways to draw from the stored
prompts: uniformly, oldest first, and equally many of each domain. Which comparisons decide is fixed in each study's
`Primary`; that with `balanced` is secondary in all of them, because it was left out when these were fixed.
"""

from __future__ import annotations

from typing import Any

from rllib_srl.studies.study import Arm
from rllib_srl.tune_configs.pools import HISTORY, PLAIN, YOUNG_REUSE

STREAM_SEEDS = tuple(range(811, 821))
FACT_SEEDS = tuple(range(831, 841))


def stream_arms(revisit_fraction: float) -> list[Arm]:
    """Return the arms, those that replay with this share of revisits."""
    shared: dict[str, Any] = {**YOUNG_REUSE, "replay_revisit_fraction": revisit_fraction}

    def drawn_by(rule: str, **settings: Any) -> dict[str, Any]:
        return {**shared, "replay_selection": rule, **settings}

    return [
        Arm("memory", "memory", "The rule `signal` chooses what comes back; baseline from history.",
            drawn_by("signal", **HISTORY)),
        Arm("memory_uniform", "uniform with history", "Old prompts come back at random; baseline from history.",
            drawn_by("uniform", **HISTORY)),
        Arm("memory_group", "memory, GRPO's baseline", "The rule `signal` chooses what comes back.",
            drawn_by("signal")),
        Arm("uniform", "uniform replay", "Old prompts come back at random.", drawn_by("uniform")),
        Arm("fifo", "oldest first", "Old prompts come back in turn: regularity alone.", drawn_by("fifo")),
        Arm("balanced", "balanced replay", "Old prompts come back at random, equally many of each domain.",
            drawn_by("uniform", replay_domain_quotas="equal")),
        Arm("no_replay", "no replay", "Old prompts never come back: plain GRPO.", {**PLAIN, "lr": 5e-5}),
    ]  # fmt: skip
