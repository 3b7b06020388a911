"""RLlib's buffer interface with this package's schedule: draws, grades, weights, eviction and state, by value."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.utils.metrics import TD_ERROR_KEY
from ray.rllib.utils.replay_buffers import PrioritizedEpisodeReplayBuffer
from ray.rllib.utils.replay_buffers.utils import update_priorities_in_episode_replay_buffer

from rllib_srl.replay.history import chance_of_silence
from rllib_srl.replay.store.records import key_of
from rllib_srl.types import Prompt
from tests.replay.episodes import a_buffer, an_episode, places, seen


def row(buffer, number: int, start: int = 0):
    """Return the row of the segment that begins at a step."""
    store = buffer._schedule.store
    return store.items[store.slot_of(key_of(Prompt(f"e{number}", str(start))))]


def check_valid(buffer) -> None:
    schedule = buffer._schedule
    schedule.store.check_valid()
    schedule.recall.check()
    schedule.tracker.check(schedule.store)
    assert len(buffer) == sum(len(one) for one in buffer._segments.at.values()) <= buffer.capacity
    assert set(buffer._segments.at) == set(schedule.store.slots().tolist())
    assert buffer.get_num_episodes() == len({one.episode_id for one in buffer._segments.at.values()})


# --- transitions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("n_step", [1, 3, 7])
@pytest.mark.parametrize("segment_length", [1, 3, 8])
def test_transitions_are_those_of_rllibs_own_buffer(n_step, segment_length):
    episodes = [an_episode(0, 9), an_episode(1, [0.5, -2.0, 1.0, 0.25, 4.0, 0.1, 0.7]), an_episode(2, 12, False)]
    own, other = a_buffer(segment_length=segment_length), PrioritizedEpisodeReplayBuffer(100)
    own.add(episodes)
    other.add(episodes)
    arguments = {"num_items": 60, "n_step": n_step, "gamma": 0.9, "include_extra_model_outputs": True}
    ours = {one for _ in range(8) for one in seen(own.sample(**arguments))}
    theirs = {one for _ in range(20) for one in seen(other.sample(**arguments, beta=0.0))}
    assert ours == theirs  # every transition that RLlib draws, and no other
    assert len(ours) == sum(len(episode) - n_step + 1 for episode in episodes)


def test_infos_and_model_outputs_come_on_request():
    buffer = a_buffer(segment_length=2)
    buffer.add(an_episode(0, 4))
    (plain,) = buffer.sample(1, n_step=3)
    assert set(plain.extra_model_outputs) == {"weights", "n_step"} and plain.get_infos(0) == {}
    for drawn in buffer.sample(8, n_step=3, include_infos=True, include_extra_model_outputs=True, to_numpy=True):
        (_, t), = places([drawn])
        assert [drawn.get_infos(0), drawn.get_infos(1)] == [{"at": t}, {"at": t + 3}]
        assert drawn.get_extra_model_outputs("logp", 0) == -t and drawn.t_started == t and drawn.is_numpy


def test_a_pair_of_steps_is_a_closed_interval():
    buffer = a_buffer(segment_length=4)
    buffer.add(an_episode(0, 9))
    drawn = seen([one for _ in range(30) for one in buffer.sample(10, n_step=(2, 4))])
    assert {one[6] for one in drawn} == {2, 3, 4}
    assert all(one[1][1] - one[0][1] == one[6] for one in drawn)
    assert {one[0][1] for one in drawn} == set(range(8))  # the last step is too short for any


def test_chunks_of_one_step_are_the_whole_episode():
    whole, parts = a_buffer(segment_length=3), a_buffer(segment_length=3)
    episodes = [an_episode(0, 7), an_episode(1, 5)]
    whole.add(episodes)
    for t in range(7):  # in turn, as two environments would give them
        parts.add([one.slice(slice(t, t + 1), len_lookback_buffer=0) for one in episodes if t < len(one)])
    assert parts.get_num_segments() == whole.get_num_segments() == 3 + 2 and len(parts) == 12
    found = [sorted(map(str, one._segments.get_state()["at"].values())) for one in (parts, whole)]
    assert found[0] == found[1]
    check_valid(parts)


# --- grades and draws ----------------------------------------------------------------------------


def graded(td_errors: list[float], **settings):
    """Return a buffer of segments of one step, in which the one of step t has the TD error td_errors[t]."""
    buffer = a_buffer(segment_length=1, selection_config={"noise": 0.0}, **settings)
    buffer.add(an_episode(0, len(td_errors)))
    drawn = places(buffer.sample(len(td_errors)))
    assert sorted(drawn) == [(0, t) for t in range(len(td_errors))]
    buffer.update_priorities(np.array([td_errors[t] for _, t in drawn]))
    return buffer


def test_a_grade_is_the_rank_of_the_td_error():
    buffer = graded([1.0, 2.0, 3.0, -4.0])  # the sign does not count
    # ranks 1/8, 3/8, 5/8, 7/8; rewards 1 - rank; bounds .35, .65, .9; a success from .5
    assert [row(buffer, 0, t)["reward"] for t in range(4)] == [0.875, 0.625, 0.375, 0.125]
    assert [row(buffer, 0, t)["num_success"] for t in range(4)] == [1, 1, 0, 0]
    assert [row(buffer, 0, t)["variance"] for t in range(4)] == [1, 4, 9, 16]
    # FSRS's first interval by grade: Good, Hard, Hard, Again
    stability = [float(row(buffer, 0, t)["stability"]) for t in range(4)]
    assert stability[0] > stability[1] == stability[2] > stability[3]
    silence = chance_of_silence(1, 1)
    assert [row(buffer, 0, t)["num_silent"] for t in range(4)] == pytest.approx([silence, silence, 0, 0])
    assert [row(buffer, 0, t)["num_unsolved"] for t in range(4)] == [0 + 0, 0, 1, 1]
    metrics = buffer.get_metrics()["srl"]
    assert {name: metrics[name].peek() for name in ("num_visits", "num_silent", "mean_grade")} == {
        "num_visits": 4, "num_silent": 2, "mean_grade": (3 + 2 + 2 + 1) / 4,
    }  # fmt: skip
    check_valid(buffer)


def test_signal_draws_the_oldest_first_and_the_silent_later():
    buffer = graded([0.1, 0.1, 5.0, 5.0])
    assert sorted(places(buffer.sample(2))) == [(0, 2), (0, 3)]  # equal age: those that have signal
    buffer.update_priorities([5.0, 5.0])
    assert sorted(places(buffer.sample(2))) == [(0, 0), (0, 1)]  # two draws ago beats one


def test_a_due_segment_comes_before_an_early_one():
    buffer = a_buffer(
        segment_length=1, selection="srl", selection_config={"temperature": 0.0}, spacing="leitner",
        load_control="none", diversity_coeff=0,
    )  # fmt: skip
    buffer.add(an_episode(0, 4))
    drawn = places(buffer.sample(4))
    buffer.update_priorities([[1.0, 2.0, 3.0, 4.0][t] for _, t in drawn])
    # Leitner: a success (grades 2 and above) goes to the second box, two draws; a failure to the first, one draw.
    assert [row(buffer, 0, t)["due"] for t in range(4)] == [3, 3, 3, 2]
    assert places(buffer.sample(1)) == [(0, 3)]


def test_several_transitions_of_a_segment_are_one_visit():
    buffer = a_buffer(segment_length=2)
    buffer.add(an_episode(0, 2))
    buffer.sample(4)
    buffer.update_priorities([1.0, 1.0, 3.0, 3.0])  # ranks .25, .25, .75, .75
    found = row(buffer, 0)
    assert (found["visits"], found["group_size"], found["num_success"], found["reward"]) == (1, 4, 2, 0.5)
    assert found["variance"] == 5.0 and found["pass_rate"] == 0.5  # mean of 1, 1, 9, 9


def test_grades_by_return_wait_for_the_end_of_the_episode():
    buffer = a_buffer(segment_length=4, grade_by="return")
    buffer.add([an_episode(0, [1.0] * 4), an_episode(1, [5.0] * 4), an_episode(2, [9.0] * 4, is_done=False)])
    assert sorted(number for number, _ in places(buffer.sample(3))) == [0, 1, 2]
    buffer.update_priorities([2.0, 2.0, 2.0])
    # returns 4 and 20 have ranks .25 and .75 among the two
    assert [row(buffer, n)["reward"] for n in range(3)] == [0.25, 0.75, 0]
    assert [row(buffer, n)["visits"] for n in range(3)] == [1, 1, 0] and row(buffer, 2)["variance"] == 4
    buffer.add(an_episode(2, [9.0] * 6).slice(slice(4, 6), len_lookback_buffer=0))
    buffer.sample(4)
    buffer.update_priorities([1.0] * 4)  # returns 4, 20, 54: ranks 1/6, 3/6, 5/6; the last episode has two segments
    assert [row(buffer, n)["reward"] for n in range(3)] == pytest.approx([1 / 6, 3 / 6, 5 / 6])


def test_weights_are_those_of_a_rule_that_has_them():
    own = {"selection": "per", "selection_config": {"per_alpha": 1.0, "per_beta": 1.0}}
    buffer = a_buffer(segment_length=1, **own)
    buffer.add(an_episode(0, 4))
    errors = [1.0, 2.0, 3.0, 4.0]
    drawn = buffer.sample(4)
    assert [one[7] for one in seen(drawn)] == [1.0] * 4  # nothing is known yet
    buffer.update_priorities([errors[t] for _, t in places(drawn)])
    drawn = buffer.sample(4)
    weights = {int(one[0][1]): one[7] for one in seen(drawn)}
    assert weights == pytest.approx({t: 1 / errors[t] for t in range(4)}, rel=1e-5)
    buffer.update_priorities([errors[t] for _, t in places(drawn)])
    share = np.mean([places(buffer.sample(1))[0][1] == 3 for _ in range(400)])
    assert 0.3 < share < 0.5  # 4 of 10


def test_rllib_sends_td_errors_to_it():
    buffer = a_buffer(segment_length=1)
    buffer.add(an_episode(0, 3))
    buffer.sample(3)
    errors = {DEFAULT_MODULE_ID: {TD_ERROR_KEY: np.array([1.0, 2.0, 3.0], np.float32)}, "__all__": {}}
    update_priorities_in_episode_replay_buffer(replay_buffer=buffer, td_errors=errors)
    assert sorted(row(buffer, 0, t)["variance"] for t in range(3)) == [1, 4, 9]


def test_few_segments_fill_a_batch_in_turn():
    buffer = a_buffer(segment_length=4)
    buffer.add(an_episode(0, 8))
    starts = [t // 4 for _, t in places(buffer.sample(7))]
    assert sorted(starts.count(start) for start in (0, 1)) == [3, 4]
    buffer.update_priorities(np.ones(7))
    assert buffer.get_sampled_timesteps() == 7 and row(buffer, 0, 0)["group_size"] in (3, 4)


def test_an_unusual_segment_is_more_diverse():
    buffer = a_buffer(segment_length=1, capacity=200)
    usual = [an_episode(0, 60)]
    buffer.add(usual)
    odd = an_episode(1, 1)
    odd.observations.data[0][:], odd.observations.data[1][:] = (500, -300), (500, -300)
    buffer.add(odd)
    assert row(buffer, 1)["diversity"] > 0.95 > np.median([row(buffer, 0, t)["diversity"] for t in range(60)])
    check_valid(buffer)
    off = a_buffer(diversity_coeff=0)
    off.add(usual)
    assert not off._schedule.store.items["has_vector"].any()


# --- eviction ------------------------------------------------------------------------------------


def test_the_first_in_is_evicted_and_its_episode_with_its_last_segment():
    buffer = a_buffer(capacity=8, segment_length=2, eviction="fifo")
    buffer.add([an_episode(0, 4), an_episode(1, 4)])
    assert (len(buffer), buffer.get_num_segments(), buffer.get_num_episodes()) == (8, 4, 2)
    buffer.add(an_episode(2, 2))
    assert (len(buffer), buffer.get_num_episodes(), buffer.get_num_episodes_evicted()) == (8, 3, 0)
    assert {place for _ in range(9) for place in places(buffer.sample(8))} == {
        (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1)
    }  # fmt: skip
    buffer.add(an_episode(3, 2))
    assert (buffer.get_num_episodes(), buffer.get_num_episodes_evicted(), buffer.get_added_timesteps()) == (3, 1, 12)
    metrics = buffer.get_metrics()
    assert (metrics["num_env_steps_evicted"].peek(), metrics["num_episodes_evicted"].peek()) == (4, 1)
    check_valid(buffer)


def test_what_is_mastered_is_evicted_first():
    buffer = graded([1.0, 0.0, 1.0, 1.0], capacity=4, eviction="mastered_first", diversity_coeff=0)
    buffer.add(an_episode(1, 1))
    assert set(places(buffer.sample(4))) == {(0, 0), (0, 2), (0, 3), (1, 0)}


def test_td_errors_of_an_evicted_segment_grade_nothing():
    buffer = a_buffer(capacity=2, segment_length=1, eviction="fifo")
    buffer.add(an_episode(0, 2))
    drawn = places(buffer.sample(2))
    buffer.add(an_episode(1, 1))  # evicts (0, 0); its slot is free for the new one
    buffer.update_priorities([7.0 if t else 3.0 for _, t in drawn])
    assert row(buffer, 0, 1)["variance"] == 49 and row(buffer, 1)["visits"] == 0


def test_random_calls_keep_every_transition_right():
    """An oracle knows every step; a window never holds a step of another place."""
    generator = np.random.default_rng(7)
    buffer = a_buffer(capacity=40, segment_length=3, eviction="reservoir")
    lengths, open_at, number = {}, {}, 0
    for _ in range(150):
        if generator.random() < 0.5 or not open_at:
            lengths[number], open_at[number] = int(generator.integers(1, 15)), 0
            number += 1
        one = int(generator.choice(list(open_at)))
        begin, end = open_at[one], min(lengths[one], open_at[one] + int(generator.integers(1, 6)))
        buffer.add(an_episode(one, lengths[one]).slice(slice(begin, end), len_lookback_buffer=0))
        open_at[one] = end
        if end == lengths[one]:
            del open_at[one]
        if generator.random() < 0.7:
            drawn = buffer.sample(5, n_step=(1, 3), gamma=0.5)
            for (e, t), (after, u), action, reward, is_terminated, _, n, _ in seen(drawn):
                assert (after, u, action) == (e, t + n, t) and 1 <= n <= 3
                assert reward == sum(0.5**i * (t + 1 + i) for i in range(n))
                assert is_terminated == (u == lengths[e])
            if generator.random() < 0.8:
                buffer.update_priorities(generator.exponential(size=5))
    check_valid(buffer)
    assert len(buffer) > 35 and buffer.get_num_episodes_evicted() > 10


# --- state ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"selection": "srl"}, {"selection": "per"}, {"grade_by": "return"}])
def test_a_restored_buffer_draws_the_same(settings):
    buffer = a_buffer(capacity=60, segment_length=3, **settings)

    def step(one, now: int) -> list:
        one.add(an_episode(now, 3 + now % 5))
        drawn = one.sample(6, n_step=(1, 2))
        if now % 4:
            one.update_priorities([abs(np.sin(7 * e + t)) for e, t in places(drawn)])
        return seen(drawn)

    for now in range(25):
        step(buffer, now)
    buffer.add(an_episode(99, 4, is_done=False))
    state = pickle.loads(pickle.dumps(buffer.get_state()))
    other = a_buffer(capacity=60, segment_length=3, **{**settings, "seed": 11})
    other.add(an_episode(1, 9))  # to be replaced
    other.set_state(state)
    assert len(other) == len(buffer) and other.get_num_episodes() == buffer.get_num_episodes()
    for one in (buffer, other):
        one.add(an_episode(99, 9).slice(slice(4, 9), len_lookback_buffer=0))  # the open episode goes on
    assert [step(other, now) for now in range(30, 50)] == [step(buffer, now) for now in range(30, 50)]
    assert pickle.dumps(state) == pickle.dumps(pickle.loads(pickle.dumps(state)))
    check_valid(other)


def test_a_state_of_other_settings_is_refused():
    buffer = a_buffer()
    buffer.add(an_episode(0, 4))
    state = buffer.get_state()
    with pytest.raises(ValueError, match="selection = 'srl', in the state 'signal'; expected the settings"):
        a_buffer(selection="srl").set_state(state)
    with pytest.raises(ValueError, match="segment_length = 2; expected 8"):
        a_buffer(segment_length=2).set_state(state)
    with pytest.raises(ValueError, match="expected one of SRLEpisodeReplayBuffer"):
        buffer.set_state(PrioritizedEpisodeReplayBuffer(10).get_state())


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"capacity": 0}, "capacity = 0; expected an integer of at least 1"),
        ({"capacity": 8, "batch_size_B": 16}, "capacity = 8; expected at least batch_size_B = 16"),
        ({"segment_length": 0}, "segment_length = 0; expected an integer"),
        ({"batch_length_T": 20}, "batch_length_T = 20; expected 0 or 1: transitions are drawn"),
        ({"grade_by": "loss"}, "grade_by = 'loss'; expected 'td_error' or 'return'"),
        ({"seed": -1}, "seed = -1; expected an integer of at least 0"),
        ({"selection": "singal"}, "selection = 'singal'; expected one of .* did you mean 'signal'"),
        ({"spacing": "anki"}, "spacing = 'anki'; expected one of"),
        ({"eviction": "lru"}, "eviction = 'lru'; expected one of"),
        ({"selection": "exgrpo"}, "reads successes in a group of episodes"),
        ({"selection_config": {"phi": 1.0}}, "selection_config has 'phi'"),
        ({"selection_config": {"kappa": -1}}, "kappa = -1; expected a number"),
        ({"diversity_parts": ["episodic"]}, "there are no turns of text"),
        ({"alpha": 0.6}, "alpha = 0.6; expected the parameters of a selection rule instead"),
        ({"beta": 0.4}, "per_beta"),
        ({"evicton": "fifo"}, "did you mean 'eviction'"),
        ({"reuse_fraction": 0.5}, "no such setting of SRLEpisodeReplayBuffer"),
    ],
)
def test_bad_settings_are_told_at_construction(settings, fault):
    with pytest.raises(ValueError, match=fault):
        a_buffer(**settings)


def test_all_bad_settings_are_told_at_once():
    with pytest.raises(ValueError, match=r"capacity = -1(.|\n)*colour = 1(.|\n)*spacing = 'anki'") as found:
        a_buffer(capacity=-1, spacing="anki", colour=1)
    assert len(str(found.value).splitlines()) == 4


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({"num_items": 0}, "num_items = 0; expected an integer in"),
        ({"num_items": 101}, "expected an integer in .1, capacity = 100"),
        ({"num_items": 2, "batch_size_B": 2}, "expected one of them"),
        ({"n_step": 0}, "n_step = 0; expected an integer of at least 1"),
        ({"n_step": (3, 2)}, "the smaller first"),
        ({"n_step": 5}, "no stored episode has n_step = 5 steps"),
        ({"batch_length_T": 20}, "batch_length_T = 20; expected 0 or 1"),
        ({"lookback": 1}, "lookback = 1; expected 0"),
        ({"beta": 0.4}, "beta = 0.4; expected None or 0"),
        ({"sample_episodes": False}, "expected True"),
    ],
)
def test_bad_draws_are_refused(arguments, fault):
    buffer = a_buffer()
    buffer.add(an_episode(0, 4))
    with pytest.raises(ValueError, match=fault):
        buffer.sample(**arguments)


def test_bad_calls_are_refused():
    buffer = a_buffer()
    with pytest.raises(ValueError, match="the buffer is empty"):
        buffer.sample(1)
    with pytest.raises(ValueError, match="1 priorities; expected one for each of the 0 rows"):
        buffer.update_priorities([1.0])
    buffer.add(an_episode(0, 4))
    with pytest.raises(ValueError, match="episode e0 is finished"):
        buffer.add(an_episode(0, 4))
    with pytest.raises(ValueError, match="weight = 2.0"):
        buffer.add(an_episode(1, 4), weight=2.0)
    with pytest.raises(ValueError, match="episode of type dict; expected SingleAgentEpisode"):
        buffer.add([{}])
    buffer.add(an_episode(2, 4, is_done=False))
    with pytest.raises(ValueError, match="starts at step 0; expected 4"):
        buffer.add(an_episode(2, 4))
    buffer.sample(2)
    with pytest.raises(ValueError, match="1 TD errors are not finite"):
        buffer.update_priorities([1.0, float("nan")])
    with pytest.raises(ValueError, match="3 priorities; expected one for each of the 2"):
        buffer.update_priorities([1.0, 2.0, 3.0])
    buffer.update_priorities([1.0, 2.0])
    with pytest.raises(ValueError, match="each of the 0 rows"):
        buffer.update_priorities([1.0, 2.0])
