"""How many prompts must the memory hold?

A memory is large enough if no larger one is better in final accuracy and retention. The largest holds every prompt of
a run.
"""

from __future__ import annotations

from rllib_srl.studies.study import Primary, Study
from rllib_srl.tune_configs.arms import on_stream, varied


def study() -> Study:
    """Return the study."""
    arms = [
        varied(f"items_{size}", f"{size:,} prompts", f"The memory holds {size:,} prompts.", replay_capacity=size)
        for size in (65_536, 512, 128, 32)
    ]
    primary = Primary("items_65536", tuple(arm.name for arm in arms[1:]))
    return on_stream("cpu", module=__name__, doc=__doc__, arms=arms, primary=primary)
