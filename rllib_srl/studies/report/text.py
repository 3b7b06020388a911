"""Builds the page of a report from the results of a study, with text for readers without background in the field."""

from __future__ import annotations

from collections.abc import Iterator

from rllib_srl.studies.contrasts import Verdict
from rllib_srl.studies.measures import MEASURES
from rllib_srl.studies.report.blocks import Block, Cell, Heading, Notice, Page, Table, Text
from rllib_srl.studies.report.charts import deciding_figure, figures
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
from rllib_srl.studies.report.tables import costs, differences, further, settings, trials_folded
from rllib_srl.studies.results import Results


def page_of(results: Results) -> Page:
    """Return the whole report of a study."""
    story = Story(results)
    parts = (_opening, _setup, _results, _decision, figures, costs, differences, further, settings, trials_folded)
    return Page(story.study.question, tuple(block for part in parts for block in part(story)))


def _opening(story: Story) -> Iterator[Block]:
    study, verdict = story.study, story.verdict
    kind = "confirmation" if study.is_confirmation else "development"
    meaning = (
        "its settings were frozen before it ran, and its seeds were not used to choose them"
        if study.is_confirmation
        else "settings were still being chosen, so its differences are hints and no proof"
    )
    yield Text(f"Study “{study.name}”, a {kind} run: {meaning}.")
    title, tone = _answer(story, verdict)
    expected = f"What would count as a yes was fixed beforehand: {study.answered_by}"
    yield Notice(title, (*(sentence(reason) for reason in verdict.reasons), expected), tone)
    if story.warnings:
        yield Notice("Before you believe any of it", tuple(map(sentence, story.warnings)), "warn")


def _answer(story: Story, verdict: Verdict) -> tuple[str, str]:
    study, primary = story.study, story.study.primary
    names = listed([MEASURES[name].title for name in primary.measures])
    controls = listed([study.title_of(arm) for arm in primary.controls])
    if verdict.holds is None:
        return "Not decided: these results cannot tell.", "open"
    num = len(verdict.contrasts)
    won = sum(c.is_significant and c.favours == primary.treatment for c in verdict.contrasts)
    if verdict.holds:
        return f"Yes. {study.title_of(primary.treatment)} is better in {names} than {controls}.", "good"
    return f"No. Only {won} of the {num} differences that had to be significant are.", "bad"


def _setup(story: Story) -> Iterator[Block]:
    study = story.study
    when = {domain.name: domain.learned_at for domain in study.domains if domain.learned_at is not None}
    taught = sorted(when, key=lambda name: when[name])
    yield Heading("What was done")
    yield Text(
        f"{study.subject[:1].upper()}{study.subject[1:]} was trained on {len(taught)} kinds of task (“domains”), one "
        f"after the other: {', '.join(taught)}. Learning a new kind tends to push out the old ones. Replay, practising "
        f"again what was practised before, is meant to prevent that. Each way of training below (“arm”) was run "
        f"{len(study.seeds)} times, each time with another random seed; the arms share their seeds, so they can be "
        f"compared run by run. Every run stops once its budget of {study.budget:,} tokens is spent: pieces of words "
        "that a language model writes in training, or new images that an image classifier is shown. Now and then "
        "training pauses, and the model is asked things of all domains which it never trains on: the share of right "
        "answers is its accuracy."
    )
    rows = [(story.arm_cell(arm.name), Cell(arm.description)) for arm in study.arms]
    yield Table("", ("arm", "what it does"), tuple(rows), is_text=True)


def _results(story: Story) -> Iterator[Block]:
    yield Heading("Results")
    yield Text(
        "Numbers are means over the runs. The range with each is its 95% interval: were all runs "
        "repeated with new seeds, an interval made this way would hold the true mean about 19 times in 20."
    )
    rows = [(story.arm_cell(arm), *(measured_cell(story, arm, name) for name in MAIN)) for arm in story.findings]
    yield Table("", ("arm", *map(heading_of, MAIN)), tuple(rows))
    yield Table(
        "What the columns mean. A point is one percentage point.",
        ("measure", "meaning"),
        tuple((Cell(m.title), Cell(f"{m.plain} {direction(m.better)}")) for m in (MEASURES[name] for name in MAIN)),
        is_text=True,
    )


def _decision(story: Story) -> Iterator[Block]:
    study = story.study
    yield Heading("The comparison that decides")
    yield Text(
        f"{study.title_of(study.primary.treatment)} against each arm it has to beat, run by run with equal seeds. It "
        "counts only if the whole interval lies on its side of 0 and the p value is below 0.05. A p value says how "
        "often chance alone would make a difference at least this large. It is computed exactly, by giving each "
        "run's difference either sign in all possible ways, and is then raised for the number of comparisons made "
        "(Holm's correction). The chance to be better compares every run of one arm with every run of the other: 50% "
        "means neither is."
    )
    yield contrast_table(story, story.verdict.contrasts, "")
    yield from deciding_figure(story)
