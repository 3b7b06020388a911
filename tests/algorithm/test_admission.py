"""Admission on the real path: a refused episode is not stored, and the weights are those without its loss."""

from dataclasses import replace

import numpy as np
import pytest

from rllib_srl.batch.shard import fetched
from rllib_srl.replay.admission import Refusal
from rllib_srl.types import GroupMeta
from tests.small_memory import go, memory_config, weights_of

REFUSED = {"1.0": (0,), "1.2": (1, 3), "2.1": (2,)}  # group -> episodes


def of_table(group, decode):
    found = REFUSED.get(group.group_id)
    return Refusal("listed", found) if found else None


def trained_on(group, decode):
    found = of_table(group, decode)
    return replace(found, train=True) if found else None


@pytest.fixture
def config(random_llama_dir, tmp_path, ray_here):
    return memory_config(random_llama_dir, tmp_path / "log", "Mixed", revisit_fraction=0.0, reuse_fraction=0.0)


def admitting(config, admit):
    return config.copy(copy_frozen=False).replay(admit=admit)


def without_loss(meta: GroupMeta) -> GroupMeta:
    """Return a group whose refused episodes have no loss token."""
    (group,) = fetched([meta.ref], 60.0)
    mask_N = group.loss_mask_N.copy()
    for g in REFUSED.get(meta.group_id, ()):
        mask_N[group.offsets[g] : group.offsets[g + 1]] = False
    logp_N = np.where(mask_N, group.behaviour_logp_N, np.float32(0))
    masked = replace(group, loss_mask_N=mask_N, behaviour_logp_N=logp_N)
    return GroupMeta.of(masked, masked)


@pytest.mark.slow
def test_weights_are_those_of_a_run_in_which_the_refused_episodes_had_no_loss(config, build):
    refusing = build(admitting(config, f"{__name__}:of_table"))
    iterations = go(refusing, 2)
    assert {v.group_id: v.without_loss for one in iterations for v in one.visits.values() if v.refused} == REFUSED
    trained = {group.group_id: group.size for one in iterations for _, group, _ in one.trained}
    assert {name: trained[name] for name in REFUSED if name in trained} == {
        name: 4 - len(episodes) for name, episodes in REFUSED.items() if name in trained
    }
    assert set(REFUSED) & set(trained)
    found = iterations[-1].replay
    assert (found["num_refused_listed"], found["num_episodes_without_loss"], found["num_items"]) == (3, 4, 5)

    masked = build(admitting(config, None))
    kept = masked._kept
    masked._kept = lambda batches: (lambda groups, late: ([*map(without_loss, groups)], late))(*kept(batches))
    go(masked, 2)
    np.testing.assert_allclose(weights_of(refusing), weights_of(masked), rtol=0, atol=1e-7)

    whole = build(admitting(config, f"{__name__}:trained_on"))
    assert go(whole, 2)[-1].replay["num_items"] == 5  # not stored, and trained on
    assert np.abs(weights_of(whole) - weights_of(refusing)).max() > 1e-5
    plain = build(admitting(config, None))
    go(plain, 2)
    np.testing.assert_array_equal(weights_of(whole), weights_of(plain))
