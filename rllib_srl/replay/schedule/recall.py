"""Grade visits, and set due dates by a spacing rule: spaced repetition on the item table.

    pass rate -> Beta posterior -> its mean  \\_ cut at three bounds -> grade -> rule.review -> base interval (days)
    rating by people                         /
    due = last review + max(min_recall_interval, interval * iterations_per_day / (1 + diversity_coeff * diversity))

Grades are those of `spacing.py`, 0 for none. Diversity acts on the due date only, so its effect does not compound.

A group of G episodes is a noisy test of recall: 2 successes of 2 are weaker evidence than 8 of 8. The Beta posterior
of an item's recall accounts for that. It keeps a fraction m = `MEMORY` of earlier evidence, because the policy has
changed since; s of n episodes are successes:

    alpha' = a + m (alpha - a) + s,    beta' = b + m (beta - b) + (n - s)        a, b: prior

With Jeffreys' prior and no earlier visits, 0 to 2 successes of 8 are Again, 3 to 5 Hard, 6 and 7 Good, 8 Easy; of 4,
0 and 1 are Again, then one grade each; 2 of 2 are at most Good.

Sources: Jeffreys 1946, Proc. R. Soc. A 186, "An invariant form for the prior probability in estimation problems";
Ye et al., github.com/open-spaced-repetition/py-fsrs (the grades).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rllib_srl.replay.history import GroupFacts
from rllib_srl.replay.items import Tables, filled
from rllib_srl.replay.schedule.spacing import make_spacing
from rllib_srl.replay.settings import ReplaySettings

PRIOR = (0.5, 0.5)  # Jeffreys': a, b
MEMORY = 0.25  # fraction of earlier evidence that is kept at a new visit
BOUNDS = (0.35, 0.65, 0.9)  # lowest recall of Hard, Good and Easy


def posterior(
    num_success_N: np.ndarray, size_N: np.ndarray, alpha_N: Any = PRIOR[0], beta_N: Any = PRIOR[1]
) -> tuple[np.ndarray, np.ndarray]:
    """Return alpha and beta of the Beta posterior of recall after a visit, from those before it."""
    (a, b), success_N = PRIOR, np.asarray(num_success_N, np.float64)
    failure_N = np.asarray(size_N, np.float64) - success_N
    return a + MEMORY * (np.float64(alpha_N) - a) + success_N, b + MEMORY * (np.float64(beta_N) - b) + failure_N


def grades_of(recall_N: np.ndarray) -> np.ndarray:
    """Return the grades of expected recall, or of ratings in [0, 1]: 1 plus the number of bounds that are reached."""
    return 1 + np.searchsorted(np.asarray(BOUNDS), np.asarray(recall_N, np.float64), side="right")


class Recall:
    """Grades visits and sets due dates in `Tables`; slots are distinct, and further fields one array each."""

    def __init__(self, settings: ReplaySettings, tables: Tables) -> None:
        self._settings, self._tables = settings, tables
        self.rule = make_spacing(settings.spacing, settings.desired_retention, **settings.spacing_config)

    def recall_of(self, rows_N: np.ndarray, now: int) -> np.ndarray:
        """Return the predicted recall of items at `now`, by their rows, in [0, 1]; 0 for items never reviewed."""
        elapsed_N = (now - rows_N["last_review"]) / self._settings.iterations_per_day
        return self.rule.retrievability(rows_N, elapsed_N)

    def visit(
        self, slots: Sequence[int], facts: Sequence[GroupFacts], now: int, **fields: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """Grade items by the group played for each, and review them at `now`; write `fields`, graded or not.

        Groups of fewer than `min_graded` episodes are not graded. Returns what `review` does.
        """
        rows_N = self._tables.items.at(slots)
        success_N, size_N = (np.array([getattr(group, name) for group in facts]) for name in ("num_success", "size"))
        is_new_N = rows_N["reps"] == 0
        before = [np.where(is_new_N, prior, rows_N[name]) for name, prior in zip(("alpha", "beta"), PRIOR)]
        alpha_N, beta_N = posterior(success_N, size_N, *before)
        grade_N = np.where(size_N >= self._settings.min_graded, grades_of(alpha_N / (alpha_N + beta_N)), 0)
        fields["alpha"] = np.where(grade_N > 0, alpha_N, rows_N["alpha"])
        fields["beta"] = np.where(grade_N > 0, beta_N, rows_N["beta"])
        return self.review(slots, grade_N, now, **fields)

    def review(
        self, slots: Sequence[int], grade_N: np.ndarray, now: int, **fields: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """Review items at `now` by grades of 1 to 4, or 0 for no review; write `fields`, reviewed or not.

        Returns:
            The grades, and whether each is a lapse: a failure after a success.
        """
        rows_N = self._tables.items.at(slots)
        is_graded_N = grade_N > 0
        elapsed_N = (now - rows_N["last_review"].astype(np.int64)) / self._settings.iterations_per_day
        after = self.rule.review(rows_N, np.maximum(grade_N, 1), elapsed_N)
        is_lapse_N = is_graded_N & (after["lapses"] > rows_N["lapses"])
        fields |= {name: np.where(is_graded_N, new, rows_N[name]) for name, new in after.items()}
        fields["last_review"] = np.where(is_graded_N, now, rows_N["last_review"])
        changed_N, settings = filled(rows_N, fields), self._settings
        factor_N = 1.0 / (1.0 + settings.diversity_coeff * changed_N["diversity"].astype(np.float64))
        interval_N = changed_N["interval"] * settings.iterations_per_day * factor_N
        wait_N = np.maximum(float(settings.min_recall_interval), interval_N)
        self._tables.items.update(slots, **fields, due=changed_N["last_review"] + wait_N)
        return grade_N, is_lapse_N
