"""Computes the shared values of a report once, and formats its numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rllib_srl.studies.contrasts import (
    Contrast,
    Finding,
    curves_of,
    findings_of,
    verdict_of,
    warnings_of,
)
from rllib_srl.studies.measures import COSTS, MEASURES
from rllib_srl.studies.report.blocks import Cell, Table
from rllib_srl.studies.report.charts import COLOURS, NUM_DRAWN
from rllib_srl.studies.results import Results

MAIN = ("average_accuracy", "retention_area", "forgetting", "plasticity", "online_accuracy")
UNKNOWN = "–"


class Story:
    """Shared values of a report: curves, findings, verdict, and the colours of arms.

    Invariant: arms of the primary comparison come first in `styles`; arms without a style appear in tables only.
    """

    def __init__(self, results: Results) -> None:
        """Compute all values.

        Raises:
            ValueError: a trial lacks the evaluation of a stage.
        """
        self.results, self.study = results, results.study
        self.curves = curves_of(results)
        self.findings = findings_of(self.curves)
        self.verdict = verdict_of(results, self.findings)
        self.warnings = warnings_of(results, self.findings)
        primary = self.study.primary
        order = dict.fromkeys([primary.treatment, *primary.controls, *(arm.name for arm in self.study.arms)])
        self.styles = {arm: number for number, arm in enumerate(list(order)[:NUM_DRAWN])}

    def arm_cell(self, arm: str) -> Cell:
        """Return the name of an arm, with its colour if it has one."""
        return Cell(self.study.title_of(arm), style=COLOURS[self.styles[arm]] if arm in self.styles else "")

    def others(self) -> list[str]:
        """Return all arms but the treatment."""
        return [arm.name for arm in self.study.arms if arm.name != self.study.primary.treatment]


def number(value: float, unit: str, signed: bool = False) -> str:
    """Format a number in its unit; `signed` writes the + of a positive difference."""
    return _number(value, unit, signed).replace("-", "\u2212")


def _number(value: float, unit: str, signed: bool) -> str:
    if math.isnan(value):
        return UNKNOWN
    if math.isinf(value):
        return "never"
    sign = "+" if signed else ""
    if unit in ("share", "points"):
        return f"{100 * value:{sign}.1f} points" if unit == "points" or signed else f"{100 * value:.1f}%"
    if unit == "bytes":
        return f"{value / 1e9:{sign}.2f} GB"
    if unit == "seconds":
        return f"{value:{sign},.0f} s" if abs(value) < 600 else f"{value / 3600:{sign}.2f} h"
    return f"{value:{sign},.0f}" if unit == "tokens" or abs(value) >= 1000 else f"{value:{sign}.3g}"


def span(low: float, high: float, unit: str, signed: bool = False) -> str:
    """Format an interval as "81.1 to 83.7", without a unit that the number beside it has."""
    if math.isnan(low):
        return "no interval"
    if low == high:
        return "in all runs"
    ends = [number(end, unit, signed).removesuffix("%").removesuffix(" points") for end in (low, high)]
    return " to ".join(ends) if ends[0] != ends[1] else "almost equal"


def value_cell(finding: Finding | None, unit: str) -> Cell:
    """Return mean and interval."""
    if finding is None or math.isnan(finding.mean):
        return Cell(UNKNOWN)
    return Cell(number(finding.mean, unit), span(*finding.interval, unit))


def p_text(p: float) -> str:
    """Return a p value."""
    return "below 0.001" if p < 0.001 else f"{p:.3f}"


def measured_cell(story: Story, arm: str, name: str) -> Cell:
    return value_cell(story.findings[arm].get(name), (MEASURES | COSTS)[name].unit)


def heading_of(name: str) -> str:
    return f"{MEASURES[name].title}\N{NO-BREAK SPACE}{'↑' if MEASURES[name].better == 'higher' else '↓'}"


def direction(better: str) -> str:
    return {"higher": "Higher is better (↑).", "lower": "Lower is better (↓).", "": ""}[better]


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def listed(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    comma, last = ("; ", "; and ") if any("," in name for name in names) else (", ", " and ")
    return comma.join(names[:-1]) + last + names[-1]


def contrast_table(story: Story, contrasts: Sequence[Contrast], measure: str) -> Table:
    header = ("against", "difference", "p, corrected", "better in", "verdict")
    rows = []
    for c in contrasts:
        unit, label = MEASURES[c.measure].unit, story.arm_cell(c.second)
        better = sum(d > 0 if MEASURES[c.measure].better == "higher" else d < 0 for d in c.differences.values())
        rows.append(
            (
                label if measure else Cell(label.text, MEASURES[c.measure].title, style=label.style),
                Cell(number(c.mean, unit, True), span(*c.interval, unit, True)),
                Cell(p_text(c.p_holm), f"{p_text(c.p)} before"),
                Cell(f"{better} of {len(c.differences)} runs"),
                Cell(_judged(c)),
            )
        )
    return Table("", header, tuple(rows))


def _judged(contrast: Contrast) -> str:
    if contrast.is_significant:
        return "better" if contrast.favours == contrast.first else "worse"
    return "undecided: too few runs" if contrast.smallest_p_holm >= contrast.alpha else "no clear difference"
