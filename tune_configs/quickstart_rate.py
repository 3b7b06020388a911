"""At which learning rate does the quick-start learn with every seed, in fp32 and in bf16?

The lower rate is the better default if no seed of it ends at chance in either precision, and if its mean final accuracy
is not below the higher rate's by more than .05, which is what 256 questions can tell. Seeds illustrate; they are no
test, since no exact test of three pairs reaches .05. All other settings are those of `srl quickstart`.
"""

from __future__ import annotations

from rllib_srl.studies.study import Arm, Primary, Study
from rllib_srl.tune_configs.on_quickstart import on_quickstart

RATES = ("2e-5", "3e-5")
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16"}


def study() -> Study:
    """Return the study."""
    arms = [
        Arm(f"{short}_{rate}", f"{short}, lr {rate}", f"The quick-start in {dtype} with a learning rate of {rate}.",
            {"compute_dtype": dtype, "lr": float(rate)})
        for short, dtype in PRECISIONS.items()
        for rate in RATES
    ]  # fmt: skip
    primary = Primary("fp32_2e-5", ("fp32_3e-5",), ("average_accuracy",))
    return on_quickstart(module=__name__, doc=__doc__, arms=arms, primary=primary)
