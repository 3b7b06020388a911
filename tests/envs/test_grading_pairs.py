"""Test that right answers earn 1 and wrong ones 0, over pairs of every class (tests/envs/grading_pairs.py)."""

from __future__ import annotations

from rllib_srl.envs.math.final_answers import graded
from tests.envs.grading_pairs import PAIRS, TABLES

# (gold, turn) of the pairs that are graded wrongly today.
FAILING: set[tuple[str, str]] = set()


def test_the_pairs_are_graded_as_worked_by_hand():
    failing = {
        (gold, turn) for gold, turn, is_right in PAIRS if (graded(gold, turn, deadline_s=20.0).grade or 0.0) != is_right
    }
    assert failing == FAILING


def test_the_pairs_cover_every_class_and_weigh_wrong_answers_as_much_as_right_ones():
    assert len(PAIRS) >= 300 and len({(gold, turn) for gold, turn, _ in PAIRS}) == len(PAIRS)
    assert sum(is_right for *_, is_right in PAIRS) <= len(PAIRS) / 2
    assert all(any(wrong for *_, wrong in table) for table in TABLES.values())
