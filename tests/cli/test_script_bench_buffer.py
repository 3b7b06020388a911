"""The benchmark of the buffer in a short mode: all sides draw the same work, and its figures belong together."""

from __future__ import annotations

import builtins
import json
from dataclasses import replace
from statistics import median

import numpy as np
import pytest

from scripts.bench import buffer as bench_buffer
from scripts.bench import buffer_against, buffer_sides, buffer_sizes
from scripts.bench.buffer_sides import Batch, Cpprb, Ours, RLlibTokens, RLlibTurns, made_group

PLAN = replace(bench_buffer.SHORT, num_stored=4, num_drawn=(1, 2), num_tokens=12, num_iterations=3)


@pytest.fixture
def groups():
    generator = np.random.default_rng(0)
    return [made_group(number, 2, 12, generator) for number in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Ours, RLlibTurns, Cpprb])
def test_what_a_side_draws_are_whole_episodes_that_were_stored(kind, groups, tmp_path):
    if kind is Cpprb:
        pytest.importorskip("cpprb")
    side = kind(groups, str(tmp_path)) if kind is Ours else kind(groups)
    batch = Batch.of(8, 12)
    assert side.copy(side.take(4), batch) == 8 * 12
    stored = {
        (group.stream(g).tobytes(), group.behaviour_logp_N[12 * g : 12 * g + 12].tobytes(), float(group.rewards_G[g]))
        for group in groups
        for g in range(2)
    }
    drawn = [(batch.ids_BT[b].tobytes(), batch.logp_BT[b].tobytes(), float(batch.rewards_B[b])) for b in range(8)]
    assert set(drawn) <= stored
    assert np.array_equal(batch.mask_BT, np.tile(groups[0].loss_mask_N[:12], (8, 1)))
    if kind is Ours:  # groups are whole and distinct; the others draw rows, some twice
        assert set(drawn) == stored
    side.close()


@pytest.mark.slow
def test_rows_of_tokens_are_tokens_that_were_stored(groups):
    side, batch = RLlibTokens(groups), Batch.of(2, 12)
    num = side.copy(side.take(1), batch)
    assert num == 24
    columns = (groups[0].token_ids_N, groups[0].loss_mask_N, groups[0].behaviour_logp_N)
    stored = set(zip(*(column.tolist() for column in columns)))
    assert set(zip(batch.ids_BT.ravel().tolist(), batch.mask_BT.ravel().tolist(), batch.logp_BT.ravel().tolist())) <= (
        stored
    )


@pytest.mark.slow
def test_a_journal_that_was_filled_in_bulk_is_a_valid_buffer(tmp_path):
    buffer_sizes.fill(tmp_path, 300)
    buffer = buffer_sizes.opened(tmp_path, 300)
    calls = buffer_sizes.calls(buffer, 300)
    times, drawn = next(calls)
    assert set(times) == set(buffer_sizes.CALLS) and all(wall > 0 and cpu >= 0 for wall, cpu in times.values())
    assert len(drawn) == buffer_sizes.NUM_VISITS + buffer_sizes.NUM_REUSES
    assert len(buffer) == 312 and buffer.counts["num_revisits"] == 4 and buffer.counts["num_rated"] == 16
    buffer.check_valid()
    buffer.close()


@pytest.mark.slow
def test_all_sections_run_and_their_figures_belong_together(ray_here, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_buffer, "SHORT", replace(PLAN, num_small=200, num_large=400, megabytes=1))
    monkeypatch.setattr(bench_buffer, "start_ray", lambda verbose: None)  # it runs
    monkeypatch.setattr(buffer_sides.RLlibTokens, "MOST", 16)
    monkeypatch.setattr(buffer_sides, "InActor", lambda kind, groups: kind(groups))  # a process takes seconds to start
    path = tmp_path / "figures.json"
    status = bench_buffer.main(["--short", "--model", "tiny", "--directory", str(tmp_path), "--json", str(path)])
    printed, figures = capsys.readouterr().out, json.loads(path.read_text())
    assert status == (0 if all(figures["is_met"].values()) else 1) and set(figures["is_met"]) == set(
        bench_buffer.SECTIONS
    )
    last = figures["draw"][-1]["rates"]
    ratios = np.divide(last["ours"], last["rllib"])
    assert f"ours over rllib: {median(ratios):.2f} " in printed
    assert {len(rates) for rates in last.values()} == {PLAN.num_repeats}
    assert 152 <= figures["size"]["state_bytes"] <= 440 and figures["size"]["prompt_bytes"] > 100
    assert len(figures["iteration"]["busy"]) == 3 and figures["iteration"]["num_tokens"] > 100
    busy = [sum(parts) for parts in zip(*figures["iteration"]["parts"].values())]
    assert figures["iteration"]["busy"] == pytest.approx(busy)
    assert all(b <= w for b, w in zip(busy, figures["iteration"]["waited"]))
    assert f"{'met' if figures['is_met']['iteration'] else 'MISSED'}" in printed


@pytest.mark.slow
def test_a_rival_that_is_missing_is_left_out_and_named(groups, tmp_path, ray_here, monkeypatch):
    real = builtins.__import__

    def without_cpprb(name, *given, **kwargs):
        if name == "cpprb":
            raise ImportError("no cpprb here")
        return real(name, *given, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_cpprb)
    monkeypatch.setattr(buffer_sides, "OursInActor", lambda groups, directory: None)
    monkeypatch.setattr(buffer_sides, "InActor", lambda kind, groups: None)
    said: list[str] = []
    sides = bench_buffer.sides_of(groups, str(tmp_path), said.append)
    assert "cpprb is left out: no cpprb here; expected `pip install cpprb`" in said[0]
    names = {"ours", "rllib", "rllib, a row a token"}
    assert set(sides) == names | {f"{name}, actor" for name in names}
    sides["ours"].close()


@pytest.mark.slow
def test_two_checkouts_draw_the_same_and_their_times_stand_side_by_side(tmp_path, capsys):
    buffer_against.main(["HEAD", "--sizes", "300", "--iterations", "2", "--directory", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| 300")]
    assert [row[1] for row in rows] == [*buffer_sizes.CALLS[:2], "add", "review", "all"]
    assert all(float(value) > 0 for row in rows for value in row[2:])
    assert list(tmp_path.iterdir()) == []
