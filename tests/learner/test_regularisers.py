"""Regularisers in the real learner: gradients against slow ones, weights pulled back, states, learners, LoRA."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch

from rllib_srl.batch.shard import build_shards
from rllib_srl.learner.group.learners import Learners
from rllib_srl.learner.scoring import load_causal_lm
from rllib_srl.types import GroupMeta, Prompt
from tests.small_learner import GROUPS, Recording, learner_config, learner_group, make_group, relative_gap, update

pytestmark = pytest.mark.slow
STAGES = [{"env": name, "env_config": {"num_shots": 0}, "iterations": 2} for name in ("compare", "lookup")]
OLD = [replace(one, origin="revisit", prompt=Prompt("env", "1", domain="old")) for one in GROUPS]
NOTHING = [np.zeros(group.size) for group in GROUPS]
LORA = {"lora_rank": 4}


@pytest.fixture
def config(random_llama_dir):
    config = learner_config(random_llama_dir, stream=STAGES).replay(revisit_fraction=0.25)
    return config.training(lr=0.1, optimizer_name="sgd", grad_clip=None)


def changed(config, **settings):
    return config.copy(copy_frozen=False).training(**settings)


def trained(group):
    return {name: one.detach().clone() for name, one in group._learner.model.named_parameters() if one.requires_grad}


def shaken(group, seed=3):
    torch.manual_seed(seed)
    moves = {}
    with torch.no_grad():
        for name, one in group._learner.model.named_parameters():
            if one.requires_grad:
                moves[name] = 0.02 * torch.randn_like(one)
                one.add_(moves[name])
    return moves


def end_stage(group, groups, domains=("old",)):
    metas = [GroupMeta.of(one, one) for one in groups]
    shards = build_shards(metas, [np.zeros(one.size) for one in groups], max(1, group.config.num_learners), 30)
    return Learners(group).end_stages(domains, shards, 120)


def difference(one, other):
    return {name: one[name] - other[name] for name in one}


def logps_of(model, group, g):
    """Return the log-probs of the tokens that the policy wrote, by Hugging Face's forward pass alone."""
    ids = torch.tensor(group.stream(g), dtype=torch.long)
    mask = torch.from_numpy(group.loss_mask_N[group.offsets[g] : group.offsets[g + 1]])
    logp = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return logp[mask[1:]]


@pytest.mark.parametrize("lora", [{}, LORA])
def test_l2_pulls_every_trained_weight_back(config, ray_here, lora):
    group = learner_group(changed(config, regularisers={"l2": 0.5}, **lora))
    start = trained(group)
    moves = shaken(group)
    (gradient,), stats = update(group, GROUPS, advantages=NOTHING)  # the loss itself has no gradient
    assert relative_gap(gradient, {name: 0.5 * move.numpy() for name, move in moves.items()}) < 1e-4
    assert stats["regularisers/l2"] == pytest.approx(0.25 * sum(float((m**2).sum()) for m in moves.values()), rel=1e-4)
    for name, now in trained(group).items():  # a step of .1: 5 % of the way
        torch.testing.assert_close(now - start[name], 0.95 * moves[name], rtol=1e-4, atol=1e-6)
    assert bool(lora) == all("lora_" in name for name in moves)


def test_a_coefficient_of_zero_changes_no_bit(config, ray_here):
    plain = learner_group(config)
    off = learner_group(changed(config, regularisers={"l2": 0, "ewc": {"coeff": 0.0}, "lwf": 0, "distill": 0}))
    for group in (plain, off):
        shaken(group)
    end_stage(off, OLD)
    (wanted, first), (own, second) = (update(group, OLD) for group in (plain, off))
    assert all(np.array_equal(own[0][name], wanted[0][name]) for name in wanted[0])
    assert set(first) == set(second)
    assert all(torch.equal(one, trained(plain)[name]) for name, one in trained(off).items())
    assert "regularisers" not in off._learner.get_state()


def slow_importance(model, groups):
    """Return the mean over episodes of the squared gradient of an episode's log-prob, of the trained weights."""
    parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
    episodes = [(group, g) for group in groups for g in range(group.size)]
    total = {name: torch.zeros_like(one) for name, one in parameters.items()}
    for group, g in episodes:
        found = torch.autograd.grad(logps_of(model, group, g).sum(), list(parameters.values()))
        for name, one in zip(parameters, found, strict=True):
            total[name] += one**2
    return {name: (one / len(episodes)).numpy() for name, one in total.items()}


def test_ewc_measures_the_importance_and_pulls_by_it(config, random_llama_dir, ray_here):
    group = learner_group(changed(config, regularisers={"ewc": {"coeff": 3.0, "decay": 0.5}}))
    plain, learner, start = learner_group(config), group._learner, deepcopy(group.get_state())
    (before,), stats = update(group, GROUPS, advantages=NOTHING)
    assert stats["regularisers/ewc"] == 0 and not any(one.any() for one in before.values())  # no stage has ended
    num = sum(one.size for one in OLD)
    assert end_stage(group, OLD) == num
    first = learner.get_state()["regularisers"]["ewc"]
    importance = {name.removeprefix("model."): one for name, one in first["importance"].items()}
    wanted = slow_importance(load_causal_lm(str(random_llama_dir)), OLD)
    assert relative_gap(importance, wanted) < 1e-4
    for one in (group, plain):
        moves = shaken(one)
    (own,), stats = update(group, GROUPS)
    (other,), _ = update(plain, GROUPS)
    pulls = {name: 3.0 * wanted[name] * moves[name].numpy() for name in wanted}
    assert relative_gap(difference(own, other), pulls) < 1e-3
    by_hand = 1.5 * sum(float((wanted[name] * moves[name].numpy() ** 2).sum()) for name in wanted)
    assert stats["regularisers/ewc"] == pytest.approx(by_hand, rel=1e-4)
    # The second stage halves what the first has measured, and moves the anchor.
    end_stage(group, OLD[:1], ("newer",))
    second = learner.get_state()["regularisers"]["ewc"]
    assert all((second["importance"][name] >= 0.5 * one - 1e-9).all() for name, one in first["importance"].items())
    assert relative_gap(second["anchor"], first["anchor"]) > 1e-3
    assert learner.regularisers.end_stages(["empty"], [], 1.0, True) == 0  # and an empty stage changes nothing
    assert relative_gap(learner.get_state()["regularisers"]["ewc"]["importance"], second["importance"]) == 0
    group.set_state(start)  # of before the first end of a stage
    assert learner.get_state()["regularisers"]["ewc"] == {}


def test_two_learners_measure_the_importance_of_one(config, ray_here):
    config = changed(config, regularisers={"ewc": 2.0, "lwf": 1.0})
    local = learner_group(config)
    two = config.copy(copy_frozen=False).learners(num_learners=2, num_cpus_per_learner=0.5, learner_class=Recording)
    both = learner_group(two)
    try:
        for group in (local, both):
            update(group, GROUPS)
            assert end_stage(group, OLD[1:2]) == 2  # one learner has none
            update(group, OLD)
        (wanted,), stats = update(local, OLD)
        own, again = update(both, OLD)
    finally:
        both.shutdown()
    for gradients in own:
        assert relative_gap(gradients, wanted) < 1e-4
    for name in ("regularisers/ewc", "regularisers/lwf", "regularisers/lwf_tokens"):
        assert again[name] == pytest.approx(stats[name], rel=1e-3) and stats[name] > 0


def test_lwf_holds_old_prompts_at_the_policy_of_the_stage(config, random_llama_dir, ray_here):
    group, plain = learner_group(changed(config, regularisers={"lwf": 2.0})), learner_group(config)
    newer = [make_group(21, 5, [4, 3])]  # of a domain that has not ended
    end_stage(group, OLD)
    for one in (group, plain):
        shaken(one)
    moved = deepcopy(group._learner.model)
    (own,), stats = update(group, [*OLD, *newer])
    (other,), _ = update(plain, [*OLD, *newer])
    frozen = load_causal_lm(str(random_llama_dir))
    num = sum(int(one.num_loss_tokens_G().sum()) for one in (*OLD, *newer))
    parameters = dict(moved.named_parameters())
    total, kl = 0.0, 0.0
    for one in OLD:
        for g in range(one.size):
            with torch.no_grad():
                target = logps_of(frozen, one, g)
            gap = logps_of(moved, one, g) - target
            total = total + 2.0 / num * (0.5 * gap**2).sum()
            kl += float((torch.exp(-gap) + gap - 1).sum().detach())
    found = torch.autograd.grad(total, list(parameters.values()))
    wanted = {name: one.numpy() for name, one in zip(parameters, found, strict=True)}
    assert relative_gap(difference(own, other), wanted) < 1e-3
    num_old = sum(int(one.num_loss_tokens_G().sum()) for one in OLD)
    assert stats["regularisers/lwf_tokens"] == num_old
    assert stats["regularisers/lwf"] == pytest.approx(kl / num_old, rel=1e-3)
