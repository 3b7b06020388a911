"""On fresh kinds and seeds, does a memory without a choice of prompts learn a finite pool with fewer tokens?

The second idea, after `signal` was behind on the development pool: shuffled passes with a baseline from history and
groups of one. It does if the accuracy on unseen prompts over training is higher than that
of plain GRPO at its own best setting. Two more comparisons say why: against the rule `signal` with the same baseline
and reuse (is it right not to choose?), and against the same passes and reuse with GRPO's own baseline (is it the
history?). Each paired difference needs a 95 % interval above 0 and a p value below .05 / 3 after Holm's correction.
Accuracy on the pool itself is reported with its interval: "no worse" needs the lower end above -.02.
"""

from __future__ import annotations

from rllib_srl.studies.study import Study
from rllib_srl.tune_configs.kinds import LOTS
from rllib_srl.tune_configs.pools import proof


def study() -> Study:
    """Return the study."""
    return proof("passes", ("plain", "memory", "reuse"), LOTS[1], module=__name__, doc=__doc__)
