"""Moving moments of ratings, by hand and in the long run; rewards of schemes are in test_rating_store.py."""

from __future__ import annotations

import pytest

from rllib_srl.people.rating import Moving


def test_a_moving_mean_and_variance_by_hand():
    moving = Moving(momentum=0.5)
    assert moving.normalised(5) == pytest.approx(2 / 2**0.5)  # against mean 3, variance 2
    assert (moving.mean, moving.variance) == (4.0, 0.5 * (2 + 0.5 * 4))  # d = 2
    assert moving.normalised(1) == pytest.approx(-3 / 2**0.5)
