"""Settings of the memory that act outside the buffer, on the driver and in the learners: each is seen to act."""

from __future__ import annotations

import numpy as np
import pytest

from rllib_srl.replay.client import ReplayClient
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.types import GroupMeta
from tests.replay.groups import a_group
from tests.small_learner import Recording, learner_group, relative_gap, update
from tests.small_learner import make_group as a_stored_group
from tests.small_worlds import small_config

STORED = [a_stored_group(11, 5, [6, 2]), a_stored_group(12, 9, [3, 1, 12])]


@pytest.fixture
def memory_of(tmp_path):
    """Return a function that starts a memory in this process and plays twelve prompts; all are stopped afterwards."""
    started = []

    def of(**given) -> ReplayClient:
        values = {"capacity": 50, "admit": None, "min_buffer_size": 1, "reuse_fraction": 0.25, **given}
        where = {"directory": tmp_path / str(len(started)), "seed": 1, "run": f"run{len(started)}"}
        started.append(ReplayClient.start(ReplaySettings(**values), **where, is_local=True, timeout_s=5.0))
        groups = [a_group(index, 1, index) for index in range(12)]
        started[-1].add([GroupMeta.of(group, group) for group in groups], 1)
        started[-1].stats(1)
        return started[-1]

    yield of
    for memory in started:
        memory.stop()


# Setting: two values, and what is to be seen of each.
OF_THE_CLIENT = {
    "revisit_fraction": {0.25: 2, 0.5: 4},  # of 8 prompts
    "reuse_fraction": {0.2: 2, 0.5: 8},  # beside 8 played ones
    "min_buffer_size": {12: 2, 13: 0},
}


@pytest.mark.parametrize("name", OF_THE_CLIENT)
def test_a_setting_of_the_driver_acts(name, memory_of):
    for value, expected in OF_THE_CLIENT[name].items():
        memory = memory_of(**{name: value})
        draw = memory.draw_groups if name == "reuse_fraction" else memory.draw_prompts
        assert len(draw(8, 2)) == expected, value


def test_the_largest_gap_of_reused_episodes_acts(random_llama_dir, tmp_path, ray_here):
    gradients = []
    for value in (None, 0.3):
        config = small_config(random_llama_dir, tmp_path / "log").learners(learner_class=Recording)
        config.env_runners(max_episode_tokens=128).training(optimizer_name="sgd", lr=0.0, grad_clip=None)
        learners = learner_group(config.replay(revisit_fraction=0, reuse_fraction=0, max_logp_gap=value))
        gradients.append(update(learners, [], STORED)[0][0])
        learners.shutdown()
    assert any(np.abs(array).max() > 0 for array in gradients[0].values())
    assert relative_gap(gradients[1], gradients[0]) > 1e-2
