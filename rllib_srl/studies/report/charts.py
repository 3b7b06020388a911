"""Charts of a report: one line per arm or metric, distinguishable with colour blindness.

Colours are those of Okabe and Ito (2008, "Color universal design"); each line also has its own dash.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rllib_srl.studies.curves import Curve
from rllib_srl.studies.report.page import Chart
from rllib_srl.studies.seeds import bootstrap_interval

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#000000", "#CC79A7", "#56B4E9", "#E69F00")
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (5, 1.5, 1.5, 1.5)), "-", (0, (5, 1.5)), (0, (1.5, 1.2)))
NUM_DRAWN = len(COLOURS)
SIZE = (4.8, 3.5)  # inches; small, so that text stays readable on a phone
NUM_POINTS = 25  # grid points of a curve if seeds were evaluated at different costs
FONT: Any = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "path"}


class Line(NamedTuple):
    """The height of a line at each x, and its 95 % interval (NaN: none)."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def line_of(x_by_seed: Sequence[np.ndarray], y_by_seed: Sequence[np.ndarray]) -> Line:
    """Average the curves of several seeds: at their x if it is equal, else on a grid over their common range."""
    first = x_by_seed[0]
    if all(len(x) == len(first) and np.allclose(x, first, rtol=0.02) for x in x_by_seed):
        grid, y_EI = np.mean(x_by_seed, axis=0), np.array(y_by_seed)
    else:
        grid = np.linspace(max(x[0] for x in x_by_seed), min(x[-1] for x in x_by_seed), NUM_POINTS)
        y_EI = np.array([np.interp(grid, x, y) for x, y in zip(x_by_seed, y_by_seed, strict=True)])
    low, high = np.array([bootstrap_interval(column) for column in y_EI.T]).T
    return Line(grid, y_EI.mean(axis=0), low, high)


def accuracy_lines(curves: Mapping[str, Mapping[int, Curve]], domain: int | None = None) -> dict[str, Line]:
    """Return the accuracy of each arm over generated tokens, on a domain or (None) averaged over the taught ones."""
    lines = {}
    for arm, by_seed in curves.items():
        if by_seed:
            x = [curve.num_generated_tokens_I for curve in by_seed.values()]
            y = [c.average_I() if domain is None else c.accuracy_IC[:, domain] for c in by_seed.values()]
            lines[arm] = line_of(x, y)
    return lines


def chart(
    lines: Mapping[str, Line], title: str, x: str, y: str, marks: Sequence[float] = (), is_share: bool = True
) -> Chart:
    """Draw the first `NUM_DRAWN` lines, with a legend if there are several; equal lines give equal bytes.

    Args:
        lines: by the name in the legend.
        title: above the chart.
        x: label of the x axis.
        y: label of the y axis.
        marks: x of dotted vertical lines.
        is_share: the y axis goes from 0 to 1, in percent; else it fits the lines.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**FONT, "svg.hashsalt": "report"}):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.add_subplot()
        for (name, line), colour, dash in zip(lines.items(), COLOURS, DASHES, strict=False):
            mark = "o" if len(line.x) <= NUM_POINTS else ""
            axes.plot(
                line.x, line.mean, color=colour, linestyle=dash, marker=mark, markersize=3, linewidth=1.6, label=name
            )
            axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.15, linewidth=0)
        for at in marks:
            axes.axvline(at, color="0.5", linestyle=":", linewidth=1)
        axes.set(xlabel=x, ylabel=y, xlim=(0, None))
        axes.set_title(title, fontsize="medium", loc="left")
        if is_share:
            axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}" if is_share else short(round(value, 9)))
        axes.xaxis.set_major_formatter(lambda value, _: short(value))
        axes.grid(axis="y", color="0.9", linewidth=0.7)
        if len(lines) > 1:
            figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize="small")
        written = io.BytesIO()
        figure.savefig(written, format="svg", metadata={"Date": None})
    ends = "; ".join(f"{name} ends at {short(float(line.mean[-1]))}" for name, line in lines.items() if len(line.x))
    return Chart(written.getvalue(), f"{title}. {ends}")


def short(value: float) -> str:
    """Return 12000 as "12k", 3400000 as "3.4M"."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"
