"""On the held-out stream of five skills, does the memory keep more than uniform replay?

It does if final accuracy and retention are higher than with uniform replay, with oldest first and without replay, each
paired difference with a 95 % interval above 0 and a p value below .05 after Holm's correction. With five skills and six
slots every rule brings back every skill, so no more than a tie is expected of the choice; the baseline from history may
still differ.
"""

from __future__ import annotations

from rllib_srl.studies.study import Primary, Study
from rllib_srl.tune_configs.arms import on_stream
from rllib_srl.tune_configs.stream_arms import STREAM_SEEDS, stream_arms


def study() -> Study:
    """Return the study.

    Secondary, decided by nothing and printed beside the primary comparison: `memory` against `balanced`,
    `memory_uniform` and `memory_group` (`srl tune pool_stream_heldout --arms memory balanced`).
    """
    primary = Primary("memory", ("uniform", "fifo", "no_replay"))
    return on_stream("cpu_heldout", module=__name__, doc=__doc__, arms=stream_arms(0.4), primary=primary,
                     seeds=STREAM_SEEDS)
