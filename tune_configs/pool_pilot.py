"""At which learning rate, with how many passes over a batch, does plain GRPO do best on a finite pool?

The setting with the largest accuracy over training is the fair baseline: every arm of `pool_proof` is held against it.
All settings generate equally many tokens; more passes only train on them more often. The pool is the development pool,
which no confirmation uses. Few seeds: the table is read for its largest differences, not for the last percent.
"""

from __future__ import annotations

from rllib_srl.studies.study import Primary, Study
from rllib_srl.tune_configs.kinds import DEVELOPMENT
from rllib_srl.tune_configs.pools import MEASURES, grid, on_pool


def study() -> Study:
    """Return the study."""
    primary = Primary("plain_0.0004_x1", ("plain_0.0002_x1",), MEASURES)
    return on_pool(DEVELOPMENT, module=__name__, doc=__doc__, arms=grid("plain"), primary=primary)
