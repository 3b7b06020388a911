"""The worlds' benchmark: what it counts, its bounds, and a small run of each part."""

from __future__ import annotations

import json

from scripts.bench import envs as bench_envs
from scripts.bench.scripted_engine import Bytes, GoldEngine

COMPARE, REGISTERS = "rllib_srl.envs.math.compare:Compare", "rllib_srl.envs.games.registers:Registers"


def test_turns_are_counted_and_the_fastest_of_the_repeats_counts():
    # Each prompt is played by its gold turns (2 of registers) and by two wrong ones, three turns each.
    times = bench_envs.measure_turns(REGISTERS, {"num_shots": 0}, "", num_prompts=4, num_repeats=2)
    assert len(times.turns_ms) == 4 * (2 + 3 + 3) and len(times.resets_ms) == 4 * 3
    assert all(0 < each < 1000 for each in times.turns_ms) and times.is_met


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


def test_a_small_run_writes_every_figure(tmp_path, capsys):
    argv = ["--worlds", COMPARE, REGISTERS, "--num-prompts", "3", "--num-repeats", "1", "--num-episodes", "12"]
    status = bench_envs.main([*argv, "--no-sandbox", "--no-grading", "--json", str(tmp_path / "figures.json")])
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [world["world"] for world in figures["worlds"]] == [COMPARE, REGISTERS]
    assert figures["crowd"]["num_episodes"] == 12 and figures["crowd"]["num_wrong"] == 0
    said = capsys.readouterr().out
    assert "event-loop lag" in said and "rewarded 1: 12 of 12" in said
    assert status == (0 if "MISSED" not in said else 1)
