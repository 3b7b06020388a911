"""Does SRL + diversity remember more because of what it repeats, or only because it trains on more tokens?

What it repeats is the reason if it beats, in final accuracy and retention, plain GRPO that trains on as many tokens by
more passes over its own batches, and uniform reuse that repeats as large a share of stored answers. Both meet the run
of SRL + diversity with the same seed: the passes keep up with its trained tokens stage by stage, the share is the one
it realised. The report shows the trained tokens that came of it.
"""

from __future__ import annotations

from rllib_srl.continual.study import Primary, Study
from tune_configs.arms import on_stream


def study() -> Study:
    """Return the study."""
    controls = ("extra_epochs", "uniform_reuse")
    primary = Primary("srl_diversity", controls)
    return on_stream("cpu", module=__name__, doc=__doc__, arms=["srl_diversity", *controls], primary=primary)
