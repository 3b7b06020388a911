"""Does replay by spacing and diversity remember more than no replay, at an equal budget of tokens?

It does if final accuracy and the area under the retention curve are higher than without replay and than with uniform
replay, each paired difference with a 95 % interval above 0 and a corrected p value below .05, and not lower than with
the best of the other methods.
"""

from __future__ import annotations

from rllib_srl.studies.study import Primary, Study
from rllib_srl.tune_configs.arms import BEST_BASELINE, on_stream


def study() -> Study:
    """Return the study."""
    arms = list(dict.fromkeys(["srl_diversity", "no_replay", "uniform", BEST_BASELINE]))
    primary = Primary("srl_diversity", ("no_replay", "uniform"))
    return on_stream("cpu", module=__name__, doc=__doc__, arms=arms, primary=primary)
