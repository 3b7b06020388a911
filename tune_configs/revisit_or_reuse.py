"""Is it better to ask old prompts again, to train on stored answers again, or to do both?

Both are worth their cost if both together beat each alone in final accuracy and retention. Asking again costs
generated tokens, which the budget counts; training again costs trained tokens and seconds, which the report shows.
"""

from __future__ import annotations

from rllib_srl.studies.study import Arm, Primary, Study
from rllib_srl.tune_configs.arms import CONSTANT_SRL, on_stream, varied


def study() -> Study:
    """Return the study."""
    both = varied("both", "both", "Old prompts come back, and stored answers are used again.", CONSTANT_SRL)
    only_revisit = varied("revisit", "revisits only", "Old prompts come back; stored answers are not used again.",
                          CONSTANT_SRL, replay_reuse_fraction=0.0)
    only_reuse = varied("reuse", "reuse only", "Stored answers are used again; old prompts do not come back.",
                        CONSTANT_SRL, replay_revisit_fraction=0.0)
    primary = Primary("both", ("revisit", "reuse"))
    arms: list[str | Arm] = [both, only_revisit, only_reuse, "no_replay"]
    return on_stream("cpu", module=__name__, doc=__doc__, arms=arms, primary=primary)
