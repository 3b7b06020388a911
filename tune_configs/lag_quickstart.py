"""Does the quick-start learn as much if its runner plays ahead of training, at equal generated tokens?

It does if both 95 % intervals of the difference in final accuracy, `max_lag` 0 (taking turns) minus 1
and minus 4, end below +.05, which is what 256 questions can tell. Three paired seeds illustrate `lag`; they are no test
of their own, since no exact test of three pairs reaches .05. All settings are those of `srl quickstart`.
"""

from __future__ import annotations

from collections.abc import Sequence

from rllib_srl.cli.quickstart import SETTINGS
from rllib_srl.studies.study import Arm, Domain, Primary, Study
from rllib_srl.tune_configs.lag import LAGS, RUNNER, arm

TOKENS = 5_200  # ten iterations of 16 x 8 answers of four tokens
NUM_MARKS = 2
SEEDS = (1, 2, 3)
OF_TRIALS = ("iterations", "checkpoint_every", "seed")  # what a study sets itself


def study() -> Study:
    """Return the study."""
    primary = Primary("lag_0", ("lag_1", "lag_4"), ("average_accuracy",))
    return on_quickstart(module=__name__, doc=__doc__, arms=tuple(map(arm, LAGS)), primary=primary)


def on_quickstart(*, module: str, doc: str | None, arms: Sequence[Arm], primary: Primary) -> Study:
    """Return a study with the settings of `srl quickstart`, which its arms change.

    Args:
        module: of the study; its last part names the study and its directory.
        doc: docstring of the module: the question in the first line, then which result answers it.
        arms: to compare.
        primary: the comparison that decides.
    """
    question, _, answer = (doc or "").partition("\n")
    return Study(
        name=module.rpartition(".")[2],
        question=question,
        answered_by=" ".join(answer.split()),
        arms=tuple(arms),
        domains=(Domain(SETTINGS["env"], NUM_MARKS - 1),),
        num_stages=NUM_MARKS,
        seeds=SEEDS,
        budget=TOKENS,
        primary=primary,
        settings={name: value for name, value in SETTINGS.items() if name not in OF_TRIALS} | RUNNER,
    ).checked()
