"""Distillation: the KL of two tokens by hand, the learner's gradient against a slow one, learners, teachers, runs."""

import math
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch

from rllib_srl.algorithm.validation import config_errors
from rllib_srl.learner.regularisers.distillation import Distillation
from rllib_srl.learner.scoring import load_causal_lm
from rllib_srl.losses.kl import top_kl
from rllib_srl.types import Prompt
from tests.engine.small_llama import save_random_llama
from tests.learner.test_regularisers import changed, difference, shaken, trained
from tests.learner.test_regularisers import config as config  # a fixture
from tests.small_learner import GROUPS, Gathering, learner_group, make_group, relative_gap, update
from tests.small_memory import go, memory_config

OTHER = [replace(make_group(21, 5, [4, 3]), prompt=Prompt("env", "21", domain="other"))]
P, Q = (0.8, 0.2), (0.5, 0.5)  # teacher and policy over two tokens; the first one was sampled


def kl_and_gradient(**parameters):
    """Return the KL at one token of a vocabulary of two, and its gradient with respect to the logits."""
    logits = torch.tensor([Q]).log().requires_grad_()
    logp, top_k = logits.log_softmax(-1), parameters["top_k"]
    batch = {"teacher_logp": torch.tensor([P[0]]).log(), "teacher_top": torch.tensor([P[:top_k]]).log()}
    kl = Distillation(**parameters)._kl(batch, {"logp": logp[:, 0], "given_logp": logp[:, :top_k]})[0]
    return kl.item(), torch.autograd.grad(kl, logits)[0][0].tolist()


@pytest.mark.parametrize("top_k", [1, 2])  # one token and the rest, or both and no rest
def test_two_tokens_by_hand(top_k):
    # KL(p || q) = .8 log 1.6 + .2 log .4; gradient of the logits q - p.
    value, gradient = kl_and_gradient(mode="forward", top_k=top_k)
    assert value == pytest.approx(0.8 * math.log(1.6) + 0.2 * math.log(0.4), abs=1e-5)
    assert gradient == pytest.approx([-0.3, 0.3], abs=1e-4)
    # KL(q || p) = .5 log(.5 / .8) + .5 log(.5 / .2); gradient q_v (log q_v / p_v - KL) = -+ .5 log 2.
    value, gradient = kl_and_gradient(mode="reverse", top_k=top_k)
    assert value == pytest.approx(0.5 * math.log(0.625) + 0.5 * math.log(2.5), abs=1e-5)
    assert gradient == pytest.approx([-0.5 * math.log(2), 0.5 * math.log(2)], abs=1e-4)


def test_the_rest_is_one_class():
    # p = (1/2 | 1/2), q = (1/4 | 3/4): 1/2 log 2 + 1/2 log(2/3), less than over all three tokens.
    logits = torch.tensor([[0.25, 0.25, 0.5]]).log().requires_grad_()
    kl = top_kl(torch.tensor([[0.5]]).log(), logits.log_softmax(-1)[:, :1])[0]
    assert kl.item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), abs=1e-6)
    # q_0 - p_0 = -1/4; the rest's 1/4 falls on the others in proportion to q, 1 : 2
    assert torch.autograd.grad(kl, logits)[0][0].tolist() == pytest.approx([-0.25, 0.25 / 3, 0.5 / 3], abs=1e-6)


def test_a_policy_that_gives_a_token_of_the_teacher_nothing_is_pushed_back():
    logp = torch.tensor([[-90.0, -1e-30]]).requires_grad_()
    (gradient,) = torch.autograd.grad(top_kl(torch.tensor([[0.75, 0.25]]).log(), logp).sum(), logp)
    assert torch.isfinite(gradient).all() and gradient[0, 0] == pytest.approx(-0.75)


def test_the_sampled_token_alone_by_hand():
    # d = log .5 - log .8: the value is exp(-d) + d - 1, the gradient d times that of log q.
    gap = math.log(0.625)
    value, gradient = kl_and_gradient(mode="reverse", top_k=0)
    assert value == pytest.approx(1.6 + gap - 1, abs=1e-5)
    assert gradient == pytest.approx([0.5 * gap, -0.5 * gap], abs=1e-5)


@pytest.mark.parametrize(("settings", "error"), [
    ({"distill": {"teacher": ""}}, "regularisers.distill.teacher = ''; expected 'start', a model, a checkpoint, or"),
    ({"distill": {"mode": "forward", "top_k": 0}}, "regularisers.distill.top_k = 0 with mode = 'forward'; expected"),
    ({"distill": {"teacher": "./none"}}, "regularisers.distill.teacher = './none'; model directory ./none does not"),
    ({"distill": {"teacher": "tiny"}}, "of the teacher's 647 tokens have another id there, or none"),
])  # fmt: skip
def test_a_teacher_that_does_not_fit_is_refused_in_one_line(config, settings, error):
    (line,) = config_errors(config.training(regularisers=settings))
    assert error in line


def test_answers_without_rewards_need_a_teacher(config):
    (line,) = config_errors(config.training(advantage="none", group_size=1))
    assert line == "advantage = 'none'; expected a teacher, .distill(teacher=...): nothing else is learned"
    assert config_errors(config.distill()) == []
    assert config.regularisers == {"distill": {"teacher": "start"}}


@pytest.fixture(scope="session")
def teacher_dir(tmp_path_factory):
    """Return a Llama of the policy's shape with other random weights."""
    return save_random_llama(tmp_path_factory.mktemp("teacher"), seed=7)


def all_logps(model, group, g):
    """Return log-probs over the vocabulary where the policy wrote a token [T, V], and these tokens [T]."""
    ids = torch.tensor(group.stream(g), dtype=torch.long)
    mask = torch.from_numpy(group.loss_mask_N[group.offsets[g] : group.offsets[g + 1]])[1:]
    return model(ids[None]).logits[0, :-1].log_softmax(-1)[mask], ids[1:][mask]


def slow_kl(policy, teacher, group, g, mode, top_k):
    """Return the sum of the KL over an episode's tokens, from whole distributions and by Hugging Face's pass alone."""
    with torch.no_grad():
        p_TV, tokens = all_logps(teacher, group, g)
    q_TV, _ = all_logps(policy, group, g)
    if not top_k:
        d_T = (q_TV - p_TV).gather(1, tokens[:, None])[:, 0]
        return (0.5 * d_T**2).sum()
    at = p_TV.topk(top_k).indices
    p, q = ([one.gather(1, at).exp(), 1 - one.gather(1, at).exp().sum(1, keepdim=True)] for one in (p_TV, q_TV))
    p, q = torch.cat(p, 1), torch.cat(q, 1)
    return (q * (q / p).log()).sum() if mode == "reverse" else (p * (p / q).log()).sum()


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "top_k"), [("reverse", 0), ("reverse", 4), ("forward", 4)])
def test_the_gradient_is_that_of_the_kl_to_the_teacher_of_each_domain(config, teacher_dir, ray_here, mode, top_k):
    parameters = {"teacher": {"": str(teacher_dir)}, "coeff": 2.0, "mode": mode, "top_k": top_k}
    group, plain = learner_group(changed(config, regularisers={"distill": parameters})), learner_group(config)
    for one in (group, plain):
        shaken(one)
    moved, teacher = deepcopy(group._learner.model), load_causal_lm(str(teacher_dir))
    (own,), stats = update(group, [*GROUPS, *OTHER])  # the domain "other" has no teacher
    (other,), _ = update(plain, [*GROUPS, *OTHER])
    num = sum(int(one.num_loss_tokens_G().sum()) for one in (*GROUPS, *OTHER))
    kl = sum(slow_kl(moved, teacher, one, g, mode, top_k) for one in GROUPS for g in range(one.size))
    wanted = torch.autograd.grad(2.0 / num * kl, list(moved.parameters()))
    wanted = {name: one.numpy() for (name, _), one in zip(moved.named_parameters(), wanted, strict=True)}
    assert relative_gap(difference(own, other), wanted) < 1e-3
    num_taught = sum(int(one.num_loss_tokens_G().sum()) for one in GROUPS)
    assert stats["regularisers/distill_tokens"] == num_taught
    if top_k:
        assert stats["regularisers/distill"] == pytest.approx(kl.item() / num_taught, rel=1e-3)


@pytest.mark.slow
def test_two_sharded_learners_are_taught_and_pulled_back_as_one(config, teacher_dir, ray_here):
    parameters = {"teacher": {"": "start", "other": str(teacher_dir)}, "top_k": 3}
    terms = {"distill": parameters, "l2": 0.5}
    config = changed(config, regularisers=terms, grad_clip=0.5, optimizer_name="adamw", lr=1e-4)
    local = learner_group(config)
    groups = [*GROUPS, *OTHER]
    wanted = [update(local, groups) for _ in range(2)]
    two = config.copy(copy_frozen=False).learners(num_learners=2, num_cpus_per_learner=0.5, learner_class=Gathering)
    both = learner_group(two.training(fsdp=True, offload_frozen=True))
    try:
        own = [update(both, groups) for _ in range(2)]
    finally:
        both.shutdown()
    for (gradients, stats), (expected, by_one) in zip(own, wanted, strict=True):
        assert all(relative_gap(each, expected[0]) < 1e-4 for each in gradients)
        for name in ("regularisers/distill", "regularisers/l2"):
            assert stats[name] == pytest.approx(by_one[name], rel=1e-3)
        assert stats["regularisers/distill"] > 0
    assert wanted[1][1]["regularisers/l2"] > wanted[0][1]["regularisers/l2"] == 0


@pytest.mark.slow
def test_a_run_without_rewards_returns_to_its_checkpoint(random_llama_dir, tmp_path, ray_here, build):
    config = memory_config(random_llama_dir, tmp_path, revisit_fraction=0.0, reuse_fraction=0.0)
    algo = build(config.training(optimizer_name="adamw", lr=2e-3))
    algo.save_to_path(tmp_path / "early")
    early = {name: one.clone() for name, one in trained(algo.learner_group).items()}
    own = config.copy(copy_frozen=False).distill(str(tmp_path / "early"), coeff=1.0).training(
        advantage="none", group_size=1, num_prompts_per_batch=16, lr=2e-4
    )
    again = build(own)
    moves = shaken(again.learner_group)
    again.weight_sync.sync(again.version)
    results = [one.result for one in go(again, 16)]
    kls = [one["learners"]["default_policy"]["regularisers/distill"] for one in results]
    assert np.mean(kls[-4:]) < 0.9 * np.mean(kls[:4])
    assert all(one["num_empty_batches"] == 0 for one in results)  # every group of one was trained on
    taught = again.learner_group._learner.regularisers._all["distill"]._teachers[0].model
    assert all(torch.equal(one, early[name]) for name, one in taught.named_parameters()) and moves
