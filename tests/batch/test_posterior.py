"""The baseline from history: by hand, its two limits, what is trained on, and what it refuses to be combined with."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_srl.algorithm.validation import config_errors
from rllib_srl.batch.advantages import AdvantageEstimator, group_relative
from rllib_srl.batch.posterior import NO_HISTORY, baseline, posterior, predicted
from rllib_srl.losses.settings import LossSettings
from rllib_srl.types import History
from tests.batch.test_advantage_estimator import as_lists, meta_of

REWARDS = st.lists(st.floats(0, 1, width=32), min_size=1, max_size=8)
HISTORIES = st.builds(
    lambda num, mean, domain: History(num * mean, num, domain), st.floats(0, 20), st.floats(0, 1), st.floats(0, 1)
)


def test_a_baseline_by_hand():
    # w0 m = 2 * .25 = .5, s = 3, n = 4: b of the first = (.5 + 3 + 0 + 1) / (2 + 4 + 2) = 4.5 / 8
    rewards_G = np.array([1.0, 0.0, 1.0])
    assert baseline(rewards_G, History(3.0, 4.0, 0.25), 2.0).tolist() == [4.5 / 8, 5.5 / 8, 4.5 / 8]
    assert baseline(np.array([1.0]), History(0.0, 0.0, 0.25), 2.0).tolist() == [0.25]  # a first visit: the domain
    assert predicted(History(3.0, 4.0, 0.25), 2.0) == 3.5 / 6 and predicted(NO_HISTORY, 0.0) == 0.5
    with pytest.raises(ValueError, match="without a history has no baseline; expected prior_weight above 0"):
        baseline(np.array([1.0]), NO_HISTORY, 0.0)


@given(rewards=REWARDS, history=HISTORIES, weight=st.floats(0.1, 5), own=st.floats(0, 1))
def test_no_reward_is_part_of_its_own_baseline(rewards, history, weight, own):
    rewards_G = np.array(rewards, np.float64)
    before = baseline(rewards_G, history, weight)
    rewards_G[0] = own
    assert baseline(rewards_G, history, weight)[0] == pytest.approx(before[0], abs=1e-12)


def test_scales_by_hand():
    histories = [History(0.0, 0.0, 0.5)] * 2
    rewards = [np.array([1.0]), np.array([0.0])]
    assert posterior(rewards, histories, 2.0, "none") == as_lists([np.array([0.5]), np.array([-0.5])])
    assert posterior(rewards, histories, 2.0) == as_lists([np.array([1.0]), np.array([-1.0])])
    rewards = [np.array([1.0]), np.array([1.0])]  # r - b: .5 and .25
    histories = [History(0.0, 0.0, 0.5), History(0.0, 0.0, 0.75)]
    rms = np.sqrt((0.25 + 0.0625) / 2)
    assert posterior(rewards, histories, 1.0) == as_lists([np.array([0.5 / rms]), np.array([0.25 / rms])])
    assert posterior(rewards, histories, 1.0, "centred") == as_lists([np.array([1.0]), np.array([-1.0])])
    certain = [History(99.99, 100.0, 1.0)] * 2
    (one, _) = posterior(rewards, certain, 0.0)
    assert one[0] == pytest.approx(0.0001 / 0.05)  # the floor: what was expected stays small
    assert posterior([], [], 2.0) == []


@given(groups=st.lists(st.lists(st.floats(0, 1, width=32), min_size=2, max_size=8), min_size=1, max_size=6))
def test_without_history_prior_and_scale_it_is_rloo(groups):
    rewards = [np.array(one, np.float64) for one in groups]
    ours = posterior(rewards, [NO_HISTORY] * len(rewards), 0.0, "none")
    for one, theirs in zip(ours, group_relative(rewards, "leave_one_out"), strict=True):
        np.testing.assert_allclose(one, theirs, rtol=0, atol=1e-12)


@given(batch=st.lists(st.tuples(st.floats(0.5, 12), st.floats(0.5, 12), st.booleans()), min_size=2, max_size=32))
def test_one_episode_with_the_pseudo_counts_as_history_is_spo(batch):
    """SPO: v = alpha / (alpha + beta), A = (r - v - mean) / std over the batch."""
    surprises = np.array([won - alpha / (alpha + beta) for alpha, beta, won in batch])
    expected = (surprises - surprises.mean()) / max(0.05, surprises.std())
    histories = [History(alpha, alpha + beta) for alpha, beta, _ in batch]
    ours = posterior([np.array([float(won)]) for *_, won in batch], histories, 0.0, "centred")
    np.testing.assert_allclose(np.concatenate(ours), expected, rtol=0, atol=1e-9)


def estimate(groups, histories, reused=(), kl=None, **given):
    estimator = AdvantageEstimator(LossSettings.made(advantage="posterior", **given))
    rewards = estimator.shaped_rewards(groups)
    return estimator.estimate(groups, rewards, kl, list(reused), histories)


FORGOTTEN, KNOWN = History(7.6, 8.0, 0.5), History(8.0, 8.0, 1.0)


def test_which_surprises_train():
    groups = [meta_of([0, 0], "forgotten"), meta_of([1, 1], "known"), meta_of([1], "new")]
    batch = estimate(groups, [FORGOTTEN, KNOWN, NO_HISTORY], surprise_scale="none")
    # forgotten: b = (1 + 7.6 + 0) / (2 + 8 + 1); known: 1; new: .5, from one episode
    assert [group.prompt.prompt_id for group in batch.groups] == ["forgotten", "new"]
    assert as_lists(batch.advantages) == [[-8.6 / 11] * 2, [0.5]]
    assert as_lists(batch.played) == [[-8.6 / 11] * 2, [0.0] * 2, [0.5]]
    assert batch.counts["num_groups_unsurprising"] == 1
    groups = [meta_of([1, 0], "a"), meta_of([1, 1], "b")]
    histories = [NO_HISTORY, History(7.5, 8.0, 1.0)]  # b = (2 + 7.5 + 1) / 11, so r - b = .5 / 11
    for least, num in ((0.04, 2), (0.05, 1), (2.0, 0)):
        batch = estimate(groups, histories, surprise_scale="none", min_surprise=least)
        assert (len(batch.groups), batch.counts["num_groups_unsurprising"]) == (num, 2 - num)
    certain = [meta_of([1, 1], "b")]
    assert estimate(certain, [History(8.0, 8.0, 1.0)], min_surprise=0.0).groups == []  # nothing to learn at all


def test_shaping_acts_on_the_rewards_and_on_those_of_the_others():
    group = meta_of([1, 1], lengths=[10, 4])
    settings = {"longest_answer": 10, "overlong_penalty": 1.0, "surprise_scale": "none"}
    (advantage_G,) = estimate([group], [NO_HISTORY], **settings).advantages
    assert advantage_G == pytest.approx([0 - (1 + 1) / 3, 1 - (1 + 0) / 3])  # ten tokens cost 1


def stored(rewards, name, history):
    return replace(meta_of(rewards, name, origin="reuse"), history=history)


def test_a_single_rated_answer_without_a_baseline_is_not_trained_on():
    reused = [replace(stored([0, 1], "a", NO_HISTORY), has_reward_G=np.array([False, True]))]
    batch = estimate([], [], [*reused, stored([1, 0], "b", NO_HISTORY)], prior_weight=0.0, surprise_scale="none")
    assert [group.prompt.prompt_id for group in batch.groups] == ["b"]
    assert as_lists(batch.advantages) == [[1.0, -1.0]] and batch.counts["num_reuses_unsurprising"] == 0
    (alone,) = estimate([], [], reused, prior_weight=2.0, surprise_scale="none").advantages
    assert alone.tolist() == [0.5]  # the baseline of two episodes at the mean of the domain, .5


def test_reused_groups_are_judged_by_todays_history_in_units_of_the_played_groups():
    played = meta_of([1, 0], "a")  # r - b: 1 - (1 + 0) / 3 and 0 - (1 + 1) / 3, so the rms is 2 / 3
    reused = [stored([1, 0, 0], "b", History(1.5, 2.0, 0.25)), stored([0], "c", History(3.0, 4.0, 0.75))]
    # b: (2 * .25 + 1.5 + the others') / (2 + 2 + 2), and (1.5 + 3) / 6
    expected = [np.array([1 - 2 / 6, -3 / 6, -3 / 6]), np.array([-4.5 / 6])]
    batch = estimate([played], [NO_HISTORY], reused)
    for one, by_hand in zip(batch.advantages[1:], expected, strict=True):
        assert one == pytest.approx(by_hand / (2 / 3))
    alone = estimate([], [], reused)  # nothing was played: in units of their own
    rms = np.sqrt(np.mean(np.concatenate(expected) ** 2))
    assert as_lists(alone.advantages) == [(one / rms).tolist() for one in expected]
    known = meta_of([1], "d")  # 1 - (2 * .5 + 1) / 4 = .5; centred with 2 / 3, -2 / 3: middle .5 / 3
    centred = estimate([played, known], [NO_HISTORY, History(1.0, 2.0, 0.5)], reused, surprise_scale="centred")
    spread = np.std([2 / 3, -2 / 3, 0.5])
    assert centred.advantages[3] == pytest.approx([(-0.75 - 0.5 / 3) / spread])


def test_one_episode_is_enough_with_a_prior_alone():
    assert AdvantageEstimator(LossSettings.made()).min_episodes == 2
    assert AdvantageEstimator(LossSettings.made(advantage="posterior")).min_episodes == 1
    assert AdvantageEstimator(LossSettings.made(advantage="posterior", prior_weight=0.0)).min_episodes == 2


@pytest.fixture
def config(config):
    return config.training(advantage="posterior")


def test_the_name_alone_and_parameters_are_accepted_with_a_memory(config):
    assert config_errors(config) == []
    alone = config.copy(copy_frozen=False).replay("none")
    (error,) = config_errors(alone)
    assert error == "advantage = 'posterior' with replay_capacity = 0; expected a memory, which keeps the history"
    assert (config.loss_settings().prior_weight, config.loss_settings().min_surprise) == (2.0, 0.1)
    config.training(advantage="posterior", prior_weight=3.0, min_surprise=0.0, surprise_scale="none")
    settings = config.loss_settings()
    assert (settings.prior_weight, settings.min_surprise, settings.surprise_scale) == (3.0, 0.0, "none")
    assert config_errors(config.training(group_size=1).replay(reuse_fraction=0)) == []
    assert config.replay_settings().min_graded == 1  # a group of one is graded
    assert config.training(group_size=8).replay_settings().min_graded == 2


BAD = [
    ({"advantage": "group", "prior_weight": 1}, "'group'; expected it only with advantage = 'posterior'"),
    ({"prior_weight": 0, "group_size": 1}, "prior_weight = 0 with group_size = 1; expected more than 0"),
    ({"loss": "dapo"}, "dynamic_sampling_tries = 10 with advantage = 'posterior'; expected 0"),
    ({"advantage": "group", "group_size": 1}, "group_size = 1; expected an integer of at least 2, or advantage"),
]


@pytest.mark.parametrize("training, message", BAD)
def test_what_does_not_fit_is_refused_in_one_line(config, training, message):
    if training.get("group_size") == 1:
        config.replay(reuse_fraction=0.0)  # the default would be a second error
    errors = config_errors(config.training(**training))
    assert len(errors) == 1 and message in errors[0], errors
