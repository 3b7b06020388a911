"""Is a pretrained model of 135M with held answers level with old prompts, where skills help each other?

Four pairs illustrate it: too few for a test. Final accuracy and retention are reported with their intervals.
"""

from __future__ import annotations

from rllib_srl.studies.study import Primary, Study
from rllib_srl.tune_configs.arms import PRESET, RETENTION, on_stream
from rllib_srl.tune_configs.retention_pretrained import PRETRAINED, STAGE_TOKENS


def study() -> Study:
    """Return the study."""
    primary = Primary("retention", ("uniform",))
    return on_stream("pretrained_shared", module=__name__, doc=__doc__, arms=[RETENTION, "uniform", PRESET],
                     primary=primary, seeds=range(1, 5), tokens=STAGE_TOKENS, settings=PRETRAINED)
