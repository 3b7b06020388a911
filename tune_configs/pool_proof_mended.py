"""On fresh prompts and seeds, does the memory learn a finite pool with fewer tokens, now that no domain is left out?

The first proof ran with a rule that never came back to a domain whose first answers all agreed (docs/LOG.md). With
the rule mended, the memory in groups of two is compared with plain GRPO at its own best setting; with
shuffled passes at the memory's baseline, reuse, rate and shape (is the choice of prompts worth anything?); and with
the same memory with GRPO's own baseline (is the history?). Each paired difference in accuracy on unseen prompts over
training needs a 95 % interval above 0 and a p value below .05 / 4 after Holm's correction: three ideas came before.
Accuracy on the pool itself is reported with its interval: "no worse" needs the lower end above -.02.
"""

from __future__ import annotations

from rllib_srl.studies.seeds import ALPHA
from rllib_srl.studies.study import Primary, Study
from rllib_srl.tune_configs.kinds import LOTS
from rllib_srl.tune_configs.pool_parts import EQUAL
from rllib_srl.tune_configs.pools import MEASURES, NUM_IDEAS, method, on_pool

# The best shape of three for the mended memory on the development pool, at this rate and one pass (docs/LOG.md).
FROZEN = {**EQUAL, "num_prompts_per_batch": 64, "group_size": 2}


def study() -> Study:
    """Return the study."""
    equal = ("passes", "memory_group")
    arms = [method("memory", **FROZEN), method("plain"), *(method(name, **FROZEN) for name in equal)]
    lot = LOTS[3]
    primary = Primary("memory", ("plain", *equal), MEASURES, alpha=ALPHA / (NUM_IDEAS + 1))
    return on_pool(lot.kinds, module=__name__, doc=__doc__, arms=arms, primary=primary, seeds=lot.seeds,
                   pool_seed=lot.pool_seed, is_confirmation=True)  # fmt: skip
