"""Corrections of predicted recall in whole runs without a model: losses fall on later reviews, resumes are exact."""

from __future__ import annotations

import pytest

from rllib_srl import SRL
from rllib_srl.replay.schedule.spacing import make_spacing
from rllib_srl.replay.schedule.spacing.fitting import predict
from tests.algorithm.test_stub_run import staged_config
from tests.replay.test_correction import loss_of
from tests.small_memory import SCHEDULED

NUM = 40  # iterations; the second domain begins at 30, and the first is forgotten
CORRECTED = {"line": {"recalibrate_every": 4}, "refits": {"refit_every": 12}}


def config_of(directory, every):
    config = staged_config(directory)
    own = {**SCHEDULED, "spacing": {"name": "fsrs", **every}}
    return config.replay(revisit_fraction=0.5, reuse_fraction=0.0, min_buffer_size=4, **own)


def buffer_of(algo):
    return algo.memory._actor.buffer


@pytest.mark.slow
def test_corrected_predictions_lose_less_on_the_reviews_that_follow(ray_here, tmp_path):
    """Each prediction of a log was made before its visit, so all reviews are held out from the fits before them."""
    gains, counts = {}, {}
    for name, every in CORRECTED.items():
        algo = config_of(tmp_path / name, every).build_algo()
        try:
            for _ in range(NUM):
                replay = algo.train()["replay"]
            log, as_set = buffer_of(algo).reviews.log(), make_spacing("fsrs")
            assert buffer_of(algo).recall.rule == as_set or name == "refits"
        finally:
            algo.stop()
        assert replay["recall_log_loss"] == pytest.approx(loss_of(log))
        gains[name] = loss_of(predict(as_set, log)) - loss_of(log)
        counts[name] = (replay["num_recalibrations"], replay["num_refits"])
    assert gains["line"] > 0.03 and counts["line"][0] >= 8 and counts["line"][1] == 0
    assert gains["refits"] > 0.03 and counts["refits"] == (0, 3)


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_its_corrections(ray_here, tmp_path):
    every = {"recalibrate_every": 3, "refit_every": 12}
    algo = config_of(tmp_path / "run", every).build_algo()
    try:
        for _ in range(16):
            algo.train()
        state = buffer_of(algo).recall.correction.get_state()
        path = algo.save_to_path(str(tmp_path / "checkpoint"))
        for _ in range(6):
            algo.train()
        expected = (buffer_of(algo).reviews.rows.tobytes(), buffer_of(algo).recall.correction.get_state())
    finally:
        algo.stop()
    assert state["fitted"] and state["line"] != [0.0, 1.0] and state != expected[1]
    again = SRL.from_checkpoint(path)
    try:
        assert buffer_of(again).recall.correction.get_state() == state
        for _ in range(6):
            again.train()
        found = (buffer_of(again).reviews.rows.tobytes(), buffer_of(again).recall.correction.get_state())
    finally:
        again.stop()
    assert found == expected
