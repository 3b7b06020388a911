"""The measures of a trial by name, with a title and an explanation for the report; `of` refers to the formula.

Retention is measured over generated tokens, not iterations: all arms have the same token budget.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rllib_srl.studies import accuracy
from rllib_srl.studies.curves import Curve
from rllib_srl.studies.online import ONLINE_ACCURACY


@dataclass(frozen=True)
class Measure:
    """One measure of a trial. `better` is "higher", "lower", or "" if neither is better."""

    title: str
    plain: str  # one sentence for readers without background
    unit: str  # "share", "points" (a difference of shares), "tokens", "seconds", "bytes" or "count"
    better: str
    of: Callable[[Curve], float]


def _retention(curve: Curve) -> float:
    time_I = curve.num_generated_tokens_I
    return _mean(
        [accuracy.retention_area(time_I[at:], curve.accuracy_IC[at:, j]) for j, at in curve.remembered_from().items()]
    )


def _area(time_I: np.ndarray, accuracy_I: np.ndarray) -> float:
    """Return the mean height over time; NaN if a value is unknown."""
    return accuracy.retention_area(time_I, accuracy_I) if np.isfinite(accuracy_I).all() else float("nan")


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


MEASURES = {
    "average_accuracy": Measure(
        "final accuracy",
        "After all training: the share of held-out prompts answered correctly, averaged over all trained domains.",
        "share",
        "higher",
        lambda c: accuracy.average_accuracy(c.accuracy_SC, c.learned_at_C),
    ),
    "retention_area": Measure(
        "retention",
        "The average accuracy on a domain from the end of its own training to the end of all (area under the "
        "retention curve). High if the domain was learned well and then kept.",
        "share",
        "higher",
        _retention,
    ),
    "forgetting": Measure(
        "forgetting",
        "How far the accuracy on earlier domains fell from its best to the end. 0 means nothing was lost.",
        "points",
        "lower",
        lambda c: accuracy.forgetting(c.accuracy_SC, c.learned_at_C),
    ),
    "online_accuracy": Measure(
        "online accuracy",
        "The share of right answers to prompts at their first play, before anything was learned from them, averaged "
        "over the domains.",
        "share",
        "higher",
        lambda c: c.extras.get(ONLINE_ACCURACY, float("nan")),
    ),
    "backward_transfer": Measure(
        "backward transfer",
        "Change on earlier domains between the end of their own training and the end of all. Below 0: later training "
        "did harm. Above 0: it helped.",
        "points",
        "higher",
        lambda c: accuracy.backward_transfer(c.accuracy_SC, c.learned_at_C),
    ),
    "forward_transfer": Measure(
        "forward transfer",
        "How much earlier training improved a domain before its own training began.",
        "points",
        "higher",
        lambda c: accuracy.forward_transfer(c.accuracy_SC, c.learned_at_C, c.before_C),
    ),
    "plasticity": Measure(
        "plasticity",
        "How much a domain gains while it is trained: the ability to go on learning new things.",
        "points",
        "higher",
        lambda c: accuracy.plasticity(c.accuracy_SC, c.learned_at_C, c.before_C),
    ),
    "accuracy_area": Measure(
        "accuracy over training",
        "The average accuracy on held-out prompts from the start to the end of training, over generated tokens (area "
        "under the curve). High if learning is fast and lasts.",
        "share",
        "higher",
        lambda c: _area(c.num_generated_tokens_I, c.average_I()),
    ),
}
COSTS = {
    "num_generated_tokens": Measure(
        "generated tokens",
        "Tokens generated for training, including revisits of old prompts.",
        "tokens",
        "",
        lambda c: float(c.num_generated_tokens_I[-1]),
    ),
    "num_trained_tokens": Measure(
        "trained tokens",
        "Tokens in the loss; a reused or held token counts each time.",
        "tokens",
        "",
        lambda c: float(c.num_trained_tokens_I[-1]),
    ),
    "seconds": Measure(
        "seconds", "Wall-clock time of training, without evaluations.", "seconds", "", lambda c: float(c.seconds_I[-1])
    ),
    "peak_bytes": Measure(
        "peak memory", "Largest memory in use at any time.", "bytes", "", lambda c: float(c.peak_bytes)
    ),
    "num_probe_tokens": Measure(
        "evaluation tokens",
        "Tokens generated in evaluations; not part of the budget.",
        "tokens",
        "",
        lambda c: float(c.num_probe_tokens_I[-1]),
    ),
}


def measure(curve: Curve) -> dict[str, float]:
    """Return all measures, costs and extras of a trial by name; NaN if unknown."""
    return {name: entry.of(curve) for name, entry in (MEASURES | COSTS).items()} | curve.extras
