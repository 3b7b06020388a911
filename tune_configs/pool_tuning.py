"""At which learning rate, with how many passes over a batch, does each other method do best on a finite pool?

Each method gets the grid that plain GRPO gets in `pool_pilot`, on the same pool with the same seeds, so that no arm of
`pool_proof` owes its result to its tuning. The setting with the largest accuracy over training is the one taken. Run
one method at a time: --arms with its twelve settings.
"""

from __future__ import annotations

from rllib_srl.studies.study import Primary, Study
from rllib_srl.tune_configs.kinds import DEVELOPMENT
from rllib_srl.tune_configs.pools import MEASURES, METHODS, grid, on_pool


def study() -> Study:
    """Return the study."""
    arms = [arm for name in METHODS if name != "plain" for arm in grid(name)]
    primary = Primary("memory_0.0004_x1", ("passes_0.0004_x1",), MEASURES)
    return on_pool(DEVELOPMENT, module=__name__, doc=__doc__, arms=arms, primary=primary)
