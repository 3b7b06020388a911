"""Retention in the learner: the gradient by value, any split, targets as the learner computes them."""

from dataclasses import replace

import numpy as np
import pytest
import ray
import torch
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_srl.batch.parts import part_meta, part_of
from rllib_srl.batch.retention import MOST_SCORED, PER_GROUP, plan, right_answers
from rllib_srl.batch.shard import build_shards
from rllib_srl.learner import retention
from rllib_srl.learner.group.learners import Learners
from rllib_srl.losses.retention import Retention, make_target, scales
from rllib_srl.types import TARGET, GroupMeta, Prompt
from tests.small_learner import (
    ADVANTAGES,
    GROUPS,
    VOCABULARY,
    Gathering,
    learner_config,
    learner_group,
    make_group,
    relative_gap,
)

WEIGHT = 0.7
STORED = [make_group(11, 5, [6]), make_group(12, 9, [3]), make_group(13, 2, [4]), make_group(14, 5, [1])]


def held_answers(top_k):
    """Return groups of one episode with random targets, of two domains."""
    term, rng = Retention(1.0, top_k), torch.Generator().manual_seed(top_k)
    held = []
    for number, group in enumerate(STORED):
        tokens = torch.tensor(group.token_ids_N[group.loss_mask_N].astype(np.int64))
        logits = torch.randn(len(tokens), VOCABULARY, generator=rng)
        target = term.target(logits, tokens, group.group_id)
        prompt = Prompt("env", str(number), domain="ab"[number % 2])
        held.append(replace(group, prompt=prompt, origin="retain", extra={TARGET: target}))
    return held


def config_of(model_dir, top_k=4, **training):
    config = learner_config(model_dir).training(optimizer_name="sgd", lr=0.0, grad_clip=None, **training)
    return config.replay(retain=WEIGHT, retain_top_k=top_k, revisit_fraction=0, reuse_fraction=0, capacity=100)


def update(group, played, advantages, held=(), silent=(), compared=()):
    """Train once; return the gradient of the first learner, its statistics, targets and reports."""
    metas = [GroupMeta.of(one, ray.put(one)) for one in played]
    stored = [GroupMeta.of(one, ray.put(one)) for one in held]
    factors = scales([m.num_loss_tokens_G.sum() for m in stored], [m.prompt.domain for m in stored], WEIGHT)
    num_shards = max(1, group.config.num_learners)
    shards = build_shards(metas, advantages, num_shards, 30)
    all_played = [(meta, ()) for meta in (*metas, *(GroupMeta.of(one, ray.put(one)) for one in silent))]
    for shard, part in zip(shards, plan(stored, factors, all_played, metas, num_shards, 0.9, 0), strict=True):
        shard.retention = replace(part, compared=compared)
    learners = Learners(group)
    results = learners.update(shards, {}, group.config.num_epochs, 120)
    stats = {name: value.peek() for name, value in results[0][DEFAULT_MODULE_ID].items()}
    targets = [one.get() for one in group.foreach_learner(lambda learner: learner.take_targets())]
    reports = [one.get() for one in group.foreach_learner(lambda learner: learner.retention_report())]
    gradients = [one.get() for one in group.foreach_learner(lambda learner: learner.gradients())]
    return gradients[0], stats, [target for some in targets for target in some], reports


@pytest.fixture
def run(random_llama_dir, ray_here):
    groups = []

    def go(*arguments, change=lambda config: config, top_k=4, **more):
        groups.append(learner_group(change(config_of(random_llama_dir, top_k))))
        return update(groups[-1], *arguments, **more)

    yield go
    for group in groups:
        group.shutdown()


def logits_of(model, group):
    """Return the logits that predict the written tokens of a group of one episode, by Hugging Face's own pass."""
    ids = torch.tensor(group.token_ids_N.astype(np.int64))
    return model(ids[None]).logits[0, :-1][torch.tensor(group.loss_mask_N[1:])]


def by_hand(model_dir, held, top_k):
    """Return the gradient of the term, its KL by domain, and Delta by domain."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    domains = sorted({group.prompt.domain for group in held})
    kl, gap, lengths = ({domain: [] for domain in domains} for _ in range(3))
    for group in held:
        domain, target = group.prompt.domain, group.extra[TARGET]
        logp_TV = logits_of(model, group).log_softmax(-1)
        tokens = torch.tensor(group.token_ids_N[group.loss_mask_N].astype(np.int64))
        sampled, stored = logp_TV[torch.arange(len(tokens)), tokens], torch.tensor(target.sampled_logp_T).float()
        if top_k:
            p, ids_Tk = torch.tensor(target.logp_Tk).float().exp(), torch.tensor(target.ids_Tk).long()
            q = logp_TV.gather(1, ids_Tk).exp()
            rest_p, rest_q = 1 - p.sum(1), 1 - q.sum(1)
            kl_T = (p * (p / q).log()).sum(1) + rest_p * (rest_p / rest_q).log()
        else:
            kl_T = (sampled - stored).exp() - (sampled - stored) - 1
        kl[domain].append(kl_T.sum())
        gap[domain].append((stored - sampled).sum().item())
        lengths[domain].append(len(tokens))
    # Per answer, divided by the domain's mean length, summed over domains.
    loss = WEIGHT * sum(torch.stack(kl[domain]).mean() / np.mean(lengths[domain]) for domain in kl)
    loss.backward()
    gradient = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    return gradient, {domain: sum(kl[domain]).item() for domain in kl}, {domain: sum(gap[domain]) for domain in gap}


@pytest.mark.parametrize("top_k", [0, 1, 4])
def test_the_gradient_is_that_of_the_formula(run, random_llama_dir, top_k):
    held = held_answers(top_k)
    plain, *_ = run(GROUPS, ADVANTAGES, top_k=top_k)
    both, stats, _, (report,) = run(GROUPS, ADVANTAGES, held, top_k=top_k)
    assert report.cosines is None
    want, kl, gap = by_hand(random_llama_dir, held, top_k)
    assert relative_gap({name: both[name] - plain[name] for name in both}, want) < 1e-4
    norm = {
        name: np.linalg.norm(np.concatenate([g.ravel() for g in some.values()]))
        for name, some in (("want", want), ("both", both))
    }
    assert stats["retention/gradient_share"] == pytest.approx(norm["want"] / norm["both"], rel=1e-3)
    for domain in "ab":
        assert report.sums[domain] == pytest.approx([2, kl[domain], gap[domain]], rel=1e-4)


TWO = {"num_learners": 2, "num_cpus_per_learner": 0}
SPLITS = [
    lambda config: config.learners(**TWO),
    pytest.param(lambda config: config.training(fsdp=True).learners(**TWO, learner_class=Gathering),
                 marks=pytest.mark.slow),
    lambda config: config.training(prefix_sharing=False),
    lambda config: config.training(micro_batch_tokens=10_000),
]  # fmt: skip
NAMES = ["two learners", "sharded learners", "padded", "one pass"]


@pytest.mark.parametrize("change", SPLITS, ids=NAMES)
def test_the_split_changes_nothing_and_gradients_are_compared_on_the_last_block(run, random_llama_dir, change):
    held = held_answers(4)
    played, *_ = run(GROUPS, ADVANTAGES)
    one, _, targets, (report,) = run(GROUPS, ADVANTAGES, held)
    alone, _, others, reports = run(GROUPS, ADVANTAGES, held, change=change)
    assert relative_gap(alone, one) < 1e-5
    assert {(t.group_id, t.episode) for t in targets} == {(t.group_id, t.episode) for t in others}
    for domain in "ab":
        rows = [each.sums.get(domain, [0, 0, 0]) for each in reports]
        assert np.sum(rows, 0).tolist() == pytest.approx(report.sums[domain], rel=1e-4)
    compared, _, _, reports = run(GROUPS, ADVANTAGES, held, change=change, compared=("a", "b"))
    assert relative_gap(compared, alone) == 0  # the same run
    block = [name for name in played if ".layers.1." in name]
    assert len(block) == 9

    def flat(gradient):
        return np.concatenate([gradient[name].ravel() for name in block])

    def cosine(gradient):
        a, b = flat(gradient), flat(played)
        return a @ b / np.linalg.norm(a) / np.linalg.norm(b)

    own = {d: by_hand(random_llama_dir, [one for one in held if one.prompt.domain == d], 4)[0] for d in "ab"}
    want = {domain: cosine(gradient) for domain, gradient in own.items()}
    of_all = cosine({name: own["a"][name] + own["b"][name] for name in block})
    for report in reports:
        assert report.cosines.by_domain == pytest.approx(want, abs=1e-4)
        assert report.cosines.of_all == pytest.approx(of_all, abs=1e-4)


def test_a_gradient_of_zero_has_no_direction(run):
    *_, (report,) = run(GROUPS, [np.zeros(group.size) for group in GROUPS], held_answers(4), compared=("a", "b"))
    assert report.cosines.by_domain == {} and np.isnan(report.cosines.of_all)


def test_targets_are_the_learners_log_probs(run, random_llama_dir, monkeypatch):
    """Up to rounding of fp32 before they are stored, and of fp16 after."""
    from transformers import AutoModelForCausalLM

    exact = {}

    def noting(group_id, episode, *tensors):
        exact[group_id, episode] = tensors
        return make_target(group_id, episode, *tensors)

    monkeypatch.setattr(retention, "make_target", noting)
    right = [replace(group, rewards_G=np.arange(group.size) % 2 == 1) for group in GROUPS]
    silent = replace(make_group(31, 4, [5, 2]), rewards_G=np.ones(2, np.float32))
    cold = {"change": lambda config: config.env_runners(temperature=0.6)}
    _, _, targets, _ = run(right, ADVANTAGES, silent=[silent], **cold)
    wanted = {(g.group_id, e) for g in (*right, silent) for e in np.flatnonzero(g.rewards_G)[:PER_GROUP]}
    assert {(t.group_id, t.episode) for t in targets} == wanted
    model = AutoModelForCausalLM.from_pretrained(random_llama_dir, dtype=torch.float64)
    groups = {group.group_id: group for group in (*right, silent)}
    for target in targets:
        one = part_of(groups[target.group_id], [target.episode])
        logp_TV = (logits_of(model, one) / 0.6).log_softmax(-1).detach()
        tokens = one.token_ids_N[one.loss_mask_N].astype(np.int64)
        assert (target.ids_Tk == logp_TV.topk(4).indices.numpy()).mean() > 0.95  # near ties may change places
        sampled_logp_T = logp_TV[range(len(tokens)), tokens]
        assert np.allclose(target.logp_Tk, logp_TV.topk(4).values, rtol=2**-11, atol=1e-6)  # above -8 nats within 2e-3
        assert np.allclose(target.sampled_logp_T, sampled_logp_T, rtol=2**-11, atol=1e-6)
        _, top_logp_Tk, own_logp_T = exact[target.group_id, target.episode]
        # Against float64: a few units in the last place of fp32 logits of up to 16.
        assert np.allclose(top_logp_Tk, logp_TV.topk(4).values, rtol=1e-6, atol=2e-5)
        assert np.allclose(own_logp_T, sampled_logp_T, rtol=1e-6, atol=2e-5)


def test_an_answer_at_its_target_has_no_gradient(run):
    right = [replace(group, rewards_G=np.ones(group.size, np.float32)) for group in GROUPS]
    silent = [np.zeros(group.size) for group in right]
    _, _, targets, _ = run(right, silent, top_k=16)
    by_id = {group.group_id: group for group in right}
    held = [replace(part_of(by_id[t.group_id], [t.episode]), extra={TARGET: t}) for t in targets]
    gradient, _, _, (report,) = run(right, silent, held, top_k=16)
    far, *_ = run(right, silent, held_answers(16), top_k=16)
    size = {name: sum(float((g**2).sum()) for g in some.values()) for name, some in (("at", gradient), ("far", far))}
    assert size["at"] < 1e-5 * size["far"]
    assert report.sums[""][0] == len(held) and abs(report.sums[""][1]) < 2e-3 * len(held)


def meta(seed=1, rewards=(1, 1, 0, 1), **changes):
    group = make_group(seed, 4, [2] * len(rewards))
    group = replace(group, rewards_G=np.array(rewards, np.float32), **changes)
    return GroupMeta.of(group, group)


def test_two_right_answers_of_the_present_weights_are_taken():
    assert right_answers(meta(), 0.9, 0) == [0, 1]
    assert right_answers(meta(), 0.9, 1) == []  # weights have moved on
    mixed = np.array([[0, 1], [1, 1], [1, 1], [1, 1]])
    assert right_answers(meta(versions_G2=mixed), 0.9, 1) == [1, 3]
    assert right_answers(meta(versions_G2=mixed), 0.9, 0) == [0, 1]  # with `max_lag` 1
    assert right_answers(meta(), 0.9, 0, without={0}) == [1, 3]
    part = part_meta(meta(), [1, 2, 3])
    assert right_answers(part, 0.9, 0, without={1}) == [2]  # episode 3 of the stored group


def test_parts_of_groups_name_episodes_of_the_stored_group():
    part = part_meta(meta(), [1, 3])
    (found,) = plan([], [], [(meta(), ())], [part], 1, 0.9, 0)
    assert found.taken == {("g1", 1), ("g1", 3)} and found.scored == ()


def test_one_answer_of_each_silent_group_is_scored_before_a_second():
    played = [(meta(seed, (1, 1, 1)), ()) for seed in range(MOST_SCORED - 2)]
    (found,) = plan([], [], played, [], 1, 0.9, 0)
    assert len(found.scored) == MOST_SCORED
    assert sorted(ref.episodes[0] for ref in found.scored) == [0] * (MOST_SCORED - 2) + [1] * 2
    assert plan([], [], played, [], 1, 0.9, 7)[0].scored == ()  # played by other weights


def test_shards_share_the_answers_and_agree_on_their_number():
    held = [GroupMeta.of(group, group) for group in held_answers(0)]
    parts = plan(held, [1.0, 2.0, 3.0, 4.0], [], [], 2, 0.9, 0)
    assert sorted(scale for part in parts for scale in part.scales) == [1.0, 2.0, 3.0, 4.0]
    assert {part.num_held_tokens for part in parts} == {6 + 3 + 4 + 1}
    assert sorted(one.group_id for part in parts for one in part.held) == ["g11", "g12", "g13", "g14"]


def test_more_probabilities_than_tokens_are_refused(random_llama_dir):
    with pytest.raises(ValueError, match="replay_retain_top_k = 1000000; expected at most"):
        learner_config(random_llama_dir).replay(retain=1, retain_top_k=10**6).validate()
