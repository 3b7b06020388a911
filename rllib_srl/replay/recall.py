"""Spaced repetition on the item table: a visit is graded, and the item gets a new due date.

    visit: pass rate -> grade -> rule.review -> base interval (days, stored)
           due = last review + stretch * max(min_recall_interval, interval * iterations_per_day * diversity factor)

Diversity and the stretch of load control act on the due date only: a stored interval never compounds.
A new item waits outside the schedule until expected reviews fit the revisit slots (`load.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rllib_srl.replay.diversity import interval_factor
from rllib_srl.replay.grading import GRADES, PRIOR, Evidence, posterior
from rllib_srl.replay.load import LoadControl
from rllib_srl.replay.memory import MemoryStore
from rllib_srl.replay.records import LEECH, SCHEDULED, filled, rows_at
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
        rows_N = rows_at(self._store.items, slots_N)
        elapsed_N = (now - rows_N["last_review"]) / self._settings.iterations_per_day
        return self.rule.retrievability(SpacingState.of(rows_N), elapsed_N)

    # --- a visit ---------------------------------------------------------------------------------

    def visit(self, slot: int, facts: GroupFacts, now: int, **fields: Any) -> Graded:
        """Grade an item by the group that was played, and review it.

        Args:
            slot: of the item.
            facts: what was played.
            now: the training iteration.
            fields: of the item that the visit changes beside, graded or not.
        """
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
            self.change(slot, **fields)
            return Graded(0)
        fields |= {"alpha": alpha_N[0], "beta": beta_N[0]}
        return self.review(slot, grade, now, facts.trained_tokens > 0, **fields)

    def review(self, slot: int, grade: int, now: int, is_trained: bool, **fields: Any) -> Graded:
        """Review an item with a grade that is known, and set its due date.

        Args:
            slot: of the item.
            grade: 1 to 4.
            now: the training iteration.
            is_trained: whether the visit is trained on, and not only tested.
            fields: of the item that change with it.
        """
        row_1 = rows_at(self._store.items, [slot])
        row, state = row_1[0], SpacingState.of(row_1)
        elapsed = now - int(row["last_review"])
        is_first = row["reps"] == 0
        predicted = float("nan") if is_first else float(self.retrievability(np.array([slot]), now)[0])
        timing = "new" if is_first else timing_of(now, float(row["due"]), float(self._intervals(row_1)[0]))
        after = self.rule.review(
            state,
            np.array([grade]),
            np.array([elapsed / self._settings.iterations_per_day]),
            np.array([is_trained]),
            self._source_diversity(slot, fields),
        )
        self.change(slot, last_review=now, **{name: column[0] for name, column in after.columns().items()}, **fields)
        is_lapse = bool(after.lapses_N[0] > state.lapses_N[0])
        return Graded(grade, predicted, elapsed, is_lapse, timing)

    def change(self, slot: int, **fields: Any) -> None:
        """Write fields of an item, and the status, due date and load that follow from them."""
        settings = self._settings
        self._leave_load(slot)
        row_1 = filled(rows_at(self._store.items, [slot]), fields)
        interval_1, row = self._intervals(row_1), row_1[0]
        is_leech = 0 < settings.leech_failures <= -int(row["streak"])
        status = LEECH if is_leech else SCHEDULED if row["status"] == LEECH else int(row["status"])
        if status == SCHEDULED:
            self.load.add(interval_1)  # its own reviews are among those that have to fit
        wait = float(settings.leech_interval) if is_leech else float(interval_1[0]) * self.load.stretch(self.slots)
        self._store.update(slot, **fields, status=status, due=float(row["last_review"]) + wait)

    def forget(self, slots: Iterable[int]) -> None:
        """Take items that will be evicted out of the load."""
        for slot in slots:
            self._leave_load(slot)

    def _leave_load(self, slot: int) -> None:
        if self._store.items[slot]["status"] == SCHEDULED:
            self.load.remove(self._intervals(rows_at(self._store.items, [slot])))

    # --- the schedule ----------------------------------------------------------------------------

    def admit(self, now: int, domains: Collection[int] | None = None, at_least: int = 0) -> int:
        """Take waiting items into the schedule while their expected reviews fit; return how many.

        Args:
            now: the training iteration.
            domains: by number, the only ones that are revisited; None: all.
            at_least: items that have rested and enter whether they fit or not, because a batch must be full.
        """
        waiting = self._store.waiting(self._settings.candidate_pool, domains)
        if not len(waiting):
            return 0
        rows_N = rows_at(self._store.items, waiting)
        mean_N = rows_N["alpha"] / (rows_N["alpha"] + rows_N["beta"])
        coeff = self._settings.diversity_coeff if "draw" in self._settings.diversity_on else 0.0
        worth_N = mean_N * (1 - mean_N) * (1 + coeff * rows_N["diversity"])
        is_tired_N = rows_N["last_review"] + self._settings.min_recall_interval > now
        # Forced in for this very draw, an item that has not rested would only leave its slot empty.
        order = np.lexsort((rows_N["seq"], -worth_N, is_tired_N & (at_least > 0)))
        ordered, num_rested = waiting[order], int((~is_tired_N).sum())
        interval_N = self._intervals(rows_N)[order]
        num = min(at_least, num_rested) if at_least else self.load.admit(interval_N, self.slots)
        for slot, interval in zip(ordered[:num].tolist(), interval_N.tolist()):
            wait = interval * self.load.stretch(self.slots)
            due = max(float(now), float(self._store.items[slot]["last_review"]) + wait)
            self._store.update(slot, status=SCHEDULED, due=due)
            self.load.add(np.array([interval]))
        return num

    def rebuild(self) -> None:
        """Sum the load up afresh, after rows were loaded."""
        self.load = LoadControl(self._settings.load_control)
        self.load.add(self._intervals(rows_at(self._store.items, self._scheduled())))

    def check(self) -> None:
        """Compare the load with the table.

        Raises:
            ValueError: they differ.
        """
        self.load.check(self._intervals(rows_at(self._store.items, self._scheduled())))

    def _scheduled(self) -> np.ndarray:
        slots_N = self._store.slots()
        return slots_N[self._store.items["status"][slots_N] == SCHEDULED]

    def _intervals(self, rows_N: np.ndarray) -> np.ndarray:
        """Return effective intervals before stretching, in iterations."""
        settings = self._settings
        interval_N = rows_N["interval"] * settings.iterations_per_day
        if "interval" in settings.diversity_on:
            interval_N = interval_N * interval_factor(rows_N["diversity"], settings.diversity_coeff)
        return np.maximum(float(settings.min_recall_interval), interval_N)

    def _source_diversity(self, slot: int, fields: Mapping[str, Any]) -> np.ndarray | None:
        """Return what the source system's own rule divides by; only `srl1` with faithful=True reads it.

        Args:
            slot: of the item.
            fields: of it that are about to change.
        """
        if not (isinstance(self.rule, SRL1) and self.rule.faithful):
            return None
        slots_N = self._store.slots()
        rows_N = rows_at(self._store.items, slots_N)
        rows_N[slots_N == slot] = filled(rows_N[slots_N == slot], fields)
        diversity_N = source_diversity(rows_N["variance"], rows_N["centroid"])
        return diversity_N[slots_N == slot]
