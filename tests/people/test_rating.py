"""Moving moments of ratings, by hand and in the long run; rewards of schemes are in test_rating_store.py."""

from __future__ import annotations

from statistics import pvariance

import numpy as np
import pytest

from rllib_srl.people.rating import Moving


def test_a_moving_mean_and_variance_by_hand():
    moving = Moving(momentum=0.5)
    assert moving.normalised(5) == pytest.approx(2 / 2**0.5)  # against mean 3, variance 2
    assert (moving.mean, moving.variance) == (4.0, 0.5 * (2 + 0.5 * 4))  # d = 2
    assert moving.normalised(1) == pytest.approx(-3 / 2**0.5)


def test_in_the_long_run_both_are_those_of_the_ratings():
    moving, stars = Moving(0.999), np.random.default_rng(0).integers(1, 6, 20_000).tolist()
    normalised = [moving.normalised(each) for each in stars]
    assert moving.mean == pytest.approx(3, abs=0.15) and moving.variance == pytest.approx(2, abs=0.15)
    assert sum(normalised[-5000:]) / 5000 == pytest.approx(0, abs=0.1)
    assert pvariance(normalised[-5000:]) == pytest.approx(1, abs=0.1)
