"""The worlds' benchmark: what it counts, its bounds, and a small run of each part."""

from __future__ import annotations

import json

import pytest

from scripts.bench import envs as bench_envs
from scripts.bench.envs import Crowd, Grading, Times
from scripts.bench.scripted_engine import Bytes, GoldEngine

COMPARE, REGISTERS = "rllib_srl.envs.math.compare:Compare", "rllib_srl.envs.games.registers:Registers"


def test_turns_are_counted_and_the_fastest_of_the_repeats_counts():
    # Each prompt is played by its gold turns (2 of registers) and by two wrong ones, three turns each.
    times = bench_envs.measure_turns(REGISTERS, {"num_shots": 0}, "", num_prompts=4, num_repeats=2)
    assert len(times.turns_ms) == 4 * (2 + 3 + 3) and len(times.resets_ms) == 4 * 3
    assert all(0 < each < 1000 for each in times.turns_ms) and times.is_met


def test_a_bound_is_held_in_the_99th_percentile():
    fast, slow = [0.1] * 1000, [0.1] * 900 + [2.5] * 100
    assert Times("w", fast, [1.0], "").is_met and not Times("w", slow, [1.0], "").is_met
    assert Times("w", slow, [1.0], "a foreign game").is_met
    assert Times("w", slow, [1.0], "").row()[-1] == "MISSED"
    assert Times("w", slow, [1.0], "a foreign game").row()[-1] == "(a foreign game)"


def test_lag_is_what_passes_between_steps_while_something_is_written(monkeypatch):
    clock = iter([10.0, 10.5, 10.6])
    monkeypatch.setattr("scripts.bench.scripted_engine.time.perf_counter", lambda: next(clock))
    engine = GoldEngine(Bytes(), {"g": ["ab", "c"]})
    engine.submit("g/0/0", [1], None)
    assert engine.step() == [] and engine.lags_s == []  # the first step follows none; stood since 10.0
    (turn,) = engine.step()  # 0.5 s later; nothing is being written after it, so what comes next is no lag
    assert (turn.text, turn.token_ids.tolist(), engine.lags_s) == ("ab", [97, 98], [0.5])
    engine.submit("g/0/1", [1], None)
    assert [turn.text for turn in engine.step()] == ["c"] and engine.lags_s == [0.5]


def test_a_late_loop_or_a_wrong_reward_is_a_miss():
    single = Crowd(4, 1.0, [0.1])
    lines = "\n".join(bench_envs.crowd_lines(Crowd(8, 2.0, [1.0, 50.0], worlds=["w"]), single))
    assert "worst 50.00 ms" in lines and lines.endswith("at most 100 ms: met") and "rewarded 1: 8 of 8" in lines
    assert bench_envs.crowd_lines(Crowd(8, 2.0, [101.0]), single)[-1].endswith("MISSED")
    assert bench_envs.crowd_lines(Crowd(8, 2.0, [1.0], num_wrong=1), single)[-1].endswith("MISSED")


def test_a_hostile_grading_that_is_late_or_a_wrong_grade_is_a_miss():
    fine = Grading([1.0, 1900.0], [2.0], [3.0], num_late=1)
    assert fine.is_met and fine.lines()[-1].endswith("1 late, 0 workers lost, 0 wrong; hostile p99 at most 2 s: met")
    assert "hostile p50 950.5 ms, p99 1881.0 ms (2); ordinary, alone p50 2.0 ms" in fine.lines()[0]
    for bad in (Grading([2100.0], [2.0], [3.0]), Grading([1.0], [2.0], [3.0], num_wrong=1),
                Grading([1.0], [2.0], [3.0], num_workers_lost=2)):  # fmt: skip
        assert not bad.is_met and bad.lines()[-1].endswith("MISSED")


def test_a_small_run_writes_every_figure(tmp_path, capsys):
    argv = ["--worlds", COMPARE, REGISTERS, "--num-prompts", "3", "--num-repeats", "1", "--num-episodes", "12"]
    status = bench_envs.main([*argv, "--no-sandbox", "--no-grading", "--json", str(tmp_path / "figures.json")])
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [world["world"] for world in figures["worlds"]] == [COMPARE, REGISTERS]
    assert figures["crowd"]["num_episodes"] == 12 and figures["crowd"]["num_wrong"] == 0
    said = capsys.readouterr().out
    assert "event-loop lag" in said and "rewarded 1: 12 of 12" in said
    assert status == (0 if "MISSED" not in said else 1)


def test_an_unmet_bound_is_the_exit_status(monkeypatch, capsys):
    monkeypatch.setattr(bench_envs, "MOST_TURN_MS", 0.0)
    argv = ["--worlds", COMPARE, "--num-prompts", "1", "--num-repeats", "1", "--num-episodes", "0"]
    assert bench_envs.main([*argv, "--no-sandbox", "--no-grading"]) == 1
    assert "MISSED" in capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(bench_envs.NEEDED))
def test_settings_that_worlds_need_make_them(name):
    from tests.envs import world_table

    if name in world_table.entry_points():
        world_table.made(world_table.entry_points()[name], world_table.Row(bench_envs.NEEDED[name])).close()
