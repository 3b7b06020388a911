"""Spaced repetition on the item table: grades visits and sets due dates.

    visit: pass rate -> grade -> rule.review -> base interval (days, stored)
           due = last review + max(min_recall_interval, interval * iterations_per_day * diversity factor)

Diversity acts on the due date only, so its effect on intervals does not compound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rllib_srl.replay.diversity.measures import interval_factor
from rllib_srl.replay.items import Tables, filled, rows_at
from rllib_srl.replay.schedule.grading import GRADES, PRIOR, Evidence, posterior
from rllib_srl.replay.schedule.spacing import SpacingState, make_spacing
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.replay.visits import GroupFacts, timing_of


@dataclass(frozen=True)
class Graded:
    """Result of grading one visit; grade 0 means no review."""

    grade: int
    is_lapse: bool = False
    timing: str = "new"


class Recall:
    """Grades visits and sets due dates in `Tables`; slots are distinct, and further fields one array each."""

    def __init__(self, settings: ReplaySettings, store: Tables) -> None:
        """Schedule the items of `store` with the spacing rule of `settings`."""
        self._settings, self._store = settings, store
        self._grade = GRADES.named(settings.grade)
        self.rule = make_spacing(settings.spacing, settings.desired_retention, **settings.spacing_config)

    def recall_of(self, rows_N: np.ndarray, now: int) -> np.ndarray:
        """Return the predicted recall of items at `now`, by their rows, in [0, 1]; 0 for items never reviewed."""
        elapsed_N = (now - rows_N["last_review"]) / self._settings.iterations_per_day
        return self.rule.retrievability(SpacingState.of(rows_N), elapsed_N)

    def visit(self, slots: Sequence[int], facts: Sequence[GroupFacts], now: int, **fields: Any) -> list[Graded]:
        """Grade items by the group played for each, and review them at `now`; write `fields`, graded or not."""
        rows_N = rows_at(self._store.items, slots)
        columns = {name: np.array([getattr(one, name) for one in facts]) for name in ("size", "num_success", "reward")}
        is_new_N = rows_N["reps"] == 0
        before = [np.where(is_new_N, prior, rows_N[name]) for name, prior in zip(("alpha", "beta"), PRIOR)]
        alpha_N, beta_N = posterior(columns["num_success"], columns["size"], *before)
        evidence = Evidence(
            alpha_N=alpha_N,
            beta_N=beta_N,
            rating_N=np.full(len(facts), np.nan),  # ratings arrive through `rate`
            **{f"{name}_N": column for name, column in columns.items()},
        )
        grade_N = np.asarray(self._grade(evidence, min_graded=self._settings.min_graded), np.int64)
        fields["alpha"] = np.where(grade_N > 0, alpha_N, rows_N["alpha"])
        fields["beta"] = np.where(grade_N > 0, beta_N, rows_N["beta"])
        return self.review(slots, grade_N, now, **fields)

    def review(self, slots: Sequence[int], grade_N: np.ndarray, now: int, **fields: Any) -> list[Graded]:
        """Review items at `now` by grades of 1 to 4, or 0 for no review; write `fields`, reviewed or not."""
        rows_N = rows_at(self._store.items, slots)
        state, is_graded_N, interval_N = SpacingState.of(rows_N), grade_N > 0, self._intervals(rows_N)
        elapsed_N = (now - rows_N["last_review"].astype(np.int64)) / self._settings.iterations_per_day
        after = self.rule.review(state, np.maximum(grade_N, 1), elapsed_N)
        fields |= {name: np.where(is_graded_N, new, rows_N[name]) for name, new in after.columns().items()}
        fields["last_review"] = np.where(is_graded_N, now, rows_N["last_review"])
        self.change(slots, **fields)
        graded = []
        for n, grade in enumerate(grade_N.tolist()):
            timing = timing_of(now, float(rows_N["due"][n]), float(interval_N[n])) if state.reps_N[n] else "new"
            is_lapse = bool(after.lapses_N[n] > state.lapses_N[n])
            graded.append(Graded(grade, is_lapse, timing) if grade else Graded(0))
        return graded

    def change(self, slots: Sequence[int], **fields: Any) -> None:
        """Write fields of items, and update their due dates."""
        rows_N = filled(rows_at(self._store.items, slots), fields)
        self._store.update(slots, **fields, due=rows_N["last_review"] + self._intervals(rows_N))

    def _intervals(self, rows_N: np.ndarray) -> np.ndarray:
        """Return effective intervals, in iterations."""
        settings = self._settings
        factor_N = interval_factor(rows_N["diversity"], settings.diversity_coeff)
        interval_N: np.ndarray = rows_N["interval"] * settings.iterations_per_day * factor_N
        effective_N: np.ndarray = np.maximum(float(settings.min_recall_interval), interval_N)
        return effective_N
