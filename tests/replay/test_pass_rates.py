"""Pass rates from the memory: of reviewed items, of domains and of what nobody has played, over one shard and two."""

from __future__ import annotations

import numpy as np
import pytest

from rllib_srl.replay import SRLReplayBuffer
from rllib_srl.replay.client import ReplayClient
from rllib_srl.replay.pass_rates import PassRates, estimates
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.types import GroupMeta, Prompt
from tests.replay.groups import a_group


def test_domains_of_several_shards_are_added_up():
    """Mean (1/2 + .9 + .3 + .6) / 4 = .575 of domain a: Beta(1.15, .85); nothing is known of b."""
    prompts = [Prompt("w", "1", "a"), Prompt("w", "2", "a"), Prompt("w", "3", "b")]
    parts = [PassRates({prompts[0].key: (4.5, 0.5)}, {"a": (1.2, 2)}), PassRates({}, {"a": (0.6, 1), "c": (1.0, 1)})]
    np.testing.assert_allclose(estimates(prompts, parts), [[4.5, 0.5], [1.15, 0.85], [1, 1]])
    assert estimates(prompts, ()).tolist() == [[1, 1]] * 3
    assert estimates([], ()).shape == (0, 2)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_the_memory_estimates_by_item_and_by_domain(num_shards, tmp_path):
    settings = ReplaySettings(capacity=50, on_secret="keep", num_shards=num_shards)
    memory = ReplayClient.start(settings, directory=tmp_path, seed=1, run="run", is_local=True, timeout_s=5.0)
    groups = [a_group(index, 1, index) for index in range(6)]
    memory.add([GroupMeta.of(group, group) for group in groups], 1)
    played = [group.prompt for group in groups]
    domain = played[0].domain
    found = memory.pass_rates([*played, Prompt("w", "new", domain), Prompt("w", "new", "another")])
    expected = [(0.5 + one.is_success_G(0.999).sum(), 0.5 + (~one.is_success_G(0.999)).sum()) for one in groups]
    np.testing.assert_allclose(found[:6], expected)
    of_domain = [a / (a + b) for (a, b), one in zip(expected, played, strict=True) if one.domain == domain]
    mean = (0.5 + sum(of_domain)) / (1 + len(of_domain))
    np.testing.assert_allclose(found[6:], [[2 * mean, 2 * (1 - mean)], [1, 1]], rtol=1e-6)
    memory.stop()


def test_an_empty_memory_knows_nothing():
    with_nothing = SRLReplayBuffer(capacity=5, on_secret="keep").pass_rates(["1f"])
    assert with_nothing == PassRates({}, {})
