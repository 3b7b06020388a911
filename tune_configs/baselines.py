"""Which rule for choosing replayed prompts remembers most, and is any of them better than SRL + diversity?

Every method has the same budget of generated tokens and the same prompts. SRL + diversity stands if it is better than
each on final accuracy and retention; a method that is significantly better refutes it. The best of the others is
`BEST_BASELINE` of `arms.py` from then on.
"""

from __future__ import annotations

from rllib_srl.studies.study import Primary, Study
from rllib_srl.tune_configs.arms import on_stream


def study() -> Study:
    """Return the study."""
    others = ["no_replay", "uniform", "uniform_less", "balanced", "fifo", "per", "fresh_per", "learnability"]
    others += ["difficulty_pool", "dapo", "speed", "knapsack", "zvp", "repo", "exgrpo", "exit", "srl", "diversity"]
    primary = Primary("srl_diversity", tuple(others))
    return on_stream("cpu", module=__name__, doc=__doc__, arms=["srl_diversity", *others], primary=primary)
