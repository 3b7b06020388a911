"""The plan of the study of retention: its streams, the settings that it tunes, and what decides."""

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from scripts import retention_picture
from scripts import retention_study as study
from scripts.retention_study import CONFLICT, SEEDS, SHARED, TASKS, TESTED, Trial


def test_streams_are_of_their_kind_and_always_the_same():
    assert study.draw_stream("conflict", 7001)[:2] == ["registers_7_smaller", "registers_4_smaller"]
    for kind, (development, proof) in SEEDS.items():
        streams = [study.draw_stream(kind, seed) for seed in (*development, *proof)]
        assert len(set(map(tuple, streams))) == 14
        for order in streams:
            assert len(set(order)) == 5 and set(order) <= set(TASKS)
            pairs = list(combinations(order, 2))
            lost = {a: CONFLICT[a][b] for a, b in pairs if b in CONFLICT.get(a, {})}
            num_spoiled = len({a for a, b in pairs if CONFLICT.get(a, {}).get(b, 0) >= 0.2})
            num_shared = sum(b in SHARED.get(a, ()) for a, b in pairs)
            assert num_spoiled >= 2 if kind == "conflict" else not lost and num_shared >= 2


def row(trial: Trial, final: float) -> dict[str, Any]:
    matrix = np.full((5, 5), final).tolist()
    costs = {"trained_tokens": 100, "seconds": 1.0}
    return {**trial._asdict(), "final": final, "before": [0.2] * 5, "after": matrix, **costs}


def test_the_best_setting_of_a_tuned_arm_runs_on_the_seeds_of_the_table():
    rows: list[dict[str, Any]] = []
    todo = list(study.missing(rows))
    assert {trial.arm for trial in todo} == {"srl"} and {trial.seed for trial in todo} == {7001, 7002}
    assert len(todo) == 4 * 2
    rows += [row(trial, 0.4 + 0.1 * (trial.settings["replay_revisit_fraction"] == 0.4)) for trial in todo[:-1]]
    assert list(study.missing(rows)) == todo[-1:]
    rows += [row(todo[-1], 0.3)]
    todo = list(study.missing(rows))
    assert [(trial.arm, trial.settings) for trial in todo[:4]] == [
        ("none", {"lr": 2e-4}),
        ("uniform", {"replay_revisit_fraction": 0.4}),
        (TESTED, {"replay_retain": 3.0}),
        ("srl", {"replay_revisit_fraction": 0.4}),
    ]
    assert len(todo) == 4 * 12 and {trial.seed for trial in todo} == set(range(7101, 7113))
    rows += [row(trial, 0.5) for trial in todo]
    assert next(study.missing(rows)).kind == "shared"


@pytest.mark.parametrize(("gain", "verdict"), [(0.0, "srl is shown"), (-0.03, "srl is not shown")])
def test_the_table_compares_arms_seed_by_seed_and_judges_srl(gain, verdict):
    rows = [row(trial, 0.5) for trial in study.missing([])]
    done = [row(trial, 0.5 + gain * (trial.arm == "srl")) for trial in study.missing(rows)]
    table = "\n".join(study.result_table(rows + done))
    assert f"srl - {TESTED}: {gain:+.4f} [{gain:+.4f}, {gain:+.4f}], 0 of 12" in table
    assert f"{verdict} to be no worse than {TESTED} by 0.02" in table
    assert "uniform             " not in "\n".join(study.result_table(rows + done[4:]))  # its first seed is missing


@pytest.mark.parametrize("arm", study.ARMS)
def test_the_settings_of_each_arm_are_valid(arm):
    tuned = study.grid_of("shared", study.ARMS[arm].like or arm)[0]
    settings = study.settings_of(Trial("shared", arm, 8001, tuned), study.draw_stream("shared", 8001))
    study.build_config(settings).validate()
    num_domains = len(settings["stream"]["domains"] if arm == "joint" else settings["stream"])
    assert num_domains == 5 and settings["lr"] == (1e-4 if arm in ("none", "joint") else 4e-4)


def test_the_picture_is_of_the_seed_with_the_median_gain(tmp_path):
    rows = []
    for at, seed in enumerate(SEEDS["conflict"][1]):
        for arm in ("none", "uniform", TESTED):
            trial = Trial("conflict", arm, seed, {})
            tasks = {"tasks": study.draw_stream("conflict", seed)}
            rows.append({**row(trial, 0.5 + 0.01 * ((at + 5) % 12) * (arm == TESTED)), **tasks})
    assert retention_picture.median_seed(rows) == 7101  # the sixth of gains 0, .01, ..., .11: .05
    for name in ("one.svg", "two.svg"):
        retention_picture.draw(rows, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert "old answers are held" in (tmp_path / "one.svg").read_text()
