"""Does a pretrained model of 135M parameters learn a pool of real questions faster with the memory than without?

It does if the accuracy on unseen questions over training is higher with replay by uniform draws and the baseline from
history than with plain GRPO in shuffled passes; against the same replay without history it shows what history adds.
Three paired seeds illustrate the proofs on larger pools; they are no test of their own, since no exact test of three
pairs reaches .05.

The questions are arithmetic, counting and word problems of reasoning-gym, with four solved ones before each. The model
answers each kind sometimes before any training, and none always. A trial is 27 iterations: about five visits of a
question.
"""

from __future__ import annotations

from typing import Any

from rllib_srl.cli.quickstart import SETTINGS as QUICKSTART
from rllib_srl.studies.study import Arm, Domain, Primary, Study
from rllib_srl.tune_configs.arms import COMMON, described_by
from rllib_srl.tune_configs.pools import HISTORY, MEASURES, PLAIN, YOUNG_REUSE
from rllib_srl.tune_configs.pretrained import PRETRAINED

TOKENS = 12_000  # generated in a trial: 27 iterations of 16 x 8 answers of 3.5 tokens
NUM_MARKS = 4
PROMPTS_PER_KIND = 10
HELDOUT_PER_KIND = 16
SEEDS = (911, 912, 913)
# Of the model before any training, 16 questions x 8 answers a kind: pass rate, share of groups without signal
# (docs/LOG.md). Kinds were chosen by this alone.
UNTRAINED = {
    "aiw": (0.19, 0.44),
    "basic_arithmetic": (0.12, 0.56),
    "calendar_arithmetic": (0.13, 0.38),
    "chain_sum": (0.38, 0.31),
    "gcd": (0.20, 0.25),
    "leg_counting": (0.05, 0.62),
    "letter_counting": (0.38, 0.44),
    "products": (0.43, 0.06),
}
REPLAY: dict[str, Any] = {**YOUNG_REUSE, "replay_revisit_fraction": "auto", "replay_selection": "uniform"}


def kinds() -> dict[str, dict[str, Any]]:
    """Return the kinds of questions, as the environment `pool` takes them."""
    return {
        name: {"env": "reasoning_gym", "env_config": {"dataset": name, "level": 0, "num_shots": 4, "pool_size": 512}}
        for name in UNTRAINED
    }


def study() -> Study:
    """Return the study."""
    pool = {"environments": kinds(), "num_prompts_per_kind": PROMPTS_PER_KIND}
    settings = {"env": "pool", "env_config": pool, "evaluation_duration": HELDOUT_PER_KIND * len(UNTRAINED)}
    # Listing the questions takes seconds.
    settings |= {"lr": QUICKSTART["lr"], "max_turns": 1, "env_timeout_s": 60.0}
    return Study(
        *described_by(__name__, __doc__),
        arms=(
            Arm("plain", "plain GRPO", "Shuffled passes over the pool, nothing stored.", PLAIN),
            Arm("uniform", "uniform replay", "Questions are drawn at random; young groups are trained on again.",
                REPLAY),
            Arm("history", "replay with history", "As uniform replay, with the baseline from history.",
                {**REPLAY, **HISTORY}),
        ),
        domains=tuple(Domain(kind, NUM_MARKS - 1) for kind in UNTRAINED),
        num_stages=NUM_MARKS,
        seeds=SEEDS,
        budget=TOKENS,
        primary=Primary("history", ("plain", "uniform"), MEASURES),
        settings={**COMMON, **PRETRAINED, **settings},
    ).checked()  # fmt: skip
