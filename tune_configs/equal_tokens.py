"""Does SRL + diversity remember more because of what it repeats, or only because it trains on more tokens?

Its choice of repetitions is the reason if it beats two controls in final accuracy and retention: plain GRPO that trains
on as many tokens by more passes over its own batches, and uniform reuse of an equal share of stored answers. Both match
the run of SRL + diversity with the same seed: the passes follow its trained tokens stage by stage, and the share is the
one it realised. The report shows the resulting trained tokens.
"""

from __future__ import annotations

from rllib_srl.studies.study import Primary, Study
from rllib_srl.tune_configs.arms import on_stream


def study() -> Study:
    """Return the study."""
    controls = ("extra_epochs", "uniform_reuse")
    primary = Primary("srl_diversity", controls)
    return on_stream("cpu", module=__name__, doc=__doc__, arms=["srl_diversity", *controls], primary=primary)
