"""The plan of the study of retention: its streams, the settings that it tunes, and what decides."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from scripts import retention_picture
from scripts import retention_study as study
from scripts.retention_study import CONFLICT, SEEDS, SHARED, TASKS, TESTED, Trial


def test_streams_are_of_their_kind_and_always_the_same():
    assert study.draw_stream("conflict", 6001)[:2] == ["registers_4_larger", "registers_6_larger"]
    for kind, (development, proof) in SEEDS.items():
        streams = [study.draw_stream(kind, seed) for seed in (*development, *proof)]
        assert len(set(map(tuple, streams))) > 20
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


def test_the_best_setting_is_frozen_after_one_widening_and_then_proved():
    rows: list[dict[str, Any]] = []
    todo = list(study.missing(rows))
    assert len(todo) == 3 * 16 * 4 and {trial.seed for trial in todo} == {6001, 6002, 7001, 7002}
    best = {"lr": 8e-4, "replay_retain": 1.0}  # on the edge by its rate
    rows += [row(trial, 0.4 + 0.1 * (trial.settings == best)) for trial in todo]
    todo = list(study.missing(rows))
    wider = [trial.settings for trial in todo if trial.arm == TESTED]
    assert wider == [{"lr": 1.6e-3, "replay_retain": weight} for weight in (0.3, 1.0, 3.0, 10.0)] * 4
    rows += [row(trial, 0.3) for trial in todo]
    todo = list(study.missing(rows))
    assert len(todo) == 3 * 24 and {trial.seed for trial in todo} == set(range(7101, 7125))
    assert {tuple(trial.settings.items()) for trial in todo if trial.arm == TESTED} == {tuple(best.items())}
    rows += [row(trial, 0.5) for trial in todo[:-1]]
    assert next(study.proof_table(rows)) == "conflict: trials that are missing: 1; nothing is shown before"


@pytest.mark.parametrize(("gain", "told"), [(0.05, "primary: holds"), (0.015, "primary: missed")])
def test_the_primary_needs_both_controls_and_the_least_mean(gain, told):
    development, proof = SEEDS["conflict"]
    rows = []
    for arm in ("none", "uniform", TESTED):
        settings = study.grid_of(arm)
        tuned = [Trial("conflict", arm, seed, setting) for seed in development for setting in settings]
        rows += [row(trial, 0.4 + 0.1 * (trial.settings == settings[5])) for trial in tuned]
        rows += [row(Trial("conflict", arm, seed, settings[5]), 0.5 + gain * (arm == TESTED)) for seed in proof]
        rows += [row(Trial("conflict", arm, seed, settings[6]), 0.0) for seed in proof]  # not the frozen setting
    table = list(study.proof_table(rows))
    assert told in table
    assert f"{TESTED} - uniform: {gain:+.4f} [{gain:+.4f}, {gain:+.4f}]" in " ".join(table)


@pytest.mark.parametrize("arm", study.ARMS)
def test_the_settings_of_each_arm_are_valid(arm):
    other = study.ARMS[arm].like or arm
    trial = Trial("conflict", arm, 6001, study.grid_of(other)[5])
    settings = study.settings_of(trial, study.draw_stream("conflict", 6001))
    study.build_config(settings).validate()
    num_domains = len(settings["stream"]["domains"] if arm == "joint" else settings["stream"])
    assert num_domains == 5 and settings["lr"] == 2e-4


def test_an_arm_may_take_the_setting_of_another_and_half_of_the_seeds():
    found = {"lr": 2e-4, "replay_retain": 1.0}
    rows = [row(Trial("conflict", "retention", seed, s), 0.4 + 0.1 * (s == found)) for seed in SEEDS["conflict"][0]
            for s in study.grid_of("retention")]  # fmt: skip
    assert study.frozen(rows, "conflict", "retention_60") == (found, [])
    assert study.tokens_of(Trial("conflict", "retention_60", 7101, found)) == 12_000
    assert study.proof_seeds("conflict", "lwf") == tuple(range(7101, 7113))
    assert study.proof_seeds("shared", "cross_entropy") == tuple(range(8101, 8125))


def test_the_picture_is_of_the_seed_with_the_median_gain(tmp_path):
    rows = []
    for at, seed in enumerate(SEEDS["conflict"][1]):
        for arm in ("none", "uniform", TESTED):
            trial = Trial("conflict", arm, seed, {})
            tasks = {"tasks": study.draw_stream("conflict", seed)}
            rows.append({**row(trial, 0.5 + 0.01 * ((at + 5) % 24) * (arm == TESTED)), **tasks})
    assert retention_picture.median_seed(rows) == 7107  # the twelfth of gains 0, .01, ..., .23: .11
    for name in ("one.svg", "two.svg"):
        retention_picture.draw(rows, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert "old answers are held" in (tmp_path / "one.svg").read_text()
