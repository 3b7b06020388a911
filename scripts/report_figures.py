"""The pictures of a report and what is said below them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from rllib_srl.continual.measures import MEASURES
from scripts.report_blocks import Block, Charts, Heading, Text
from scripts.report_charts import (
    Line,
    average_lines,
    chart,
    domain_lines,
    forest,
    legend_line,
    retention_lines,
)

if TYPE_CHECKING:
    from scripts.report_story import Story

AXES = {
    "num_generated_tokens_I": "generated tokens",
    "num_trained_tokens_I": "trained tokens",
    "seconds_I": "seconds of training",
}


def deciding_figure(story: Story) -> Iterator[Block]:
    """Yield the differences that decide, as intervals."""
    known = [c for c in story.verdict.contrasts if not np.isnan(c.interval.low)]
    shares = [c for c in known if MEASURES[c.measure].unit in ("share", "points")]
    if not shares:
        return
    labels = [f"{MEASURES[c.measure].title},\nagainst {story.study.title_of(c.second)}" for c in shares]
    title = f"{story.study.title_of(story.study.primary.treatment)} minus others"
    alt = "; ".join(f"{label}: {100 * c.mean:+.1f} points" for label, c in zip(labels, shares, strict=True))
    caption = (
        "Dot: mean difference. Line: its 95% interval. Filled dot: significant after correction. Right of 0 favours "
        f"{story.study.title_of(story.study.primary.treatment)}, but for measures where lower is better."
    )
    yield Charts((forest(shares, labels, title, alt),), caption)


def figures(story: Story) -> Iterator[Block]:
    """Yield learning, retention and domain curves."""
    if not any(story.curves.values()):
        return
    styles, legend = story.styles, _legend(story)
    yield Heading("Learning, at equal cost")
    yield Text(
        "Accuracy averaged over all domains, those not yet taught included, so it rises as more of them are taught. "
        "The same runs are drawn over three costs: an arm may be cheap in one and dear in another."
    )
    charts = []
    for cost, words in AXES.items():
        lines = average_lines(story.curves, cost)
        charts.append(chart(lines, styles, f"over {words}", words, "average accuracy", _told(story, lines)))
    yield Charts(tuple(charts), _caption(story), legend)
    lines = retention_lines(story.curves)
    if lines:
        yield Heading("Remembering")
        yield Text(
            "Accuracy on a domain from the moment its own training ended, averaged over the domains. A line that stays "
            "level forgets nothing. Its right end rests on the domains that were taught first."
        )
        words = "generated tokens since its training ended"
        one = chart(lines, styles, "retention", words, "accuracy on old domains", _told(story, lines))
        yield Charts((one,), _caption(story), legend)
    yield Heading("Domain by domain")
    charts = []
    for at, domain in enumerate(story.study.domains):
        lines, marks = domain_lines(story.curves, at), _stage(story, at)
        told = _told(story, lines)
        charts.append(chart(lines, styles, domain.name, "generated tokens", "accuracy", told, marks, with_band=False))
    caption = "Dotted lines: where the training of this domain began and ended. Lines are means over the runs."
    yield Charts(tuple(charts), caption, legend)


def _stage(story: Story, domain: int) -> list[float]:
    """Return where the stage that taught a domain began and ended, in generated tokens, the mean over all runs."""
    curves = [curve for by_seed in story.curves.values() for curve in by_seed.values()]
    stage = story.study.domains[domain].learned_at
    if stage is None:
        return []
    ends = np.mean([curve.num_generated_tokens_I[curve.ends_S()] for curve in curves], axis=0)
    return [float(ends[stage - 1]) if stage else 0.0, float(ends[stage])]


def _legend(story: Story) -> tuple:
    drawn = {arm: number for arm, number in story.styles.items() if story.curves[arm]}
    return tuple((story.study.title_of(arm), legend_line(n, story.study.title_of(arm))) for arm, n in drawn.items())


def _caption(story: Story) -> str:
    missing = [arm.title for arm in story.study.arms if arm.name not in story.styles]
    rest = f" Not drawn, to keep it readable, but in every table: {', '.join(missing)}." if missing else ""
    return f"Line: mean over the runs. Shade: its 95% interval.{rest}"


def _told(story: Story, lines: dict[str, Line]) -> str:
    drawn = {story.study.title_of(arm): line for arm, line in lines.items() if arm in story.styles}
    return "; ".join(f"{title} ends at {line.mean[-1]:.0%}" for title, line in drawn.items())
