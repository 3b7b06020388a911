"""How many of the played prompts should come from the memory?

The default of a quarter stands unless another share is better in final accuracy and retention, at an equal budget of
generated tokens: each revisit takes the place of a fresh prompt.
"""

from __future__ import annotations

from rllib_srl.studies.study import Arm, Primary, Study
from rllib_srl.tune_configs.arms import on_stream

PERCENTS = (25, 10, 40, 60)  # the first is the default


def study() -> Study:
    """Return the study."""
    arms = [
        Arm(f"revisit_{percent}", f"{percent} % old prompts", f"{percent} % of the played prompts come back.",
            {"replay_revisit_fraction": percent / 100})
        for percent in PERCENTS
    ]  # fmt: skip
    primary = Primary(arms[0].name, tuple(arm.name for arm in arms[1:]))
    return on_stream("cpu", module=__name__, doc=__doc__, arms=arms, primary=primary)
