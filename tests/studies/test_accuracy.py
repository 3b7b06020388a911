"""Measures of an accuracy matrix, worked by hand on the one drawn in accuracy.py."""

import numpy as np
import pytest

from rllib_srl.studies.accuracy import (
    NEVER,
    average_accuracy,
    backward_transfer,
    final_parts,
    forgetting,
    forward_transfer,
    plasticity,
    retention_area,
)

BEFORE = np.array([0.1, 0.2, 0.1])
R = np.array([[0.9, 0.3, 0.1], [0.7, 0.8, 0.2], [0.6, 0.7, 0.9]])
IN_ORDER = np.arange(3)


def test_the_matrix_of_the_docstring():
    assert average_accuracy(R, IN_ORDER) == pytest.approx(2.2 / 3)  # (.6 + .7 + .9) / 3
    assert backward_transfer(R, IN_ORDER) == pytest.approx(-0.2)  # ((.6 - .9) + (.7 - .8)) / 2
    assert forward_transfer(R, IN_ORDER, BEFORE) == pytest.approx(0.1)  # ((.3 - .2) + (.2 - .1)) / 2
    assert forgetting(R, IN_ORDER) == pytest.approx(0.2)  # ((.9 - .6) + (.8 - .7)) / 2
    assert plasticity(R, IN_ORDER, BEFORE) == pytest.approx(2 / 3)  # ((.9 - .1) + (.8 - .3) + (.9 - .2)) / 3


def test_forgetting_counts_from_the_best_and_backward_transfer_from_the_own_stage():
    # domain 0 still rises after its stage: .5, .8, .6; domain 1: -, .7, .7
    risen = np.array([[0.5, 0.0], [0.8, 0.7], [0.6, 0.7]])
    taught = np.array([0, 1])
    assert forgetting(risen, taught) == pytest.approx(0.1)  # ((.8 - .6) + (.7 - .7)) / 2
    assert backward_transfer(risen, taught) == pytest.approx(0.05)  # ((.6 - .5) + (.7 - .7)) / 2
    lost_early = np.array([[0.5, 0.9], [0.5, 0.6], [0.5, 0.6]])  # a best from before a domain was taught
    assert forgetting(lost_early, taught) == pytest.approx(0.0)
    one = np.array([[0.5]]), np.array([0])  # nothing to average
    assert np.isnan(backward_transfer(*one)) and np.isnan(forgetting(*one))


def test_a_domain_that_is_never_taught_counts_in_forward_transfer_alone():
    taught = np.array([0, 1, NEVER])
    assert average_accuracy(R, taught) == pytest.approx(0.65)  # (.6 + .7) / 2
    assert forward_transfer(R, taught, BEFORE) == pytest.approx(0.45)  # ((.3 - .2) + (.9 - .1)) / 2
    assert plasticity(R, taught, BEFORE) == pytest.approx(0.65)  # ((.9 - .1) + (.8 - .3)) / 2
    assert forgetting(R, taught) == pytest.approx(0.2)


def test_all_that_does_not_fit_is_named():
    with pytest.raises(ValueError, match=r"learned_at_C has shape \(2,\), accuracy_SC 3 domains"):
        average_accuracy(R, np.array([0, 1]))
    with pytest.raises(ValueError, match=r"(?s)expected stages from 0 to 2.*before_C has shape \(1,\)"):
        plasticity(R, np.array([0, 1, 3]), np.array([0.1]))
    with pytest.raises(ValueError, match=r"expected \[S, C\]"):
        average_accuracy(np.zeros((0, 3)), IN_ORDER)


TIME, HEIGHT = np.array([10.0, 20.0, 40.0]), np.array([0.8, 0.6, 0.4])


def test_the_parts_of_the_final_average_add_up():
    # Final .6 .7 .9; base .4 / 3; forward (.3 - .2) + (.2 - .1); learning .8 + .5 + .7; backward -.3 - .1; all / 3.
    parts = final_parts(R, IN_ORDER, BEFORE)
    assert parts == pytest.approx((0.4 / 3, 0.2 / 3, 2.0 / 3, -0.4 / 3))
    assert sum(parts) == pytest.approx(average_accuracy(R, IN_ORDER))
    draw = np.random.default_rng(4)
    for num in (1, 2, 5):
        matrix, order, before = draw.random((num, num)), draw.permutation(num), draw.random(num)
        assert sum(final_parts(matrix, order, before)) == pytest.approx(matrix[-1].mean())
    with pytest.raises(ValueError, match="expected one stage for each of 3 domains"):
        final_parts(R, np.array([0, 0, 1]), BEFORE)


def test_the_area_under_a_curve_is_its_mean_height():
    # (10 * (.8 + .6) / 2 + 20 * (.6 + .4) / 2) / 30 = (7 + 10) / 30
    assert retention_area(TIME, HEIGHT) == pytest.approx(17 / 30)
    assert retention_area(TIME, np.full(3, 0.3)) == pytest.approx(0.3)
    assert np.isnan(retention_area(TIME[:1], HEIGHT[:1]))  # a curve without a span
    with pytest.raises(ValueError, match="expected one length, not 0"):
        retention_area(TIME, HEIGHT[:2])
    with pytest.raises(ValueError, match="expected times that do not fall"):
        retention_area(TIME[::-1], HEIGHT)
