"""Turn a chart of a run into shapes of an SVG picture, in the colours of the page, light or dark.

A line has at most `MOST_POINTS` points: of a long run each is the mean over some iterations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rllib_srl.cli.report.run_plots import Plot
from rllib_srl.studies.report.charts import Line, short

WIDTH, HEIGHT = 400, 250
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 34  # margins
MOST_POINTS = 200
NUM_TICKS = 5


@dataclass(frozen=True)
class Curve:
    """A drawn series; `style` is the number of its colour and dash; points are what a pointer reads."""

    name: str
    style: int
    path: str
    band: str
    dots: tuple[tuple[str, str], ...]  # centres, of a series of few points
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Drawing:
    """A chart as shapes. Invariant: coordinates lie in `WIDTH` x `HEIGHT`."""

    plot: Plot
    curves: tuple[Curve, ...]
    x_ticks: tuple[tuple[str, str], ...]  # position and label
    y_ticks: tuple[tuple[str, str], ...]
    x_range: tuple[float, float]
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    top: int = TOP
    bottom: int = HEIGHT - BOTTOM


def drawing_of(plot: Plot) -> Drawing:
    """Return a chart as shapes."""
    lines = {name: thinned(line) for name, line in plot.lines.items()}
    xs = np.concatenate([[0.0], *(line.x for line in lines.values())])
    ys = np.concatenate([[], *(part for line in lines.values() for part in (line.mean, line.low, line.high))])
    ys = ys[np.isfinite(ys)]
    x_range = (0.0, max(1.0, float(xs.max())))
    y_range = (0.0, 1.0) if plot.is_share or not len(ys) else _padded(float(ys.min()), float(ys.max()))
    x_ticks, y_ticks = _ticks(*x_range), _ticks(*y_range)
    in_percent = plot.is_share
    drawn, has_bands = enumerate(lines.items()), bool(plot.bands)
    curves = tuple(_curve(name, place, line, has_bands, x_range, y_range) for place, (name, line) in drawn)
    return Drawing(
        plot,
        curves,
        tuple((f"{_x(value, x_range):.1f}", short(float(f"{value:.6g}"))) for value in x_ticks),
        tuple((f"{_y(value, y_range):.1f}", _label(value, in_percent)) for value in y_ticks),
        x_range,
    )


def thinned(line: Line) -> Line:
    """Return a line of at most `MOST_POINTS` points, each the mean of its neighbours; points that are no number go."""
    known = np.isfinite(line.mean)
    columns = [column[known] for column in line]
    if len(columns[0]) <= MOST_POINTS:
        return Line(*columns)
    parts = [np.array_split(column, MOST_POINTS) for column in columns]
    return Line(*(np.array([one.mean() for one in part]) for part in parts))


def _curve(name: str, place: int, line: Line, has_band: bool, x_range: Pair, y_range: Pair) -> Curve:
    xs = [f"{_x(x, x_range):.1f}" for x in line.x]
    means, lows, highs = ([f"{_y(y, y_range):.1f}" for y in column] for column in (line.mean, line.low, line.high))
    edge = [*zip(xs, highs, strict=True), *reversed([*zip(xs, lows, strict=True)])]
    is_drawn = has_band and len(xs) > 1 and bool(np.isfinite([line.low, line.high]).all())
    return Curve(
        name,
        place,
        _path(list(zip(xs, means, strict=True))),
        _path(edge) + "Z" if is_drawn else "",
        tuple(zip(xs, means, strict=True)) if len(xs) <= NUM_TICKS * 8 else (),
        tuple((round(float(x), 1), float(f"{y:.4g}")) for x, y in zip(line.x, line.mean, strict=True)),
    )


Pair = tuple[float, float]


def _path(points: Sequence[tuple[str, str]]) -> str:
    return "M" + "L".join(f"{x},{y}" for x, y in points) if points else ""


def _x(value: float, limits: Pair) -> float:
    return LEFT + (value - limits[0]) / (limits[1] - limits[0]) * (WIDTH - LEFT - RIGHT)


def _y(value: float, limits: Pair) -> float:
    return HEIGHT - BOTTOM - (value - limits[0]) / (limits[1] - limits[0]) * (HEIGHT - TOP - BOTTOM)


def _padded(low: float, high: float) -> Pair:
    """Return limits with some room, from 0 on if all values are positive and 0 is near."""
    room = 0.06 * (high - low) or max(abs(high), 1.0) * 0.1
    return (0.0 if 0 <= low <= high / 2 else low - room), high + room


def _ticks(low: float, high: float) -> list[float]:
    from matplotlib.ticker import MaxNLocator

    found = MaxNLocator(nbins=NUM_TICKS).tick_values(low, high)
    return [float(value) for value in found if low <= value <= high + 1e-9 * (high - low)]


def _label(value: float, in_percent: bool) -> str:
    return f"{value:.0%}" if in_percent else short(float(f"{value:.6g}"))
