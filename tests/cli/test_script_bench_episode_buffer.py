"""The comparison of episode buffers in a short mode: every buffer is timed, trains, and has its row in the tables."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rllib_srl.replay import SRLEpisodeReplayBuffer
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
@pytest.mark.parametrize("arm", ["srl, signal", "srl, due dates"])
def test_a_trial_trains_on_the_sparse_task(arm, ray_here, monkeypatch):
    sent, update = [], SRLEpisodeReplayBuffer.update_priorities

    def watched(buffer, priorities, *args, **kwargs):
        sent.append((buffer._schedule.settings.selection, len(priorities), bool(np.isfinite(priorities).all())))
        return update(buffer, priorities, *args, **kwargs)

    monkeypatch.setattr(SRLEpisodeReplayBuffer, "update_priorities", watched)
    found = episode_buffer.train("frozen_lake", episode_buffer.BUFFERS[arm], seed=1, steps=500)
    rule = {"srl, signal": "signal", "srl, due dates": "srl"}[arm]
    assert sent == [(rule, 32, True)] * 76  # one after each fragment of four steps, from step 200 to step 500
    assert set(found) == {"final", "during", "seconds"} and found["seconds"] > 0
    assert found["final"] in (0.0, 1.0) and 0 <= found["during"] <= 1 and not math.isnan(found["during"])
