"""Does the quick-start learn as much if its runner plays ahead of training, at equal generated tokens?

It does if both 95 % intervals of the difference in final accuracy, `max_lag` 0 (taking turns) minus 1
and minus 4, end below +.05, which is what 256 questions can tell. Three paired seeds illustrate `lag`; they are no test
of their own, since no exact test of three pairs reaches .05. All settings are those of `srl quickstart`.
"""

from __future__ import annotations

from rllib_srl.studies.study import Primary, Study
from rllib_srl.tune_configs.lag import LAGS, arm
from rllib_srl.tune_configs.on_quickstart import on_quickstart


def study() -> Study:
    """Return the study."""
    primary = Primary("lag_0", ("lag_1", "lag_4"), ("average_accuracy",))
    return on_quickstart(module=__name__, doc=__doc__, arms=tuple(map(arm, LAGS)), primary=primary)
