"""Does a pretrained model of 135M parameters also remember more with SRL + diversity than without replay?

It does if final accuracy and retention are higher. The setting is the frozen one of `arms.py`, at a learning rate of
3e-5 for both arms and with vLLM. Two seeds illustrate `confirm`; they are no test of their own.
"""

from __future__ import annotations

from dataclasses import replace

from rllib_srl.studies.study import Primary, Study
from rllib_srl.tune_configs.arms import ARMS, on_stream

STAGE_TOKENS = 6_000
PRETRAINED = {
    "model": "smollm2-135m",
    "engine": "vllm",
    "num_env_runners": 1,
    "compute_dtype": "auto",
    "lr": 3e-5,
    "max_turns": 3,
    "max_turn_tokens": 8,
    "evaluation_duration": 256,
}


def study() -> Study:
    """Return the study."""
    plain = ARMS["no_replay"]
    plain = replace(plain, settings={name: value for name, value in plain.settings.items() if name != "lr"})
    return on_stream("cpu_pretrained", module=__name__, doc=__doc__, arms=["srl_diversity", plain],
                     primary=Primary("srl_diversity", ("no_replay",)), seeds=(301, 302), tokens=STAGE_TOKENS,
                     settings=PRETRAINED)
