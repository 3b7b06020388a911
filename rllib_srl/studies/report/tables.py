"""The tables of a report: costs, all differences, all further measures, exact settings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import numpy as np

from rllib_srl.studies.contrasts import contrasts_of
from rllib_srl.studies.curves import Curve
from rllib_srl.studies.measures import COSTS, MEASURES
from rllib_srl.studies.report.blocks import Block, Cell, Details, Heading, Table, Text
from rllib_srl.studies.report.story import (
    MAIN,
    UNKNOWN,
    Story,
    contrast_table,
    direction,
    heading_of,
    measured_cell,
)


def differences(story: Story) -> Iterator[Block]:
    study = story.study
    yield Heading("All differences by measure")
    yield Text(
        f"{study.title_of(study.primary.treatment)} minus every other arm. Within one table p values are corrected for "
        "the number of its rows. These comparisons are exploratory: they were not part of the primary comparison."
    )
    for name, measure in MEASURES.items():
        contrasts = contrasts_of(story.findings, study.primary.treatment, story.others(), (name,))
        if any(contrast.differences for contrast in contrasts):
            yield Heading(measure.title.capitalize(), 3)
            yield Text(f"{measure.plain} {direction(measure.better)}")
            yield contrast_table(story, contrasts, name)


def costs(story: Story) -> Iterator[Block]:
    yield Heading("Costs")
    names = list(COSTS)
    rows = [(story.arm_cell(arm), *(measured_cell(story, arm, name) for name in names)) for arm in story.findings]
    yield Table(
        f"The budget was {story.study.budget:,} generated tokens per run. Seconds depend on the machine and its load.",
        ("arm", *(COSTS[name].title for name in names)),
        tuple(rows),
    )


def further(story: Story) -> Iterator[Block]:
    yield Heading("Further metrics")
    is_known = {name for found in story.findings.values() for name in found if not np.isnan(found[name].mean)}
    names = [name for name in MEASURES if name not in MAIN and name in is_known]
    rows = [(story.arm_cell(arm), *(measured_cell(story, arm, name) for name in names)) for arm in story.findings]
    yield Table("Their definitions are above, with the differences.", ("arm", *map(heading_of, names)), tuple(rows))
    for arm, by_seed in story.curves.items():
        if by_seed:
            yield _matrix(story, arm, by_seed)


def _matrix(story: Story, arm: str, by_seed: Mapping[int, Curve]) -> Table:
    study = story.study
    rows_SC = np.mean([np.vstack([curve.before_C, curve.accuracy_SC]) for curve in by_seed.values()], axis=0)
    labels = ["before training"]
    for stage in range(study.num_stages):
        taught = [domain.name for domain in study.domains if domain.learned_at == stage]
        labels.append(f"after {', '.join(taught) or f'stage {stage + 1}'}")
    rows = [
        (Cell(label), *(Cell(UNKNOWN) if np.isnan(a) else Cell(f"{a:.0%}", shade=float(a)) for a in row_C))
        for label, row_C in zip(labels, rows_SC, strict=True)
    ]
    where = "accuracy on each domain (columns) after each stage of training (rows)"
    caption = f"{study.title_of(arm)}: {where}, mean over the runs. Darker is better."
    return Table(caption, ("", *(domain.name for domain in study.domains)), tuple(rows))


def settings(story: Story) -> Iterator[Block]:
    """Yield the complete settings: those equal in all trials, and those that differ between arms."""
    yield Heading("Settings")
    trials = story.results.trials
    names = sorted({name for trial in trials for name in trial.header.settings})
    texts = {n: {t.path: json.dumps(t.header.settings.get(n), sort_keys=True) for t in trials} for n in names}
    shared = [name for name in names if len(set(texts[name].values())) == 1]
    varied = [name for name in names if name not in shared]
    of_arm = {arm.name: [t for t in trials if t.header.arm == arm.name] for arm in story.study.arms}
    header = ("setting", *(arm.title for arm in story.study.arms))
    rows = []
    for name in varied:
        seen = [sorted({texts[name][trial.path] for trial in of_arm[arm.name]}) for arm in story.study.arms]
        rows.append((Cell(name), *(Cell(" or ".join(values) or UNKNOWN) for values in seen)))
    if rows:
        caption = "Settings that differ between runs; “or” stands between those of different seeds."
        yield Table(caption, header, tuple(rows))
    equal = tuple((Cell(name), Cell(next(iter(texts[name].values())))) for name in shared)
    if equal:
        table = Table("", ("setting", "value"), equal, is_text=True)
        yield Details(f"{len(equal)} settings that all runs share", (table,))
