"""A run of scripts/train.py on the tiny model that several tests look at, and a clean logger for all."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from scripts import train

TINY = [
    *("--model", "tiny", "--engine", "transformers", "--num_env_runners", "0", "--compute_dtype", "float32"),
    *("--env", "compare", "--env_config", "num_shots=0", "--max_turn_tokens", "8", "--max_episode_tokens", "128"),
    *("--num_prompts_per_batch", "4", "--group_size", "4", "--lr", "3e-4", "--seed", "5"),
]


@pytest.fixture(autouse=True)
def logger_as_it_was():
    """Undo what the scripts do to the package's logger."""
    logger = logging.getLogger("rllib_srl")
    handlers, propagate = list(logger.handlers), logger.propagate
    yield
    logger.handlers, logger.propagate = handlers, propagate


@pytest.fixture(scope="module")
def trained(ray_here, tmp_path_factory) -> Path:
    """Return the directory of a run of two iterations."""
    directory = tmp_path_factory.mktemp("trained") / "run"
    assert train.main([*TINY, "--iterations", "2", "--out", str(directory), "--debug"]) == 0
    return directory
