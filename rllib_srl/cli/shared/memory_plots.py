"""Plot a memory: the visits of each prompt and its mean reward by history, and groups of equal rewards in a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rllib_srl.replay.history import MAX_SILENT
from rllib_srl.replay.journal.reader import Reading

WIDTH, HEIGHT = 12.0, 4.0  # inches


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

    rows = memory.stored.items
    if not len(rows):
        raise ValueError(f"{memory.path} has no items yet; expected a memory with at least one item")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(WIDTH, HEIGHT), layout="constrained")
    _history(left, rows)
    _silence(right, rows)
    figure.suptitle(f"memory of {len(rows)} items after iteration {memory.now}")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def reward_points(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return visits, mean discounted reward, and whether the last group was silent, of each item with a history."""
    known = rows[rows["history_count"] > 0]
    return known["visits"], known["history_sum"] / known["history_count"], known["num_silent"] > 0


def silent_counts(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return how many visited items had 0, 1, ... 8 silent groups in a row: those solved once, those never solved."""
    visited = rows[rows["visits"] > 0]
    in_a_row_N, num = visited["num_silent"], MAX_SILENT + 1
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


def _say_nothing(axes: Any, text: str) -> None:
    axes.set(xticks=(), yticks=())
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color="0.4")
