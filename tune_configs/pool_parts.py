"""On a finite pool, what is the choice of prompts worth, and what the baseline from history, everything else equal?

The memory of `pool_proof` in groups of four, with one part taken away at a time. The choice is worth something if the
accuracy on unseen prompts over training is higher than in shuffled passes with the same baseline and reuse; history is,
if it is higher than with each group's own mean as the baseline. Each paired difference needs a 95 % interval above 0
and a p value below .05 after Holm's correction. Kinds, prompts and seeds are those of `pool_proof`, which had missed
before this study was written. Shuffled passes without history (`reuse`) are beside them, decided by nothing.
"""

from __future__ import annotations

from typing import Any

from rllib_srl.studies.study import Primary, Study
from rllib_srl.tune_configs.kinds import LOTS
from rllib_srl.tune_configs.pools import MEASURES, YOUNG_REUSE, method, on_pool

# Groups of one, where `memory` did best, leave a group no mean of its own to compare with.
EQUAL: dict[str, Any] = {
    "lr": 4e-4,
    "num_epochs": 1,
    "num_prompts_per_batch": 32,
    "group_size": 4,
    "replay_reuse_fraction": YOUNG_REUSE["replay_reuse_fraction"],
}


def study() -> Study:
    """Return the study."""
    controls = ("passes", "memory_group")
    arms = [method(name, **EQUAL) for name in ("memory", *controls, "reuse")]
    lot = LOTS[0]
    return on_pool(lot.kinds, module=__name__, doc=__doc__, arms=arms, primary=Primary("memory", controls, MEASURES),
                   seeds=lot.seeds, pool_seed=lot.pool_seed)  # fmt: skip
