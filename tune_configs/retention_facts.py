"""Does holding stored answers keep arbitrary facts better than old prompts do?

It does if final accuracy and retention are higher than with uniform draws of old prompts, at an equal budget of
generated tokens. Facts have no rule that later facts could teach: a fact is kept by repetition, or by being held.
"""

from __future__ import annotations

from rllib_srl.studies.study import Arm, Primary, Study
from rllib_srl.tune_configs.arms import RETENTION, on_stream


def study() -> Study:
    """Return the study."""
    primary = Primary("retention", ("uniform", "no_replay"))
    arms: list[str | Arm] = [RETENTION, "uniform", "no_replay"]
    return on_stream("facts", module=__name__, doc=__doc__, arms=arms, primary=primary, tokens=30_000)
