"""On new domains and seeds, does SRL remember more than uniform replay if it rehearses forgotten domains?

It does if final accuracy and retention are higher than with uniform replay, each paired difference with a 95 % interval
above 0 and a p value below .05 after Holm's correction. `confirm` found no difference with a rule that follows a
domain's failure rate: a domain that cannot be learned keeps failing, and took most of the replay.
"""

from __future__ import annotations

from rllib_srl.studies.study import Arm, Primary, Study
from rllib_srl.tune_configs.arms import on_stream, varied

SEEDS = tuple(range(601, 611))  # used for nothing else


def study() -> Study:
    """Return the study."""
    forgotten = varied("srl_forgotten", "SRL + diversity, by forgetting", "Old prompts come back more often the more "
                       "the accuracy of their domain fell, dissimilar ones first.",
                       planner_mode={"rehearse": "forgotten", "sharpness": 20.0})
    arms: list[str | Arm] = [forgotten, "uniform", "balanced", "srl_diversity", "no_replay"]
    return on_stream("cpu_heldout_2", module=__name__, doc=__doc__, arms=arms,
                     primary=Primary("srl_forgotten", ("uniform",)), seeds=SEEDS, is_confirmation=True)
