"""Segments of episodes, n-step windows over their borders, and the vectors of their observations."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest

from rllib_srl.replay.episodes.segments import Segment, Segments, Step, discounted_sum
from rllib_srl.replay.episodes.vectors import SegmentVectors, flat


def stored(lengths: tuple[int, ...] = (3, 3, 2), is_terminated: bool = True) -> Segments:
    """Return one episode in slots 0, 1, ...; step t has the action t, the reward 10 + t and leads to t + 1."""
    segments, t = Segments(3), 0
    for slot, length in enumerate(lengths):
        segments.open(slot, Segment("e", t, [t], [{}]), slot - 1 if slot else None)
        for _ in range(length):
            is_end = is_terminated and t + 1 == sum(lengths)
            segments.append(slot, Step(t, 10.0 + t, t + 1, {}, {"logp": -t}, is_end, False))
            t += 1
    return segments


def test_a_window_crosses_borders():
    segments = stored()
    window = segments.window(0, 2, 4)  # steps 2, 3, 4, 5
    assert (window.step, window.action, window.observations) == (2, 2, (2, 6))
    assert window.rewards == [12.0, 13.0, 14.0, 15.0] and window.extras == {"logp": -2}
    assert not window.is_terminated
    last = segments.window(1, 1, 4)  # steps 4 to 7, the last of the episode
    assert last.observations == (4, 8) and last.is_terminated and not last.is_truncated
    assert segments.window(2, 0, 1).is_terminated is False and segments.window(2, 1, 1).is_terminated
    assert discounted_sum(window.rewards, 0.5) == 12 + 6.5 + 3.5 + 1.875


def test_reach_counts_what_is_stored_without_a_gap():
    segments = stored()
    assert segments.reach(0)[:3].tolist() == [3, 3, 2]
    assert segments.reach(1)[:3].tolist() == [6, 5, 2]  # at least length + 1 where so much is stored
    assert segments.reach(9)[:3].tolist() == [8, 5, 2]
    assert segments.num_steps == 8
    segments.remove(1)
    assert segments.reach(9)[:3].tolist() == [3, 0, 2] and segments.num_steps == 5
    segments.open(1, Segment("f", 0, [0], [{}]))  # another episode in the freed slot
    segments.append(1, Step(0, 0.0, 1, {}, {}, True, False))
    assert segments.reach(9)[:3].tolist() == [3, 1, 2]


def test_a_restored_store_is_the_same_and_a_copy():
    segments = stored()
    segments.remove(0)
    state = segments.get_state()
    other = Segments.from_state(3, state)
    assert other.get_state() == state and other.reach(9).tolist() == segments.reach(9).tolist()
    other.append(2, Step(8, 1.0, 9, {}, {"logp": 0}, True, False))
    assert len(segments.at[2]) == 2 and len(segments.at[2].extras["logp"]) == 2


def test_a_vector_is_the_mean_in_deviations():
    vectors = SegmentVectors(0)
    np.testing.assert_array_equal(vectors.of([[0.0, 7.0], [2.0, 7.0]]), [0, 0])  # the second coordinate never changes
    (first, second) = vectors.of([[4.0, 7.0], [4.0, 7.0]])  # of 0, 2, 4, 4: mean 2.5, variance 2.75
    assert first == pytest.approx(1.5 / np.sqrt(2.75)) and second == 0
    other = SegmentVectors(0)
    other.set_state(vectors.get_state())
    np.testing.assert_array_equal(other.of([[5.0, 1.0]]), vectors.of([[5.0, 1.0]]))
    with pytest.raises(ValueError, match="an observation has 3 numbers; expected 2"):
        vectors.of([[1.0, 2.0, 3.0]])


def test_observations_of_any_kind_become_numbers():
    assert flat(2, gymnasium.spaces.Discrete(4)).tolist() == [0, 0, 1, 0]
    assert flat({"b": np.ones((1, 2)), "a": (3, [4.0])}).tolist() == [3, 4, 1, 1]
    assert flat({}).tolist() == []


def test_many_numbers_are_projected_and_keep_their_distances():
    generator = np.random.default_rng(0)
    images = generator.normal(size=(40, 400))
    one, other = SegmentVectors(5), SegmentVectors(5)
    found = np.stack([one.of([image]) for image in images])
    assert found.shape == (40, 64)
    np.testing.assert_array_equal(found, np.stack([other.of([image]) for image in images]))
    ratio = np.linalg.norm(found[20:], axis=1) / np.linalg.norm(images[20:], axis=1)
    assert 0.8 < ratio.mean() < 1.2
