"""ESR: targets of an episode wherever it is, the gradient in the real learner, and a run that trains with it."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch

from rllib_srl.algorithm.validation import faults_of
from rllib_srl.batch.parts import part_of
from rllib_srl.contrib.esr import ESR, key_of
from rllib_srl.learner.rl_module import load_causal_lm
from rllib_srl.types import Prompt
from tests.learner.test_regularisers import LORA, NOTHING, changed, difference, shaken
from tests.learner.test_regularisers import config as config  # a fixture
from tests.small_learner import GROUPS, learner_group, make_group, relative_gap, update
from tests.small_memory import memory_config


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"replay": {"reuse_fraction": 0.0}}, "with replay_reuse_fraction = 0; expected above 0"),
        ({"training": {"fsdp": True}}, "with fsdp = True; expected fsdp = False"),
        ({"learners": {"num_learners": 2}}, "with num_learners = 2; expected 0 or 1"),
    ],
)
def test_esr_needs_reuse_and_one_learner(config, change, expected):
    config = config.replay(reuse_fraction=0.25).training(regularisers={"contrib.esr": 1.0})
    for method, values in change.items():
        config = getattr(config, method)(**values)
    lines = [line for line in faults_of(config) if line.startswith("regularisers.contrib.esr")]
    assert len(lines) == 1 and expected in lines[0]


REUSING = {"regularisers": {"contrib.esr": {"coeff": 2.0, "top_k": 3, "episodes": 8}}}


@pytest.fixture
def reusing(config):
    return config.copy(copy_frozen=False).replay(reuse_fraction=0.25)


def distributions_of(model, group, g):
    """Return log-probs of all tokens at each token that the policy wrote [T, V], by Hugging Face's forward pass."""
    ids = torch.tensor(group.stream(g), dtype=torch.long)
    mask = torch.from_numpy(group.loss_mask_N[group.offsets[g] : group.offsets[g + 1]])
    return model(ids[None]).logits[0, :-1].log_softmax(-1)[mask[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("prefix_sharing", [True, False])
def test_esr_holds_reused_groups_at_their_stored_logits(reusing, random_llama_dir, ray_here, prefix_sharing):
    group, plain = (learner_group(changed(reusing, prefix_sharing=prefix_sharing, **one)) for one in (REUSING, {}))
    for one in (group, plain):
        update(one, GROUPS)  # 10 episodes of 3 groups: the oldest is not kept
        shaken(one)
    moved = deepcopy(group._learner.model)
    newer = [make_group(21, 5, [4, 3])]
    (own,), stats = update(group, newer, GROUPS)
    (other,), _ = update(plain, newer, GROUPS)
    frozen = load_causal_lm(str(random_llama_dir))
    num = sum(int(one.num_loss_tokens_G().sum()) for one in GROUPS)
    parameters = dict(moved.named_parameters())
    total, kl, num_stored = 0.0, 0.0, 0
    for one in GROUPS[1:]:
        for g in range(one.size):
            with torch.no_grad():
                p_TK, tokens_TK = distributions_of(frozen, one, g).exp().topk(3)
            q_TK = distributions_of(moved, one, g).exp().gather(1, tokens_TK)
            p, q = (torch.cat([each, 1 - each.sum(-1, keepdim=True)], 1) for each in (p_TK, q_TK))
            kl_T = (p * (p / q).log()).sum(-1)
            total, kl, num_stored = total + 2.0 / num * kl_T.sum(), kl + float(kl_T.sum().detach()), num_stored + len(p)
    found = torch.autograd.grad(total, list(parameters.values()))
    wanted = {name: one.numpy() for name, one in zip(parameters, found, strict=True)}
    assert relative_gap(difference(own, other), wanted) < 1e-3
    assert stats["regularisers/esr_tokens"] == num_stored < num
    assert stats["regularisers/esr"] == pytest.approx(kl / num_stored, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [{}, LORA])
def test_esr_brings_the_policy_back_and_its_store_is_saved(reusing, ray_here, lora):
    config = changed(reusing, regularisers={"contrib.esr": {"coeff": 0.2, "top_k": 3}}, **lora)
    group = learner_group(config)
    update(group, GROUPS[:2], advantages=NOTHING[:2])  # stores; the weights stay
    shaken(group)
    state = deepcopy(group.get_state())
    found = [update(group, GROUPS[2:], GROUPS[:2], advantages=NOTHING[2:] + NOTHING[:2])[1] for _ in range(3)]
    values = [one["regularisers/esr"] for one in found]
    assert values[0] > values[1] > values[2] > 0
    other = learner_group(config)
    other.set_state(state)
    again = update(other, GROUPS[2:], GROUPS[:2], advantages=NOTHING[2:] + NOTHING[:2])[1]
    assert again["regularisers/esr"] == values[0] and again["regularisers/esr_tokens"] > 0


# --- targets ----------------------------------------------------------------------------------------

TOP = 2
PROMPT = Prompt("world", "same")


def fresh():
    """Return an ESR that has stored nothing."""
    found = ESR(1.0, TOP, 100)
    found.start(None)
    return found


def group_of(seed, rewards):
    """Return a group of equally long episodes with these rewards; all groups have one prompt."""
    group = make_group(seed, 4, [3] * len(rewards))
    return replace(group, prompt=PROMPT, rewards_G=np.array(rewards, np.float32))


def tokens_of(groups):
    """Return a micro-batch of groups: the episode of each loss token."""
    sizes = np.concatenate([group.num_loss_tokens_G() for group in groups])
    return {"episode": torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes))}


def marks_of(group, g):
    """Return the log-prob by which tests know the episode: minus the sum of its token ids."""
    return -float(group.stream(g).sum())


def store(stored, groups):
    """Keep the logits of played groups; each token's log-probs are the mark of its episode."""
    batch = tokens_of(groups)
    stored.begin(groups, [])
    stored.prepare(batch, is_reused=False)
    marks = np.array([marks_of(group, g) for group in groups for g in range(group.size)], np.float32)
    top_NK = torch.from_numpy(marks)[batch["episode"]][:, None].repeat(1, TOP)
    stored.keep(batch, {"top_tokens": torch.ones_like(top_NK, dtype=torch.long), "top_logp": top_NK})


def targets_of(stored, groups):
    """Return the stored log-prob of each episode of reused groups, None for one without."""
    batch = tokens_of(groups)
    stored.begin(groups, [])
    stored.prepare(batch, is_reused=True)
    found = []
    for episode in range(sum(group.size for group in groups)):
        at = batch["episode"] == episode
        is_stored = batch["is_stored"][at] if "is_stored" in batch else torch.zeros(3, dtype=torch.bool)
        values = batch["stored_top"][at].unique().tolist() if is_stored.all() else [None]
        assert len(values) == 1 and is_stored.unique().numel() == 1
        found += values
    return found


def test_a_part_of_a_group_gets_what_was_stored_for_its_own_episodes():
    group = group_of(1, [0, 1])
    stored = fresh()
    store(stored, [group])
    first, second = marks_of(group, 0), marks_of(group, 1)
    assert first != second
    assert targets_of(stored, [part_of(group, [1])]) == [second]
    assert targets_of(stored, [part_of(group, [0]), part_of(group, [1]), group]) == [first, second, first, second]


def test_an_episode_that_was_not_stored_has_no_target():
    group = group_of(1, [0, 1])
    stored = fresh()
    store(stored, [part_of(group, [1])])  # a partly rated group, or one whose first episode was replaced
    assert targets_of(stored, [group]) == [None, marks_of(group, 1)]
    assert targets_of(stored, [replace(group, group_id="other")]) == [None, None]


def test_a_key_is_of_the_group_its_tokens_and_what_was_written():
    group = group_of(1, [0, 1])
    mask_N = group.loss_mask_N.copy()
    mask_N[group.offsets[1] + 1] ^= True
    others = [replace(group, group_id="other"), replace(group, loss_mask_N=mask_N)]
    keys = [key_of(one, 1) for one in (group, *others)] + [key_of(group, 0)]
    assert len(set(keys)) == 4
    again = replace(
        group, token_ids_N=group.token_ids_N.astype(np.int64)
    )  # a stored group may come back in another type
    assert key_of(again, 1) == keys[0] == key_of(part_of(group, [1]), 0)


def test_a_state_goes_on():
    group = group_of(1, [0, 1])
    stored, other = fresh(), fresh()
    store(stored, [group])
    other.set_state(stored.get_state())
    assert targets_of(other, [part_of(group, [1])]) == [marks_of(group, 1)]


@pytest.mark.slow
def test_a_run_trains_with_it(random_llama_dir, tmp_path, ray_here, build):
    config = memory_config(random_llama_dir, tmp_path, revisit_fraction=0.5)
    algo = build(config, regularisers={"contrib.esr": 0.5})
    learned = [algo.train()["learners"]["default_policy"] for _ in range(3)]
    assert learned[2]["regularisers/esr_tokens"] > 0 and np.isfinite(learned[2]["regularisers/esr"])
