"""Does the quick-start learn as much if its runner plays ahead of training, at equal generated tokens?

It does if both 95 % intervals of the difference in final accuracy, `max_lag` 0 (taking turns) minus 1
and minus 4, end below +.05, which is what 256 questions can tell. Three paired seeds illustrate `lag`; they are no test
of their own, since no exact test of three pairs reaches .05. All settings are those of `srl quickstart`.
"""

from __future__ import annotations

from rllib_srl.cli.quickstart import SETTINGS
from rllib_srl.studies.study import Domain, Primary, Study
from rllib_srl.tune_configs.lag import LAGS, RUNNER, arm

TOKENS = 5_200  # ten iterations of 16 x 8 answers of four tokens
NUM_MARKS = 2
SEEDS = (1, 2, 3)
OF_TRIALS = ("iterations", "checkpoint_every", "seed")  # what a study sets itself


def study() -> Study:
    """Return the study."""
    question, _, answer = (__doc__ or "").partition("\n")
    return Study(
        name=__name__.rpartition(".")[2],
        question=question,
        answered_by=" ".join(answer.split()),
        arms=tuple(map(arm, LAGS)),
        domains=(Domain(SETTINGS["env"], NUM_MARKS - 1),),
        num_stages=NUM_MARKS,
        seeds=SEEDS,
        budget=TOKENS,
        primary=Primary("lag_0", ("lag_1", "lag_4"), ("average_accuracy",)),
        settings={name: value for name, value in SETTINGS.items() if name not in OF_TRIALS} | RUNNER,
    ).checked()
