"""A run on two domains: one is paid by its answers, one pays for everything."""

import pytest

from tests.small_envs import small_config


@pytest.fixture
def two_domains(random_llama_dir, tmp_path, ray_here):
    """Return settings of eight prompts an iteration of the domains `even` and `odd`."""
    config = small_config(random_llama_dir, tmp_path).training(num_prompts_per_batch=8)
    config.env = None
    return config.environment(envs={"tests.small_envs:Even": {}, "tests.small_envs:Odd": {"pay": 0.0}})
