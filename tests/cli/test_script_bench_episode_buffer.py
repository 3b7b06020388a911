"""The comparison of episode buffers in a short mode: every buffer is timed, trains, and has its row in the tables."""

from __future__ import annotations

import math

import pytest

from scripts.bench import episode_buffer


def test_every_buffer_is_timed():
    figures = episode_buffer.speed(num_steps=120, num_draws=4)
    assert list(figures) == list(episode_buffer.BUFFERS)
    assert all(one["draw"] > 0 and one["mean add"] > 0 for one in figures.values())
    assert figures["uniform"]["update"] == 0 < figures["srl, signal"]["update"]
    table = episode_buffer.speed_table({120: {"uniform": {"draw": 1.0, "update": 2.0, "add": 9.0, "mean add": 0.5}}})
    assert table.splitlines()[-1] == "| 120 | uniform | 1.00 | 2.00 | 0.50 | 3.50 |"


def test_the_table_has_paired_differences():
    arms = {
        "prioritised": {"final": [1.0, 2.0, 3.0], "during": [1.0, 1.0, 1.0], "seconds": [4.0, 4.0, 4.0]},
        "srl, signal": {"final": [2.0, 4.0, 6.0], "during": [0.5, 0.5, 2.0], "seconds": [5.0, 5.0, 5.0]},
    }
    *_, base, own = episode_buffer.learning_table({"cartpole": arms}).splitlines()
    assert base == "| cartpole | prioritised | 1 |  |  | 2 |  |  | 4 |"
    assert own.startswith("| cartpole | srl, signal | 1 | +0 (")
    assert " | 1 | 4 | +2 (" in own and own.endswith(" | 0.25 | 5 |")  # p of -.5, -.5, 1 and of 1, 2, 3


@pytest.mark.slow
def test_a_trial_trains_on_the_sparse_task(ray_here):
    found = episode_buffer.train("frozen_lake", episode_buffer.BUFFERS["uniform"], seed=1, steps=500)
    assert set(found) == {"final", "during", "seconds"} and found["seconds"] > 0
    assert found["final"] in (0.0, 1.0) and 0 <= found["during"] <= 1 and not math.isnan(found["during"])
