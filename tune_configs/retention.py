"""At which expected recall should an old prompt come back?

People learn best at a recall of about .9; a policy learns nothing from a prompt that all its answers solve.
The default of .9 stands unless a lower recall is better in final accuracy and retention, at equal generated tokens.
"""

from __future__ import annotations

from rllib_srl.studies.study import Primary, Study
from rllib_srl.tune_configs.arms import on_stream, varied


def study() -> Study:
    """Return the study."""
    arms = [
        varied(f"recall_{percent}", f"recall {percent} %", "A prompt is due when this is how often it is expected to "
               "be solved.", replay_spacing={"name": "fsrs", "desired_retention": percent / 100})
        for percent in (90, 80, 70, 50)
    ]
    primary = Primary("recall_90", tuple(arm.name for arm in arms[1:]))
    return on_stream("cpu", module=__name__, doc=__doc__, arms=arms, primary=primary, asks_about_spacing=True)
