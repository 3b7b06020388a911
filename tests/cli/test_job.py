"""A stranger's environment, 20 lines outside of the repository, trains through `ray job submit` to a local cluster."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.cli.killing import ROOT, end
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
MY_ENV = '''
import random

import gymnasium as gym


class MyEnv(gym.Env):
    """Asks for a vowel; a seed is the prompt, as in any environment of gymnasium."""

    def __init__(self, env_config):
        self.vowels = env_config.get("vowels", "aeiou")

    def reset(self, *, seed=None, options=None):
        name = random.Random(seed).choice("bcdfg")
        return f"A vowel for {name}: ", {}

    def step(self, action):
        return "", float(any(letter in self.vowels for letter in action)), True, False, {}
'''


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def cluster(tmp_path):
    """Start a head on this machine; return the dashboard's address and the environment of its clients."""
    directory = Path(tempfile.mkdtemp(prefix="srl"))  # not below tmp_path: names of sockets must be short
    flags = ("port", "dashboard-port", "dashboard-agent-listen-port", "ray-client-server-port")
    ports = {name: free_port() for name in flags} | {"min-worker-port": 0, "max-worker-port": 0}
    command = [*RAY, "start", "--head", "--block", "--num-cpus=2", "--node-ip-address=127.0.0.1"]
    command += ["--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--temp-dir={directory}"]
    command += [f"--{name}={port}" for name, port in ports.items()]
    environment = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "PYTHONPATH")}
    environment |= {"RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with (tmp_path / "head.log").open("w") as log:
        head = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=tmp_path, start_new_session=True)
    address = f"http://127.0.0.1:{ports['dashboard-port']}"
    try:
        assert wait_until(lambda: head.poll() is not None or listens(ports["dashboard-port"]), 120)
        assert head.poll() is None, (tmp_path / "head.log").read_text()
        yield address, environment
    finally:
        end(head)
        shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.smoke
def test_an_env_from_outside_trains_as_a_job(cluster, random_llama_dir, tmp_path):
    address, environment = cluster
    home, out = tmp_path / "home", tmp_path / "out"
    home.mkdir()
    (home / "my_env.py").write_text(MY_ENV)
    train = [sys.executable, str(ROOT / "tests/cli/srl_here.py"), "train", "--env", "my_env:MyEnv", "--out", str(out)]
    train += ["--model", str(random_llama_dir), "--engine", "transformers", "--iterations", "2", "--lr", "1e-3"]
    train += ["--num_prompts_per_batch", "4", "--group_size", "4", "--max_turn_tokens", "4"]
    train += ["--max_episode_tokens", "64", "--num_cpus_per_env_runner", "0.5", "--num_cpus_for_main_process", "0.5"]
    submit = [*RAY, "job", "submit", "--address", address, "--working-dir", str(home), "--", *train]
    job = subprocess.run(submit, env=environment, cwd=home, capture_output=True, text=True, timeout=300, check=False)
    assert job.returncode == 0, job.stdout[-6000:] + job.stderr[-3000:]
    assert "succeeded" in job.stdout
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [1, 2]
    assert all(line["env_runners/num_groups"] + line["env_runners/num_groups_dropped"] == 4 for line in lines)
    shown = [json.loads(line) for line in (out / "transcripts.jsonl").read_text(encoding="utf-8").splitlines()]
    assert all(line["turns"][0]["text"].startswith("A vowel for ") for line in shown)
    assert all(line["reward"] == any(c in "aeiou" for c in line["turns"][1]["text"]) for line in shown)
