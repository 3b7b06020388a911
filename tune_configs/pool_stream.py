"""With twenty skills in turn and two revisit slots, does the memory keep more than uniform replay?

It does if final accuracy and retention are higher than with uniform replay, with oldest first and without replay, each
paired difference with a 95 % interval above 0 and a p value below .05 after Holm's correction. A fifth of the skills
cannot be learned: two are answered right by chance only, two never. Uniform draws were the ones to beat in the first
pilots (docs/LOG.md).
"""

from __future__ import annotations

from rllib_srl.studies.study import Primary, Study
from rllib_srl.tune_configs.arms import on_stream
from rllib_srl.tune_configs.stream_arms import STREAM_SEEDS, stream_arms

TOKENS = 5_800  # of a stage
TWO_SLOTS = 2 / 16  # of the batch


def study() -> Study:
    """Return the study. It does not measure pools: the only ones here are 4,000 facts of pure chance.

    Secondary, decided by nothing and printed beside the primary comparison: `memory` against `balanced`,
    `memory_uniform` and `memory_group` (`srl tune pool_stream --arms memory balanced`).
    """
    primary = Primary("memory", ("uniform", "fifo", "no_replay"))
    return on_stream("skills", module=__name__, doc=__doc__, arms=stream_arms(TWO_SLOTS), primary=primary,
                     seeds=STREAM_SEEDS, tokens=TOKENS, measures_pool=False)
