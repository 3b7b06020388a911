"""What share of played and trained episodes should come from the memory, and should it follow forgetting?

The share of `arms.py`, which follows forgetting, stands unless a constant one is better in final accuracy and
retention. More replay leaves less room for new prompts: plasticity, in the same report, shows the cost.
"""

from __future__ import annotations

from rllib_srl.studies.study import Primary, Study
from rllib_srl.tune_configs.arms import CONSTANT_SRL, FRACTIONS, on_stream, varied


def study() -> Study:
    """Return the study."""
    asked, trained = FRACTIONS["replay_revisit_fraction"], FRACTIONS["replay_reuse_fraction"]
    shares = {"constant": (asked, trained), "little": (0.05, trained), "less": (0.2, trained), "more": (0.6, trained)}
    shares |= {"no_reuse": (asked, 0.0), "reuse_half": (asked, 0.5)}
    arms = [
        varied(name, f"{revisit:.0%} revisits, {reuse:.0%} reuse", f"{revisit:.0%} of the prompts are old ones, and "
               f"{reuse:.0%} of the trained groups are stored ones.", CONSTANT_SRL, replay_revisit_fraction=revisit,
               replay_reuse_fraction=reuse)
        for name, (revisit, reuse) in shares.items()
    ]
    primary = Primary("srl_diversity", tuple(arm.name for arm in arms))
    return on_stream("cpu", module=__name__, doc=__doc__, arms=["srl_diversity", *arms], primary=primary)
