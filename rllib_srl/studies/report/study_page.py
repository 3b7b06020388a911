"""The report page of a study, for readers without background in the field, and how its numbers are written."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from rllib_srl.algorithm.settings import without_secrets
from rllib_srl.studies.contrasts import (
    Contrast,
    Finding,
    Verdict,
    curves_of,
    findings_of,
    verdict_of,
    warnings_of,
)
from rllib_srl.studies.curves import Curve
from rllib_srl.studies.measures import COSTS, MEASURES
from rllib_srl.studies.records import Results
from rllib_srl.studies.report.charts import NUM_DRAWN, Line, accuracy_lines, chart
from rllib_srl.studies.report.page import Block, Charts, Details, Heading, Notice, Page, Table, Text
from rllib_srl.studies.study import Study

MAIN = ("average_accuracy", "retention_area", "forgetting", "plasticity", "online_accuracy")
UNKNOWN = "–"
DIRECTIONS = {"higher": "Higher is better (↑).", "lower": "Lower is better (↓).", "": ""}
ARROWS = {"higher": "↑", "lower": "↓"}

Findings = Mapping[str, Mapping[str, Finding]]


def page_of(results: Results) -> Page:
    """Return the whole report of a study.

    Raises:
        ValueError: a trial lacks the evaluation of a stage.
    """
    study, curves = results.study, curves_of(results)
    findings = findings_of(curves)
    verdict = verdict_of(results, findings)
    return Page(
        study.question,
        (
            *_opening(results, verdict, warnings_of(results, findings)),
            *_setup(study),
            *_results(study, findings),
            *_decision(study, verdict),
            *_figures(study, curves),
            *_matrices(study, curves),
            *_settings(study),
        ),
    )


def summary_of(results: Results) -> list[Block]:
    """Return the answer, the measures and costs of the arms, and the primary comparison, for a terminal.

    Raises:
        ValueError: a trial lacks the evaluation of a stage.
    """
    study, findings = results.study, findings_of(curves_of(results))
    verdict = verdict_of(results, findings)
    opening = _opening(results, verdict, warnings_of(results, findings))
    return [*opening, _table_of(study, findings, (*MAIN, *COSTS)), *list(_decision(study, verdict))[-1:]]


def _opening(results: Results, verdict: Verdict, warnings: list[str]) -> Iterator[Block]:
    study, trials = results.study, results.trials
    cut = [f"{trial.arm} seed {trial.seed}" for trial in trials if not trial.is_finished]
    runs = f"{len(trials) - len(cut)} finished runs" + (f"; cut off: {', '.join(cut)}" if cut else "")
    yield Text(f"Study “{study.name}”, fingerprint {study.fingerprint}, {runs}.")
    title, tone = _answer(study, verdict)
    expected = f"The criterion for yes, fixed beforehand: {study.answered_by}"
    yield Notice(title, (*map(_sentence, verdict.reasons), expected), tone)
    if warnings:
        yield Notice("Warnings", tuple(map(_sentence, warnings)), "warn")


def _answer(study: Study, verdict: Verdict) -> tuple[str, str]:
    primary = study.primary
    if verdict.holds is None:
        return "Undecided: these results do not answer the question.", "open"
    if verdict.holds:
        names = " and ".join(MEASURES[name].title for name in primary.measures)
        controls = " and ".join(study.title_of(arm) for arm in primary.controls)
        return f"Yes. {study.title_of(primary.treatment)} is better in {names} than {controls}.", "good"
    won = sum(c.is_significant and c.favours == primary.treatment for c in verdict.contrasts)
    return f"No. Only {won} of the {len(verdict.contrasts)} required differences are significant.", "bad"


def _setup(study: Study) -> Iterator[Block]:
    when = {domain.name: domain.learned_at for domain in study.domains if domain.learned_at is not None}
    taught = sorted(when, key=lambda name: when[name])
    yield Heading("Setup")
    yield Text(
        f"A language model was trained on {len(taught)} kinds of task (“domains”): {', '.join(taught)}. Training on "
        "one domain tends to lower the accuracy on others (forgetting). Replay, which trains on earlier prompts again, "
        f"is meant to prevent that. Number of random seeds with which each training method below (“arm”) was run: "
        f"{len(study.seeds)}; the arms share their seeds, so they are compared in pairs. Every run ends after "
        f"{study.budget:,} generated tokens (parts of words). The model is evaluated on held-out prompts of all "
        "domains: the share of right answers is its accuracy."
    )
    rows = [(arm.title, arm.description) for arm in study.arms]
    yield Table(("arm", "description"), rows, is_text=True)


def _results(study: Study, findings: Findings) -> Iterator[Block]:
    yield Heading("Results")
    yield Text(
        "Values are means over the runs, with 95% intervals: if all runs were repeated with new seeds, such an "
        "interval would contain the true mean about 19 times in 20."
    )
    yield _table_of(study, findings, MAIN)
    every = MEASURES | COSTS
    meanings = [(measure.title, f"{measure.plain} {DIRECTIONS[measure.better]}") for measure in every.values()]
    others = tuple(name for name in every if name not in MAIN)
    meaning = Table(("measure", "meaning"), meanings, "A point is one percentage point.", is_text=True)
    yield Details("All measures and costs", (_table_of(study, findings, others), meaning))


def _table_of(study: Study, findings: Findings, names: tuple[str, ...]) -> Table:
    measures = {name: (MEASURES | COSTS)[name] for name in names}
    header = ("arm", *(f"{measure.title} {ARROWS.get(measure.better, '')}".strip() for measure in measures.values()))
    rows = [
        (study.title_of(arm), *(_mean(of_arm.get(name), measure.unit) for name, measure in measures.items()))
        for arm, of_arm in findings.items()
    ]
    return Table(header, rows)


def _mean(finding: Finding | None, unit: str) -> str:
    if finding is None or math.isnan(finding.mean):
        return UNKNOWN
    return f"{number(finding.mean, unit)} ({span(*finding.interval, unit)})"


def _decision(study: Study, verdict: Verdict) -> Iterator[Block]:
    yield Heading("Primary comparison")
    yield Text(
        f"{study.title_of(study.primary.treatment)} against each control, paired by seed. A difference is significant "
        f"if its whole interval lies on one side of 0 and its p value is below {study.primary.alpha:.2g}. The p value "
        "is the probability of a difference at least this large by chance alone. It is computed exactly, from all "
        "assignments of signs to the paired differences, and corrected for the number of comparisons (Holm)."
    )
    header = ("against", "measure", "difference", "p, corrected", "better in", "verdict")
    yield Table(header, [_contrast_row(study, contrast) for contrast in verdict.contrasts])


def _contrast_row(study: Study, contrast: Contrast) -> tuple[str, ...]:
    measure = MEASURES[contrast.measure]
    better = sum(d > 0 if measure.better == "higher" else d < 0 for d in contrast.differences.values())
    difference = number(contrast.mean, measure.unit, True)
    return (
        study.title_of(contrast.second),
        measure.title,
        f"{difference} ({span(*contrast.interval, measure.unit, True)})",
        "below 0.001" if contrast.p_holm < 0.001 else f"{contrast.p_holm:.3f}",
        f"{better} of {len(contrast.differences)} runs",
        _judged(contrast),
    )


def _judged(contrast: Contrast) -> str:
    if contrast.is_significant:
        return "better" if contrast.favours == contrast.first else "worse"
    return "undecided: too few runs" if contrast.smallest_p_holm >= contrast.alpha else "no clear difference"


def _figures(study: Study, curves: Mapping[str, Mapping[int, Curve]]) -> Iterator[Block]:
    """Yield the learning curves, averaged and by domain; arms of the primary comparison come first."""
    if not any(curves.values()):
        return
    primary = study.primary
    order = dict.fromkeys([primary.treatment, *primary.controls, *curves])
    drawn = {arm: curves[arm] for arm in list(order)[:NUM_DRAWN]}
    left_out = [study.title_of(arm) for arm in list(order)[NUM_DRAWN:]]
    note = f" Not drawn, but in every table: {', '.join(left_out)}." if left_out else ""

    def titled(lines: Mapping[str, Line]) -> dict[str, Line]:
        return {study.title_of(arm): line for arm, line in lines.items()}

    x = "generated tokens"
    yield Heading("Accuracy, at equal cost")
    average = chart(titled(accuracy_lines(drawn)), "all domains", x, "average accuracy")
    by_domain = [
        chart(titled(accuracy_lines(drawn, at)), domain.name, x, "accuracy", _stage(study, curves, domain.learned_at))
        for at, domain in enumerate(study.domains)
    ]
    caption = "Line: mean over the runs. Shade: its 95% interval. Dotted: where training on the domain began and ended."
    yield Charts((average, *by_domain), caption + note)


def _stage(study: Study, curves: Mapping[str, Mapping[int, Curve]], stage: int | None) -> list[float]:
    """Return start and end of a stage in generated tokens, averaged over all runs."""
    if stage is None:
        return []
    every = [curve for by_seed in curves.values() for curve in by_seed.values()]
    ends = np.mean([curve.num_generated_tokens_I[curve.ends_S()] for curve in every], axis=0)
    return [float(ends[stage - 1]) if stage else 0.0, float(ends[stage])]


def _matrices(study: Study, curves: Mapping[str, Mapping[int, Curve]]) -> Iterator[Block]:
    """Yield the accuracy matrix of each arm."""
    tables = []
    for arm, by_seed in curves.items():
        if by_seed:
            rows_SC = np.mean([np.vstack([curve.before_C, curve.accuracy_SC]) for curve in by_seed.values()], axis=0)
            labels = ["before training", *(f"after stage {stage + 1}" for stage in range(study.num_stages))]
            cells = [[UNKNOWN if np.isnan(value) else f"{value:.0%}" for value in row_C] for row_C in rows_SC]
            rows = [(label, *row) for label, row in zip(labels, cells, strict=True)]
            tables.append(Table(("", *(domain.name for domain in study.domains)), rows, study.title_of(arm)))
    if tables:
        yield Details("Accuracy on each domain after each stage, mean over the runs", tables)


def _settings(study: Study) -> Iterator[Block]:
    yield Heading("Settings")
    names = list(dict.fromkeys(name for arm in study.arms for name in arm.settings))
    every = [{**study.settings, **arm.settings} for arm in study.arms]
    rows = [(name, *(_shown(name, settings.get(name, "default")) for settings in every)) for name in names]
    if rows:
        yield Table(("setting", *(arm.title for arm in study.arms)), rows, "Settings of the arms.")
    shared = [(name, _shown(name, value)) for name, value in study.settings.items() if name not in names]
    yield Details(f"{len(shared)} settings that all runs share", (Table(("setting", "value"), shared, is_text=True),))


def _shown(name: str, value: object) -> str:
    return str(without_secrets(value, name))


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def number(value: float, unit: str, signed: bool = False) -> str:
    """Format a number in its unit; `signed` writes the + of a positive difference."""
    if math.isnan(value):
        return UNKNOWN
    sign = "+" if signed else ""
    if unit in ("share", "points"):
        text = f"{100 * value:{sign}.1f} points" if unit == "points" or signed else f"{100 * value:.1f}%"
    elif unit == "bytes":
        text = f"{value / 1e9:{sign}.2f} GB"
    elif unit == "seconds":
        text = f"{value:{sign},.0f} s" if abs(value) < 600 else f"{value / 3600:{sign}.2f} h"
    else:
        text = f"{value:{sign},.0f}" if unit == "tokens" or abs(value) >= 1000 else f"{value:{sign}.3g}"
    return text.replace("-", "\u2212")


def span(low: float, high: float, unit: str, signed: bool = False) -> str:
    """Format an interval as "81.1 to 83.7", without the unit, which the number next to it has."""
    if math.isnan(low):
        return "no interval"
    ends = [number(end, unit, signed).removesuffix("%").removesuffix(" points") for end in (low, high)]
    return " to ".join(ends)
