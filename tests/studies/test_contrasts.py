"""From results to a verdict: by hand on made-up findings, and on a synthetic study whose truth is known."""

from dataclasses import replace

import numpy as np
import pytest

from rllib_srl.studies.contrasts import Finding, contrasts_of, curves_of, findings_of, verdict_of, warnings_of
from rllib_srl.studies.records import read_results
from rllib_srl.studies.seeds import Interval
from tests.studies.synthetic import small_study, write_synthetic


@pytest.fixture(scope="module")
def whole(written):
    results = read_results(written)
    curves = curves_of(results)
    return results, curves, findings_of(curves)


def finding(**values):
    return Finding({int(seed[1:]): value for seed, value in values.items()}, 0.0, Interval(0, 0))


def test_a_contrast_pairs_by_seed_and_corrects_for_its_family():
    ours = {"average_accuracy": finding(s1=0.5, s2=0.6, s3=0.7, s4=0.9), "forgetting": finding(s1=0.1, s2=0.1, s3=0.2)}
    theirs = {"average_accuracy": finding(s2=0.5, s3=0.5, s4=0.5), "forgetting": finding(s1=0.2, s2=0.3, s3=0.1)}
    accuracy, forgot = contrasts_of({"a": ours, "b": theirs}, "a", ["b"], ["average_accuracy", "forgetting"])
    assert accuracy.differences == pytest.approx({2: 0.1, 3: 0.2, 4: 0.4})
    assert accuracy.mean == pytest.approx(0.7 / 3) and accuracy.favours == "a"
    assert accuracy.p == 0.25 and accuracy.p_holm == 0.5  # 2 of 2^3 patterns; twice that for two comparisons
    assert accuracy.smallest_p_holm == 0.5 and not accuracy.is_significant
    assert forgot.favours == "a"  # forgetting -.1, -.2, +.1: lower is better


@pytest.mark.slow
def test_the_verdict_of_a_study_whose_truth_is_known(whole):
    results, _, findings = whole
    verdict = verdict_of(results, findings)
    assert verdict.holds is True and not verdict.reasons and len(verdict.contrasts) == 6
    assert {c.p_holm for c in verdict.contrasts} == {6 * 2 / 1024}  # all at the least there is, six of them
    lowest = next(c for c in verdict.contrasts if c.measure == "average_accuracy" and c.second == "uniform")
    assert 0.05 < lowest.interval.low < lowest.mean < lowest.interval.high < 0.15


@pytest.mark.slow
def test_the_other_way_round_it_fails_and_says_why(whole):
    results, _, findings = whole
    primary = replace(results.study.primary, treatment="no_replay", controls=("extra_epochs", "srl"))
    verdict = verdict_of(replace(results, study=replace(results.study, primary=primary)), findings)
    assert verdict.holds is False and len(verdict.reasons) == 4
    assert verdict.reasons[0].startswith("final accuracy against extra epochs: the difference is not significant")
    assert verdict.reasons[1].endswith("against SRL + diversity: the difference favours the control, significantly")


def test_an_unfinished_or_small_study_decides_nothing(tmp_path, quick):
    study = small_study(seeds=range(4), arms=("srl", "no_replay"))
    results = read_results(write_synthetic(tmp_path, study, skip=[("srl", 2)]))
    findings = findings_of(curves_of(results))
    verdict = verdict_of(results, findings)
    assert verdict.holds is None
    assert verdict.reasons[0] == "SRL + diversity: 1 of 4 trials are not finished"
    assert "3 pairs of trials are too few" in verdict.reasons[1] and "0.5" in verdict.reasons[1]  # 2 * 2 / 2^3
    assert set(findings["srl"]["forgetting"].values) == {0, 1, 3}
    text = "\n".join(warnings_of(results, findings))
    assert "SRL + diversity: no finished trial with seed 2" in text and "4 runs per arm are too few" in text


def test_missed_budgets_are_said(whole):
    results, _, findings = whole
    assert warnings_of(results, findings) == []
    doubled = replace(results, study=replace(results.study, budget=2 * results.study.budget))
    assert "the budget of generated tokens was not met: 50% with seed 1" in warnings_of(doubled, findings)[0]


def test_a_measure_that_is_missing_in_a_run_is_unknown_and_undecided(whole):
    results, _, findings = whole
    known = findings["srl"]["retention_area"]
    broken = {**findings["srl"], "retention_area": replace(known, values={**known.values, 1: float("nan")})}
    verdict = verdict_of(results, {**findings, "srl": broken})
    assert verdict.holds is None and verdict.reasons == ("retention is missing for some trials",)
    assert all(np.isfinite(c.mean) for c in verdict.contrasts)
