"""The measures of a trial by name, with a title and an explanation for the report; `of` refers to the formula.

Retention is measured over generated tokens, not iterations: all arms have the same token budget.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from rllib_srl.algorithm import answers
from rllib_srl.studies import accuracy, retention
from rllib_srl.studies.curves import Curve

KEPT = 0.8  # share of its accuracy below which a domain counts as decayed
MIN_REVIEWS = 4.0  # reviews of the median item that a test of spacing needs


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
        [retention.retention_area(time_I[at:], curve.accuracy_IC[at:, j]) for j, at in curve.remembered_from().items()]
    )


def _decay(curve: Curve) -> float:
    """Return the mean over domains of the time to decay; a domain that did not decay counts with its whole span."""
    time_I = curve.num_generated_tokens_I
    found = [(time_I[at:], curve.accuracy_IC[at:, j]) for j, at in curve.remembered_from().items()]
    return _mean([retention.time_to_decay(time, heights, KEPT).time for time, heights in found])


def _part(curve: Curve, which: str) -> float:
    """Return the mean over domains of one part ("superficial" or "essential") of the drop since their training."""
    parts = []
    for j, at in curve.remembered_from().items():
        rates = (curve.parse_rate_IC[at, j], curve.parse_rate_IC[-1, j])
        if np.isnan(rates).any():
            return float("nan")
        shares = (float(curve.accuracy_IC[at, j]), float(curve.accuracy_IC[-1, j]))
        parts.append(getattr(answers.forgetting_parts(shares, (float(rates[0]), float(rates[1]))), which))
    return _mean(parts)


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


MEASURES = {
    "average_accuracy": Measure(
        "final accuracy",
        "After all training: the share of unseen prompts answered right, averaged over all domains that were taught.",
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
    "time_to_decay": Measure(
        "time to decay, in tokens",
        f"How many tokens the policy wrote after a domain's training until its accuracy had lost a fifth (fell below "
        f"{KEPT:.0%} of what it was); a domain that never lost a fifth counts with all the time there was.",
        "tokens",
        "higher",
        _decay,
    ),
    "superficial_forgetting": Measure(
        "forgotten format",
        "The part of the loss on earlier domains that comes from answers which can no longer be read.",
        "points",
        "lower",
        partial(_part, which="superficial"),
    ),
    "essential_forgetting": Measure(
        "forgotten content",
        "The part of the loss on earlier domains that comes from readable answers which are wrong.",
        "points",
        "lower",
        partial(_part, which="essential"),
    ),
}
COSTS = {
    "num_generated_tokens": Measure(
        "generated tokens",
        "Tokens the policy wrote for training, practice of old prompts included.",
        "tokens",
        "",
        lambda c: float(c.num_generated_tokens_I[-1]),
    ),
    "num_trained_tokens": Measure(
        "trained tokens",
        "Tokens the policy learned from; one that is used again counts again.",
        "tokens",
        "",
        lambda c: float(c.num_trained_tokens_I[-1]),
    ),
    "seconds": Measure(
        "seconds", "Time of training on the clock, tests left out.", "seconds", "", lambda c: float(c.seconds_I[-1])
    ),
    "peak_bytes": Measure(
        "peak memory", "The most memory in use at any moment.", "bytes", "", lambda c: float(c.peak_bytes)
    ),
    "num_probe_tokens": Measure(
        "test tokens",
        "Tokens written in tests, which train nothing and are counted apart.",
        "tokens",
        "",
        lambda c: float(c.num_probe_tokens_I[-1]),
    ),
}
EXTRAS = {  # meaning of names in a row's `measures`, which may also hold others
    "pass_at_k": "chance that k answers hold at least one right one",
    "pass_hat_k": "chance that k answers are all right",
    "answer_diversity": "chance that two answers to one prompt differ",
    "iteration_gain": "reward gained by answering K times more",
    "net_corrections": "wrong answers made right minus right ones made wrong, over K further answers",
    "num_chains": "first answers that were answered K times more",
    "median_reviews": "reviews of the median item of the memory",
    "revisit_share": "share of played prompts that were revisits",
    "reuse_share": "share of all groups of the batches that were used before",
    "reuse_share_tokens": "share of trained tokens that were used before",
    "observed_recall": "share of reviews that were recalled",
    "predicted_recall": "share that the spacing rule expected",
    "load_ratio": "reviews that fall due over reviews there is room for; above 1 the backlog grows",
}


def measure(curve: Curve) -> dict[str, float]:
    """Return all measures, costs and extras of a trial by name; NaN if unknown."""
    return {name: entry.of(curve) for name, entry in (MEASURES | COSTS).items()} | curve.extras
