"""SRL end to end, all in one process on a small random model: it counts, learns, evaluates, reports and exports."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from ray.rllib.callbacks.callbacks import RLlibCallback

from rllib_srl.batch.advantages import group as group_rule
from rllib_srl.batch.advantages import has_variance
from rllib_srl.types import StopReason
from tests.algorithm.test_checkpoint_trust import same, weights_of
from tests.small_envs import small_config, watch

pytestmark = pytest.mark.slow


@pytest.fixture
def config(random_llama_dir, tmp_path, ray_here):
    return small_config(random_llama_dir, tmp_path)


def tokens_of(batches) -> list[list[int]]:
    return [meta.ref.token_ids_N.tolist() for batch in batches for meta in batch.groups]


def played(result, name: str) -> float:
    return float(result["env_runners"][name])


@pytest.mark.smoke
def test_reward_rises(config, build):
    algo = build(config.training(num_prompts_per_batch=8, group_size=8))
    rewards = [played(algo.train(), "episode_return_mean") for _ in range(12)]
    # 64 answers an iteration: the standard error of a mean is at most .063
    assert np.mean(rewards[:2]) < 0.5 and np.mean(rewards[-3:]) > np.mean(rewards[:2]) + 0.35, rewards


def test_colocated_engines_sleep_while_the_learner_works(config, build):
    """On a CPU nothing is freed, but the contract is the one of a shared GPU: asleep, then awake, whatever happens."""
    algo = build(config.training(num_prompts_per_batch=8).env_runners(colocate=True))
    learner, engine, asleep = algo.learner_group._learner, algo.env_runner.engine, []
    accumulate = learner._accumulate_gradients
    learner._accumulate_gradients = lambda: asleep.append(engine._is_asleep) or accumulate()
    algo.train()
    assert asleep == [True] and not engine._is_asleep and algo.version == 1

    def fail():
        raise RuntimeError("out of memory")

    learner._accumulate_gradients = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        algo.train()
    assert not engine._is_asleep


def test_what_teaches_nothing_is_resampled_until_the_tries_are_used_up_and_leaves_the_weights(config, build):
    algo = build(config.environment(env_config={"pay": 0.5}), dynamic_sampling_tries=3)
    before, seen = weights_of(algo), watch(algo)
    for _ in range(2):
        result = algo.train()
    assert same(weights_of(algo), before)
    assert (algo.version, result["num_empty_batches"], played(result, "num_groups_zero_variance")) == (0, 2, 16)
    assert sum(len(batch.groups) for batch in seen) == 2 * (4 + 3 * 4) and result["num_prompts_resampled"] == 24


def kl_of_episodes(model, group, temperature: float) -> list[float]:
    sums = []
    for g in range(group.size):
        cut = slice(group.offsets[g], group.offsets[g + 1])
        ids = torch.tensor(group.token_ids_N[cut]).long()[None]
        with torch.no_grad():
            logp = (model(input_ids=ids).logits[0].float() / temperature).log_softmax(-1).numpy()
        at = np.flatnonzero(group.loss_mask_N[cut])
        d = group.behaviour_logp_N[cut][at].astype(float) - logp[at - 1, ids[0].numpy()[at]]
        sums.append(float((np.exp(-d) + d - 1).sum()))
    return sums


def test_the_kl_in_the_reward_changes_what_is_trained_on(config, build):
    """Advantages are those of reward less kl_coeff times the KL; which groups train is decided by the reward alone."""
    algo = build(config.training(kl_coeff=0.5, kl_estimator="k3", kl_in_reward=True, num_prompts_per_batch=8))
    learner = algo.learner_group._learner
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.mul_(1.1)  # away from the reference
    algo._sync_weights()
    shards = captured(algo)
    result = algo.train()
    (shard,) = shards
    assert 0 < played(result, "num_groups_with_variance") == len(shard.group_refs)
    for group, advantages, sums in zip(shard.groups(), shard.advantages, learner.episode_kl(shard)):
        assert np.ptp(group.rewards_G) > 0 and np.ptp(sums) > 0.01
        own = kl_of_episodes(learner.reference.model, group, algo.config.temperature)
        assert sums == pytest.approx(own, rel=1e-3, abs=1e-4)
        assert advantages == pytest.approx(group_rule(group.rewards_G.astype(float) - 0.5 * np.array(sums)))
        assert advantages != pytest.approx(group_rule(group.rewards_G.astype(float)), rel=1e-3)


def test_evaluation_never_touches_the_randomness_of_training(config, build):
    runs = []
    for interval in (None, 1):
        changed = config.copy(copy_frozen=False).evaluation(evaluation_interval=interval, evaluation_pass_k=2)
        algo = build(changed)
        seen = watch(algo)
        results = [algo.train() for _ in range(3)]
        assert ("evaluation" in results[0]) == (interval == 1)
        training = [batch for batch in seen if batch.groups and batch.groups[0].ref is not None]
        assert len(training) == 3 and len(seen) == (3 if interval is None else 9)
        runs.append((tokens_of(training), weights_of(algo)))
    assert runs[0][0] == runs[1][0]
    assert same(runs[0][1], runs[1][1])


class Counting(RLlibCallback):
    calls: Counter = Counter()

    def on_episode_end(self, *, episode, env_runner, metrics_logger, **kwargs):
        self.calls["on_episode_end"] += 1
        metrics_logger.log_value("answer_length", len(episode.get_actions(0)), reduce="mean", window=1000)

    def on_sample_end(self, *, samples, env_runner, metrics_logger, **kwargs):
        self.calls["on_sample_end"] += len(samples)

    def on_evaluate_start(self, *, algorithm, metrics_logger, **kwargs):
        self.calls["on_evaluate_start"] += 1

    def on_evaluate_end(self, *, algorithm, metrics_logger, evaluation_metrics, **kwargs):
        self.calls["on_evaluate_end"] += evaluation_metrics["num_prompts"]

    def on_train_result(self, *, algorithm, metrics_logger, result, **kwargs):
        self.calls["on_train_result"] += 1


def test_callbacks_of_rllib_are_called(config, build):
    Counting.calls.clear()
    config.callbacks(Counting, on_episode_end=lambda **kwargs: Counting.calls.update(["function"]))
    algo = build(config.evaluation(evaluation_interval=1, evaluation_duration=6))
    result = algo.train()
    assert Counting.calls == {
        "on_episode_end": 16 + 6,
        "function": 16 + 6,
        "on_sample_end": 16 + 6,
        "on_evaluate_start": 1,
        "on_evaluate_end": 6,
        "on_train_result": 1,
    }
    assert 1 <= played(result, "answer_length") <= 3


def test_counts_and_transcripts_are_those_of_what_was_played_and_learnt(config, build):
    algo = build(config.training(num_prompts_per_batch=5, group_size=3).env_runners(num_transcripts=2))
    seen = watch(algo)
    for iteration in (1, 2, 3):
        result = algo.train()
        names = ("num_groups_with_variance", "num_groups_zero_variance", "num_groups_dropped")
        assert sum(played(result, name) for name in names) == 5
        assert sum(played(result, f"stop_reason/{reason.value}") for reason in StopReason) == 15
        assert played(result, "num_episodes_lifetime") == 15 * iteration
        rewards = [meta.rewards_G for meta in seen[-1].groups]
        assert played(result, "num_groups_with_variance") == sum(len(set(r.tolist())) > 1 for r in rewards)
        assert played(result, "episode_return_mean") == pytest.approx(np.concatenate(rewards).mean())
        num_tokens = sum(int(meta.ref.loss_mask_N.sum()) for meta in seen[-1].groups)
        assert played(result, "num_generated_tokens") == num_tokens
    assert algo.iteration == 3
    text = Path(algo.logdir, "transcripts.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["iteration"] for line in lines] == [1] * 6 + [2] * 6 + [3] * 6
    groups = {meta.group_id: meta for batch in seen for meta in batch.groups}
    assert len({line["group_id"] for line in lines}) == 6
    for line in lines:
        meta = groups[line["group_id"]]
        advantages = group_rule(meta.rewards_G.astype(float))
        assert line["reward"] == meta.rewards_G[line["index"]]
        assert line["advantage"] == pytest.approx(advantages[line["index"]])
        assert line["stop_reason"] == meta.stop_reasons[line["index"]].value
        assert (line["prompt_id"], line["origin"]) == (meta.prompt.prompt_id, "fresh")
        assert line["version"] == line["iteration"] - 1
        ask, answer = line["turns"][:2]
        assert ask == {"role": "environment", "text": f"{meta.prompt.prompt_id}: "}
        assert answer["role"] == "policy"
        assert line["reward"] == float(bool(answer["text"]) and ord(answer["text"][0]) % 2 == 0)
    assert list(Path(algo.logdir).glob("events.out.tfevents*"))


def test_engine_and_export_hold_the_weights_of_the_learner(config, build, tmp_path):
    """The export loads in transformers with equal logits."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    algo = build(config)
    first = weights_of(algo)
    result = algo.train()
    assert algo.version == algo.env_runner.engine.version == result["weight_sync"]["version"] == 1
    assert not same(weights_of(algo), first) and result["weight_sync"]["canary_max"] <= 1e-3
    engine = {f"model.{name}": p.numpy() for name, p in algo.env_runner.engine._model.named_parameters()}
    assert same(engine, weights_of(algo))
    path = algo.export_to_huggingface(tmp_path / "export")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    ids = torch.tensor([tokenizer("even 12: ").input_ids])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, algo.learner_group._learner.model(ids).logits)
    with pytest.raises(FileExistsError, match=r"export directory .* is not empty; expected a new one"):
        algo.export_to_huggingface(tmp_path / "export")


def captured(algo):
    """Return a list that the shards of every iteration are added to; nothing is learned."""
    seen = []
    algo._learn = lambda shards: seen.extend(shards) or False
    return seen


def test_dynamic_sampling_plays_until_every_slot_has_a_signal(config, build):
    """About a third of all groups have none."""
    algo = build(config, group_size=2, num_prompts_per_batch=6, dynamic_sampling_tries=20)
    seen, shards = watch(algo), captured(algo)
    result = algo.train()
    groups = [group for batch in seen for group in batch.groups]
    with_variance = sum(has_variance(group.rewards_G) for group in groups)
    assert with_variance == 6 == len(shards[0].group_refs)  # of two answers half agree: 6 would have about 3
    assert result["num_prompts_resampled"] == len(groups) - 6 > 0
    assert len({group.group_id for group in groups}) == len(groups)
    assert len({group.prompt.key for group in groups}) == len(groups)
    runs = result["env_runners"]
    assert (runs["num_groups_with_variance"], runs["num_groups"]) == (6, len(groups))


def test_a_preset_reaches_shards_and_learner(config, build):
    algo = build(config, loss="dr_grpo")
    shards = captured(algo)
    algo.train()
    num = sum(group.size for group in shards[0].groups())
    assert shards[0].scales == [pytest.approx(1 / (num * 3))] * len(shards[0].scales)  # one turn of 3 tokens
    assert algo.learner_group._learner.config.loss_settings().aggregation == "constant"
