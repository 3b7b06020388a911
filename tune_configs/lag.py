"""Does a run learn as much if its runners play ahead of training, at equal generated tokens?

It does if the difference in accuracy over training between `max_lag` 1 or 4 and runs in which rollout and training take
turns has a 95 % interval above -.02. The primary comparison asks more, namely whether lag 1 is better, which nobody
expects. Plain GRPO on the development pool of the pool studies, one runner a trial.
"""

from __future__ import annotations

from rllib_srl.studies.study import Arm, Primary, Study
from rllib_srl.tune_configs.arms import DEV_SEEDS
from rllib_srl.tune_configs.kinds import DEVELOPMENT
from rllib_srl.tune_configs.pools import MEASURES, PLAIN, on_pool

TOKENS = 60_000  # of a trial
RUNNER = {"num_env_runners": 1}  # what plays ahead is another process
LAGS = (0, 1, 4)


def study() -> Study:
    """Return the study."""
    arms = [
        Arm(f"lag_{lag}", f"max_lag = {lag}", "Rollout and training take turns." if lag == 0 else
            f"A group is trained on at most {lag} updates after its first token.", {**PLAIN, **RUNNER, "max_lag": lag,
            **({"late": "drop"} if lag else {})})
        for lag in LAGS
    ]  # fmt: skip
    primary = Primary("lag_1", ("lag_0",), MEASURES)
    settings = {"lr": 4e-4, "num_prompts_per_batch": 16, "group_size": 8}
    return on_pool(DEVELOPMENT, module=__name__, doc=__doc__, arms=arms, primary=primary, seeds=DEV_SEEDS,
                   tokens=TOKENS, settings=settings)
