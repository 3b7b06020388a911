"""Plot a memory: the history of its prompts, forgetting curves of the spacing rule, calibration and intervals.

visits of each prompt, and its mean reward by history    | prompts by groups without signal in a row
forgetting curves of the rule, with observed pass rates  | a few items: predicted recall and observed pass rate
predicted against observed recall (calibration)          | intervals of the items in the schedule

Without a spacing rule nothing predicts recall, and only the first row is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rllib_srl.cli.episodes import printable
from rllib_srl.common.statistics import wilson_interval
from rllib_srl.replay.history import MAX_SILENT
from rllib_srl.replay.journal.reader import Reading
from rllib_srl.replay.schedule.calibration import ReviewLog, calibration_curve, report
from rllib_srl.replay.schedule.refit import whole_log
from rllib_srl.replay.schedule.spacing import SpacingRule, SpacingState
from rllib_srl.replay.store.records import SCHEDULED, WAITING
from rllib_srl.replay.tools.explain import all_items

WIDTH, ROW_HEIGHT = 12.0, 4.0  # inches
NUM_ITEMS = 4  # items with a curve of their own
NUM_CURVES = 3  # forgetting curves of the rule, after 1, 2, ... Good reviews
GOOD = 3
POINTS = 200  # per curve
NOTHING = "no item has been revisited yet"


def plot_memory(path: Path, memory: Reading) -> Path:
    """Write the plots as PNG and return the path.

    Args:
        path: of the file.
        memory: an open reading.

    Raises:
        ValueError: the memory has no data to plot yet.
    """
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    if not len(memory.stored.items):
        raise ValueError(f"{memory.path} has no items yet; expected a memory with at least one item")
    log, scale = whole_log(memory), memory.settings.iterations_per_day
    layout: Any = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08)
    has_due_dates = memory.settings.has_due_dates
    num_rows = 3 if has_due_dates else 1
    figure = pyplot.figure(figsize=(WIDTH, ROW_HEIGHT * num_rows), layout=layout)
    parts: Any = figure.subfigures(num_rows, 2, squeeze=False)
    rows = memory.stored.items
    _history(parts[0, 0].subplots(), rows)
    _silence(parts[0, 1].subplots(), rows)
    title = f"memory of {len(rows)} items after iteration {memory.now}: {len(log)} reviews"
    if has_due_dates:
        rule = memory.rule
        _curves(parts[1, 0], rule, log, scale)
        _items(parts[1, 1], memory, log, scale)
        axes, beside = parts[2, 0].subplots(1, 2, width_ratios=(3, 1.7))
        _calibration(axes, beside, log)
        _intervals(parts[2, 1].subplots(), rows)
        title += f", spacing rule {rule.name}, due at a predicted recall of {rule.desired_retention:g}"
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


# --- the history of prompts -----------------------------------------------------------------------


def reward_points(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return visits, mean discounted reward, and whether the last group was silent, of each item with a history."""
    known = rows[rows["history_count"] > 0]
    return known["visits"], known["history_sum"] / known["history_count"], known["num_silent"] > 0


def silent_counts(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return how many visited items had 0, 1, ... 8 silent groups in a row: those solved once, those never solved."""
    visited = rows[rows["visits"] > 0]
    in_a_row_N, num = np.rint(visited["num_silent"]).astype(np.int64), int(MAX_SILENT) + 1
    is_solved_N = visited["is_solved"]
    return np.bincount(in_a_row_N[is_solved_N], minlength=num), np.bincount(in_a_row_N[~is_solved_N], minlength=num)


def _history(axes: Any, rows: np.ndarray) -> None:
    visits_N, reward_N, is_silent_N = reward_points(rows)
    unseen = len(rows) - len(visits_N)
    axes.set_title("each prompt: visits, and mean reward of its history", fontsize="medium")
    axes.set(xlabel=f"visits\n(not shown: {unseen} prompts without a history)", ylabel="mean reward")
    if not len(visits_N):
        _say_nothing(axes, "no prompt has a history yet")
        return
    for is_wanted_N, colour, label in (
        (~is_silent_N, "tab:blue", "last group with signal"),
        (is_silent_N, "tab:orange", "last group silent"),
    ):
        dots = np.column_stack([visits_N[is_wanted_N], np.round(reward_N[is_wanted_N], 2)])
        dot_K2, count_K = np.unique(dots, axis=0, return_counts=True)
        area_K, label = 6 + 400 * count_K / len(visits_N), f"{label}: {len(dots)}"  # several prompts may share a dot
        axes.scatter(*dot_K2.T, area_K, color=colour, alpha=0.5, linewidths=0, label=label)
    axes.set_ylim(-0.05, 1.07)
    axes.xaxis.get_major_locator().set_params(integer=True)
    for handle in axes.legend(fontsize="x-small").legend_handles:
        handle.set_sizes([20])


def _silence(axes: Any, rows: np.ndarray) -> None:
    solved_C, unsolved_C = silent_counts(rows)
    axes.set_title("groups without signal in a row", fontsize="medium")
    axes.set(xlabel="groups in a row (8: eight or more)", ylabel="prompts")
    if not solved_C.sum() + unsolved_C.sum():
        _say_nothing(axes, "no prompt has been played yet")
        return
    number_C = np.arange(len(solved_C))
    axes.bar(number_C, solved_C, color="tab:green", label=f"all right once: {solved_C.sum()}")
    axes.bar(number_C, unsolved_C, bottom=solved_C, color="tab:red", label=f"not yet: {unsolved_C.sum()}")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize="x-small")


# --- the rule -------------------------------------------------------------------------------------


def rule_states(rule: SpacingRule) -> Iterator[SpacingState]:
    """Yield the states of an item after 1, 2, ... reviews with the grade Good, each at its due date."""
    state, elapsed_1 = SpacingState.new(1), np.zeros(1)
    for _ in range(NUM_CURVES):
        state = rule.review(state, np.array([GOOD]), elapsed_1, np.ones(1, bool), np.zeros(1))
        elapsed_1 = state.interval_N
        yield state


def observed_by_time(log: ReviewLog, scale: float) -> Iterator[tuple[float, float, float, float]]:
    """Yield mean iterations since the previous visit, pass rate and its 95 % interval, for doubling time ranges."""
    log = log.predictable()
    elapsed_N = np.maximum(1.0, log.elapsed_days * scale)
    bin_N = np.floor(np.log2(elapsed_N) + 1e-9)
    for which in np.unique(bin_N):
        here_N = bin_N == which
        num_right, num = int(log.num_success[here_N].sum()), int(log.n[here_N].sum())
        low, high = wilson_interval(num_right, num)
        yield float(np.average(elapsed_N[here_N], weights=log.n[here_N])), num_right / num, low, high


def _curves(figure: Any, rule: SpacingRule, log: ReviewLog, scale: float) -> None:
    axes = figure.subplots()
    states = list(rule_states(rule))
    seen = list(observed_by_time(log, scale))
    longest = max([point[0] for point in seen] + [float(state.interval_N[0]) * scale for state in states[:2]])
    time_T = np.linspace(0, 1.3 * max(2.0, longest), POINTS)
    for number, state in enumerate(states, 1):
        recall_T = [float(rule.retrievability(state, np.array([time / scale]))[0]) for time in time_T]
        due = float(state.interval_N[0]) * scale
        label = f"rule, after {number} Good review{'s' * (number > 1)}: due after {due:.3g} iterations"
        axes.plot(time_T, recall_T, color=str(0.75 - 0.25 * (number - 1)), label=label)
    axes.axhline(rule.desired_retention, color="tab:green", linestyle="--", linewidth=1, label="desired retention")
    _dots(axes, seen, "observed, all items, 95 % interval\n(difficult items are due earlier)")
    axes.set(xlabel="iterations since the previous review", ylabel="recall", ylim=(0, 1.02), xlim=(0, time_T[-1]))
    axes.set_title("forgetting: predicted and observed recall", fontsize="medium")
    figure.legend(fontsize="x-small", loc="outside lower center", ncols=2)


def _dots(axes: Any, points: Sequence[tuple[float, float, float, float]], label: str) -> None:
    if points:
        x, y, low, high = np.array(points).T
        errors = np.maximum(0.0, [y - low, high - y])
        axes.errorbar(x, y, yerr=errors, fmt="o", color="tab:blue", capsize=3, label=label)


# --- items ----------------------------------------------------------------------------------------


def expected_over_time(
    rule: SpacingRule, log: ReviewLog, scale: float, until: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return iterations and the predicted recall of one item under its review log; None if the rule cannot predict.

    Args:
        rule: with its current parameters.
        log: of this item only, from its first visit on.
        scale: iterations per day.
        until: the last iteration.
    """
    state, times, recalls = SpacingState.new(1), [], []
    ends = [*log.now[1:].tolist(), until]
    for at, end in enumerate(ends):
        try:
            state = rule.review(state, log.grade[[at]], log.elapsed_days[[at]], log.trained[[at]])
        except ValueError:  # srl1 with faithful=True also needs a diversity, which no log has
            return None
        begin = int(log.now[at])
        time_T = np.linspace(begin, max(begin, end), 30)
        times.append(time_T)
        recalls += [float(rule.retrievability(state, np.array([(time - begin) / scale]))[0]) for time in time_T]
    return np.concatenate(times), np.array(recalls)


def _items(figure: Any, memory: Reading, log: ReviewLog, scale: float) -> None:
    names = {int(item.row["key"]): item.prompt.prompt_id for item in all_items(memory)}
    keys_K, num_K = np.unique(log.key, return_counts=True)
    most = [int(keys_K[at]) for at in np.argsort(-num_K, kind="stable")[:NUM_ITEMS] if num_K[at] > 1]
    all_axes = np.atleast_1d(figure.subplots(max(1, len(most)), 1, sharex=True))
    title = "items with the most reviews: predicted recall (line), pass rate at each review (dots)"
    figure.suptitle(title, fontsize="medium")
    for axes, key in zip(all_axes, most):
        own = log[log.key == np.uint64(key)]
        if (expected := expected_over_time(memory.rule, own, scale, memory.now)) is not None:
            axes.plot(*expected, color="0.4", linewidth=1)
        axes.plot(own.now, own.num_success / own.n, "o", color="tab:blue", markersize=4)
        axes.set(ylim=(-0.08, 1.08), yticks=(0, 0.5, 1), ylabel="recall")
        name = printable(names.get(key, "evicted"))[:40]
        axes.set_title(f"{name}  ({key:016x})", fontsize="x-small", loc="left", pad=2)
    if not most:
        _say_nothing(all_axes[0])
        return
    all_axes[-1].set_xlabel("iteration")


# --- predictions and intervals --------------------------------------------------------------------


def calibration_points(log: ReviewLog) -> list[tuple[float, float, float, float]]:
    """Return mean prediction, pass rate and its 95 % interval for each tenth of the predictions."""
    log = log.predictable()
    curve = calibration_curve(log.predicted, log.num_success, log.n)
    rows = zip(curve.predicted.tolist(), curve.observed.tolist(), curve.num_episodes.tolist())
    return [(p, o, *wilson_interval(round(o * num), num)) for p, o, num in rows]


def _calibration(axes: Any, beside: Any, log: ReviewLog) -> None:
    axes.set_title("calibration of predicted recall", fontsize="medium")
    beside.axis("off")
    if not len(log.predictable()):
        _say_nothing(axes)
        return
    found = report(log)
    axes.plot([0, 1], [0, 1], color="0.6", linewidth=1, label="perfect calibration")
    axes.axhline(
        found.observed, color="tab:orange", linestyle="--", linewidth=1, label="constant: the mean pass rate"
    )
    _dots(axes, calibration_points(log), "spacing rule, by tenth of predicted recall,\n95 % interval")
    axes.set(xlabel="predicted recall", ylabel="observed pass rate", xlim=(0, 1.02), ylim=(0, 1.02))
    beside.legend(*axes.get_legend_handles_labels(), fontsize="x-small", loc="upper left", borderaxespad=0)
    better = "better than" if found.beats_constant else "no better than"
    text = (
        f"{found.num_reviews} reviews of {found.num_items} items\n\nlog loss, nats per episode:\n"
        f"{found.log_loss:.3f}  the rule\n{found.log_loss_constant:.3f}  the constant\n\n"
        f"The rule is {better}\nthe constant."
    )
    beside.text(0, 0.02, text, transform=beside.transAxes, fontsize="small", va="bottom")


def _intervals(axes: Any, rows: np.ndarray) -> None:
    planned = rows[rows["status"] == SCHEDULED]
    interval_N = np.maximum(1e-2, planned["due"] - planned["last_review"])
    axes.set_title("intervals of scheduled items", fontsize="medium")
    waiting, leeches = int((rows["status"] == WAITING).sum()), len(rows) - len(planned)
    beside = f"not shown: {waiting} unscheduled items, {leeches - waiting} leeches"
    axes.set(xlabel=f"iterations from the last review to the due date\n({beside})", ylabel="scheduled items")
    if not len(planned):
        _say_nothing(axes, "no item is scheduled")
        return
    halves_N = np.rint(2 * np.log2(interval_N))  # bars are half an octave wide, each around a power of the root of 2
    edges = 2.0 ** (np.arange(halves_N.min() - 2.5, halves_N.max() + 3) / 2)
    axes.hist(interval_N, bins=edges, color="tab:blue", edgecolor="white")
    median = float(np.median(interval_N))
    axes.axvline(median, color="0.2", linestyle="--", linewidth=1, label=f"median {median:.1f}")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize="x-small")


def _say_nothing(axes: Any, text: str = NOTHING) -> None:
    axes.set(xticks=(), yticks=())
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color="0.4")
