"""What retention is compared with, by value, on the real learner."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_srl.batch.parts import part_of
from rllib_srl.contrib.retained import AsActed, CrossEntropy, FromStart, Importance
from rllib_srl.types import TARGET
from tests.learner.test_retention import WEIGHT, config_of, held_answers, logits_of, update
from tests.small_learner import ADVANTAGES, GROUPS, Recording, learner_group, relative_gap

RIGHT = [replace(group, rewards_G=np.ones(group.size, np.float32)) for group in GROUPS]


@pytest.fixture
def learners(random_llama_dir, ray_here):
    groups = []

    def of(kind, top_k=4, **changes):
        class Recorded(kind, Recording):
            """Keeps its gradients."""

        config = config_of(random_llama_dir, top_k).learners(learner_class=Recorded).training(**changes)
        groups.append(learner_group(config))
        return groups[-1]

    yield of
    for group in groups:
        group.shutdown()


def model_of(directory):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


@pytest.mark.parametrize(("kind", "loss_of"), [
    (CrossEntropy, lambda logp, stored: -logp),
    (Importance, lambda logp, stored: -torch.minimum((logp - stored).exp(), torch.tensor(1.28))),
], ids=["cross-entropy", "importance"])  # fmt: skip
def test_the_gradient_is_that_of_the_formula(learners, random_llama_dir, kind, loss_of):
    held = held_answers(4)
    for one in held:  # some far above and some far below, so that the clip acts on some
        one.extra[TARGET].sampled_logp_T[:] = np.linspace(-9, -3, len(one.extra[TARGET].sampled_logp_T))
    plain, *_ = update(learners(kind), GROUPS, ADVANTAGES)
    both, _, _, (report,) = update(learners(kind), GROUPS, ADVANTAGES, held)
    model = model_of(random_llama_dir)
    loss, lengths = {"a": 0.0, "b": 0.0}, {"a": 0, "b": 0}
    for one in held:
        tokens = torch.tensor(one.token_ids_N[one.loss_mask_N].astype(np.int64))
        logp_T = logits_of(model, one).log_softmax(-1)[torch.arange(len(tokens)), tokens]
        stored_T = torch.tensor(one.extra[TARGET].sampled_logp_T).float()
        loss[one.prompt.domain] += loss_of(logp_T, stored_T).sum()
        lengths[one.prompt.domain] += len(tokens)
    (WEIGHT * sum(loss[domain] / lengths[domain] for domain in loss)).backward()
    want = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    assert relative_gap({name: both[name] - plain[name] for name in both}, want) < 1e-4
    assert report.sums["a"][0] == 2 and report.sums["a"][1] > 0  # the KL is measured all the same


def test_recorded_log_probs_are_targets(learners):
    _, _, targets, _ = update(learners(AsActed, top_k=0), RIGHT, ADVANTAGES)
    groups = {group.group_id: group for group in RIGHT}
    assert len(targets) == 6
    for target in targets:
        one = part_of(groups[target.group_id], [target.episode])
        assert np.allclose(target.sampled_logp_T, one.behaviour_logp_N[one.loss_mask_N], atol=4e-3)
        assert target.ids_Tk.shape == (len(target.sampled_logp_T), 0)


def test_more_than_recorded_log_probs_are_refused(learners):
    with pytest.raises(ValueError, match=r"top_k = 4 with contrib.retained:AsActed; expected 0"):
        learners(AsActed)


def test_the_starting_model_gives_the_targets(learners, random_llama_dir):
    group = learners(FromStart, lr=1e-2)
    update(group, RIGHT, ADVANTAGES)
    _, _, targets, _ = update(group, RIGHT, ADVANTAGES)
    weights, start = group.get_weights()[DEFAULT_MODULE_ID], model_of(random_llama_dir)
    first = dict(start.named_parameters())["model.layers.0.mlp.up_proj.weight"].detach().numpy()
    assert np.abs(weights["model.model.layers.0.mlp.up_proj.weight"] - first).max() > 1e-4  # the policy has moved
    groups = {group.group_id: group for group in RIGHT}
    assert len(targets) == 6
    for target in targets:
        one = part_of(groups[target.group_id], [target.episode])
        logp_TV = logits_of(start, one).log_softmax(-1).detach()
        tokens = one.token_ids_N[one.loss_mask_N].astype(np.int64)
        assert np.allclose(target.logp_Tk, logp_TV.topk(4).values, atol=4e-3)
        assert np.allclose(target.sampled_logp_T, logp_TV[range(len(tokens)), tokens], atol=4e-3)
