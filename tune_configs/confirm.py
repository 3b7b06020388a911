"""On other domains and fresh seeds, does the frozen setting remember more than its controls?

It does if final accuracy and retention are higher than without replay, than with uniform replay, and than with as
many trained tokens spent otherwise, each paired difference with a 95 % interval above 0 and a p value below .05 after
Holm's correction. The best baseline of development runs as well, to separate scheduling from equal shares of all
domains. Run it once for each frozen setting of `arms.py`; every run is reported, including those after a change.
"""

from __future__ import annotations

from rllib_srl.studies.study import Primary, Study
from rllib_srl.tune_configs.arms import BEST_BASELINE, FRESH_SEEDS, on_stream


def study() -> Study:
    """Return the study."""
    controls = ("no_replay", "uniform", "extra_epochs", "uniform_reuse")
    primary = Primary("srl_diversity", controls)
    arms = dict.fromkeys(["srl_diversity", *controls, BEST_BASELINE])
    return on_stream("cpu_heldout", module=__name__, doc=__doc__, arms=list(arms), primary=primary, seeds=FRESH_SEEDS,
                     is_confirmation=True)
