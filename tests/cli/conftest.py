"""A run of srl train on the tiny model that several tests look at."""

from pathlib import Path

import pytest

from rllib_srl.cli import train

TINY = [
    *("--model", "tiny", "--engine", "transformers", "--num_env_runners", "0", "--compute_dtype", "float32"),
    *("--env", "compare", "--env_config", "num_shots=0", "--max_turn_tokens", "8", "--max_episode_tokens", "128"),
    *("--num_prompts_per_batch", "4", "--group_size", "4", "--lr", "3e-4", "--seed", "5"),
]


@pytest.fixture(scope="module")
def trained(ray_here, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("trained") / "run"
    assert train.main([*TINY, "--iterations", "2", "--out", str(directory), "--debug"]) == 0
    return directory
