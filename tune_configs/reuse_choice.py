"""Which stored groups should be trained on again: how old, how often, by which rule, and with which correction?

One part at a time is changed from young reuse, a quarter of the groups, at most six iterations old, drawn uniformly.
What raises the accuracy over training by more than the seeds differ becomes the default; the rest keeps the plainest
value. Without reuse, the same settings show what reuse is worth at all.
"""

from __future__ import annotations

from typing import Any

from rllib_srl.studies.study import Arm, Primary, Study
from rllib_srl.tune_configs.arms import changed
from rllib_srl.tune_configs.kinds import DEVELOPMENT
from rllib_srl.tune_configs.pools import MEASURES, method, on_pool

VARIED: dict[str, tuple[str, dict[str, Any]]] = {  # name -> difference from young reuse, settings
    "none": ("nothing is trained on again", {"replay_reuse_fraction": 0.0}),
    "half": ("half of the trained groups are stored ones", {"replay_reuse_fraction": 0.5}),
    "age_2": ("at most 2 iterations old", {"replay_max_age": 2}),
    "age_20": ("at most 20 iterations old", {"replay_max_age": 20}),
    "once": ("each group at most once", {"replay_max_uses": 1}),
    "often": ("each group up to 16 times", {"replay_max_uses": 16}),
    "advantage": ("prioritised by advantage", {"replay_reuse_selection": "per"}),
    "newest_reward": ("prioritised by reward, fading with age", {"replay_reuse_selection": "fresh_per"}),
    "learnable": ("by p(1 - p), p being how often the prompt was solved", {"replay_reuse_selection": "learnability"}),
    "unlike": ("groups unlike the others first",
               {"replay_reuse_selection": "srl", "replay_diversity": {"coeff": 1.0, "on": ["draw"]}}),
    "mask": ("tokens whose ratio left its window are masked", {"replay_reuse_correction": "mask"}),
    "truncate": ("ratios are truncated", {"replay_reuse_correction": "truncate"}),
    "leave_one_out": ("judged by the other episodes, unscaled", {"reuse_advantage": "leave_one_out"}),
    "history": ("with the baseline from history for all groups", {"advantage": "posterior"}),
}


def study() -> Study:
    """Return the study."""
    arms = [method("reuse")]
    for name, (difference, settings) in VARIED.items():
        arms.append(Arm(f"reuse_{name}", f"reuse, {name.replace('_', ' ')}", f"Young reuse, but {difference}.",
                        changed(method("reuse").settings, settings)))
    primary = Primary("reuse", ("reuse_none",), MEASURES)
    return on_pool(DEVELOPMENT, module=__name__, doc=__doc__, arms=arms, primary=primary)
