"""Spaced repetition on the item table: grades visits, sets due dates, and corrects recall by domain.

    visit: pass rate -> grade -> rule.review -> base interval (days, stored)
           due = last review + stretch * max(min_recall_interval, interval * iterations_per_day * diversity factor)

Diversity and the stretch of load control act on the due date only, so their effect on intervals does not compound.
A new item waits outside the schedule until expected reviews fit the revisit slots (`load.py`).

    review of an item ──> observed and predicted recall of its domain, decaying with a half-life
                          factor of a domain = (sum of observed + 1) / (sum of predicted + 1), at most 1

A spacing rule models the forgetting of each item independently, but a policy forgets whole skills: if training on
another task has degraded one item, it has probably degraded similar items too, long before their own reviews. The
domain factor multiplies the recall that the rule predicts for an item, and an item whose product is below the desired
retention is due. The 1 is a prior of one review that went as predicted, so that a single lapse has a limited effect.

Source: Lindsey, Shroyer, Pashler and Mozer 2014, Psychological Science 25(3), "Improving students' long-term knowledge
retention through personalized review": predicts recall of an item from its own history and that of all items of its
kind. Difference: the paper fits a logistic regression; the factor and its half-life are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rllib_srl.replay.diversity.measures import interval_factor
from rllib_srl.replay.schedule.calibration import ReviewLog
from rllib_srl.replay.schedule.correction import Correction
from rllib_srl.replay.schedule.grading import GRADES, PRIOR, Evidence, posterior
from rllib_srl.replay.schedule.load import LoadControl
from rllib_srl.replay.schedule.spacing import SpacingRule, SpacingState
from rllib_srl.replay.schedule.spacing.srl1 import SRL1, source_diversity
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.replay.store.items import ItemStore
from rllib_srl.replay.store.records import LEECH, SCHEDULED, filled, rows_at
from rllib_srl.replay.visits import GroupFacts, timing_of

PRIOR_REVIEWS = 1.0  # prior of each domain: this many reviews that went as predicted


def overdue_by_recall(recall_N: np.ndarray, desired_retention: float) -> np.ndarray:
    """Return (1 - recall) / (1 - desired_retention) - 1: 0 where recall is the desired one, above 0 below it."""
    return (1 - recall_N) / (1 - desired_retention) - 1


class DomainRecall:
    """Exponentially decaying sums of observed and predicted recall by domain.

    Invariant: each noted review has weight 0.5 ** (iterations since / half_life); with a half-life of 0 nothing is
    noted, and every factor is 1.
    """

    def __init__(self, half_life: float) -> None:
        """Start with empty sums; `half_life` is in iterations, 0 disables the correction."""
        self._half_life = half_life
        self._sums: dict[int, tuple[float, float, int]] = {}  # domain -> observed, predicted, iteration of the sums

    def note(self, domain_N: np.ndarray, observed_N: np.ndarray, predicted_N: np.ndarray, now: int) -> None:
        """Add reviews to the sums; those without a prediction (nan) are ignored.

        Args:
            domain_N: domain number of each item.
            observed_N: share of successful episodes.
            predicted_N: predicted recall, or nan.
            now: the training iteration.
        """
        if self._half_life <= 0:
            return
        is_told_N = ~np.isnan(predicted_N)
        for domain in np.unique(domain_N[is_told_N]).tolist():
            is_here_N = is_told_N & (domain_N == domain)
            observed, predicted = self._faded(domain, now)
            observed += float(observed_N[is_here_N].sum())
            predicted += float(predicted_N[is_here_N].sum())
            self._sums[domain] = (observed, predicted, now)

    def factor(self, domain_N: np.ndarray, now: int) -> np.ndarray:
        """Return the factor of predicted recall, in (0, 1], for items of these domains."""
        factor_N = np.ones(len(domain_N))
        for domain in self._sums:
            observed, predicted = self._faded(domain, now)
            factor_N[domain_N == domain] = min(1.0, (observed + PRIOR_REVIEWS) / (predicted + PRIOR_REVIEWS))
        return factor_N

    def get_state(self) -> list[list[float]]:
        """Return the sums, as JSON types."""
        return [[domain, *sums] for domain, sums in self._sums.items()]

    def set_state(self, state: list[list[Any]]) -> None:
        """Restore the state that `get_state` returned."""
        self._sums = {int(domain): (float(seen), float(told), int(at)) for domain, seen, told, at in state}

    def _faded(self, domain: int, now: int) -> tuple[float, float]:
        observed, predicted, at = self._sums.get(domain, (0.0, 0.0, now))
        left = 0.5 ** (max(0, now - at) / self._half_life)
        return observed * left, predicted * left


@dataclass(frozen=True)
class Graded:
    """Result of grading one visit. Invariant: `predicted` is nan at a first review; grade 0 means no review."""

    grade: int
    predicted: float = float("nan")
    elapsed: int = 0  # iterations
    is_lapse: bool = False
    timing: str = "new"


class Recall:
    """Grades visits and sets due dates in a `ItemStore`.

    Invariant: `load` is the sum over the scheduled items, each with its unstretched interval.
    """

    def __init__(self, settings: ReplaySettings, store: ItemStore) -> None:
        """Schedule the items of `store` with the spacing rule of `settings`."""
        self._settings, self._store = settings, store
        self.correction = Correction(settings)
        self.load = LoadControl(settings.load_control)
        self.domains = DomainRecall(settings.domain_half_life)
        self.slots = 0.0  # average number of revisits an iteration

    @property
    def rule(self) -> SpacingRule:
        """Return the spacing rule in use: as set, or as refitted in this run."""
        return self.correction.rule

    def retrievability(self, slots_N: np.ndarray, now: int) -> np.ndarray:
        """Return the predicted recall at `now`, in [0, 1], corrected (`correction.py`); 0 for items never reviewed."""
        rows_N = rows_at(self._store.items, slots_N)
        elapsed_N = (now - rows_N["last_review"]) / self._settings.iterations_per_day
        return self.correction.recall(SpacingState.of(rows_N), elapsed_N)

    def correct(self, log: Callable[[], ReviewLog], now: int) -> dict[str, int]:
        """Correct predicted recall from the reviews so far, if it is time; return the numbers of fits by count.

        Args:
            log: returns the newest reviews; called only if a fit is due.
            now: the training iteration.
        """
        if not self.correction.is_due(now):
            return {}
        reviews = log()
        fits = self.correction.fit(reviews, now)
        if fits.is_refitted:
            self._recompute(fits.histories.states(self.rule, reviews))
        return {"num_refits": int(fits.is_refitted), "num_recalibrations": int(fits.is_recalibrated)}

    def _recompute(self, found: tuple[np.ndarray, np.ndarray, SpacingState]) -> None:
        """Write the states of the items that a refit has replayed, and the intervals of all reviewed items.

        Args:
            found: keys, iterations of the last review, and states after it (`Histories.states`).
        """
        slots_N = self._store.slots()
        slots_N = slots_N[self._store.items["reps"][slots_N] > 0]
        if not len(slots_N):
            return  # all of them were evicted
        rows_N, (key_H, last_H, state) = rows_at(self._store.items, slots_N), found
        order_H = np.argsort(key_H)
        at_N = order_H[np.minimum(np.searchsorted(key_H[order_H], rows_N["key"]), len(key_H) - 1)]
        # An item that was evicted and came back, or was imported, has another history than the log's.
        is_whole_N = (
            (key_H[at_N] == rows_N["key"])
            & (state.reps_N[at_N] == rows_N["reps"])
            & (last_H[at_N] == rows_N["last_review"])
        )
        old, new = SpacingState.of(rows_N).columns(), state[at_N].columns()
        columns = {name: np.where(is_whole_N, new[name], old[name]) for name in ("stability", "difficulty")}
        columns["interval"] = self.rule.interval_of(columns["stability"])
        interval_N = self.correction.interval_of(SpacingState.of({**old, **columns}))
        self.change(slots_N.tolist(), **{**columns, "interval": interval_N})

    # --- a visit ---------------------------------------------------------------------------------

    def visit(self, slots: Sequence[int], facts: Sequence[GroupFacts], now: int, **fields: Any) -> list[Graded]:
        """Grade items by their played groups, and review them.

        Args:
            slots: of the items, distinct.
            facts: summary of the group played for each item.
            now: the training iteration.
            fields: further fields to write, whether the visit is graded or not; one array each.
        """
        rows_N = rows_at(self._store.items, slots)
        columns = {name: np.array([getattr(one, name) for one in facts]) for name in ("size", "num_success", "reward")}
        is_new_N = rows_N["reps"] == 0
        a_N, b_N = (np.where(is_new_N, prior, rows_N[name]) for name, prior in zip(("alpha", "beta"), PRIOR))
        alpha_N, beta_N = posterior(columns["num_success"], columns["size"], a_N, b_N)
        evidence = Evidence(
            alpha_N=alpha_N,
            beta_N=beta_N,
            rating_N=np.full(len(facts), np.nan),  # ratings arrive through `rate`
            **{f"{name}_N": column for name, column in columns.items()},
        )
        by = GRADES.named(self._settings.grade)
        grade_N = np.asarray(by(evidence, min_graded=self._settings.min_graded), np.int64)
        is_graded_N = grade_N > 0
        fields["alpha"] = np.where(is_graded_N, alpha_N, rows_N["alpha"])
        fields["beta"] = np.where(is_graded_N, beta_N, rows_N["beta"])
        has_signal_N = np.array([one.signal_tokens > 0 for one in facts])
        graded = self.review(slots, grade_N, now, has_signal_N, **fields)
        predicted_N = np.array([one.predicted for one in graded])
        self.domains.note(rows_N["domain"], columns["num_success"] / np.maximum(1, columns["size"]), predicted_N, now)
        return graded

    def review(
        self, slots: Sequence[int], grade_N: np.ndarray, now: int, trained_N: np.ndarray, **fields: Any
    ) -> list[Graded]:
        """Review items with given grades, and set their due dates.

        Args:
            slots: of the items, distinct.
            grade_N: 1 to 4, or 0 for no review.
            now: the training iteration.
            trained_N: whether a visit counts as trained on: its rewards differ. False: only a test.
            fields: further fields to write, whether an item is reviewed or not; one array each.
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
        columns = {**after.columns(), "interval": self.correction.interval_of(after)}
        changed = {
            name: np.where(is_graded_N, column, getattr(state, f"{name}_N")) for name, column in columns.items()
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
        """Write fields of items, and update their status, due dates and load.

        Args:
            slots: of the items, distinct.
            fields: one array each.
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
        """Remove items from the load before they are evicted."""
        for slot in slots:
            self._leave_load(slot)

    def _leave_load(self, slot: int) -> None:
        if self._store.items[slot]["status"] == SCHEDULED:
            self.load.remove(self._intervals(rows_at(self._store.items, [slot])))

    # --- the schedule ----------------------------------------------------------------------------

    def admit(
        self,
        now: int,
        domains: Collection[int] | None = None,
        at_least: int = 0,
        wanted: Callable[[np.ndarray, int], np.ndarray] | None = None,
    ) -> int:
        """Schedule waiting items while their expected reviews fit the slots; return how many.

        Args:
            now: the training iteration.
            domains: numbers of the domains that are revisited; None: all.
            at_least: above 0, schedule up to this many items past their minimum recall interval, whether they fit or
                not, to fill a batch.
            wanted: function of slots and `now` that returns the slots that may be revisited; None: all.
        """
        num = self._settings.candidate_pool if wanted is None else len(self._store)  # wanted items may be anywhere
        waiting = self._store.waiting(num, domains)
        waiting = waiting if wanted is None else wanted(waiting, now)
        if not len(waiting):
            return 0
        rows_N = rows_at(self._store.items, waiting)
        mean_N = rows_N["alpha"] / (rows_N["alpha"] + rows_N["beta"])
        coeff = self._settings.diversity_coeff if "draw" in self._settings.diversity_on else 0.0
        worth_N = mean_N * (1 - mean_N) * (1 + coeff * rows_N["diversity"])
        is_tired_N = rows_N["last_review"] + self._settings.min_recall_interval > now
        # Items within their minimum recall interval cannot be drawn now, so they would not help to fill the batch.
        order = np.lexsort((rows_N["seq"], -worth_N, is_tired_N & (at_least > 0)))
        ordered, num_rested = waiting[order], int((~is_tired_N).sum())
        interval_N = self._intervals(rows_N)[order]
        num = min(at_least, num_rested) if at_least else self.load.admit(interval_N, self.slots)
        wait_N = np.zeros(num)
        for n, interval in enumerate(interval_N[:num]):  # one by one: each item admitted stretches the next interval
            wait_N[n] = interval * self.load.stretch(self.slots)
            self.load.add(interval_N[n : n + 1])
        due_N = np.maximum(float(now), rows_N["last_review"][order][:num] + wait_N)
        self._store.update_many(ordered[:num], status=SCHEDULED, due=due_N)
        return num

    def rebuild(self) -> None:
        """Recompute the load after rows were loaded."""
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
        scheduled_N: np.ndarray = slots_N[self._store.items["status"][slots_N] == SCHEDULED]
        return scheduled_N

    def _intervals(self, rows_N: np.ndarray) -> np.ndarray:
        """Return effective intervals before stretching, in iterations."""
        settings = self._settings
        interval_N = rows_N["interval"] * settings.iterations_per_day
        if "interval" in settings.diversity_on:
            interval_N = interval_N * interval_factor(rows_N["diversity"], settings.diversity_coeff)
        return np.maximum(float(settings.min_recall_interval), interval_N)

    def _source_diversity(self, slots: Sequence[int], fields: Mapping[str, Any]) -> np.ndarray | None:
        """Return the diversity that `srl1` with faithful=True divides by; None for every other rule.

        Args:
            slots: of the items.
            fields: new values of their fields, not written yet.
        """
        if not (isinstance(self.rule, SRL1) and self.rule.faithful):
            return None
        all_N = self._store.slots()
        rows_N, at_N = rows_at(self._store.items, all_N), np.searchsorted(all_N, slots)
        rows_N[at_N] = filled(rows_N[at_N], fields)
        return source_diversity(rows_N["variance"], rows_N["centroid"])[at_N]
