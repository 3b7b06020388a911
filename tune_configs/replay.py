"""Do old prompts that come back keep more than plain GRPO does, at an equal budget of generated tokens?

They do if final accuracy and the area under the retention curve are higher than without replay, each paired difference
with a 95 % interval above 0 and a corrected p value below .05. The other rules for what comes back are compared with
uniform draws beside that; they decide nothing.
"""

from __future__ import annotations

from rllib_srl.studies.study import Primary, Study
from rllib_srl.tune_configs.arms import on_stream


def study() -> Study:
    """Return the study."""
    arms = ["uniform", "no_replay", "balanced", "fifo", "high_reward", "per", "srl"]
    return on_stream("cpu", module=__name__, doc=__doc__, arms=arms, primary=Primary("uniform", ("no_replay",)))
