"""Shared part of the studies that vary the quick-start.

    on_quickstart(module=__name__, doc=__doc__, arms=[...], primary=...)     a whole `Study`
"""

from __future__ import annotations

from collections.abc import Sequence

from rllib_srl.cli.quickstart import SETTINGS
from rllib_srl.studies.study import Arm, Domain, Primary, Study
from rllib_srl.tune_configs.arms import described_by
from rllib_srl.tune_configs.lag import RUNNER

TOKENS = 5_200  # ten iterations of 16 x 8 answers of four tokens
NUM_MARKS = 2
SEEDS = (1, 2, 3)
OF_TRIALS = ("iterations", "checkpoint_every", "seed")  # what a study sets itself


def on_quickstart(*, module: str, doc: str | None, arms: Sequence[Arm], primary: Primary) -> Study:
    """Return a study with the settings of `srl quickstart`, which its arms change.

    Args:
        module: of the study; its last part names the study and its directory.
        doc: docstring of the module: the question in the first line, then which result answers it.
        arms: to compare.
        primary: the comparison that decides.

    Raises:
        ValueError: the study is not valid.
    """
    return Study(
        *described_by(module, doc),
        arms=tuple(arms),
        domains=(Domain(SETTINGS["env"], NUM_MARKS - 1),),
        num_stages=NUM_MARKS,
        seeds=SEEDS,
        budget=TOKENS,
        primary=primary,
        settings={name: value for name, value in SETTINGS.items() if name not in OF_TRIALS} | RUNNER,
    ).checked()
