"""Findings of a study: means with intervals for each arm, paired differences between arms, and the verdict.

Only the primary comparison, which the study fixed beforehand, decides the verdict. All other differences are
exploratory: they are corrected for multiple tests within a measure, but not across measures.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rllib_srl.studies.curves import Curve
from rllib_srl.studies.measures import COSTS, MEASURES, measure
from rllib_srl.studies.records import Results, Trial
from rllib_srl.studies.seeds import (
    ALPHA,
    Interval,
    bootstrap_interval,
    holm,
    paired_test,
)
from rllib_srl.studies.study import Study

MIN_SEEDS = 6  # with fewer seeds no exact paired test reaches ALPHA
BUDGET_TOLERANCE = 0.05  # allowed relative deviation from the budget: a trial stops after a whole iteration


@dataclass(frozen=True)
class Finding:
    """One measure of one arm over its seeds; NaN if unknown."""

    values: dict[int, float]  # by seed
    mean: float
    interval: Interval  # 95 %, of the mean


@dataclass(frozen=True)
class Contrast:
    """The paired difference of one measure, `first` minus `second`, over the seeds that both arms finished."""

    measure: str
    first: str
    second: str
    differences: dict[int, float]  # by seed
    mean: float
    interval: Interval  # 95 %, of the mean difference
    p: float  # two-sided, by exact sign flips
    p_holm: float  # corrected for its family of tests
    smallest_p_holm: float  # smallest corrected p value that this number of pairs allows
    alpha: float = ALPHA  # significance level

    @property
    def is_significant(self) -> bool:
        """Return whether the corrected test is significant and the interval excludes 0."""
        return self.p_holm < self.alpha and (self.interval.low > 0 or self.interval.high < 0)

    @property
    def favours(self) -> str:
        """Return the arm with the better mean, "" if they are equal."""
        gain = self.mean if MEASURES[self.measure].better == "higher" else -self.mean
        return self.first if gain > 0 else self.second if gain < 0 else ""


@dataclass(frozen=True)
class Verdict:
    """Outcome of the primary comparison. `holds` is None while trials are missing or the pairs are too few."""

    holds: bool | None
    contrasts: tuple[Contrast, ...]
    reasons: tuple[str, ...]  # why it does not hold or is undecided


def curves_of(results: Results) -> dict[str, dict[int, Curve]]:
    """Return the curves of finished trials by arm and seed.

    Raises:
        ValueError: a trial lacks the evaluation of a stage.
    """
    arms = [arm.name for arm in results.study.arms]
    return {arm: {t.seed: curve_of(t, results.study) for t in results.of(arm)} for arm in arms}


def curve_of(trial: Trial, study: Study) -> Curve:
    """Return a trial's curve.

    Raises:
        ValueError: a stage has no evaluation; the message names the file.
    """
    evaluations, names = trial.evaluations, [domain.name for domain in study.domains]
    if missing := set(range(study.num_stages)) - {evaluation.stage for evaluation in evaluations}:
        raise ValueError(f"{trial.path}: no evaluation of the stages {sorted(missing)}; expected one after each stage")
    extras: dict[str, list[float]] = defaultdict(list)
    for measures in evaluations[-1].measures.values():
        for name, value in measures.items():
            extras[name].append(value)

    def column(name: str) -> np.ndarray:
        return np.array([getattr(evaluation, name) for evaluation in evaluations])

    return Curve(
        accuracy_IC=np.array([[evaluation.accuracy[name] for name in names] for evaluation in evaluations]),
        stage_I=column("stage"),
        num_generated_tokens_I=column("num_generated_tokens"),
        num_trained_tokens_I=column("num_trained_tokens"),
        num_probe_tokens_I=column("num_probe_tokens"),
        seconds_I=column("seconds"),
        peak_bytes=max(evaluation.peak_bytes for evaluation in evaluations),
        learned_at_C=study.learned_at_C(),
        extras={name: float(np.mean(values)) for name, values in sorted(extras.items())},
    )


def findings_of(curves: Mapping[str, Mapping[int, Curve]]) -> dict[str, dict[str, Finding]]:
    """Return each measure of each arm: arm -> measure -> finding."""
    findings = {}
    for arm, by_seed in curves.items():
        measured = {seed: measure(curve) for seed, curve in by_seed.items()}
        names = dict.fromkeys([*MEASURES, *COSTS, *(name for values in measured.values() for name in values)])
        findings[arm] = {name: _finding({s: m.get(name, float("nan")) for s, m in measured.items()}) for name in names}
    return findings


def contrasts_of(
    findings: Mapping[str, Mapping[str, Finding]], first: str, others: Sequence[str], measures: Sequence[str]
) -> list[Contrast]:
    """Compare `first` with each of `others` on each measure, as one family of tests for Holm's correction."""
    contrasts = []
    for name in measures:
        for second in others:
            values, beside = findings[first][name].values, findings[second][name].values
            pairs = {s: (values[s], beside[s]) for s in sorted(values.keys() & beside.keys())}
            contrasts.append(_contrast(name, first, second, {s: p for s, p in pairs.items() if np.isfinite(p).all()}))
    adjusted = holm([contrast.p for contrast in contrasts])
    least = [min(1.0, c.smallest_p_holm * len(contrasts)) for c in contrasts]
    return [
        replace(c, p_holm=float(p), smallest_p_holm=max(c.smallest_p_holm, low))
        for c, p, low in zip(contrasts, adjusted, least, strict=True)
    ]


def verdict_of(results: Results, findings: Mapping[str, Mapping[str, Finding]]) -> Verdict:
    """Evaluate the primary comparison: each interval in favour of the treatment, each corrected p value below alpha."""
    study, primary = results.study, results.study.primary
    family = contrasts_of(findings, primary.treatment, primary.controls, primary.measures)
    contrasts = [replace(contrast, alpha=primary.alpha) for contrast in family]
    arms = (primary.treatment, *primary.controls)
    missing = {arm: len(study.seeds) - len(results.of(arm)) for arm in arms}
    num = len(study.seeds)
    reasons = [f"{study.title_of(arm)}: {n} of {num} trials are not finished" for arm, n in missing.items() if n]
    unknown = sorted({c.measure for c in contrasts if len(c.differences) < _num_pairs(results, c)})
    reasons += [f"{MEASURES[name].title} is missing for some trials" for name in unknown]
    least = max(contrast.smallest_p_holm for contrast in contrasts)
    if least >= primary.alpha:
        pairs = min(len(contrast.differences) for contrast in contrasts)
        reasons.append(
            f"{pairs} {'pair of trials is' if pairs == 1 else 'pairs of trials are'} too few: the smallest possible "
            f"p value is {least:.2g}, corrected for {len(contrasts)} comparisons"
        )
    if reasons:
        return Verdict(None, tuple(contrasts), tuple(reasons))
    failed = [c for c in contrasts if not (c.is_significant and c.favours == primary.treatment)]
    reasons = [f"{MEASURES[c.measure].title} against {study.title_of(c.second)}: {_why(c)}" for c in failed]
    return Verdict(not failed, tuple(contrasts), tuple(reasons))


def warnings_of(results: Results, findings: Mapping[str, Mapping[str, Finding]]) -> list[str]:
    """Return warnings about the validity of the results: few seeds, missing trials, missed budgets."""
    study, lines = results.study, []
    if len(study.seeds) < MIN_SEEDS:
        few = "run per arm is" if len(study.seeds) == 1 else "runs per arm are"
        why = "intervals are too narrow, and no difference can be significant"
        lines.append(f"{len(study.seeds)} {few} too few: {why}")
    for arm in study.arms:
        finished = {trial.seed for trial in results.of(arm.name)}
        if absent := [seed for seed in study.seeds if seed not in finished]:
            lines.append(f"{arm.title}: no finished trial with seed {', '.join(map(str, absent))}")
        spent = {s: v / study.budget for s, v in findings[arm.name]["num_generated_tokens"].values.items()}
        if off := {s: share for s, share in spent.items() if abs(share - 1) > BUDGET_TOLERANCE}:
            shares = ", ".join(f"{share:.0%} with seed {seed}" for seed, share in off.items())
            lines.append(f"{arm.title}: the budget of generated tokens was not met: {shares}")
    return lines


def _finding(values: dict[int, float]) -> Finding:
    numbers = np.array(list(values.values()), np.float64)
    if not len(numbers) or np.isnan(numbers).any():
        return Finding(values, float("nan"), Interval(float("nan"), float("nan")))
    return Finding(values, float(numbers.mean()), bootstrap_interval(numbers))


def _contrast(name: str, first: str, second: str, pairs: Mapping[int, tuple[float, float]]) -> Contrast:
    differences = {seed: a - b for seed, (a, b) in pairs.items()}
    gaps_E = np.array(list(differences.values()), np.float64)
    test = paired_test(gaps_E)
    return Contrast(
        name,
        first,
        second,
        differences,
        float(gaps_E.mean()) if pairs else float("nan"),
        bootstrap_interval(gaps_E),
        test.p,
        test.p,
        test.smallest,
    )


def _num_pairs(results: Results, contrast: Contrast) -> int:
    first, second = ({trial.seed for trial in results.of(arm)} for arm in (contrast.first, contrast.second))
    return len(first & second)


def _why(contrast: Contrast) -> str:
    if contrast.favours == contrast.second:
        return "the difference favours the control" + (", significantly" if contrast.is_significant else "")
    return f"the difference is not significant (p = {contrast.p_holm:.2g} after correction)"
