"""What the loss asks of the driver, through `algo.train()`: resampling, shaping, advantages, references, saving."""

import pytest

from rllib_srl.batch.advantages import has_signal
from tests.small_worlds import small_config, watch

pytestmark = pytest.mark.slow


@pytest.fixture
def config(random_llama_dir, tmp_path, ray_here):
    return small_config(random_llama_dir, tmp_path)


def captured(algo):
    """Return a list that the shards of every iteration are added to; nothing is learned."""
    seen = []
    algo._learn = lambda shards: seen.extend(shards) or False
    return seen


def test_dynamic_sampling_plays_until_every_slot_has_a_signal(config, build):
    """About a third of all groups have none."""
    algo = build(config, group_size=2, num_prompts_per_batch=6, dynamic_sampling_tries=20)
    seen, shards = watch(algo), captured(algo)
    result = algo.train()
    groups = [group for batch in seen for group in batch.groups]
    with_signal = sum(has_signal(group.rewards_G) for group in groups)
    assert with_signal == 6 == len(shards[0].group_refs)  # of two answers half agree: 6 would have about 3
    assert result["num_prompts_resampled"] == len(groups) - 6 > 0
    assert len({group.group_id for group in groups}) == len(groups)
    assert len({group.prompt.key for group in groups}) == len(groups)
    runs = result["env_runners"]
    assert (runs["num_groups_with_signal"], runs["num_groups"]) == (6, len(groups))


def test_a_preset_reaches_shards_and_learner(config, build):
    algo = build(config, loss="dr_grpo")
    shards = captured(algo)
    algo.train()
    num = sum(group.size for group in shards[0].groups())
    assert shards[0].scales == [pytest.approx(1 / (num * 3))] * len(shards[0].scales)  # one turn of 3 tokens
    assert algo.learner_group._learner.config.loss_settings().aggregation == "constant"
