"""Does a run learn as much if its runners play ahead of training, at equal generated tokens?

It does if both 95 % intervals of the difference in accuracy over training, `max_lag` 0 (taking turns)
minus 1 and minus 4, end below +.02. The primary comparison asks whether turns are better at all. Plain GRPO on the
development pool of the pool studies, one runner a trial.
"""

from __future__ import annotations

from typing import Any

from rllib_srl.studies.study import Arm, Primary, Study
from rllib_srl.tune_configs.arms import DEV_SEEDS
from rllib_srl.tune_configs.kinds import DEVELOPMENT
from rllib_srl.tune_configs.pools import MEASURES, PLAIN, on_pool

TOKENS = 60_000  # of a trial
RUNNER = {"num_env_runners": 1}  # what plays ahead is another process
LAGS = (0, 1, 4)


def arm(lag: int, **settings: Any) -> Arm:
    """Return the arm in which groups lag at most so many updates, with further settings."""
    about = f"A group is trained on at most {lag} updates after its first token."
    return Arm(f"lag_{lag}", f"max_lag = {lag}", about if lag else "Rollout and training take turns.",
               {**settings, "max_lag": lag})  # fmt: skip


def study() -> Study:
    """Return the study."""
    arms = [arm(lag, **PLAIN, **RUNNER, **({"late": "drop"} if lag else {})) for lag in LAGS]
    primary = Primary("lag_0", ("lag_1", "lag_4"), MEASURES)
    settings = {"lr": 4e-4, "num_prompts_per_batch": 16, "group_size": 8}
    return on_pool(DEVELOPMENT, module=__name__, doc=__doc__, arms=arms, primary=primary, seeds=DEV_SEEDS,
                   tokens=TOKENS, settings=settings)
