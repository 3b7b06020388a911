"""On other domains and fresh seeds, does the frozen setting remember more than its controls?

It does if final accuracy and retention are higher than without replay, than with uniform replay, and than with as
many trained tokens spent otherwise, each paired difference with a 95 % interval above 0 and a p value below .05 after
Holm's correction. The best baseline of development runs beside them: is it scheduling that helps, or would equal shares
of all domains do? Run once for each frozen setting of `arms.py`; every run is reported, those after a change as well.
"""

from __future__ import annotations

from rllib_srl.continual.study import Primary, Study
from tune_configs.arms import BEST_BASELINE, FRESH_SEEDS, on_stream


def study() -> Study:
    """Return the study."""
    controls = ("no_replay", "uniform", "extra_epochs", "uniform_reuse")
    primary = Primary("srl_diversity", controls)
    arms = dict.fromkeys(["srl_diversity", *controls, BEST_BASELINE])
    return on_stream("cpu_heldout", module=__name__, doc=__doc__, arms=list(arms), primary=primary, seeds=FRESH_SEEDS,
                     is_confirmation=True)
