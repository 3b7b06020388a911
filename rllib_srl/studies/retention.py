"""Measures of retention after a domain's training has ended: retention curve, area under it, time to decay.

    accuracy
      .9 *--.            time 0: the last evaluation of the stage that taught it
      .6    '--*---.     area: mean height of the line over the whole span, here the primary measure beside accuracy
      .5 - - - - - -'*   time to decay: where the line first falls below a share of its start
         0     1     2   time, in any unit (studies use generated tokens, of which all arms have the same budget)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

ROUNDING = 1e-12  # .4 * .75 is above .3 in floating point


class Decay(NamedTuple):
    """Time to decay, in the unit of the curve; if `is_censored`, the accuracy had not decayed by then."""

    time: float
    is_censored: bool


def retention_area(time_I: np.ndarray, accuracy_I: np.ndarray, relative: bool = False) -> float:
    """Return the area under the retention curve divided by its span: the mean accuracy since training ended.

    AURC = integral of a(t) dt / (t_last - t_0), by the trapezoid rule; in [0, 1], NaN for a curve without a span.

    Args:
        time_I: increasing, the first where the domain's training ended.
        accuracy_I: in [0, 1].
        relative: divide by a(t_0), so that 1 means no loss; NaN if a(t_0) is 0. It favours arms that learned little,
            so comparisons of arms use the absolute area.

    Raises:
        ValueError: the arrays are empty or differ in shape, or time decreases.

    Source: the curve is Ebbinghaus's (1885, "Ueber das Gedaechtnis"); mean height as one number is our reading of
    "area under the retention curve", for which no paper we know gives a formula.
    """
    _check(time_I, accuracy_I)
    span = float(time_I[-1] - time_I[0])
    if span == 0 or (relative and accuracy_I[0] == 0):
        return float("nan")
    area = float(np.trapezoid(accuracy_I, time_I)) / span
    return area / float(accuracy_I[0]) if relative else area


def time_to_decay(time_I: np.ndarray, accuracy_I: np.ndarray, kept: float = 0.8) -> Decay:
    """Return the time until accuracy first fell below `kept` times its start, interpolated linearly.

    Args:
        time_I: increasing, the first where the domain's training ended.
        accuracy_I: in [0, 1].
        kept: share of the accuracy at the start, in (0, 1).

    Returns:
        The time since the start. A curve that never fell that far is censored at its span: the true time is longer.

    Raises:
        ValueError: the arrays are empty or differ in shape, time decreases, or `kept` is out of range.

    Source: the half-life of Settles and Meeder 2016 (ACL, "A trainable spaced repetition model"), read off a measured
    curve at the level `kept`.
    """
    _check(time_I, accuracy_I)
    if not 0 < kept < 1:
        raise ValueError(f"kept = {kept}; expected a share above 0 and below 1")
    level = kept * float(accuracy_I[0])
    below = np.flatnonzero(accuracy_I < level - ROUNDING)
    if not len(below):
        return Decay(float(time_I[-1] - time_I[0]), is_censored=True)
    last, first = int(below[0]) - 1, int(below[0])
    share = (float(accuracy_I[last]) - level) / float(accuracy_I[last] - accuracy_I[first])
    return Decay(float(time_I[last] + share * (time_I[first] - time_I[last]) - time_I[0]), is_censored=False)


def cost_to_reach(cost_I: np.ndarray, accuracy_I: np.ndarray, target: float) -> float:
    """Return the cost at which accuracy first reached `target`, interpolated linearly.

    Args:
        cost_I: increasing: generated tokens, trained tokens or seconds so far.
        accuracy_I: in [0, 1].
        target: accuracy to reach.

    Returns:
        The cost; infinity if the target is never reached, the first cost if it is reached from the start.

    Raises:
        ValueError: the arrays are empty or differ in shape, or cost decreases.

    Source: the "time to accuracy" of Coleman et al. 2017 (DAWNBench), with tokens for time.
    """
    _check(cost_I, accuracy_I)
    reached = np.flatnonzero(accuracy_I >= target)
    if not len(reached):
        return float("inf")
    first = int(reached[0])
    if first == 0:
        return float(cost_I[0])
    share = (target - float(accuracy_I[first - 1])) / float(accuracy_I[first] - accuracy_I[first - 1])
    return float(cost_I[first - 1] + share * (cost_I[first] - cost_I[first - 1]))


def _check(time_I: np.ndarray, accuracy_I: np.ndarray) -> None:
    if time_I.ndim != 1 or time_I.shape != accuracy_I.shape or not len(time_I):
        raise ValueError(f"time_I has shape {time_I.shape}, accuracy_I {accuracy_I.shape}; expected one length, not 0")
    if (np.diff(time_I) < 0).any():
        raise ValueError(f"time_I = {time_I.tolist()}; expected times that do not fall")
