"""scripts/retention.py: the chance of signal by hand, what the simulation must show, and the table."""

from __future__ import annotations

import numpy as np
import pytest

from rllib_srl.replay.schedule.spacing import make_spacing
from scripts import retention
from scripts.retention import LEARNERS, Learner, signal, simulate

SIZES = {"num_items": 60, "iterations": 90, "group_size": 8, "seed": 1}


def test_the_chance_of_signal_is_that_of_the_design() -> None:
    assert [round(signal(p, 8), 2) for p in (0.0, 0.5, 0.9, 0.99, 1.0)] == [0, 0.99, 0.57, 0.08, 0]
    generator = np.random.default_rng(0)
    right = generator.binomial(8, 0.8, 100_000)
    assert signal(0.8, 8) == pytest.approx(((right > 0) & (right < 8)).mean(), abs=0.01)


@pytest.mark.parametrize("learner", LEARNERS, ids=lambda learner: learner.name)
def test_learners_keep_nine_tenths_for_a_stability(learner: Learner) -> None:
    np.testing.assert_allclose(learner.kept(np.array([0.0, 1.0])), [1.0, 0.9])
    assert (np.diff(learner.kept(np.linspace(0, 50, 20))) < 0).all()


def test_waiting_longer_gives_more_signal_and_less_recall() -> None:
    often, seldom = (simulate(LEARNERS[0], make_spacing("leitner", r), **SIZES) for r in (0.95, 0.5))
    assert often.reviews_per_item > seldom.reviews_per_item
    assert often.recall > seldom.recall and often.pass_rate > seldom.pass_rate
    assert often.signal < seldom.signal


def test_a_rule_without_intervals_visits_every_iteration() -> None:
    outcome = simulate(LEARNERS[0], make_spacing("none"), num_items=1, iterations=30, group_size=8, seed=0)
    assert outcome.reviews_per_item == 30
    never = simulate(LEARNERS[0], make_spacing("fixed", interval=1e3), num_items=1, iterations=30, group_size=8, seed=0)
    assert never.reviews_per_item == 1 and np.isnan(never.signal)


def test_one_item_is_simulated_as_by_hand() -> None:
    person = Learner("person", needs_signal=False)
    outcome = simulate(person, make_spacing("fixed", interval=30), num_items=1, iterations=60, group_size=8, seed=0)
    generator = np.random.default_rng(0)
    base, s = generator.beta(1, 4), 8 * np.exp(generator.normal(0, 0.7))
    first = base + 0.7 * (1 - base)  # taught at 0, when stability becomes 1.6 s, and at 30
    recall = base + (first - base) * 0.9 ** (30 / (1.6 * s))
    second = recall + 0.7 * (1 - recall)
    held = base + (second - base) * 0.9 ** (np.arange(10, 30) / (1.6**2 * s))
    assert outcome.recall == pytest.approx(recall) and outcome.pass_rate == pytest.approx(held.mean())
    assert outcome.reviews_per_item == 2


def test_a_group_without_signal_teaches_a_person_only() -> None:
    person = Learner("person", needs_signal=False)
    alone = {**SIZES, "group_size": 1}  # one episode never differs from itself
    taught, untaught = (simulate(learner, make_spacing("fixed"), **alone) for learner in (person, LEARNERS[0]))
    assert untaught.pass_rate < 0.35 < 0.8 < taught.pass_rate
    assert untaught.signal == taught.signal == 0


def test_the_table(capsys: pytest.CaptureFixture) -> None:
    assert retention.main(["--rules", "sm2", "none", "--items", "20", "--iterations", "30"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "0.57 at 0.9" in lines[0]
    rows = [line.split() for line in lines[2:10]]
    assert rows[0][:6] == ["grpo,", "exponential", "forgetting:", "20", "items,", "30"]
    assert rows[1][:3] == ["rule", "retention", "reviews/item"]
    assert [row[:2] for row in rows[2:]] == [["sm2", f"{r:g}"] for r in retention.RETENTIONS]
    assert len([line for line in lines if line.split()[:2] == ["none", "-"]]) == len(LEARNERS)
