"""Does a term in the loss against forgetting remember more than plain GRPO, and as much as uniform replay?

A regulariser helps if its final accuracy and retention are higher than without replay, each paired difference with a 95
% interval above 0 and a p value below .05 after Holm's correction. It is no substitute for replay if it is lower than
uniform replay. L2, EWC and GeRe run without a memory; LwF needs revisited prompts and ESR reused groups, so their
control is uniform replay. SRL + diversity stands beside them, without a term. Coefficients are first guesses, which
give gradients of a tenth to the whole of GRPO's (docs/losses.md).
"""

from __future__ import annotations

from rllib_srl.studies.study import Arm, Primary, Study
from rllib_srl.tune_configs.arms import ARMS, NO_REPLAY, on_stream


def study() -> Study:
    """Return the study."""
    arms: list[str | Arm] = [
        Arm("ewc", "EWC", "No replay; weights that mattered in earlier stages are held (online EWC).",
            {**NO_REPLAY, "regularisers": {"ewc": {"coeff": 100.0, "decay": 0.9}}}),
        Arm("l2", "L2 to the start", "No replay; all weights are held at the starting model.",
            {**NO_REPLAY, "regularisers": {"l2": {"coeff": 0.5}}}),
        Arm("gere", "GeRe", "No replay; activations on general texts are held at the starting model.",
            {**NO_REPLAY, "regularisers": {"gere": {"coeff": 0.005}}}),
        Arm("lwf", "uniform replay + LwF", "Old prompts come back at random and are held at the policy of the last "
            "stage.", {**ARMS["uniform"].settings, "regularisers": {"lwf": {"coeff": 0.1}}}),
        Arm("esr", "uniform replay + ESR", "Old prompts come back at random; reused groups are held at their stored "
            "logits.", {**ARMS["uniform"].settings, "regularisers": {"esr": {"coeff": 0.1}}}),
        "srl_diversity",
        "uniform",
        "no_replay",
    ]  # fmt: skip
    return on_stream("cpu", module=__name__, doc=__doc__, arms=arms, primary=Primary("ewc", ("no_replay", "uniform")))
