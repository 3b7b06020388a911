"""On fresh prompts and seeds, does giving episodes by history learn a finite pool with fewer tokens than plain GRPO?

The third idea, on kinds of the first two proofs, after neither a choice of prompts nor a baseline from history was
ahead: every prompt is played in shuffled epochs, and the result of its last visit decides how many episodes it gets, so
that fewer are spent on what is solved or hopeless; stored young groups are trained on again. It does if the accuracy on
unseen prompts over training is higher than that of plain GRPO at its own best setting. One more comparison says why:
against young reuse with equal groups. Each paired difference needs a 95 % interval above 0 and a p value below .05 / 3
after Holm's correction; there are three ideas. Accuracy on the pool itself is reported with its interval: "no worse"
needs the lower end above -.02.
"""

from __future__ import annotations

from rllib_srl.studies.study import Study
from rllib_srl.tune_configs.kinds import LOTS
from rllib_srl.tune_configs.pools import proof


def study() -> Study:
    """Return the study."""
    return proof("sizes", ("plain", "reuse"), LOTS[2], module=__name__, doc=__doc__)
