"""At which learning rate, passes over a batch and shape of a batch does each method do best on a finite pool?

Every method, plain GRPO included, has the same grid on the same pool with the same seeds, so that no arm of
`pool_proof` need owe its result to its tuning; docs/LOG.md says which settings were run. All settings generate equally
many tokens; more passes only train on them more often. The setting with the largest accuracy over training is the one
taken. The pool is the development pool, which no confirmation uses.

Run one method at a time, with --arms: first all of its settings with one seed, then the best three with two more.
`scripts/pool_choice.py` prints the table and the names of the best.
"""

from __future__ import annotations

from rllib_srl.studies.study import Primary, Study
from rllib_srl.tune_configs.kinds import DEVELOPMENT
from rllib_srl.tune_configs.pools import MEASURES, METHODS, grid, on_pool


def study() -> Study:
    """Return the study."""
    arms = [arm for name in METHODS for arm in grid(name)]
    primary = Primary("memory_0.0004_x1_32x4", ("plain_0.0004_x1_32x4",), MEASURES)
    return on_pool(DEVELOPMENT, module=__name__, doc=__doc__, arms=arms, primary=primary)
