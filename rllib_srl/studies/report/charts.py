"""Draws the charts of a report and their captions: one line per arm, distinguishable with colour blindness.

Colours are those of Okabe and Ito (2008, "Color universal design"); each arm also has its own dash and marker.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rllib_srl.studies.curves import Curve
from rllib_srl.studies.report.blocks import Chart
from rllib_srl.studies.seeds import Interval, bootstrap_interval

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#000000", "#CC79A7", "#56B4E9", "#E69F00")
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (5, 1.5, 1.5, 1.5)), "-", (0, (5, 1.5)), (0, (1.5, 1.2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
NUM_DRAWN = len(COLOURS)
SIZE = (4.8, 3.5)  # inches; small, so that text stays readable on a phone
NUM_POINTS = 25  # grid points of a curve if seeds were evaluated at different costs
FONT: Any = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "path"}


class Line(NamedTuple):
    """Mean over seeds at each x, with its 95 % interval."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def line_of(x_by_seed: Sequence[np.ndarray], y_by_seed: Sequence[np.ndarray], with_band: bool = True) -> Line:
    """Average the curves of several seeds: at their x if it is equal, else on a grid over their common range.

    Args:
        x_by_seed: increasing x of each seed.
        y_by_seed: y of each seed, as long as its x.
        with_band: also compute the 95 % intervals; otherwise they are NaN.
    """
    first = x_by_seed[0]
    if all(len(x) == len(first) and np.allclose(x, first, rtol=0.02) for x in x_by_seed):
        grid, y_EI = np.mean(x_by_seed, axis=0), np.array(y_by_seed)
    else:
        grid = np.linspace(max(x[0] for x in x_by_seed), min(x[-1] for x in x_by_seed), NUM_POINTS)
        y_EI = np.array([np.interp(grid, x, y) for x, y in zip(x_by_seed, y_by_seed, strict=True)])
    unknown = Interval(float("nan"), float("nan"))
    low, high = np.array([bootstrap_interval(column) if with_band else unknown for column in y_EI.T]).T
    return Line(grid, y_EI.mean(axis=0), low, high)


def average_lines(curves: Mapping[str, Mapping[int, Curve]]) -> dict[str, Line]:
    """Return the average accuracy of each arm over generated tokens."""
    return {
        arm: line_of([c.num_generated_tokens_I for c in of.values()], [c.average_I() for c in of.values()])
        for arm, of in curves.items()
        if of
    }


def domain_lines(curves: Mapping[str, Mapping[int, Curve]], domain: int) -> dict[str, Line]:
    """Return the accuracy of each arm on one domain over generated tokens, without bands."""
    found = {}
    for arm, of in curves.items():
        if of:
            x, y = zip(*((c.num_generated_tokens_I, c.accuracy_IC[:, domain]) for c in of.values()))
            found[arm] = line_of(x, y, with_band=False)
    return found


def chart(
    lines: Mapping[str, Line],
    styles: Mapping[str, int],
    title: str,
    x: str,
    y: str,
    alt: str,
    marks: Sequence[float] = (),
    with_band: bool = True,
    is_share: bool = True,
) -> Chart:
    """Draw a line for each arm in `styles`.

    Args:
        lines: lines by arm.
        styles: index of each arm's colour, dash and marker.
        title: title above the chart.
        x: label of the x axis.
        y: label of the y axis.
        alt: text alternative.
        marks: x of dotted vertical lines.
        with_band: shade the 95 % intervals.
        is_share: the y axis goes from 0 to 1, in percent; else it fits the lines.
    """
    with _Figure() as (figure, axes):
        for arm, number in styles.items():
            if arm not in lines:
                continue
            line = lines[arm]
            how = {"color": COLOURS[number], "linestyle": DASHES[number], "marker": MARKERS[number]}
            axes.plot(line.x, line.mean, markersize=4, markevery=max(1, len(line.x) // 8), linewidth=1.6, **how)
            if with_band:
                axes.fill_between(line.x, line.low, line.high, color=COLOURS[number], alpha=0.15, linewidth=0)
        for at in marks:
            axes.axvline(at, color="0.5", linestyle=":", linewidth=1)
        axes.set(xlabel=x, ylabel=y, xlim=(0, None))
        axes.set_title(title, fontsize="medium", loc="left")
        if is_share:
            axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}" if is_share else short(round(value, 9)))
        axes.xaxis.set_major_formatter(lambda value, _: short(value))
        axes.grid(axis="y", color="0.9", linewidth=0.7)
        axes.set_axisbelow(True)
        return Chart(_svg(figure), title, alt)


def legend_line(number: int, title: str) -> Chart:
    """Draw a sample of an arm's line, for a legend."""
    with _Figure(height=0.3, width=1.0) as (figure, axes):
        axes.axis("off")
        axes.plot(
            [0, 1, 2], [0, 0, 0], color=COLOURS[number], linestyle=DASHES[number], marker=MARKERS[number], markevery=[1]
        )
        return Chart(_svg(figure), title, f"line of {title}")


def short(value: float) -> str:
    """Return 12000 as "12k", 3400000 as "3.4M"."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:g}"


class _Figure:
    """Context manager for a figure with one axes; it needs no display and is closed at the end."""

    def __init__(self, width: float = SIZE[0], height: float = SIZE[1]) -> None:
        self._size = (width, height)

    def __enter__(self) -> tuple[Any, Any]:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        with matplotlib.rc_context(FONT):
            self._figure, axes = pyplot.subplots(figsize=self._size, layout="constrained")
        return self._figure, axes

    def __exit__(self, *error: object) -> None:
        from matplotlib import pyplot

        pyplot.close(self._figure)


def _svg(figure: Any) -> bytes:
    """Return a figure as SVG; equal figures give equal bytes."""
    import matplotlib

    written = io.BytesIO()
    with matplotlib.rc_context({**FONT, "svg.hashsalt": "report"}):
        figure.savefig(written, format="svg", metadata={"Date": None})
    return written.getvalue()
