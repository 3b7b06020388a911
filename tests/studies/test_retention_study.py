"""The plans of the study of retention: their streams, the settings that they tune, and what decides."""

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from scripts import retention_picture
from scripts import retention_study as study
from scripts.retention_study import ATTEMPT_3, CHECK, CONFLICT, HELD, PLANS, SHARED, TASKS, TESTED, Trial


def test_streams_are_of_their_kind_and_always_the_same():
    assert study.draw_stream("conflict", 7001)[:2] == ["registers_7_smaller", "registers_4_smaller"]
    for plan in (*PLANS[:2], *ATTEMPT_3):
        kind, streams = plan.kind, [study.draw_stream(plan.kind, seed) for seed in (*plan.development, *plan.table)]
        assert len(set(map(tuple, streams))) > 0.9 * len(streams)
        for order in streams:
            assert len(set(order)) == 5 and set(order) <= set(TASKS)
            pairs = list(combinations(order, 2))
            lost = {a: CONFLICT[a][b] for a, b in pairs if b in CONFLICT.get(a, {})}
            num_spoiled = len({a for a, b in pairs if CONFLICT.get(a, {}).get(b, 0) >= 0.2})
            num_shared = sum(b in SHARED.get(a, ()) for a, b in pairs)
            assert num_spoiled >= 2 if kind == "conflict" else not lost and num_shared >= 2


def row(trial: Trial, final: float) -> dict[str, Any]:
    matrix = np.full((5, 5), final).tolist()
    costs = {"trained_tokens": 100, "held_tokens": 40, "seconds": 2.0}
    return {**trial._asdict(), "final": final, "before": [0.2] * 5, "after": matrix, **costs}


def test_the_best_setting_of_a_tuned_arm_runs_on_the_seeds_of_the_table():
    todo = list(study.missing([]))
    assert {trial.arm for trial in todo} == {"none", "uniform"} and len(todo) == 2 * 12  # others cannot run any more
    rows = [row(trial, 0.5) for trial in todo]
    todo = list(study.missing(rows))
    assert {(trial.kind, trial.arm) for trial in todo} == {("shared", "none")}
    assert {trial.seed for trial in todo} == {8001, 8002} and len(todo) == 4 * 2
    rows += [row(trial, 0.4 + 0.1 * (trial.settings["lr"] == 4e-4)) for trial in todo[:-1]]
    assert list(study.missing(rows)) == todo[-1:]
    rows += [row(todo[-1], 0.3)]
    todo = list(study.missing(rows))
    assert [(trial.arm, trial.settings) for trial in todo[:2]] == [
        ("none", {"lr": 4e-4}), ("uniform", {"replay_revisit_fraction": 0.25}),
    ]  # fmt: skip
    assert len(todo) == 2 * 12 and {trial.seed for trial in todo} == set(range(8101, 8113))


@pytest.mark.parametrize(("gain", "verdict"), [(0.0, "srl is shown"), (-0.03, "srl is not shown")])
def test_the_table_compares_arms_seed_by_seed_and_judges_srl(gain, verdict):
    plan = PLANS[0]
    rows = [
        row(Trial(plan.kind, arm, seed, setting), 0.5 + gain * (arm == "srl"))
        for seed in (*plan.development, *plan.table)
        for arm, grid in plan.grids.items()
        for setting in grid
    ]
    table = "\n".join(study.result_table(rows))
    assert f"srl - {TESTED}: {gain:+.4f} [{gain:+.4f}, {gain:+.4f}], 0 of 12" in table
    assert f"{verdict} to be no worse than {TESTED} by 0.02" in table
    assert "forgetting 0.000, 100 + 40 trained and held tokens, 2 s" in table
    lacking = [each for each in rows if (each["arm"], each["seed"]) != ("uniform", 7112)]
    assert "uniform             " in table and "uniform             " not in "\n".join(study.result_table(lacking))


@pytest.mark.parametrize(("gain", "verdict"), [(0.03, "holds"), (0.01, "missed"), (-0.03, "missed")])
def test_the_third_attempt_asks_for_significance_and_for_two_points(gain, verdict):
    conflict, shared = ATTEMPT_3
    rng = np.random.default_rng(0)
    final = {"none": 0.6, "uniform": 0.7, "cross_entropy": 0.7 + gain}
    rows = [
        row(Trial(plan.kind, arm, seed, setting), final[arm] + rng.normal(0, 0.001) - 0.1 * at)
        for plan in ATTEMPT_3
        for arm, grid in plan.grids.items()
        for at, setting in enumerate(grid)
        for seed in (*plan.development, *plan.table)
    ]
    table = list(study.result_table(rows))
    assert [line.split(":")[1].strip() for line in table if "primary" in line] == [
        verdict, "holds" if gain > -0.02 else "missed",
    ]  # fmt: skip
    assert best_lines(study.tuning_table(rows)) == 5
    assert len(shared.table) == 24 and len(conflict.table) == 48


def test_the_check_compares_on_the_seeds_that_both_arms_have():
    assert [(plan.kind, len(plan.table), list(plan.grids)) for plan in CHECK] == [
        ("conflict", 24, ["uniform_40", HELD, "preset"]),
        ("shared", 24, [HELD, "preset"]),
        ("conflict", 48, ["uniform_40"]),
        ("shared", 24, ["preset_10"]),
        ("conflict", 24, ["constant", "preset_constant"]),
        ("shared", 24, ["constant", "preset_constant"]),
        ("conflict", 24, ["uniform_twice"]),
    ]
    final = {"preset_10": 0.79, "preset": 0.79, HELD: 0.8, "uniform_40": 0.75, "uniform_twice": 0.7}
    final |= {"constant": 0.785, "preset_constant": 0.77}
    rows = [
        row(Trial(plan.kind, arm, seed, setting), final[arm] - 0.1 * at)
        for plan in CHECK
        for arm, grid in plan.grids.items()
        for at, setting in enumerate(grid)
        for seed in (*plan.development, *plan.table)
    ]
    for done in rows:
        done |= {"entropy": 0.1 + done["seed"] % 2, "sampled": {"pass_at_1": 0.5, "pass_at_k": 0.9}}
    table = "\n".join(study.result_table(rows))
    assert table.count(", entropy 0.600, pass@1 0.500, pass@8 0.900") == 12
    assert "held - uniform_40: +0.0500 [+0.0500, +0.0500], 24 of 24" in table
    assert "preset - uniform_40: +0.0400" in table
    assert table.count("preset is shown to be no worse than held by 0.02") == 2
    assert table.count("preset_constant is shown to be no worse than constant by 0.02") == 2
    verdicts = [line for line in table.splitlines() if " constant is " in line]
    assert [line.split(" is ")[1] for line in verdicts] == [
        "not shown to be no worse than held by 0.01", "shown to be no worse than held by 0.02",
    ]  # fmt: skip


def best_lines(table) -> int:
    return sum("attempt 3" in line and "<- best" in line for line in table)


def test_a_trial_that_two_plans_ask_for_runs_once():
    """Attempt 3 tunes on seeds of the other plan's table: at 4e-4 the rows of both are the same."""
    share = {"replay_revisit_fraction": 0.4}
    done = [row(Trial("conflict", "uniform", seed, share), 0.5) for seed in range(7101, 7109)]
    asked = {"lr": 4e-4, **share}
    assert len(study.rows_of(done, asked, ATTEMPT_3[0].development)) == 8
    assert study.rows_of(done, {**asked, "lr": 2e-4}, ATTEMPT_3[0].development) == {}


@pytest.mark.parametrize("arm", [name for name, arm in study.ARMS.items() if not arm.is_former])
def test_the_settings_of_each_arm_are_valid(arm):
    for plan in PLANS:
        for tuned in plan.grids.get(study.ARMS[arm].like or arm, ()):
            settings = study.settings_of(Trial(plan.kind, arm, 1, tuned), study.draw_stream(plan.kind, 1))
            study.build_config(settings).validate()
            assert len(settings["stream"]["domains"] if arm == "joint" else settings["stream"]) == 5
            assert settings["lr"] == tuned.get("lr", 4e-4)


def test_the_picture_is_of_the_seed_with_the_median_gain(tmp_path):
    rows = []
    for at, seed in enumerate(ATTEMPT_3[0].table):
        for arm in ("none", "uniform", "cross_entropy"):
            trial = Trial("conflict", arm, seed, {})
            tasks = {"tasks": study.draw_stream("conflict", seed)}
            rows.append({**row(trial, 0.5 + 0.005 * ((at + 23) % 48) * (arm == "cross_entropy")), **tasks})
    assert retention_picture.median_seed(rows) == 7201  # the 24th of 48 gains 0, .005, ...: .115
    for name in ("one.svg", "two.svg"):
        retention_picture.draw(rows, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert "old answers are held" in (tmp_path / "one.svg").read_text()
