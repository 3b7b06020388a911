"""SM-2, Leitner's boxes and the expanding gap by hand; their laws are tested in tests/replay/test_spacing.py."""

import pytest

from rllib_srl.contrib.spacings import SM2, Expanding, Leitner
from tests.replay.test_spacing import schedule


def test_sm2_by_hand() -> None:
    # q = 4, 4, 4, 5, 3, 2; 6 * 2.5 = 15, 15 * 2.5 = 37.5, 37.5 * 2.6 = 97.5
    assert schedule(SM2(), [3, 3, 3, 4, 2])[0] == pytest.approx([1, 6, 15, 37.5, 97.5])
    # Hard takes .14 off 2.5 each time: after 9 of them 2.5 - 1.26 = 1.24 is below the floor
    assert schedule(SM2(), [2] * 9)[1]["difficulty"] == 1.3
    assert schedule(SM2(), [3, 3, 3, 4, 2, 1])[1]["difficulty"] == pytest.approx(2.46)
    assert schedule(SM2(), [1, 3, 3, 3])[0] == [1, 1, 6, 15]


def test_leitner_moves_by_boxes(monkeypatch) -> None:
    monkeypatch.setattr(Leitner, "BOXES", (1, 3, 9))
    rule = Leitner()
    assert schedule(rule, [3, 2, 4, 3, 1, 3])[0] == [3, 9, 9, 9, 1, 3]
    assert schedule(rule, [1, 1, 3])[0] == [1, 1, 3]
    # recall falls to the desired one at the interval: .7 takes ln .7 / ln .9 = 3.385281 times as long as .9
    assert schedule(Leitner(desired_retention=0.7), [3])[0] == pytest.approx([3 * 3.385281])


def test_expanding_by_hand() -> None:
    assert schedule(Expanding(), [3] * 4)[0] == [1.5, 2.25, 3.375, 5.0625]
    assert schedule(Expanding(), [1] * 5)[0] == [1] * 5  # never passing: every day
    assert schedule(Expanding(), [3, 3, 1, 3])[0] == [1.5, 2.25, 1, 1.5]
