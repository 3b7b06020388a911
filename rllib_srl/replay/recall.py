"""Spaced repetition on the item table: a visit is graded, and the item gets a new due date.

    visit: pass rate -> grade -> rule.review -> base interval (days, stored)
           due = last review + stretch * max(min_recall_interval, interval * iterations_per_day * diversity factor)

Diversity and the stretch of load control act on the due date only: a stored interval never compounds.
A new item waits outside the schedule until expected reviews fit the revisit slots (`load.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from rllib_srl.replay.diversity import interval_factor
from rllib_srl.replay.grading import GRADES, PRIOR, Evidence, posterior
from rllib_srl.replay.load import LoadControl
from rllib_srl.replay.memory import MemoryStore
from rllib_srl.replay.records import LEECH, SCHEDULED
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.replay.spacing import SpacingState, make_spacing
from rllib_srl.replay.spacing.srl1 import SRL1, source_diversity
from rllib_srl.replay.visits import GroupFacts, timing_of


@dataclass(frozen=True)
class Graded:
    """What grading found. Invariant: `predicted` is nan exactly at a first review; grade 0 changed nothing."""

    grade: int
    predicted: float = float("nan")
    elapsed: int = 0  # iterations
    is_lapse: bool = False
    timing: str = "new"


class Recall:
    """Grades visits and sets due dates in a `MemoryStore`.

    Invariant: `load` sums over the scheduled items, each with its unstretched interval.
    """

    def __init__(self, settings: ReplaySettings, store: MemoryStore) -> None:
        """Work on `store` with the spacing rule of `settings`."""
        self._settings, self._store = settings, store
        self.rule = make_spacing(settings.spacing, settings.desired_retention, **settings.spacing_config)
        self.load = LoadControl(settings.load_control)
        self.slots = 0.0  # revisits an iteration has room for, on average

    def retrievability(self, slots_N: np.ndarray, now: int) -> np.ndarray:
        """Return the recall the rule expects of items now, in [0, 1]; 0 for items never reviewed."""
        rows_N = self._store.items[slots_N]
        elapsed_N = (now - rows_N["last_review"]) / self._settings.iterations_per_day
        return self.rule.retrievability(SpacingState.of(rows_N), elapsed_N)

    # --- a visit ---------------------------------------------------------------------------------

    def visit(self, slot: int, facts: GroupFacts, now: int) -> Graded:
        """Grade an item by the group that was played, and review it."""
        size_N, num_success_N = np.array([facts.size]), np.array([facts.num_success])
        row = self._store.items[slot]
        before = (float(row["alpha"]), float(row["beta"])) if row["reps"] else PRIOR
        alpha_N, beta_N = posterior(num_success_N, size_N, *before)
        evidence = Evidence(
            num_success_N=num_success_N,
            size_N=size_N,
            alpha_N=alpha_N,
            beta_N=beta_N,
            reward_N=np.array([facts.reward]),
            rating_N=np.array([np.nan]),  # people answer through `rate`
        )
        grade = int(GRADES[self._settings.grade](evidence, min_graded=self._settings.min_graded)[0])
        if grade == 0:
            return Graded(0)
        graded = self.review(slot, grade, now, is_trained=facts.trained_tokens > 0)
        self._store.update(slot, alpha=alpha_N[0], beta=beta_N[0])
        return graded

    def review(self, slot: int, grade: int, now: int, is_trained: bool) -> Graded:
        """Review an item with a grade that is known, and set its due date.

        Args:
            slot: of the item.
            grade: 1 to 4.
            now: the training iteration.
            is_trained: whether the visit is trained on, and not only tested.
        """
        rows = self._store.items[slot : slot + 1]
        row, state = rows[0], SpacingState.of(rows)
        elapsed = now - int(row["last_review"])
        is_first = row["reps"] == 0
        predicted = float("nan") if is_first else float(self.retrievability(np.array([slot]), now)[0])
        timing = "new" if is_first else timing_of(now, float(row["due"]), self._interval(slot))
        self._leave_load(slot)
        after = self.rule.review(
            state,
            np.array([grade]),
            np.array([elapsed / self._settings.iterations_per_day]),
            np.array([is_trained]),
            self._source_diversity(slot),
        )
        self._store.update(
            slot, last_review=now, **{name: column[0] for name, column in after.columns().items()}
        )
        self.place(slot)
        is_lapse = bool(after.lapses_N[0] > state.lapses_N[0])
        return Graded(grade, predicted, elapsed, is_lapse, timing)

    def place(self, slot: int) -> None:
        """Set an item's status and due date from its row; its load must not be counted at the moment."""
        settings, row = self._settings, self._store.items[slot]
        is_leech = 0 < settings.leech_failures <= -int(row["streak"])
        status = LEECH if is_leech else SCHEDULED if row["status"] == LEECH else int(row["status"])
        wait = float(settings.leech_interval) if is_leech else self._stretched(slot)
        self._store.update(slot, status=status, due=float(row["last_review"]) + wait)
        if status == SCHEDULED:
            self.load.add(np.array([self._interval(slot)]))

    def set_diversity(self, slot: int, **fields: float) -> None:
        """Write an item's measures of diversity; its interval is counted with the new ones from here on."""
        self._leave_load(slot)
        self._store.update(slot, **fields)
        self.place(slot)

    def forget(self, slots: Iterable[int]) -> None:
        """Take items that will be evicted out of the load."""
        for slot in slots:
            self._leave_load(slot)

    def _leave_load(self, slot: int) -> None:
        if self._store.items[slot]["status"] == SCHEDULED:
            self.load.remove(np.array([self._interval(slot)]))

    # --- the schedule ----------------------------------------------------------------------------

    def admit(self, now: int, at_least: int = 0) -> int:
        """Take waiting items into the schedule while their expected reviews fit; return how many.

        Args:
            now: the training iteration.
            at_least: items that enter whether they fit or not, because a batch must be full.
        """
        waiting = self._store.waiting(self._settings.candidate_pool)
        if not len(waiting):
            return 0
        rows_N = self._store.items[waiting]
        mean_N = rows_N["alpha"] / (rows_N["alpha"] + rows_N["beta"])
        worth_N = mean_N * (1 - mean_N) * (1 + self._settings.diversity_coeff * rows_N["diversity"])
        ordered = waiting[np.lexsort((rows_N["seq"], -worth_N))]
        num = max(self.load.admit(self._intervals(ordered), self.slots), min(at_least, len(ordered)))
        for slot in ordered[:num].tolist():
            due = max(float(now), float(self._store.items[slot]["last_review"]) + self._stretched(slot))
            self._store.update(slot, status=SCHEDULED, due=due)
            self.load.add(np.array([self._interval(slot)]))
        return num

    def rebuild(self) -> None:
        """Sum the load up afresh, after rows were loaded."""
        self.load = LoadControl(self._settings.load_control)
        self.load.add(self._intervals(self._scheduled()))

    def check(self) -> None:
        """Compare the load with the table.

        Raises:
            ValueError: they differ.
        """
        self.load.check(self._intervals(self._scheduled()))

    def _scheduled(self) -> np.ndarray:
        slots_N = self._store.slots()
        return slots_N[self._store.items[slots_N]["status"] == SCHEDULED]

    def _intervals(self, slots_N: np.ndarray) -> np.ndarray:
        """Return effective intervals before stretching, in iterations."""
        settings, rows_N = self._settings, self._store.items[slots_N]
        interval_N = rows_N["interval"] * settings.iterations_per_day
        if "interval" in settings.diversity_on:
            interval_N = interval_N * interval_factor(rows_N["diversity"], settings.diversity_coeff)
        return np.maximum(float(settings.min_recall_interval), interval_N)

    def _interval(self, slot: int) -> float:
        return float(self._intervals(np.array([slot]))[0])

    def _stretched(self, slot: int) -> float:
        return self._interval(slot) * self.load.stretch(self.slots)

    def _source_diversity(self, slot: int) -> np.ndarray | None:
        """Return what the source system's own rule divides by; only `srl1` with faithful=True reads it."""
        if not (isinstance(self.rule, SRL1) and self.rule.faithful):
            return None
        slots_N = self._store.slots()
        rows_N = self._store.items[slots_N]
        diversity_N = source_diversity(rows_N["variance"], rows_N["centroid"])
        return diversity_N[slots_N == slot]
