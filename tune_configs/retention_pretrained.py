"""Does a pretrained model of 135M keep more with held answers than with old prompts, where skills undo each other?

It does if final accuracy and retention are higher than with uniform draws of old prompts and than with plain GRPO, at
an equal budget of generated tokens, each paired difference with a corrected p value below .05. All arms learn at one
rate and answer through vLLM.
"""

from __future__ import annotations

from dataclasses import replace

from rllib_srl.studies.study import Primary, Study
from rllib_srl.tune_configs.arms import ARMS, NO_REPLAY, PRESET, RETENTION, on_stream

STAGE_TOKENS = 6_000
PRETRAINED = {
    "model": "smollm2-135m",
    "engine": "vllm",
    "num_env_runners": 1,
    "compute_dtype": "float32",  # the same on every machine
    "lr": 1e-5,
    "max_turns": 3,
    "max_turn_tokens": 8,
    "evaluation_duration": 256,
}
PLAIN = replace(ARMS["no_replay"], settings={name: value for name, value in NO_REPLAY.items() if name != "lr"})


def study() -> Study:
    """Return the study."""
    primary = Primary("retention", ("uniform", "no_replay"))
    return on_stream("pretrained", module=__name__, doc=__doc__, arms=[RETENTION, "uniform", PLAIN, PRESET],
                     primary=primary, seeds=range(1, 9), tokens=STAGE_TOKENS, settings=PRETRAINED)
