"""Does holding stored answers keep more than old prompts do when twenty skills are learned in turn?

It does if final accuracy and retention are higher than with uniform draws of old prompts, at an equal budget of
generated tokens. Most of the skills help each other, so that old prompts are expected to end level or ahead.
"""

from __future__ import annotations

from rllib_srl.studies.study import Arm, Primary, Study
from rllib_srl.tune_configs.arms import RETENTION, on_stream


def study() -> Study:
    """Return the study."""
    primary = Primary("retention", ("uniform", "no_replay"))
    arms: list[str | Arm] = [RETENTION, "uniform", "no_replay"]
    return on_stream("skills", module=__name__, doc=__doc__, arms=arms, primary=primary, tokens=10_000)
