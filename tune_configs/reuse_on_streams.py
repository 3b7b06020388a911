"""Where old prompts come back, does training on stored groups again keep more?

It does if final accuracy and retention are higher than without reuse, each paired difference with a 95 % interval
above 0 and a p value below .05 after Holm's correction. Both arms have the memory's default share of revisits, drawn
uniformly; young groups, at most six iterations old, are reused or not. Reuse costs no generated token, but trained
ones.
"""

from __future__ import annotations

from rllib_srl.studies.study import Arm, Primary, Study
from rllib_srl.tune_configs.arms import on_stream
from rllib_srl.tune_configs.pools import NO_REUSE, YOUNG_REUSE

SEEDS = tuple(range(841, 851))
REVISITS = {"replay_revisit_fraction": 0.25, "replay_selection": "uniform"}


def study() -> Study:
    """Return the study."""
    shared = {**YOUNG_REUSE, **REVISITS}
    arms: list[str | Arm] = [
        Arm("reuse", "revisits and reuse", "Old prompts come back; a quarter of the trained groups are stored.",
            shared),
        Arm("no_reuse", "revisits only", "Old prompts come back; nothing is trained on again.", {**shared, **NO_REUSE}),
    ]  # fmt: skip
    primary = Primary("reuse", ("no_reuse",))
    return on_stream("cpu_heldout", module=__name__, doc=__doc__, arms=arms, primary=primary, seeds=SEEDS)
