"""The pictures of a report: one line an arm, in colours and shapes that stay apart for the colour-blind.

Colours are Okabe and Ito's (2008, "Color universal design"); each arm also has a dash and a marker of its own.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rllib_srl.continual.contrasts import Contrast
from rllib_srl.continual.curves import Curve
from rllib_srl.continual.seeds import Interval, bootstrap_interval
from scripts.report_blocks import Chart

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#000000", "#CC79A7", "#56B4E9", "#E69F00")
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (5, 1.5, 1.5, 1.5)), "-", (0, (5, 1.5)), (0, (1.5, 1.2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
NUM_DRAWN = len(COLOURS)
SIZE = (4.8, 3.5)  # inches; small, so that text stays readable on a telephone
NUM_POINTS = 25  # of a curve, where seeds were measured at different costs
FONT: Any = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "path"}


class Line(NamedTuple):
    """Mean over seeds at each x, with its 95 % interval."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def line_of(x_by_seed: Sequence[np.ndarray], y_by_seed: Sequence[np.ndarray], with_band: bool = True) -> Line:
    """Average curves of several seeds: where they share x, there; else on a grid over what all of them cover.

    Args:
        x_by_seed: increasing.
        y_by_seed: as long as its x.
        with_band: also find the 95 % intervals, else they are NaN.
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


def average_lines(curves: Mapping[str, Mapping[int, Curve]], cost: str) -> dict[str, Line]:
    """Return the average accuracy of each arm over a cost, which is the name of a field of `Curve`."""
    return {
        arm: line_of([getattr(c, cost) for c in of.values()], [c.average_I() for c in of.values()])
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


def retention_lines(curves: Mapping[str, Mapping[int, Curve]]) -> dict[str, Line]:
    """Return the mean accuracy of each arm on a domain over generated tokens since its training ended.

    The mean is over the domains that are still followed at that time, so later parts rest on fewer of them.
    """
    found = {}
    for arm, by_seed in curves.items():
        spans = [_since(curve) for curve in by_seed.values() if curve.remembered_from()]
        if spans:
            found[arm] = line_of([x for x, _ in spans], [y for _, y in spans])
    return found


def _since(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    time_I, starts = curve.num_generated_tokens_I, curve.remembered_from()
    parts = [(time_I[at:] - time_I[at], curve.accuracy_IC[at:, j]) for j, at in starts.items()]
    grid = max((time for time, _ in parts), key=lambda time: time[-1])
    heights = [np.interp(grid, time, y, right=np.nan) for time, y in parts]
    return grid, np.nanmean(np.array(heights), axis=0)


def chart(
    lines: Mapping[str, Line],
    styles: Mapping[str, int],
    title: str,
    x: str,
    y: str,
    alt: str,
    marks: Sequence[float] = (),
    with_band: bool = True,
) -> Chart:
    """Draw a line for each arm in `styles`.

    Args:
        lines: by arm.
        styles: number of each arm's colour, dash and marker.
        title: above the picture.
        x: label of the horizontal axis.
        y: label of the vertical one, a share.
        alt: what the picture shows.
        marks: x of dotted verticals.
        with_band: shade the 95 % intervals.
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
        axes.set(xlabel=x, ylabel=y, ylim=(0, 1), xlim=(0, None))
        axes.set_title(title, fontsize="medium", loc="left")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.xaxis.set_major_formatter(lambda value, _: short(value))
        axes.grid(axis="y", color="0.9", linewidth=0.7)
        axes.set_axisbelow(True)
        return Chart(_svg(figure), title, alt)


def forest(contrasts: Sequence[Contrast], labels: Sequence[str], title: str, alt: str) -> Chart:
    """Draw differences with their intervals, and a line where there is none."""
    with _Figure(height=0.9 + 0.42 * len(contrasts), width=5.6) as (figure, axes):
        for row, contrast in enumerate(contrasts):
            filled = COLOURS[0] if contrast.is_significant else "white"
            axes.plot([100 * contrast.interval.low, 100 * contrast.interval.high], [row, row], color=COLOURS[0])
            axes.plot(100 * contrast.mean, row, "o", color=COLOURS[0], markerfacecolor=filled, markersize=7)
        axes.axvline(0, color="0.2", linewidth=1)
        axes.set(yticks=range(len(labels)), yticklabels=labels, xlabel="difference in percentage points, 95% interval")
        axes.margins(x=0.08, y=0.1)
        axes.invert_yaxis()
        axes.set_title(title, fontsize="medium", loc="left")
        return Chart(_svg(figure), title, alt)


def legend_line(number: int, title: str) -> Chart:
    """Draw a piece of an arm's line, for a legend."""
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
    """A figure of one axes that is closed in the end, without a display."""

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
    """Return a figure as SVG, the same bytes each time."""
    import matplotlib

    written = io.BytesIO()
    with matplotlib.rc_context({**FONT, "svg.hashsalt": "report"}):
        figure.savefig(written, format="svg", metadata={"Date": None})
    return written.getvalue()
