"""A driver whose runners play ahead dies in mid-flight; the same command goes on from its newest checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import psutil
import pytest

from rllib_srl.curriculum.prompts import PromptSource
from rllib_srl.replay.reading import reading
from tests.conftest import ROOT
from tests.small_worlds import Even

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
P, LAST, SEED = 4, 6, 5
LIFE_S = 290.0  # on a busy machine
FLAGS = [
    *("--engine", "transformers", "--compute_dtype", "float32", "--seed", str(SEED), "--resume", "auto"),
    *("--env", "tests.small_worlds:Even", "--env_config", "num_prompts=400", "slow_s=0.3", "hold=$HELD"),
    *("--max_turn_tokens", "3", "--max_episode_tokens", "48", "--max_turns", "1", "--num_env_threads", "32"),
    *("--num_prompts_per_batch", str(P), "--group_size", "4", "--num_env_runners", "2", "--max_lag", "1"),
    *("--slice_s", "0.05", "--checkpoint_every", "1", "--iterations", str(LAST)),
    *("--replay_revisit_fraction", "0", "--replay_reuse_fraction", "0.25", "--replay_min_buffer_size", "4"),
    *("--replay_groups_per_item", "99", "--num_cpus_per_env_runner", "0.25", "--num_cpus_per_learner", "0.25"),
    *("--num_cpus_for_main_process", "0.25"),
]


def lived(directory, model, death="") -> int:
    """Run the command until it ends; return its exit status. What it has started ends with it, or is killed."""
    log, held, out = (str(directory / name) for name in ("log.jsonl", "held", "run"))
    flags = [flag.replace("$HELD", held) for flag in FLAGS] + ["--model", str(model), "--out", out]
    command = [sys.executable, "-m", "tests.algorithm.lagging_driver", log, death, held, *flags]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    family: set[psutil.Process] = set()

    def watch() -> None:
        while process.poll() is None:
            try:
                family.update(psutil.Process(process.pid).children(recursive=True))
            except psutil.NoSuchProcess:
                return
            time.sleep(0.2)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        return process.wait(LIFE_S)
    finally:
        process.kill()
        watcher.join()
        for one in family:
            try:
                one.kill()
            except psutil.NoSuchProcess:
                continue


def stored_in(directory) -> Counter:
    """Return how often the journal holds each (group, prompt)."""
    own: Counter = Counter()
    with reading(directory / "run") as memory:
        for seq in memory.stored.seqs.tolist():
            group = memory.group(seq)
            own[group.group_id, group.prompt.key] += 1
    return own


def first_prompts(num) -> list[str]:
    """Return the keys of the first prompts that a run with this seed draws."""
    name = "tests.small_worlds:Even"
    source = PromptSource({name: Even}, {name: {"num_prompts": 400}}, {name: 1.0}, SEED)
    return [prompt.key for prompt in source.draw(num)]


def test_a_driver_killed_in_mid_flight_loses_nothing_acknowledged_and_plays_nothing_twice(random_llama_dir, tmp_path):
    """It dies once while the learner trains and once while it waits for groups, both times with a slice in play."""
    assert lived(tmp_path, random_llama_dir, "_learn:3") == -signal.SIGKILL
    assert lived(tmp_path, random_llama_dir, "take:5") == -signal.SIGKILL
    assert lived(tmp_path, random_llama_dir) == 0
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [one["in_slice"] > 0 for one in log if one["what"] == "dies"] == [True, True]
    assert [one["iteration"] for one in log if one["what"] == "restore_from_path"] == [2, 4]
    stored = [one for one in log if one["what"] == "add"]
    assert [one["iteration"] for one in stored] == [1, 2, 3, 3, 4, 5, 6]

    # The memory has what it acknowledged in each iteration that stands, once; the first try of iteration 3 is undone.
    final = {one["iteration"]: one["groups"] for one in stored}
    kept = Counter((group, prompt) for groups in final.values() for group, prompt in groups.items())
    assert stored_in(tmp_path) == kept

    # Nothing is played twice or left out: what was trained on and what is in play are the first prompts of the seed.
    taken = [prompt for groups in final.values() for prompt in groups.values()]
    (*_, in_play) = (one["in_play"] for one in log if one["what"] == "save_to_path")
    assert len(taken) == LAST * P and len(in_play) == P
    assert sorted(taken + in_play) == sorted(first_prompts(len(taken + in_play)))

    # Counts add up in every iteration that stands.
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sorted({line["training_iteration"] for line in lines}) == list(range(1, LAST + 1))
    for line in lines:
        kinds = ("with_signal", "without_signal", "dropped")
        assert sum(line[f"env_runners/num_groups_{kind}"] for kind in kinds) == P
        assert line["replay/num_groups_lost"] == 0
    assert lines[-1]["num_groups_undone"] == P
