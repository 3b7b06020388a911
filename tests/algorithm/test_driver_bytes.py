"""The driver sees metadata only: what it receives in an iteration does not grow with the length of episodes."""

import numpy as np
import pytest
import ray
from ray import cloudpickle

from rllib_srl.batch.shard import fetched
from rllib_srl.types import ListedRef
from tests.small_envs import small_config, watch

LIMIT = 100_000  # bytes in one iteration of 8 groups of 8, most of it RLlib's metrics
ROUNDING = 2_000  # bytes by which two iterations may differ for other reasons


def bytes_of_an_iteration(algo, monkeypatch) -> tuple[int, int, list]:
    """Train once; return the bytes this process got from Ray, the bytes of all tokens, and the groups' metadata."""
    received, seen, get = [], watch(algo), ray.get

    def counted(*args, **kwargs):
        value = get(*args, **kwargs)
        received.append(len(cloudpickle.dumps(value)))
        return value

    with monkeypatch.context() as patch:
        patch.setattr(ray, "get", counted)
        algo.train()
    metas = [meta for batch in seen for meta in batch.groups]
    groups = fetched([meta.ref for meta in metas], 60.0)
    arrays = [array for g in groups for array in (g.token_ids_N, g.loss_mask_N, g.behaviour_logp_N)]
    return sum(received), sum(array.nbytes for array in arrays), metas


@pytest.mark.slow
def test_the_driver_receives_no_tokens_and_no_weights(random_llama_dir, tmp_path, ray_here, monkeypatch):
    """A memory adds what it says of visits and draws, whatever is in them."""
    config = small_config(random_llama_dir, tmp_path).training(num_prompts_per_batch=8, group_size=8)
    config.replay(capacity=1000, revisit_fraction=0.25, reuse_fraction=0.25, min_buffer_size=4, degenerate_share=None)
    config.env_runners(num_env_runners=1, max_episode_tokens=400, num_transcripts=0).learners(num_learners=1)
    counts = {}
    for max_turn_tokens in (1, 350):
        algo = config.copy(copy_frozen=False).env_runners(max_turn_tokens=max_turn_tokens).build_algo()
        algo.train()
        counts[max_turn_tokens] = bytes_of_an_iteration(algo, monkeypatch)
        assert algo.memory.counts["num_revisits_owed"] == algo.memory.counts["num_reuses_owed"] == 2
        assert algo.memory.counts["num_revisits_short"] == algo.memory.counts["num_reuses_short"] == 0
        num_weights = sum(w.size for w in algo.learner_group.get_weights()["default_policy"].values())
        algo.stop()
    short, long = counts[1], counts[350]
    assert long[1] > 10 * short[1] and long[1] > LIMIT  # or there would be nothing to see
    assert long[0] < LIMIT and 4 * num_weights > LIMIT
    assert abs(long[0] - short[0]) < ROUNDING
    for meta in long[2]:
        assert isinstance(meta.ref, ListedRef) and isinstance(meta.ref.ref, ray.ObjectRef)
        arrays = [value for value in vars(meta).values() if isinstance(value, np.ndarray)]
        assert {len(array) for array in arrays} == {8} and max(array.ndim for array in arrays) == 2
