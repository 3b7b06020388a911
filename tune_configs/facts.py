"""Does the memory keep arbitrary facts of earlier stages better than uniform replay, and than regularity alone?

It does if final accuracy and retention are higher than with uniform replay and with oldest first, which has the same
regular visits without any choice; each paired difference with a 95 % interval above 0 and a p value below .05 after
Holm's correction. Facts are measured with the options in another order; the accuracy as asked stands beside it.
"""

from __future__ import annotations

from rllib_srl.studies.study import Primary, Study
from rllib_srl.tune_configs.arms import on_stream
from rllib_srl.tune_configs.stream_arms import FACT_SEEDS, stream_arms

TOKENS = 30_000  # of a stage: about twenty visits of each of its facts


def study() -> Study:
    """Return the study.

    Secondary, decided by nothing: `memory` against `balanced`, `memory_uniform`, `memory_group` and `no_replay`.
    """
    primary = Primary("memory", ("uniform", "fifo"))
    return on_stream("facts", module=__name__, doc=__doc__, arms=stream_arms(0.25), primary=primary, seeds=FACT_SEEDS,
                     tokens=TOKENS)
