"""What a machine may lack: a cluster that answers, a home, short paths, a locale for every character."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rllib_srl.cli.shared import cluster
from tests.conftest import ROOT


def test_a_cluster_that_has_gone_is_named_at_once():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}", "auto", "local", "", "http://127.0.0.1:1"):
            cluster.check_address(address)
    for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
        with pytest.raises(ConnectionError, match=rf"RAY_ADDRESS = '{address}': no cluster answers .* unset it"):
            cluster.check_address(address)


def test_a_home_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    cluster.check_home()
    (tmp_path / "file").touch()
    for home in (tmp_path / "file", tmp_path / "missing"):
        monkeypatch.setenv("HOME", str(home))
        with pytest.raises(OSError, match=f"HOME = '{home}' is not writable; set HOME"):
            cluster.check_home()


@pytest.mark.parametrize(("length", "expected"), [(40, None), (41, "/tmp")])
def test_a_long_tmpdir_is_not_used_for_sockets(monkeypatch, length, expected):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", "/" + "x" * (length - 1))
    cluster.use_short_tmpdir()
    assert os.environ.get("RAY_TMPDIR") == expected


def test_ray_builds_no_environment_for_workers_under_uv(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv(cluster.UV_RUN_HOOK, raising=False)
    cluster.quiet(verbose=True)
    assert os.environ[cluster.UV_RUN_HOOK] == "0"
    from ray._private import ray_constants

    assert cluster.UV_RUN_HOOK in Path(ray_constants.__file__).read_text(encoding="utf-8")


def test_a_command_is_named_as_it_is_on_the_path(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    for place in ("bin", "other"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "srl").write_text("#!/bin/sh\n")
        (tmp_path / place / "srl").chmod(0o700)
    for path, program in ((tmp_path / "bin", "srl"), (tmp_path / "other", f"{tmp_path}/bin/srl")):
        monkeypatch.setenv("PATH", str(path))
        assert cluster.command("report", "a run") == f"{program} report 'a run'"
    (tmp_path / "bin" / "srl").unlink()
    assert cluster.command("report") == f"{tmp_path}/bin/python -m rllib_srl.cli report"


def test_every_character_is_printed_in_any_locale():
    program = "import sys; from rllib_srl.cli.main import main; main(['--help']); print('π 🦊')"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().splitlines()[-1] == "\\u03c0 \\U0001f98a"


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help-all"]])
def test_a_pager_that_ends_early_ends_the_help(arguments):
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "rllib_srl.cli", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=writes, stderr=subprocess.PIPE, timeout=120)
    os.close(writes)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")


OWN = """
import gymnasium

from envs.answers import RIGHT


class Mine(gymnasium.Env):
    domain = "mine"

    def prompt_ids(self, split, seed):
        return (f"{split} {number}" for number in range(40))

    def reset(self, *, seed=None, options=None):
        return "say: ", {}

    def step(self, action):
        return "", float(action == RIGHT), True, False, {}
"""


@pytest.mark.slow
def test_a_users_own_package_goes_before_ours_of_the_same_name(tmp_path):
    """The checkout has folders envs, scripts and tests; it is not on the path of workers where it is installed."""
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "__init__.py").touch()
    (tmp_path / "envs" / "answers.py").write_text("RIGHT = 'a'\n")
    (tmp_path / "envs" / "mine.py").write_text(OWN)
    flags = ["--env", "envs.mine:Mine", "--model", "tiny", "--engine", "transformers", "--iterations", "1"]
    sizes = ["--num_prompts_per_batch", "2", "--group_size", "2", "--max_turn_tokens", "2", "--max_failures", "0"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "rllib_srl.cli", "train", *flags, *sizes, "--out", "run"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "run" / "checkpoint_000001").is_dir()
