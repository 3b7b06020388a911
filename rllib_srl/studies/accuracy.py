"""Measures of continual learning from the accuracy matrix: transfer, forgetting, plasticity, average accuracy.

    accuracy_SC[i, j] = accuracy on domain j after stage i             learned_at_C[j] = stage that taught domain j
    before_C[j]       = accuracy on domain j before any training

             domain 0   1   2          backward transfer  last row minus the entry at each domain's own stage
    before     .1   .2  .1             forward transfer   the row above a domain's own stage minus `before`
    stage 0    .9*  .3  .1             plasticity         the entry at its own stage minus the row above it
    stage 1    .7   .8* .2             forgetting         best entry so far minus the last row
    stage 2    .6   .7  .9*            average accuracy   mean of the last row

In the literature stage j teaches domain j; `learned_at_C` allows any order. It is NEVER for a domain that is never
taught, which counts only in forward transfer. A mean over no domains is NaN.

Over time, in any unit (studies use generated tokens, of which all arms have the same budget): the area under the
retention curve, from the end of a domain's training on.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

NEVER = -1


class FinalParts(NamedTuple):
    """Parts of the final average accuracy, which is their sum."""

    base: float  # mean accuracy before any training
    forward: float  # (T - 1) / T times forward transfer
    learning: float  # plasticity: the mean gain during a domain's own stage
    backward: float  # (T - 1) / T times backward transfer


def average_accuracy(accuracy_SC: np.ndarray, learned_at_C: np.ndarray) -> float:
    """Return the mean accuracy after the last stage over the domains that were taught, in [0, 1].

    ACC = 1/C sum_j R[S-1, j].

    Raises:
        ValueError: the shapes or stages are inconsistent.

    Source: Lopez-Paz and Ranzato 2017, arXiv 1706.08840, section 2.
    """
    _check(accuracy_SC, learned_at_C)
    return _mean(accuracy_SC[-1, learned_at_C != NEVER])


def backward_transfer(accuracy_SC: np.ndarray, learned_at_C: np.ndarray) -> float:
    """Return the mean change on a domain from the end of its own stage to the end of training, in [-1, 1].

    BWT = mean_j (R[S-1, j] - R[l_j, j]) over domains taught before the last stage; below 0 is a loss. It is a
    difference, not the mean accuracy on old domains.

    Raises:
        ValueError: the shapes or stages are inconsistent.

    Source: Lopez-Paz and Ranzato 2017, arXiv 1706.08840, section 2.
    """
    _check(accuracy_SC, learned_at_C)
    old = _taught_before_the_last(accuracy_SC, learned_at_C)
    return _mean(accuracy_SC[-1, old] - accuracy_SC[learned_at_C[old], old])


def forward_transfer(accuracy_SC: np.ndarray, learned_at_C: np.ndarray, before_C: np.ndarray) -> float:
    """Return the mean gain on a domain from the stages before its own, in [-1, 1].

    FWT = mean_j (R[l_j - 1, j] - b_j) over domains taught after the first stage; a domain that is never taught counts
    with the last row. In the literature b is the accuracy of a random initialisation; here, before any training.

    Raises:
        ValueError: the shapes or stages are inconsistent.

    Source: Lopez-Paz and Ranzato 2017, arXiv 1706.08840, section 2.
    """
    _check(accuracy_SC, learned_at_C, before_C)
    later = np.flatnonzero(learned_at_C != 0)
    row = np.where(learned_at_C == NEVER, len(accuracy_SC) - 1, learned_at_C - 1)[later]
    return _mean(accuracy_SC[row, later] - np.asarray(before_C)[later])


def forgetting(accuracy_SC: np.ndarray, learned_at_C: np.ndarray) -> float:
    """Return the mean drop on a domain from its best accuracy since it was taught to its final one, in [-1, 1].

    F = mean_j (max_{l_j <= i < S-1} R[i, j] - R[S-1, j]) over domains taught before the last stage; above 0 is a loss,
    below 0 means that the final accuracy is the best.

    Raises:
        ValueError: the shapes or stages are inconsistent.

    Source: Chaudhry et al. 2018, arXiv 1801.10112, section 3. There the maximum is over all stages before the last,
    including those before the domain was taught.
    """
    _check(accuracy_SC, learned_at_C)
    old = _taught_before_the_last(accuracy_SC, learned_at_C)
    best = [accuracy_SC[learned_at_C[j] : -1, j].max() for j in old]
    return _mean(np.asarray(best) - accuracy_SC[-1, old])


def plasticity(accuracy_SC: np.ndarray, learned_at_C: np.ndarray, before_C: np.ndarray) -> float:
    """Return the mean gain on a domain during its own stage, in [-1, 1]: the ability to learn new domains.

    P = mean_j (R[l_j, j] - R[l_j - 1, j]), with b_j for R[-1, j]. A rule that retains old domains by not learning new
    ones has low forgetting and low plasticity.

    Raises:
        ValueError: the shapes or stages are inconsistent.

    Source: the gain form of the learning accuracy of Riemer et al. 2019, arXiv 1810.11910, section 5, which is
    mean_j R[j, j]; the gain does not include the accuracy before the domain's stage.
    """
    _check(accuracy_SC, learned_at_C, before_C)
    taught = np.flatnonzero(learned_at_C != NEVER)
    rows_SC = np.concatenate([np.asarray(before_C)[None], accuracy_SC])
    return _mean(rows_SC[learned_at_C[taught] + 1, taught] - rows_SC[learned_at_C[taught], taught])


def final_parts(accuracy_SC: np.ndarray, learned_at_C: np.ndarray, before_C: np.ndarray) -> FinalParts:
    """Split the final average accuracy over T domains, each taught in its own stage, into what made it.

    final = base + (T - 1) / T forward transfer + plasticity + (T - 1) / T backward transfer

    Raises:
        ValueError: the shapes or stages are inconsistent, or the stages do not teach one domain each.
    """
    _check(accuracy_SC, learned_at_C, before_C)
    num = len(learned_at_C)
    if sorted(learned_at_C) != list(range(num)) or len(accuracy_SC) != num:
        raise ValueError(f"learned_at_C = {list(learned_at_C)}; expected one stage for each of {num} domains")
    moved = (forward_transfer(accuracy_SC, learned_at_C, before_C), backward_transfer(accuracy_SC, learned_at_C))
    forward, backward = (0.0 if num == 1 else (num - 1) / num * each for each in moved)
    return FinalParts(_mean(before_C), forward, plasticity(accuracy_SC, learned_at_C, before_C), backward)


def retention_area(time_I: np.ndarray, accuracy_I: np.ndarray) -> float:
    """Return the area under the retention curve divided by its span: the mean accuracy since training ended.

    AURC = integral of a(t) dt / (t_last - t_0), by the trapezoid rule; in [0, 1], NaN for a curve without a span.

    Args:
        time_I: increasing, the first where the domain's training ended.
        accuracy_I: in [0, 1].

    Raises:
        ValueError: the arrays are empty or differ in shape, or time decreases.

    Source: the curve is Ebbinghaus's (1885, "Ueber das Gedaechtnis"); mean height as one number is our reading of
    "area under the retention curve", for which no paper we know gives a formula.
    """
    _check_curve(time_I, accuracy_I)
    span = float(time_I[-1] - time_I[0])
    return float(np.trapezoid(accuracy_I, time_I)) / span if span else float("nan")


def _taught_before_the_last(accuracy_SC: np.ndarray, learned_at_C: np.ndarray) -> np.ndarray:
    return np.flatnonzero((learned_at_C != NEVER) & (learned_at_C < len(accuracy_SC) - 1))


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


def _check(accuracy_SC: np.ndarray, learned_at_C: np.ndarray, before_C: np.ndarray | None = None) -> None:
    errors = []
    if accuracy_SC.ndim != 2 or not accuracy_SC.size:
        errors.append(f"accuracy_SC has shape {accuracy_SC.shape}; expected [S, C] with S, C >= 1")
    else:
        num_stages, num_domains = accuracy_SC.shape
        if learned_at_C.shape != (num_domains,):
            errors.append(f"learned_at_C has shape {learned_at_C.shape}, accuracy_SC {num_domains} domains")
        if ((learned_at_C < NEVER) | (learned_at_C >= num_stages)).any():
            errors.append(f"learned_at_C = {learned_at_C.tolist()}; expected stages from 0 to {num_stages - 1}, or -1")
        if before_C is not None and np.shape(before_C) != (num_domains,):
            errors.append(f"before_C has shape {np.shape(before_C)}, accuracy_SC {num_domains} domains")
    if errors:
        raise ValueError("\n".join(errors))


def _check_curve(time_I: np.ndarray, accuracy_I: np.ndarray) -> None:
    if time_I.ndim != 1 or time_I.shape != accuracy_I.shape or not len(time_I):
        raise ValueError(f"time_I has shape {time_I.shape}, accuracy_I {accuracy_I.shape}; expected one length, not 0")
    if (np.diff(time_I) < 0).any():
        raise ValueError(f"time_I = {time_I.tolist()}; expected times that do not fall")
