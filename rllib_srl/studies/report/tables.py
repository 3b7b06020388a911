"""The tables of a report: costs, all differences, all further measures, exact settings, all trials."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from rllib_srl.studies.contrasts import contrasts_of, ratios_of
from rllib_srl.studies.curves import Curve
from rllib_srl.studies.measures import COSTS, EXTRAS, MEASURES
from rllib_srl.studies.report.blocks import Block, Cell, Details, Heading, Table, Text
from rllib_srl.studies.report.story import (
    MAIN,
    UNKNOWN,
    Story,
    contrast_table,
    direction,
    heading_of,
    listed,
    measured_cell,
    number,
    value_cell,
)
from rllib_srl.studies.results import Trial


def differences(story: Story) -> Iterator[Block]:
    study = story.study
    yield Heading("All differences by measure")
    yield Text(
        f"{study.title_of(study.primary.treatment)} minus every other arm. Within one table p values are corrected for "
        "the number of its rows. These comparisons are exploratory: they were not part of the primary comparison."
    )
    yield Text(_beaten_by(story))
    for name, measure in MEASURES.items():
        contrasts = contrasts_of(story.findings, study.primary.treatment, story.others(), (name,))
        if any(contrast.differences for contrast in contrasts):
            yield Heading(measure.title.capitalize(), 3)
            yield Text(f"{measure.plain} {direction(measure.better)}")
            yield contrast_table(story, contrasts, name)


def _beaten_by(story: Story) -> str:
    """Name the arms that are significantly better than the treatment in a measure of the primary comparison."""
    study, lines = story.study, []
    for name in study.primary.measures:
        contrasts = contrasts_of(story.findings, study.primary.treatment, story.others(), (name,))
        above = [study.title_of(c.second) for c in contrasts if c.is_significant and c.favours == c.second]
        which = listed(above) if above else "no arm"
        lines.append(f"In {MEASURES[name].title} {which} is significantly better than it.")
    return " ".join(lines)


def costs(story: Story) -> Iterator[Block]:
    yield Heading("Costs")
    names = list(COSTS)
    rows = [(story.arm_cell(arm), *(measured_cell(story, arm, name) for name in names)) for arm in story.findings]
    yield Table(
        f"The budget was {story.study.budget:,} generated tokens per run. Seconds depend on the machine and its load.",
        ("arm", *(COSTS[name].title for name in names)),
        tuple(rows),
    )
    yield Table("", ("cost", "meaning"), tuple((Cell(m.title), Cell(m.plain)) for m in COSTS.values()), is_text=True)
    study = story.study
    yield Table(
        f"{study.title_of(study.primary.treatment)} relative to other arms; below 1 is better. Tokens to equal "
        "accuracy: the tokens it generated to reach the other arm's final accuracy, divided by the other arm's (median "
        "of the runs).",
        ("relative to", "forgetting", "tokens to equal accuracy"),
        tuple(
            (story.arm_cell(r.control), Cell(number(r.forgetting, "count")), Cell(number(r.tokens, "count")))
            for r in ratios_of(story.results, story.curves, story.findings)
        ),
    )


def further(story: Story) -> Iterator[Block]:
    yield Heading("Further metrics")
    is_known = {name for found in story.findings.values() for name in found if not np.isnan(found[name].mean)}
    names = [name for name in MEASURES if name not in MAIN and name in is_known]
    rows = [(story.arm_cell(arm), *(measured_cell(story, arm, name) for name in names)) for arm in story.findings]
    yield Table("Their definitions are above, with the differences.", ("arm", *map(heading_of, names)), tuple(rows))
    middle = [
        (story.arm_cell(arm), *(Cell(number(found[name].middle, MEASURES[name].unit)) for name in MAIN))
        for arm, found in story.findings.items()
    ]
    yield Table(
        "Interquartile means: the mean of the middle half of the runs, which is robust to outliers.",
        ("arm", *(MEASURES[name].title for name in MAIN)),
        tuple(middle),
    )
    extras = sorted({n for found in story.findings.values() for n in found if n not in MEASURES and n not in COSTS})
    if extras:
        found = story.findings.items()
        rows = [(story.arm_cell(arm), *(value_cell(of.get(name), "count") for name in extras)) for arm, of in found]
        told = "; ".join(f"{name}: {_meaning(name)}" for name in extras if _meaning(name))
        yield Table(f"At the last test. {told}.", ("arm", *extras), tuple(rows))
    for arm, by_seed in story.curves.items():
        if by_seed:
            yield _matrix(story, arm, by_seed)


def _meaning(name: str) -> str:
    """Return what an extra measure means; "pass_at_8" is explained by "pass_at_k"."""
    stem, _, last = name.rpartition("_")
    general = EXTRAS.get(f"{stem}_k", "") if last.isdigit() else ""
    return EXTRAS.get(name, general.replace("k answers", f"{last} answers"))


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
    by_seed = [name for name in names if name not in shared and _follows_the_seed(trials, texts[name])]
    varied = [name for name in names if name not in shared and name not in by_seed]
    of_arm = {arm.name: [t for t in trials if t.header.arm == arm.name] for arm in story.study.arms}
    header = ("setting", *(arm.title for arm in story.study.arms))
    rows = []
    for name in varied:
        seen = [sorted({texts[name][trial.path] for trial in of_arm[arm.name]}) for arm in story.study.arms]
        rows.append((Cell(name), *(Cell(" or ".join(values) or UNKNOWN) for values in seen)))
    if rows:
        caption = "Settings that differ between runs; “or” stands between those of different seeds."
        yield Table(caption, header, tuple(rows))
    if by_seed:
        yield Text(f"Settings that differ with the seed alone, the same way in all arms: {', '.join(by_seed)}.")
    equal = tuple((Cell(name), Cell(next(iter(texts[name].values())))) for name in shared)
    if equal:
        table = Table("", ("setting", "value"), equal, is_text=True)
        yield Details(f"{len(equal)} settings that all runs share", (table,))


def _follows_the_seed(trials: Sequence[Trial], texts: Mapping[Path, str]) -> bool:
    seen: dict[int, set[str]] = defaultdict(set)
    for trial in trials:
        seen[trial.header.seed].add(texts[trial.path])
    return all(len(values) == 1 for values in seen.values())


def trials_folded(story: Story) -> Iterator[Block]:
    yield Heading("Every run")
    yield Text(f"Fingerprint of the study: {story.study.fingerprint}. All runs are listed.")
    names = (*MAIN, *COSTS)
    rows = []
    for trial in story.results.trials:
        arm, seed = trial.header.arm, trial.header.seed
        values = [story.findings[arm][name].values.get(seed, float("nan")) for name in names]
        cells = [Cell(number(v, (MEASURES | COSTS)[n].unit)) for n, v in zip(names, values, strict=True)]
        state = "finished" if trial.is_finished else "cut off"
        rows.append((story.arm_cell(arm), Cell(str(seed)), *cells, Cell(state)))
    header = ("arm", "seed", *((MEASURES | COSTS)[name].title for name in names), "state")
    yield Details(f"{len(rows)} runs", (Table("", header, tuple(rows)),))
