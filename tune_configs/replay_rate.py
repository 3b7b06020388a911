"""At which learning rate do the arms with replay remember most, and does SRL + diversity lead there?

The rate of `arms.py` stands unless a higher one is better in final accuracy and retention. At a higher rate single runs
unlearn the answer format permanently, with every replay rule, so chance decides which arm ends higher.
"""

from __future__ import annotations

from dataclasses import replace

from rllib_srl.studies.study import Arm, Primary, Study
from rllib_srl.tune_configs.arms import ARMS, COMMON, on_stream

RATES = {"high": 3e-4, "low": COMMON["lr"]}


def at_rate(arm: str, name: str) -> Arm:
    """Return an arm of `arms.py` at one of `RATES`."""
    base, rate = ARMS[arm], RATES[name]
    return replace(
        base, name=f"{arm}_{name}", title=f"{base.title}, {rate:g}", settings={**base.settings, "lr": rate}
    )


def study() -> Study:
    """Return the study."""
    arms = [at_rate(arm, name) for name in ("low", "high") for arm in ("srl_diversity", "uniform", "balanced")]
    primary = Primary(arms[0].name, tuple(arm.name for arm in arms[1:]))
    return on_stream("cpu_turned", module=__name__, doc=__doc__, arms=arms, primary=primary)
