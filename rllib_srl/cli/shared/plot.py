"""Plot a run: reward by iteration, and accuracy before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rllib_srl.cli.shared.run_log import Iteration

WIDTH, HEIGHT = 9.0, 3.6  # inches


def plot_run(
    path: Path,
    iterations: Sequence[Iteration],
    accuracies: Mapping[str, Mapping[str, Any]],
    lines: Mapping[str, float | None],
) -> Path:
    """Write the plots as PNG and return the path.

    Args:
        path: of the file.
        iterations: of the run.
        accuracies: label -> evaluation results, with `accuracy`, `accuracy_low` and `accuracy_high`.
        lines: label -> accuracy of a baseline, drawn as a horizontal line; None is omitted.
    """
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(WIDTH, HEIGHT), width_ratios=(2, 1))
    left.plot([i.number for i in iterations], [i.reward for i in iterations], marker="o", markersize=3)
    left.set(xlabel="iteration", ylabel="mean reward of training episodes", ylim=(0, 1))
    left.xaxis.get_major_locator().set_params(integer=True)
    names = list(accuracies)
    heights = [accuracies[name]["accuracy"] for name in names]
    errors = [
        [max(0.0, h - accuracies[name]["accuracy_low"]) for name, h in zip(names, heights, strict=True)],
        [max(0.0, accuracies[name]["accuracy_high"] - h) for name, h in zip(names, heights, strict=True)],
    ]
    right.bar(names, heights, yerr=errors, capsize=6, color=["0.7", "tab:blue"][: len(names)], width=0.6)
    for number, (label, accuracy) in enumerate((label, a) for label, a in lines.items() if a is not None):
        right.axhline(accuracy, linestyle=("--", ":")[number % 2], color="0.3", linewidth=1, label=label)
    right.set(ylabel="held-out accuracy, 95 % interval", ylim=(0, 1))
    if right.get_legend_handles_labels()[0]:
        right.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
