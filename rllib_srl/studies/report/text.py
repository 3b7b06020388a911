"""Builds the page of a report from the results of a study, with text for readers without background in the field."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rllib_srl.studies.contrasts import Verdict
from rllib_srl.studies.measures import MEASURES
from rllib_srl.studies.report.blocks import Block, Cell, Chart, Charts, Heading, Notice, Page, Table, Text
from rllib_srl.studies.report.charts import Line, average_lines, chart, domain_lines, legend_line
from rllib_srl.studies.report.story import (
    MAIN,
    Story,
    contrast_table,
    direction,
    heading_of,
    listed,
    measured_cell,
    sentence,
)
from rllib_srl.studies.report.tables import costs, differences, further, settings
from rllib_srl.studies.results import Results


def page_of(results: Results) -> Page:
    """Return the whole report of a study."""
    story = Story(results)
    parts = (_opening, _setup, _results, _decision, _figures, costs, differences, further, settings)
    return Page(story.study.question, tuple(block for part in parts for block in part(story)))


def _opening(story: Story) -> Iterator[Block]:
    study, verdict = story.study, story.verdict
    yield Text(f"Study “{study.name}”, fingerprint {study.fingerprint}, {_trials(story)}.")
    title, tone = _answer(story, verdict)
    expected = f"The criterion for yes, fixed beforehand: {study.answered_by}"
    yield Notice(title, (*(sentence(reason) for reason in verdict.reasons), expected), tone)
    if story.warnings:
        yield Notice("Warnings", tuple(map(sentence, story.warnings)), "warn")


def _trials(story: Story) -> str:
    """Return how many trials are finished, and which are not."""
    trials = story.results.trials
    cut = [f"{trial.header.arm} seed {trial.header.seed}" for trial in trials if not trial.is_finished]
    return f"{len(trials) - len(cut)} finished runs" + (f"; cut off: {', '.join(cut)}" if cut else "")


def _answer(story: Story, verdict: Verdict) -> tuple[str, str]:
    study, primary = story.study, story.study.primary
    names = listed([MEASURES[name].title for name in primary.measures])
    controls = listed([study.title_of(arm) for arm in primary.controls])
    if verdict.holds is None:
        return "Undecided: these results do not answer the question.", "open"
    num = len(verdict.contrasts)
    won = sum(c.is_significant and c.favours == primary.treatment for c in verdict.contrasts)
    if verdict.holds:
        return f"Yes. {study.title_of(primary.treatment)} is better in {names} than {controls}.", "good"
    return f"No. Only {won} of the {num} required differences are significant.", "bad"


def _setup(story: Story) -> Iterator[Block]:
    study = story.study
    when = {domain.name: domain.learned_at for domain in study.domains if domain.learned_at is not None}
    taught = sorted(when, key=lambda name: when[name])
    how = (
        "one after the other" if len(set(when.values())) > 1 else "all of them from the start to the end of training"
    )
    yield Heading("Setup")
    yield Text(
        f"A language model was trained on {len(taught)} kinds of task (“domains”), "
        f"{how}: {', '.join(taught)}. Training on one domain tends to lower the accuracy on others "
        f"(forgetting). Replay, which trains on earlier prompts again, is meant to prevent that. Each training method "
        f"below (“arm”) was run with {len(study.seeds)} random seeds; the arms share their seeds, so they are compared "
        f"in pairs. Every run ends after {study.budget:,} generated tokens (parts of words). At intervals, the model "
        "is evaluated on held-out prompts of all domains: the share of right answers is its accuracy."
    )
    rows = [(story.arm_cell(arm.name), Cell(arm.description)) for arm in study.arms]
    yield Table("", ("arm", "description"), tuple(rows), is_text=True)


def _results(story: Story) -> Iterator[Block]:
    yield Heading("Results")
    yield Text(
        "Values are means over the runs, with 95% intervals: if all runs were repeated with new seeds, such an "
        "interval would contain the true mean about 19 times in 20."
    )
    rows = [(story.arm_cell(arm), *(measured_cell(story, arm, name) for name in MAIN)) for arm in story.findings]
    yield Table("", ("arm", *map(heading_of, MAIN)), tuple(rows))
    shown = [MEASURES[name] for name in MAIN]
    yield Table(
        "Definitions of the measures. A point is one percentage point.",
        ("measure", "meaning"),
        tuple((Cell(measure.title), Cell(f"{measure.plain} {direction(measure.better)}")) for measure in shown),
        is_text=True,
    )


def _decision(story: Story) -> Iterator[Block]:
    study = story.study
    yield Heading("Primary comparison")
    yield Text(
        f"{study.title_of(study.primary.treatment)} against each control, paired by seed. A difference is significant "
        f"if its whole interval lies on one side of 0 and its p value is below {study.primary.alpha:.2g}. The p value "
        "is the probability of a difference at least this large by chance alone. It is computed exactly, from all "
        "assignments of signs to the paired differences, and corrected for the number of comparisons (Holm)."
    )
    yield contrast_table(story, story.verdict.contrasts, "")


# --- charts ---------------------------------------------------------------------------------------


def _figures(story: Story) -> Iterator[Block]:
    """Yield learning and domain curves."""
    if not any(story.curves.values()):
        return
    styles, legend = story.styles, _legend(story)
    yield Heading("Learning, at equal cost")
    yield Text(
        "Accuracy averaged over all domains, including those not trained yet, so it rises as more of them are trained."
    )
    lines = average_lines(story.curves)
    over = "generated tokens"
    one = chart(lines, styles, f"over {over}", over, "average accuracy", _told(story, lines))
    yield Charts((one,), _caption(story), legend)
    yield Heading("Accuracy by domain")
    charts = []
    for at, domain in enumerate(story.study.domains):
        lines, marks = domain_lines(story.curves, at), _stage(story, at)
        told = _told(story, lines)
        charts.append(chart(lines, styles, domain.name, "generated tokens", "accuracy", told, marks, with_band=False))
    caption = "Dotted lines: where the training of this domain began and ended. Lines are means over the runs."
    yield Charts(tuple(charts), caption, legend)


def _stage(story: Story, domain: int) -> list[float]:
    """Return start and end of the stage that taught a domain, in generated tokens, averaged over all runs."""
    curves = [curve for by_seed in story.curves.values() for curve in by_seed.values()]
    stage = story.study.domains[domain].learned_at
    if stage is None:
        return []
    ends = np.mean([curve.num_generated_tokens_I[curve.ends_S()] for curve in curves], axis=0)
    return [float(ends[stage - 1]) if stage else 0.0, float(ends[stage])]


def _legend(story: Story) -> tuple[tuple[str, Chart], ...]:
    drawn = {arm: number for arm, number in story.styles.items() if story.curves[arm]}
    return tuple((story.study.title_of(arm), legend_line(n, story.study.title_of(arm))) for arm, n in drawn.items())


def _caption(story: Story) -> str:
    missing = [arm.title for arm in story.study.arms if arm.name not in story.styles]
    rest = f" Not drawn, to keep it readable, but in every table: {', '.join(missing)}." if missing else ""
    return f"Line: mean over the runs. Shade: its 95% interval.{rest}"


def _told(story: Story, lines: dict[str, Line]) -> str:
    drawn = {story.study.title_of(arm): line for arm, line in lines.items() if arm in story.styles}
    return "; ".join(f"{title} ends at {line.mean[-1]:.0%}" for title, line in drawn.items())
