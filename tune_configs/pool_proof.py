"""On fresh kinds and seeds, does the memory learn a finite pool with fewer tokens than plain GRPO at its best?

It does if the accuracy on unseen prompts over training is higher than that of plain GRPO at its own learning rate and
passes. Two more comparisons say why: against shuffled passes with the same baseline and reuse (is the choice of prompts
worth anything?), and against the same memory with GRPO's own baseline (is the history?). Each paired difference needs a
95 % interval above 0 and a p value below .05 / 3 after Holm's correction; there are three ideas. The first comparison
is run first (`--arms memory plain`); if it misses, the proof has missed, and the other two are not run. Accuracy on the
pool itself is reported with its interval: "no worse" needs the lower end above -.02. Kinds and seeds are drawn by lot
(kinds.py); run it once for each frozen setting, the next lot for the next idea, and report every run.

It was run before a defect of the rule `signal` was found; `pool_proof_mended` repeats it without the defect.
"""

from __future__ import annotations

from rllib_srl.studies.study import Study
from rllib_srl.tune_configs.kinds import LOTS
from rllib_srl.tune_configs.pools import proof


def study() -> Study:
    """Return the study."""
    return proof("memory", ("plain", "passes", "memory_group"), LOTS[0], module=__name__, doc=__doc__)
