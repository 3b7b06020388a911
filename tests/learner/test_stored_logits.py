"""Stored logits of ESR belong to an episode, not to a place: parts of groups, resumes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from rllib_srl.batch.parts import part_of
from rllib_srl.learner.regularisers.stored_logits import StoredLogits, key_of
from rllib_srl.types import Prompt
from tests.small_learner import make_group

TOP = 2
PROMPT = Prompt("world", "same")


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
    stored.begin(groups)
    stored.prepare(batch, is_reused=False)
    marks = np.array([marks_of(group, g) for group in groups for g in range(group.size)], np.float32)
    top_NK = torch.from_numpy(marks)[batch["episode"]][:, None].repeat(1, TOP)
    stored.keep(batch, {"top_tokens": torch.ones_like(top_NK, dtype=torch.long), "top_logp": top_NK})


def targets_of(stored, groups):
    """Return the stored log-prob of each episode of reused groups, None for one without."""
    batch = tokens_of(groups)
    stored.begin(groups)
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
    stored = StoredLogits(1.0, TOP, 100)
    store(stored, [group])
    first, second = marks_of(group, 0), marks_of(group, 1)
    assert first != second
    assert targets_of(stored, [part_of(group, [1])]) == [second]
    assert targets_of(stored, [part_of(group, [0]), part_of(group, [1]), group]) == [first, second, first, second]


def test_an_episode_that_was_not_stored_has_no_target():
    group = group_of(1, [0, 1])
    stored = StoredLogits(1.0, TOP, 100)
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


def test_a_state_goes_on_and_one_by_place_stores_nothing():
    group = group_of(1, [0, 1])
    stored, other = StoredLogits(1.0, TOP, 100), StoredLogits(1.0, TOP, 100)
    store(stored, [group])
    other.set_state(stored.get_state())
    assert targets_of(other, [part_of(group, [1])]) == [marks_of(group, 1)]
    by_place = {group.group_id: {0: (np.zeros((3, TOP), np.int32), np.zeros((3, TOP), np.float32))}}
    other.set_state({"groups": by_place})
    assert targets_of(other, [group]) == [None, None] and other.get_state() == {"groups": {}}
