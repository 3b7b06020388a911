"""Spaced repetition on the item table: a visit is graded, and the item gets a new due date.

    visit: pass rate -> grade -> rule.review -> base interval (days, stored)
           due = last review + stretch * max(min_recall_interval, interval * iterations_per_day * diversity factor)

Diversity and the stretch of load control act on the due date only: a stored interval never compounds.
A new item waits outside the schedule until expected reviews fit the revisit slots (`load.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rllib_srl.replay.diversity import interval_factor
from rllib_srl.replay.domain_recall import DomainRecall
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
        self.domains = DomainRecall(settings.domain_half_life)
        self.slots = 0.0  # revisits an iteration has room for, on average

    def retrievability(self, slots_N: np.ndarray, now: int) -> np.ndarray:
        """Return the recall the rule expects of items now, in [0, 1]; 0 for items never reviewed."""
        rows_N = rows_at(self._store.items, slots_N)
        elapsed_N = (now - rows_N["last_review"]) / self._settings.iterations_per_day
        return self.rule.retrievability(SpacingState.of(rows_N), elapsed_N)

    # --- a visit ---------------------------------------------------------------------------------

    def visit(self, slots: Sequence[int], facts: Sequence[GroupFacts], now: int, **fields: Any) -> list[Graded]:
        """Grade items by the groups that were played, and review them.

        Args:
            slots: of the items, distinct.
            facts: what was played of each.
            now: the training iteration.
            fields: of the items that the visits change beside, graded or not; an array each.
        """
        rows_N = rows_at(self._store.items, slots)
        columns = {name: np.array([getattr(one, name) for one in facts]) for name in ("size", "num_success", "reward")}
        is_new_N = rows_N["reps"] == 0
        a_N, b_N = (np.where(is_new_N, prior, rows_N[name]) for name, prior in zip(("alpha", "beta"), PRIOR))
        alpha_N, beta_N = posterior(columns["num_success"], columns["size"], a_N, b_N)
        evidence = Evidence(
            alpha_N=alpha_N,
            beta_N=beta_N,
            rating_N=np.full(len(facts), np.nan),  # people answer through `rate`
            **{f"{name}_N": column for name, column in columns.items()},
        )
        grade_N = np.asarray(GRADES[self._settings.grade](evidence, min_graded=self._settings.min_graded), np.int64)
        is_graded_N = grade_N > 0
        fields["alpha"] = np.where(is_graded_N, alpha_N, rows_N["alpha"])
        fields["beta"] = np.where(is_graded_N, beta_N, rows_N["beta"])
        trained_N = np.array([one.trained_tokens > 0 for one in facts])
        graded = self.review(slots, grade_N, now, trained_N, **fields)
        predicted_N = np.array([one.predicted for one in graded])
        self.domains.note(rows_N["domain"], columns["num_success"] / np.maximum(1, columns["size"]), predicted_N, now)
        return graded

    def review(
        self, slots: Sequence[int], grade_N: np.ndarray, now: int, trained_N: np.ndarray, **fields: Any
    ) -> list[Graded]:
        """Review items with grades that are known, and set their due dates.

        Args:
            slots: of the items, distinct.
            grade_N: 1 to 4, or 0 for no review.
            now: the training iteration.
            trained_N: whether a visit is trained on, and not only tested.
            fields: of the items that change with it, reviewed or not; an array each.
        """
        rows_N = rows_at(self._store.items, slots)
        state, is_graded_N = SpacingState.of(rows_N), grade_N > 0
        elapsed_N, is_first_N = now - rows_N["last_review"].astype(np.int64), rows_N["reps"] == 0
        predicted_N = np.where(is_first_N, np.nan, self.retrievability(np.asarray(slots), now))
        interval_N = self._intervals(rows_N)
        after = self.rule.review(
            state,
            np.maximum(grade_N, 1),
            elapsed_N / self._settings.iterations_per_day,
            trained_N,
            self._source_diversity(slots, fields),
        )
        changed = {
            name: np.where(is_graded_N, column, getattr(state, f"{name}_N")) for name, column in after.columns().items()
        }
        last_review_N = np.where(is_graded_N, now, rows_N["last_review"])
        self.change(slots, last_review=last_review_N, **changed, **fields)
        return [
            Graded(
                int(grade_N[n]),
                float(predicted_N[n]),
                int(elapsed_N[n]),
                bool(after.lapses_N[n] > state.lapses_N[n]),
                "new" if is_first_N[n] else timing_of(now, float(rows_N["due"][n]), float(interval_N[n])),
            )
            if is_graded_N[n]
            else Graded(0)
            for n in range(len(slots))
        ]

    def change(self, slots: Sequence[int], **fields: Any) -> None:
        """Write fields of items, and the status, due date and load that follow from them.

        Args:
            slots: of the items, distinct.
            fields: an array each.
        """
        settings, stretch = self._settings, self.load.stretch(self.slots)
        rows_N = rows_at(self._store.items, slots)
        self.load.remove(self._intervals(rows_N[rows_N["status"] == SCHEDULED]))
        rows_N = filled(rows_N, fields)
        interval_N = self._intervals(rows_N)
        is_leech_N = (settings.leech_failures > 0) & (-rows_N["streak"] >= settings.leech_failures)
        status_N = np.where(rows_N["status"] == LEECH, SCHEDULED, rows_N["status"])
        status_N = np.where(is_leech_N, LEECH, status_N)
        wait_N = np.where(is_leech_N, settings.leech_interval, interval_N * stretch)
        self._store.update_many(slots, **fields, status=status_N, due=rows_N["last_review"] + wait_N)
        self.load.add(interval_N[status_N == SCHEDULED])

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

    def _source_diversity(self, slots: Sequence[int], fields: Mapping[str, Any]) -> np.ndarray | None:
        """Return what the source system's own rule divides by; only `srl1` with faithful=True reads it.

        Args:
            slots: of the items.
            fields: of them that are about to change.
        """
        if not (isinstance(self.rule, SRL1) and self.rule.faithful):
            return None
        all_N = self._store.slots()
        rows_N, at_N = rows_at(self._store.items, all_N), np.searchsorted(all_N, slots)
        rows_N[at_N] = filled(rows_N[at_N], fields)
        return source_diversity(rows_N["variance"], rows_N["centroid"])[at_N]
