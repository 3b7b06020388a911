"""How much of what is played and trained should come from the memory?

The defaults, a quarter of each, stand unless other shares are better in final accuracy and retention. More of the old
leaves less of the new: plasticity, in the same report, says what it costs.
"""

from __future__ import annotations

from rllib_srl.continual.study import Primary, Study
from tune_configs.arms import on_stream, varied


def study() -> Study:
    """Return the study."""
    shares = {"quarter": (0.25, 0.25), "little": (0.1, 0.1), "half": (0.5, 0.25), "reuse_half": (0.25, 0.5)}
    arms = [
        varied(name, f"{revisit:.0%} revisits, {reuse:.0%} reuse", f"{revisit:.0%} of the prompts are old ones, and "
               f"{reuse:.0%} of the trained groups are stored ones.", replay_revisit_fraction=revisit,
               replay_reuse_fraction=reuse)
        for name, (revisit, reuse) in shares.items()
    ]
    primary = Primary("quarter", tuple(arm.name for arm in arms[1:]))
    return on_stream("cpu", module=__name__, doc=__doc__, arms=arms, primary=primary)
