"""Curves and measures of a trial, worked by hand on a stream of two domains, and the accuracy of first answers."""

import math
from pathlib import Path

import numpy as np
import pytest

from rllib_srl.studies.contrasts import curve_of
from rllib_srl.studies.measures import COSTS, MEASURES, measure
from rllib_srl.studies.online import FirstAnswers
from rllib_srl.studies.records import Evaluation, Trial
from rllib_srl.studies.study import Arm, Domain, Primary, Study
from rllib_srl.types import GroupMeta, Prompt, StopReason

STUDY = Study(
    "two", "Which is better?", "a", (Arm("a", "A", ""), Arm("b", "B", "")), (Domain("x", 0), Domain("y", 1)), 2, (1,),
    400, Primary("a", ("b",)),
)  # fmt: skip
#          stage, iteration, tokens, accuracy of x and y
POINTS = [
    (-1, 0, 0, 0.1, 0.2),
    (0, 1, 100, 0.5, 0.2),
    (0, 2, 200, 0.8, 0.3),  # R[0] = .8 .3
    (1, 3, 300, 0.6, 0.6),
    (1, 4, 400, 0.4, 0.9),  # R[1] = .4 .9
]


def trial_of(points=POINTS):
    evaluations = [
        Evaluation(STUDY.fingerprint, stage, iteration, {"y": y, "x": x}, tokens, 2 * tokens, tokens / 10,
                   7 * (iteration + 1), 0.0, 1000 + iteration % 3,
                   {"x": {"pass_at_4": x}, "y": {"pass_at_4": y}})
        for stage, iteration, tokens, x, y in points
    ]  # fmt: skip
    return Trial("a", 1, tuple(evaluations), True, Path("a--1.jsonl"))


def test_the_matrix_is_cut_at_the_ends_of_stages():
    curve = curve_of(trial_of(), STUDY)
    assert np.array_equal(curve.accuracy_SC, [[0.8, 0.3], [0.4, 0.9]])
    assert np.array_equal(curve.before_C, [0.1, 0.2])
    assert curve.average_I() == pytest.approx([0.15, 0.35, 0.55, 0.6, 0.65])
    assert curve.remembered_from() == {0: 2}


def test_every_measure_by_hand():
    found = measure(curve_of(trial_of(), STUDY))
    expected = {
        "average_accuracy": 0.65,  # (.4 + .9) / 2
        "retention_area": 0.6,  # (100 (.8 + .6) / 2 + 100 (.6 + .4) / 2) / 200
        "forgetting": 0.4,  # .8 - .4
        "backward_transfer": -0.4,
        "forward_transfer": 0.1,  # .3 - .2
        "plasticity": 0.65,  # ((.8 - .1) + (.9 - .3)) / 2
        "accuracy_area": 0.475,  # (.25 + .45 + .575 + .625) / 4, the means of neighbouring averages
        "num_generated_tokens": 400, "num_trained_tokens": 800, "seconds": 40, "peak_bytes": 1002,
        "num_probe_tokens": 35, "pass_at_4": 0.65,
    }  # fmt: skip
    assert math.isnan(found.pop("online_accuracy"))  # nothing was counted
    assert found == pytest.approx(expected)
    assert set(MEASURES) | set(COSTS) <= {*expected, "online_accuracy"}


def test_without_a_first_evaluation_what_needs_it_is_unknown():
    found = measure(curve_of(trial_of(POINTS[1:]), STUDY))
    unknown = {name for name, value in found.items() if math.isnan(value)}
    assert unknown == {"forward_transfer", "plasticity", "online_accuracy"}
    assert found["forgetting"] == pytest.approx(0.4)


def test_a_stage_without_an_evaluation_is_named():
    with pytest.raises(ValueError, match=r"a--1\.jsonl: no evaluation of the stages \[1\]"):
        curve_of(trial_of(POINTS[:3]), STUDY)


def meta(prompt_id: str, rewards: list[float], domain: str = "a", origin: str = "fresh", **fields) -> GroupMeta:
    num = len(rewards)
    ones, versions = np.ones(num, np.int64), np.zeros((num, 2), np.int64)
    reasons = (StopReason.TERMINATED,) * num
    prompt = Prompt("env", prompt_id, domain)
    rewards_G = np.array(rewards, np.float32)
    return GroupMeta(prompt_id, prompt, rewards_G, ones, ones, versions, reasons, 0, origin, None, **fields)


def test_the_answers_of_a_prompt_count_as_one_and_only_at_its_first_play() -> None:
    first = FirstAnswers()
    first.add([meta("1", [1, 1, 0, 0]), meta("2", [1, 1, 1, 1])])
    first.add([meta("1", [1, 1, 1, 1]), meta("3", [0, 0, 0, 0.5])])  # 1 again: a later pass
    first.add([meta("9", [1, 1], origin="revisit"), meta("7", [0], "b", has_reward_G=np.zeros(1, bool))])
    first.add([meta("8", [1], "b")])
    of_a = {"online_accuracy": (0.5 + 1 + 0) / 3, "online_prompts": 3.0}
    assert first.measures() == {"a": of_a, "b": {"online_accuracy": 1.0, "online_prompts": 1.0}}
