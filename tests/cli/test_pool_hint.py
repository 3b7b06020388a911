"""The hint at shuffled passes: for fixed pools that are played several times, in an order that nobody chose."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rllib_srl import SRLConfig
from rllib_srl.cli import train
from rllib_srl.cli.shared.pool_hint import pool_hint
from rllib_srl.curriculum.prompts import PromptSource
from tests.cli.conftest import TINY

NUM = 30  # questions of the file that are not held out
POOL = {"environments": {"largest": "compare"}, "num_prompts_per_kind": 40}


@pytest.fixture
def data(tmp_path: Path) -> str:
    rows = [{"question": f"Which is largest: {n}, {n + 5} or {n + 9}?", "answer": str(n + 9)} for n in range(40)]
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return str(path)


def hint(config: SRLConfig, last: int) -> str:
    creators, configs, weights = config.world_creators(), config.world_configs(), config.mixture_weights()
    source = PromptSource(creators, configs, weights, 1, config.task_stream(), config.prompt_order)
    return pool_hint(config, source, last)


def test_a_pool_that_is_played_several_times_is_told_of_shuffled_passes(data):
    """40 prompts and 8 an iteration: 15 iterations play each three times."""
    pool = SRLConfig().environment("pool", env_config=POOL).training(num_prompts_per_batch=8)
    assert hint(pool, 14) == ""
    assert hint(pool, 15) == (
        "hint: 15 iterations play each of the 40 prompts about 3 times. For a fixed pool, shuffled passes are the "
        "plain choice: --prompt_order epochs --replay_revisit_fraction 0 (docs/does-memory-help.md)"
    )
    own = SRLConfig().data(data)
    assert hint(own, 5) == "" and hint(own, 6).startswith(f"hint: 6 iterations play each of the {NUM} prompts about 3 ")


def test_generators_and_chosen_orders_get_no_hint(data):
    assert hint(SRLConfig().environment("compare"), 1000) == ""
    worlds = {"compare": {}, "pool": POOL}
    assert hint(SRLConfig().environment(worlds=worlds), 1000) == ""
    for own in (
        SRLConfig().data(data).environment(prompt_order="epochs"),
        SRLConfig().data(data).replay(revisit_fraction="auto"),
        SRLConfig().data(data).replay(revisit_fraction=0.0),
        SRLConfig().data(data).replay(selection="fifo"),
        SRLConfig().data(data).replay(spacing="fsrs"),
        SRLConfig().environment(stream=[{"world": "pool", "env_config": POOL, "iterations": 9}]),
    ):
        assert hint(own, 1000) == ""
    assert hint(SRLConfig().data(data).replay(reuse_fraction=0.2), 1000) != ""


def test_a_run_says_it_once_at_its_start(ray_here, data, tmp_path, capsys):
    at = TINY.index("--env")
    flags = [*TINY[:at], "--data", data, *TINY[at + 4 :], "--num_prompts_per_batch", str(NUM)]
    directory = str(tmp_path / "run")
    assert train.main([*flags, "--engine", "transformers", "--iterations", "4", "--out", directory, "--debug"]) == 0
    said = capsys.readouterr().out
    assert said.count("hint: 4 iterations play each of the ") == 1
    assert said.index("hint: ") < said.index("iteration 1/4  ")
    assert train.main(["--resume", directory, "--iterations", "8", "--debug"]) == 0
    assert "hint: " not in capsys.readouterr().out
