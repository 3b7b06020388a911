"""Measures the calibration of predicted recall, and compares the spacing rule with a constant prediction.

    ReviewLog (one row a visit) -> log_loss, brier, calibration_curve -> report: the rule against a constant

A visit of n episodes, s of them successes, is n trials of the recall that was predicted for it. All means are over
episodes, so a visit weighs n. The first visit of an item has no prediction (`predicted` is nan) and is left out.

Sources: Brier 1950, Monthly Weather Review 78, "Verification of forecasts expressed in terms of probability";
Naeini et al. 2015, AAAI, "Obtaining well calibrated probabilities using Bayesian binning" (calibration error).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np

from rllib_srl.common.statistics import Z_95

SURE = 1e-6  # predictions are clipped to [SURE, 1 - SURE], which bounds the loss of an episode at 13.8 nats

COLUMNS: dict[str, type] = {
    "key": np.uint64,
    "now": np.int64,
    "elapsed_days": np.float64,
    "grade": np.int64,
    "num_success": np.int64,
    "n": np.int64,
    "predicted": np.float64,
    "trained": np.bool_,
    "version": np.int64,
    "temperature": np.float64,
    "trained_tokens": np.int64,
}


@dataclass(frozen=True)
class ReviewLog:
    """Log of graded visits in chronological order; one array [N] a column.

    Invariant: the columns are equally long, of the types in `COLUMNS`; 0 <= num_success <= n, n >= 1, grade 1 to 4;
    `predicted` is nan at the first visit of an item (where `elapsed_days` is not meaningful), finite elsewhere.
    """

    key: np.ndarray  # of the item
    now: np.ndarray  # iteration of the visit
    elapsed_days: np.ndarray  # since the visit before, in the spacing rule's days
    grade: np.ndarray
    num_success: np.ndarray  # successful episodes
    n: np.ndarray  # valid episodes
    predicted: np.ndarray  # recall predicted before the visit
    trained: np.ndarray  # whether the visit counts as trained on: its rewards differ. False: only a test
    version: np.ndarray  # policy version that played it
    temperature: np.ndarray
    trained_tokens: np.ndarray  # loss tokens of the visit, 0 where `trained` is False

    def __post_init__(self) -> None:
        """Cast every column to its type and check the invariant.

        Raises:
            ValueError: naming all violations at once.
        """
        for name, dtype in COLUMNS.items():
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype))
        lengths = {name: np.shape(getattr(self, name)) for name in COLUMNS}
        if len(set(lengths.values())) > 1 or any(len(shape) != 1 for shape in lengths.values()):
            raise ValueError(f"columns of a review log have shapes {lengths}; expected one length")
        is_first_N = np.isnan(self.predicted)
        broken = {
            "n; expected at least 1": self.n < 1,
            "num_success; expected 0 to n": (self.num_success < 0) | (self.num_success > self.n),
            "grade; expected 1 to 4": (self.grade < 1) | (self.grade > 4),
            "elapsed_days; expected finite days, at least 0": ~is_first_N
            & ~((self.elapsed_days >= 0) & np.isfinite(self.elapsed_days)),
            "predicted; expected 0 to 1, nan at first visits": (self.predicted < 0) | (self.predicted > 1),
        }
        if faults := [f"{bad.sum()} rows break {name}" for name, bad in broken.items() if bad.any()]:
            raise ValueError("review log is not valid: " + "; ".join(faults))

    def __len__(self) -> int:
        """Return the number of visits."""
        return len(self.key)

    def __getitem__(self, index: np.ndarray | slice) -> ReviewLog:
        """Return the chosen visits, by mask, indices or slice."""
        return ReviewLog(**{name: column[index] for name, column in self.to_arrays().items()})

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> ReviewLog:
        """Build a log from the columns that `to_arrays` returned.

        Raises:
            ValueError: columns are missing or unknown, or the log is not valid.
        """
        if faults := sorted(set(arrays) ^ set(COLUMNS)):
            raise ValueError(f"columns {faults} are missing or unknown; expected {sorted(COLUMNS)}")
        return cls(**arrays)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return the columns by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def predictable(self) -> ReviewLog:
        """Return the visits that have a prediction: all but the first of each item."""
        return self[~np.isnan(self.predicted)]


def cross_entropy_N(predicted_N: np.ndarray, num_success_N: np.ndarray, n_N: np.ndarray) -> np.ndarray:
    """Return -[s log p + (n - s) log(1 - p)] of each visit, in nats, summed over its episodes."""
    p_N = np.clip(predicted_N, SURE, 1 - SURE)
    loss_N: np.ndarray = -(num_success_N * np.log(p_N) + (n_N - num_success_N) * np.log1p(-p_N))
    return loss_N


def log_loss(predicted_N: np.ndarray, num_success_N: np.ndarray, n_N: np.ndarray) -> float:
    """Return the cross-entropy in nats an episode: lower is better; a constant 0.5 gives ln 2.

    Args:
        predicted_N: recall, in [0, 1]; clipped to [1e-6, 1 - 1e-6].
        num_success_N: successes of each visit.
        n_N: episodes of each visit.

    Raises:
        ValueError: there is no visit.
    """
    _check_not_empty(n_N)
    return float(cross_entropy_N(predicted_N, num_success_N, n_N).sum() / n_N.sum())


def brier(predicted_N: np.ndarray, num_success_N: np.ndarray, n_N: np.ndarray) -> float:
    """Return the mean over episodes of (p - outcome)^2: s (1 - p)^2 + (n - s) p^2, in [0, 1].

    Args: as of `log_loss`.

    Raises:
        ValueError: there is no visit.

    Source: Brier 1950 (for one probability: half of the original's sum over two classes).
    """
    _check_not_empty(n_N)
    squared_N = num_success_N * (1 - predicted_N) ** 2 + (n_N - num_success_N) * predicted_N**2
    return float(squared_N.sum() / n_N.sum())


def constant(num_success_N: np.ndarray, n_N: np.ndarray) -> float:
    """Return the constant prediction with the least log loss and Brier score: the pass rate of all episodes.

    Raises:
        ValueError: there is no visit.
    """
    _check_not_empty(n_N)
    return float(num_success_N.sum() / n_N.sum())


@dataclass(frozen=True)
class Curve:
    """Predicted and observed recall by bin. Invariant: only bins with at least one episode."""

    predicted: np.ndarray  # mean prediction of a bin
    observed: np.ndarray  # pass rate of a bin
    num_episodes: np.ndarray

    @property
    def error(self) -> float:
        """Return the calibration error: |predicted - observed|, weighted by episodes."""
        return float(np.average(np.abs(self.predicted - self.observed), weights=self.num_episodes))


def calibration_curve(predicted_N: np.ndarray, num_success_N: np.ndarray, n_N: np.ndarray, bins: int = 10) -> Curve:
    """Sort visits into bins of equal width by prediction, and return each bin's mean prediction and pass rate.

    Args:
        bins: over [0, 1], at least 1; a prediction on an inner edge belongs to the bin above it.

    Raises:
        ValueError: there is no visit or no bin.

    Source: Naeini et al. 2015.
    """
    _check_not_empty(n_N)
    if bins < 1:
        raise ValueError(f"bins = {bins}; expected at least 1")
    bin_N = np.minimum((np.asarray(predicted_N) * bins).astype(np.int64), bins - 1)
    num, right, mass = (np.bincount(bin_N, w_N, bins) for w_N in (n_N, num_success_N, n_N * predicted_N))
    held = num > 0
    return Curve(mass[held] / num[held], right[held] / num[held], num[held].astype(np.int64))


@dataclass(frozen=True)
class Report:
    """Calibration of predictions. Invariant: losses are means over episodes, in nats (log) or squared (Brier)."""

    num_reviews: int
    num_items: int
    num_episodes: int
    predicted: float  # mean
    observed: float  # pass rate, which is also the constant prediction
    log_loss: float
    log_loss_constant: float
    brier: float
    brier_constant: float
    calibration_error: float
    gain: float  # log loss of the constant minus that of the rule; above 0 the rule is better
    gain_error: float  # standard error of the gain, clustered by item; inf for a single item

    @property
    def beats_constant(self) -> bool:
        """Return whether the rule is significantly better than the constant: gain > 1.96 standard errors."""
        return bool(self.gain > Z_95 * self.gain_error)


def report(log: ReviewLog, bins: int = 10) -> Report:
    """Compare predicted with observed recall, and the rule with the best constant.

    The comparison favours the constant: it is fitted to the same visits in hindsight, while the predictions were made
    before them. Visits of one item are dependent, so the standard error is clustered by item:
    sqrt(K / (K - 1) sum_k (gain_k - gain n_k)^2) / sum_k n_k, for K items.

    Args:
        log: of any rule; visits without a prediction are left out.
        bins: number of bins of the calibration error.

    Raises:
        ValueError: no visit has a prediction.
    """
    log = log.predictable()
    columns = (log.num_success, log.n)
    observed, num_episodes = constant(*columns), int(log.n.sum())
    gain_N = cross_entropy_N(np.full(len(log), observed), *columns) - cross_entropy_N(log.predicted, *columns)
    gain = float(gain_N.sum() / num_episodes)
    _, item_N = np.unique(log.key, return_inverse=True)
    residual_K = np.bincount(item_N, gain_N - gain * log.n)
    num_items = len(residual_K)
    variance = num_items / (num_items - 1) * float((residual_K**2).sum()) if num_items > 1 else np.inf
    return Report(
        num_reviews=len(log),
        num_items=num_items,
        num_episodes=num_episodes,
        predicted=float(np.average(log.predicted, weights=log.n)),
        observed=observed,
        log_loss=log_loss(log.predicted, *columns),
        log_loss_constant=log_loss(np.full(len(log), observed), *columns),
        brier=brier(log.predicted, *columns),
        brier_constant=brier(np.full(len(log), observed), *columns),
        calibration_error=calibration_curve(log.predicted, *columns, bins=bins).error,
        gain=gain,
        gain_error=float(np.sqrt(variance)) / num_episodes,
    )


def _check_not_empty(n_N: np.ndarray) -> None:
    if len(n_N) == 0:
        raise ValueError("no visit has a prediction; expected at least one item that was visited twice")
