"""What the loss asks of the driver, through `algo.train()`: resampling, shaping, rescue, ramps, references, saving."""

from __future__ import annotations

import numpy as np
import pytest

from rllib_srl.batch.estimators import EPSILON, has_signal
from rllib_srl.engine.model_dir import load_tokenizer
from tests.small_memory import go, memory_config, weights_of
from tests.small_worlds import Even, small_config, watch


@pytest.fixture
def config(random_llama_dir, tmp_path, ray_here):
    return small_config(random_llama_dir, tmp_path)


def captured(algo):
    """Return a list that the shards of every iteration are added to; nothing is learned."""
    seen = []
    algo._learn = lambda shards: seen.extend(shards) or False
    return seen


@pytest.fixture
def rare(config):
    """Return settings under which about a third of all groups have no signal."""
    return config.training(group_size=2, num_prompts_per_batch=6)


@pytest.mark.slow
def test_dynamic_sampling_plays_until_every_slot_has_a_signal(rare, build):
    algo = build(rare, dynamic_sampling_tries=20)
    seen, shards = watch(algo), captured(algo)
    result = algo.train()
    groups = [group for batch in seen for group in batch.groups]
    with_signal = sum(has_signal(group.rewards_G) for group in groups)
    assert with_signal == 6 == len(shards[0].group_refs)  # of two answers half agree: 6 would have about 3
    assert result["num_prompts_resampled"] == len(groups) - 6 > 0
    assert len({group.group_id for group in groups}) == len(groups)
    assert len({group.prompt.key for group in groups}) == len(groups)
    runs = result["env_runners"]
    assert (runs["num_groups_with_signal"], runs["num_groups"]) == (6, len(groups))


@pytest.mark.slow
def test_dynamic_sampling_stops_when_the_tries_are_used_up(config, build):
    config.environment(env_config={"pay": 0.5})
    algo = build(config, dynamic_sampling_tries=3)
    seen = watch(algo)
    result = algo.train()
    assert sum(len(batch.groups) for batch in seen) == 4 + 3 * 4  # no group ever has a signal
    assert (result["num_prompts_resampled"], result["num_empty_batches"]) == (12, 1)


@pytest.mark.slow
def test_without_dynamic_sampling_each_prompt_is_played_once(rare, build):
    algo = build(rare)
    seen = watch(algo)
    assert algo.train()["num_prompts_resampled"] == 0
    assert sum(len(batch.groups) for batch in seen) == 6


class Talk(Even):
    """As `Even`, but an answer that is wrong may be followed by two more."""

    def reset(self, **kwargs):
        """Ask, and count the turns."""
        self.turns = 0
        return super().reset(**kwargs)

    def step(self, action):
        """Pay, or ask again."""
        self.turns += 1
        _, reward, *_ = super().step(action)
        is_over = reward > 0 or self.turns == 3
        return ("" if is_over else "again: "), reward, is_over, False, {}


class Marked(Talk):
    """As `Talk`, and marks what does not pay: odd ASCII characters are errors, all others and silence wrong answers."""

    def step(self, action):
        """Mark the turn, the last one too."""
        observation, reward, *rest, info = super().step(action)
        fault = fault_of(action)
        return observation, reward, *rest, {**info, **({"turn_fault": fault} if fault else {})}


def fault_of(action):
    """Return the mark of a turn, None for one that pays."""
    if action and ord(action[0]) % 2 == 0:
        return None
    return "error" if action and action[0].isascii() else "wrong"


@pytest.fixture
def talk(config):
    return config.environment("tests.algorithm.test_losses_on_the_real_path:Talk").env_runners(max_turns=3)


@pytest.mark.slow
def test_the_length_penalty_reaches_the_advantages(talk, build):
    algo = build(talk, overlong_penalty=1.0, overlong_share=1.0, advantage="mean_only", longest_answer=12)
    shards = captured(algo)
    algo.train()
    for group, advantage_G in zip(shards[0].groups(), shards[0].advantages, strict=True):
        rewards_G = group.rewards_G - group.num_loss_tokens_G() / 12
        np.testing.assert_allclose(advantage_G, rewards_G - rewards_G.mean(), atol=1e-6)
    assert len({n for g in shards[0].groups() for n in g.num_loss_tokens_G()}) > 1  # or nothing would be seen


@pytest.mark.slow
def test_the_tool_reward_reaches_the_advantages_and_decays(talk, build):
    algo = build(talk, tool_reward=0.1, tool_reward_iterations=2, advantage="mean_only")
    shards = captured(algo)
    for decay in (1.0, 0.5, 0.0):
        shards.clear()
        algo.train()
        for group, advantage_G in zip(shards[0].groups(), shards[0].advantages, strict=True):
            rewards_G = group.rewards_G + 0.1 * decay * (group.num_turns_G() - 1)
            np.testing.assert_allclose(advantage_G, rewards_G - rewards_G.mean(), atol=1e-6)
        assert max(g.num_turns_G().max() for g in shards[0].groups()) == 3


def trained_tokens(algo):
    """Return a list that the tokens with a loss of each update are added to, by episode in order."""
    seen, learner = [], algo.learner_group._learner
    begin = learner._create_iterator_if_necessary

    def watched(**kwargs):
        found = begin(**kwargs)
        batches = learner._micro_batches[False]
        episode_N, target_N = (np.concatenate([one[name].numpy() for one in batches]) for name in ("episode", "target"))
        seen.append([target_N[episode_N == episode].tolist() for episode in range(episode_N.max() + 1)])
        return found

    learner._create_iterator_if_necessary = watched
    return seen


def turns_in(group, g):
    """Return the tokens of each turn of an episode."""
    cut = slice(group.offsets[g], group.offsets[g + 1])
    written = np.flatnonzero(group.loss_mask_N[cut])
    return [group.stream(g)[at].tolist() for at in np.split(written, np.flatnonzero(np.diff(written) > 1) + 1)]


@pytest.mark.slow
def test_turns_that_failed_are_not_trained_on(talk, build):
    """STeP: no error, and no wrong answer that a later turn corrects; the last turn always."""
    algo = build(talk.environment("tests.algorithm.test_losses_on_the_real_path:Marked"), turn_mask="right")
    trained = trained_tokens(algo)
    shards, learn = [], algo._learn
    algo._learn = lambda given: shards.extend(given) or learn(given)
    for _ in range(4):
        algo.train()
    decode, left_out, wrong_but_trained = load_tokenizer(algo.config.model_dir()).decode, {"error": 0, "wrong": 0}, 0
    assert len(trained) == len(shards) == 4
    for tokens, shard in zip(trained, shards, strict=True):
        expected = []
        for group in shard.groups():
            for g in range(group.size):
                turns = turns_in(group, g)
                faults = [fault_of(decode(turn, skip_special_tokens=True)) for turn in turns]
                is_right = faults[-1] is None
                assert group.rewards_G[g] == is_right and None not in faults[:-1]  # what the environment saw
                kept = [turns[-1]]
                for turn, fault in zip(reversed(turns[:-1]), reversed(faults[:-1]), strict=True):
                    if fault == "wrong" and not is_right:
                        kept, wrong_but_trained = [turn, *kept], wrong_but_trained + 1
                    else:
                        left_out[fault] += 1
                expected.append([token for turn in kept for token in turn])
        assert tokens == expected
    assert min(left_out.values()) >= 3 and wrong_but_trained >= 3


@pytest.mark.slow
@pytest.mark.parametrize("advantage", ["batch", "leave_one_out", "recalibrated", "gae"])
def test_the_rule_of_advantages_is_that_of_the_setting(config, build, advantage):
    algo = build(config, advantage=advantage)
    seen, shards = watch(algo), captured(algo)
    algo.train()
    played = [group.rewards_G.astype(float) for group in seen[0].groups]
    rule = {
        "batch": lambda r: (r - r.mean()) / (np.concatenate(played).std(ddof=1) + EPSILON),
        "leave_one_out": lambda r: np.array([r[i] - np.delete(r, i).mean() for i in range(len(r))]),
        "recalibrated": lambda r: r - np.median([one.mean() for one in played]),
        "gae": lambda r: r,
    }[advantage]
    for group, advantage_G in zip(shards[0].groups(), shards[0].advantages, strict=True):
        np.testing.assert_allclose(advantage_G, rule(group.rewards_G.astype(float)), atol=1e-6)
    wants_all = advantage in ("recalibrated", "gae")
    assert len(shards[0].group_refs) == (4 if wants_all else sum(map(has_signal, played)))


@pytest.mark.slow
def test_a_preset_reaches_shards_and_learner(config, build):
    algo = build(config, loss="dr_grpo")
    shards = captured(algo)
    algo.train()
    num = sum(group.size for group in shards[0].groups())
    assert shards[0].scales == [pytest.approx(1 / (num * 3))] * len(shards[0].scales)  # one turn of 3 tokens
    assert algo.learner_group._learner.config.loss_settings().aggregation == "constant"


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "gspo", "cispo", "rloo", "bapo", "mis_po"])
def test_every_preset_trains(config, build, loss):
    algo = build(config, loss=loss)
    before = weights_of(algo).copy()
    for _ in range(2):
        result = algo.train()
    stats = result["learners"]["default_policy"]
    assert stats["num_nonfinite_gradients"] == 0 and np.isfinite(stats["loss"])
    assert not np.array_equal(before, weights_of(algo))


@pytest.mark.slow
def test_a_critic_trains_beside_the_policy_and_is_saved(config, build, tmp_path):
    algo = build(config, advantage="gae", use_critic=True, gae_lambda=0.95, critic_lr=0.02)
    losses = [algo.train()["learners"]["default_policy"]["value_loss"]]
    bias = algo.learner_group._learner.critic.head.bias
    assert abs(float(bias.detach())) == pytest.approx(0.02, rel=1e-3)  # Adam's first step is the rate itself
    losses += [algo.train()["learners"]["default_policy"]["value_loss"] for _ in range(2)]
    head = algo.learner_group._learner.critic.head.weight.detach().clone()
    assert losses[0] > 0 and head.abs().sum() > 0
    path = algo.save_to_path(str(tmp_path / "saved"))
    algo.train()
    assert not head.equal(algo.learner_group._learner.critic.head.weight)
    algo.restore_from_path(path)
    assert head.equal(algo.learner_group._learner.critic.head.weight.detach())


@pytest.mark.slow
def test_a_reference_that_moves_survives_a_checkpoint(config, build, tmp_path):
    algo = build(config, kl_coeff=0.1, kl_reference="ema", reference_every=2, reference_rate=1.0)
    learner = algo.learner_group._learner
    first = {name: p.clone() for name, p in learner.reference.model.named_parameters()}
    result = [algo.train() for _ in range(3)]
    assert [one.get("num_reference_moves", 0) for one in result] == [0, 1, 1]
    moved = {name: p.clone() for name, p in learner.reference.model.named_parameters()}
    assert any(not moved[name].equal(first[name]) for name in first)
    kls = [one["learners"]["default_policy"]["kl"] for one in result]
    assert kls[1] > 1e-8 and kls[2] < 0.5 * kls[1]  # the second step was one away, then the anchor caught up
    path = algo.save_to_path(str(tmp_path / "saved"))
    learner.follow_policy(0.5)
    algo.restore_from_path(path)
    assert all(p.equal(moved[name]) for name, p in learner.reference.model.named_parameters())


@pytest.mark.slow
def test_recalibration_survives_a_checkpoint(config, build, tmp_path):
    algo = build(config, advantage="recalibrated")
    algo.train()
    means = algo.advantage_estimator.get_state()["means"]
    path = algo.save_to_path(str(tmp_path / "saved"))
    algo.train()
    assert len(means) == 4 and len(algo.advantage_estimator.get_state()["means"]) == 8
    algo.restore_from_path(path)
    assert algo.advantage_estimator.get_state()["means"] == means


# --- with a memory ------------------------------------------------------------------------------------------------


@pytest.fixture
def remembering(random_llama_dir, tmp_path, ray_here):
    return memory_config(random_llama_dir, tmp_path / "log")


@pytest.mark.slow
def test_the_ramp_lets_stored_groups_in_slowly(remembering, build):
    """With gamma(0) = 0 a first reuse changes no bit; the third iteration of 4 has half their weight."""
    algo = build(remembering, reuse_ramp=4)
    scales = []
    learn = algo._learn
    algo._learn = lambda shards: scales.append(shards[0]) or learn(shards)
    for _ in range(5):
        algo.train()
    expected = {1: 0.0, 2: 0.146447, 3: 0.5, 4: 0.853553, 5: 1.0}
    found = 0
    for now, shard in enumerate(scales, 1):
        for scale, is_reused in zip(shard.scales, shard.is_reused_P, strict=True):
            if is_reused:
                found += 1
                assert scale * shard.num_reused_tokens == pytest.approx(expected[now], abs=1e-6)
    assert found > 2


@pytest.mark.slow
def test_positive_episodes_alone_are_reused(remembering, build):
    algo = build(remembering, reuse_positive_only=True)
    iterations = go(algo, 5)
    reused = [a for one in iterations for origin, _, a in one.trained if origin == "reuse"]
    assert reused and all((a > 0).all() for a in reused)
    assert iterations[-1].result["num_episodes_not_positive"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["arpo", "rlep"])
def test_rescue_composes_groups_of_the_same_prompt(remembering, build, rule):
    """Every prompt is revisited, and answers are right half the time: older successes are there for the taking."""
    remembering.replay(revisit_fraction=0.5, reuse_fraction=0.0, min_buffer_size=2, spacing="none")
    remembering.training(group_size=2, num_prompts_per_batch=8)
    algo = build(remembering, rescue=rule, rescue_episodes=1, advantage="mean_only", lr=1e-5)
    iterations = go(algo, 8)
    rescued = 0
    for one in iterations:
        played = {group.group_id: group for group in one.played}
        trained = one.trained
        for origin, group, advantage_G in trained:
            if origin != "rescue":
                continue
            mates = [(g, a) for o, g, a in trained if o != "rescue" and g.prompt.key == group.prompt.key]
            assert len(mates) == 1 and group.group_id not in played  # an older visit of the same prompt
            (mate, mate_advantage_G), rescued = mates[0], rescued + 1
            assert group.size == 1 and group.rewards_G[0] >= 0.9
            composed = np.concatenate([mate.rewards_G, group.rewards_G]).astype(float)
            both = np.concatenate([mate_advantage_G, advantage_G])
            np.testing.assert_allclose(both, composed - composed.mean(), atol=1e-6)
            assert mate.size == (1 if rule == "arpo" else 2)
            if rule == "arpo":
                assert played[mate.group_id].rewards_G.max() == 0
    assert rescued == iterations[-1].result["num_episodes_rescued"] > 0


@pytest.mark.slow
def test_rescued_tokens_take_their_ratio_to_the_stored_log_probs(remembering, build):
    algo = build(remembering, rescue="rlep", lr=1e-5)
    remembered = go(algo, 6)
    assert any(origin == "rescue" for one in remembered for origin, *_ in one.trained)
    micro = algo.learner_group._learner._micro_batches
    assert all(one["is_reused"] for one in micro[True])
