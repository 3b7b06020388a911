"""Retention in the learner: the gradient by value, any split, and how gradients are compared."""

import weakref
from dataclasses import replace

import numpy as np
import pytest
import ray
import torch
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_srl.batch.retention import split
from rllib_srl.batch.shard import build_shards
from rllib_srl.contrib.sec import SEC
from rllib_srl.learner.group.learners import Learners
from rllib_srl.losses.retention import scales
from rllib_srl.types import GroupMeta, Prompt
from tests.small_learner import (
    ADVANTAGES,
    GROUPS,
    Gathering,
    learner_config,
    learner_group,
    make_group,
    relative_gap,
)

WEIGHT = 0.7
STORED = [make_group(11, 5, [6]), make_group(12, 9, [3]), make_group(13, 2, [4]), make_group(14, 5, [1])]


def held_answers():
    """Return groups of one episode, of two domains."""
    prompts = [Prompt("env", str(number), domain="ab"[number % 2]) for number in range(len(STORED))]
    return [replace(group, prompt=prompt, origin="retain") for group, prompt in zip(STORED, prompts, strict=True)]


def config_of(model_dir):
    config = learner_config(model_dir).training(optimizer_name="sgd", lr=0.0, grad_clip=None)
    config.callbacks(SEC)  # which plans shares of domains: without plans or a stream nothing is ever held
    return config.replay(retain=WEIGHT, revisit_fraction=0, reuse_fraction=0, capacity=100)


def update(group, played, advantages, held=(), compared=()):
    """Train once; return the gradient of the first learner, its statistics, and reports."""
    metas = [GroupMeta.of(one, ray.put(one)) for one in played]
    stored = [GroupMeta.of(one, ray.put(one)) for one in held]
    factors = scales([m.num_loss_tokens_G.sum() for m in stored], [m.prompt.domain for m in stored], WEIGHT)
    num_shards = max(1, group.config.num_learners)
    shards = build_shards(metas, advantages, num_shards, 30)
    for shard, part in zip(shards, split(stored, factors, compared, num_shards), strict=True):
        shard.retention = part
    learners = Learners(group)
    results = learners.update(shards, {}, group.config.num_epochs, 120)
    stats = {name: value.peek() for name, value in results[0][DEFAULT_MODULE_ID].items()}
    reports = learners.retention_report(30)
    gradients = [one.get() for one in group.foreach_learner(lambda learner: learner.gradients())]
    return gradients[0], stats, reports


@pytest.fixture
def run(random_llama_dir, ray_here):
    groups = []

    def go(*arguments, change=lambda config: config, **more):
        groups.append(learner_group(change(config_of(random_llama_dir))))
        return update(groups[-1], *arguments, **more)

    yield go
    for group in groups:
        group.shutdown()


def by_hand(model_dir, held, temperature=1.0, weight=WEIGHT, state=None):
    """Return the gradient of the term by Hugging Face's own passes, - log q by domain, and Delta by domain."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model.load_state_dict(state or model.state_dict())
    domains = sorted({group.prompt.domain for group in held})
    nll, gap, lengths = ({domain: [] for domain in domains} for _ in range(3))
    for group in held:
        ids, mask = torch.tensor(group.token_ids_N.astype(np.int64)), torch.tensor(group.loss_mask_N)
        logp_TV = (model(ids[None]).logits[0, :-1] / temperature).log_softmax(-1)
        logp_T = logp_TV.gather(1, ids[1:, None])[mask[1:], 0]
        nll[group.prompt.domain].append(-logp_T.sum())
        gap[group.prompt.domain].append(group.behaviour_logp_N.sum() - logp_T.sum().item())
        lengths[group.prompt.domain].append(len(logp_T))
    # Per answer, divided by the domain's mean length, summed over domains.
    loss = weight * sum(torch.stack(nll[domain]).mean() / np.mean(lengths[domain]) for domain in nll)
    loss.backward()
    gradient = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    return gradient, {domain: sum(nll[domain]).item() for domain in nll}, {domain: sum(gap[domain]) for domain in gap}


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_gradient_is_that_of_the_formula(run, random_llama_dir, temperature):
    held, cold = held_answers(), {"change": lambda config: config.env_runners(temperature=temperature)}
    plain, *_ = run(GROUPS, ADVANTAGES, **cold)
    both, stats, (report,) = run(GROUPS, ADVANTAGES, held, **cold)
    assert report.cosines is None
    want, nll, gap = by_hand(random_llama_dir, held, temperature)
    assert relative_gap({name: both[name] - plain[name] for name in both}, want) < 1e-4
    norm = {
        name: np.linalg.norm(np.concatenate([g.ravel() for g in some.values()]))
        for name, some in (("want", want), ("both", both))
    }
    assert stats["retention/gradient_share"] == pytest.approx(norm["want"] / norm["both"], rel=1e-3)
    for domain in "ab":
        assert report.sums[domain] == pytest.approx([2, nll[domain], gap[domain]], rel=1e-4)


def assert_same_sums(reports, report):
    for domain in "ab":
        rows = [each.sums.get(domain, [0, 0, 0]) for each in reports]
        assert np.sum(rows, 0).tolist() == pytest.approx(report.sums[domain], rel=1e-4)


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
    held = held_answers()
    played, *_ = run(GROUPS, ADVANTAGES)
    one, _, (report,) = run(GROUPS, ADVANTAGES, held)
    alone, _, reports = run(GROUPS, ADVANTAGES, held, change=change)
    assert relative_gap(alone, one) < 1e-5
    assert_same_sums(reports, report)
    compared, _, reports = run(GROUPS, ADVANTAGES, held, change=change, compared=("a", "b"))
    assert relative_gap(compared, alone) == 0  # the same run
    assert_same_sums(reports, report)
    block = [name for name in played if ".layers.1." in name]
    assert len(block) == 9

    def flat(gradient):
        return np.concatenate([gradient[name].ravel() for name in block])

    def cosine(gradient):
        a, b = flat(gradient), flat(played)
        return a @ b / np.linalg.norm(a) / np.linalg.norm(b)

    own = {d: by_hand(random_llama_dir, [one for one in held if one.prompt.domain == d])[0] for d in "ab"}
    want = {domain: cosine(gradient) for domain, gradient in own.items()}
    of_all = cosine({name: own["a"][name] + own["b"][name] for name in block})
    for report in reports:
        assert report.cosines.by_domain == pytest.approx(want, abs=1e-4)
        assert report.cosines.of_all == pytest.approx(of_all, abs=1e-4)


def test_a_second_epoch_holds_them_again_and_reports_the_first(run):
    held, twice = held_answers(), {"change": lambda config: config.training(num_epochs=2)}
    one, _, (report,) = run(GROUPS, ADVANTAGES, held)
    gradient, _, reports = run(GROUPS, ADVANTAGES, held, compared=("a", "b"), **twice)
    assert relative_gap(gradient, one) < 1e-5  # of the last epoch; the rate is 0
    assert_same_sums(reports, report)


def test_a_pass_has_no_gradient_beside_it_that_is_not_read_again(random_llama_dir, ray_here):
    """Gradients alive before the played passes but the parameters' own, and before those of each domain compared."""
    group = learner_group(config_of(random_llama_dir))
    learner, seen, alive = group._learner, [], []
    summed, run_passes, backward_of = learner._summed_gradients, learner._run, learner.retention.backward_of

    def noted():
        gradients = summed()
        seen.extend(map(weakref.ref, gradients))
        return gradients

    def counted(call):
        def count(*arguments):
            own = {id(parameter.grad) for parameter in learner._params.values()}
            alive.append(len({id(one()) for one in seen if one() is not None} - own) / len(learner._params))
            return call(*arguments)

        return count

    learner._summed_gradients = learner.conflict._summed = noted
    learner._run, learner.retention.backward_of = counted(run_passes), counted(backward_of)
    reused = replace(GROUPS[0], origin="reuse")
    _, stats, _ = update(group, [reused, *GROUPS[1:]], ADVANTAGES, held_answers(), compared=("a", "b"))
    assert stats["reuse/num_episodes"] == 3 and stats["retention/gradient_share"] > 0
    assert alive == [0, 0, 1, 1]  # reused, played; the update's own gradient beside that of each domain


def test_a_gradient_of_zero_has_no_direction(run):
    *_, (report,) = run(GROUPS, [np.zeros(group.size) for group in GROUPS], held_answers(), compared=("a", "b"))
    assert report.cosines.by_domain == {} and np.isnan(report.cosines.of_all)


def test_shards_share_the_answers_and_agree_on_their_number():
    held = [GroupMeta.of(group, group) for group in held_answers()]
    parts = split(held, [1.0, 2.0, 3.0, 4.0], ("a",), 2)
    assert sorted(scale for part in parts for scale in part.scales) == [1.0, 2.0, 3.0, 4.0]
    assert {(part.num_held_tokens, part.compared) for part in parts} == {(6 + 3 + 4 + 1, ("a",))}
    assert sorted(one.group_id for part in parts for one in part.held) == ["g11", "g12", "g13", "g14"]
