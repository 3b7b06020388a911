"""The files in deploy/: they name flags, paths and versions that exist, and the Slurm script resumes a stopped run."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rllib_srl.cli import train

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    """Return the spec of the RayJob."""
    spec: dict[str, Any] = yaml.safe_load((ROOT / "deploy/rayjob.yaml").read_text())["spec"]
    return spec


def test_the_job_resumes_from_the_shared_volume(job: dict[str, Any]) -> None:
    command, action, *words = shlex.split(job["entrypoint"])
    arguments = train.main.parse(words)
    assert (command, action, arguments.resume, job["backoffLimit"]) == ("srl", "train", "auto", 3)
    cluster = job["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        volume_at = {Path(mount["mountPath"]): volumes[mount["name"]] for mount in container["volumeMounts"]}
        environment = {entry["name"]: entry["value"] for entry in container["env"]}
        for path in (arguments.out, Path(environment["RLLIB_SRL_SEAL_KEY_FILE"]), Path(environment["HF_HOME"])):
            assert "persistentVolumeClaim" in volume_at[Path(*path.parts[:2])]
        assert volume_at[Path("/etc/srl")]["configMap"] == {"name": "srl-run"}
        assert volume_at[Path("/dev/shm")]["emptyDir"]["medium"] == "Memory"
        wait_s = int(environment["RAY_JOB_STOP_WAIT_TIME_S"])
        assert 0 < wait_s < pod["terminationGracePeriodSeconds"]


def test_one_pod_can_run_the_driver_and_the_head_nothing(job: dict[str, Any]) -> None:
    cluster = job["rayClusterSpec"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    needed = json.loads(job["entrypointResources"])
    given = {g["groupName"]: json.loads(json.loads(g["rayStartParams"].get("resources", '"{}"')))
             for g in cluster["workerGroupSpecs"]}  # fmt: skip
    assert needed == {"driver": 1} and given == {"driver": {"driver": 1}, "gpu": {}}


def test_versions_and_paths_are_those_of_this_repository(job: dict[str, Any]) -> None:
    pins = (ROOT / "scripts/requirements/base.txt").read_text().splitlines()
    (ray,) = [line.split("==")[1] for line in pins if line.startswith("ray")]
    assert job["rayClusterSpec"]["rayVersion"] == ray
    dockerfile = (ROOT / "deploy/Dockerfile").read_text()
    assert "RUN bash scripts/setup.sh --set" in dockerfile and (ROOT / "scripts/setup.sh").is_file()
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".venv", ".git", "results"} <= set(ignored)


@pytest.fixture
def rays_usual_ports() -> Iterator[None]:
    """Take the fixed ports that `ray start` would use, as another user's Ray on the same node does."""
    with contextlib.ExitStack() as stack:
        for port in (8265, 10001, 52365):  # of the dashboard, of Ray Client, of the node's agent
            with contextlib.suppress(OSError):  # then another process has it, which is as good
                stack.enter_context(socket.create_server(("", port)))
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("rays_usual_ports")
def test_a_job_on_slurm_is_queued_again_and_goes_on(tmp_path: Path) -> None:
    """Slurm's commands are stand-ins that run on this machine; Ray, the script and the run are real."""
    tools = tmp_path / "bin"
    tools.mkdir()
    skip_flags = 'while [[ "$1" == --* ]]; do shift; done'
    for name, body in {
        "srun": f'{skip_flags}\nexec "$@"',
        "scontrol": f'echo "$@" >> {tmp_path}/scontrol.log\n[ "$1" != show ] || echo localhost',
    }.items():
        (tools / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tools / name).chmod(0o755)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    settings = {
        "env": "compare", "model": "tiny", "engine": "transformers", "num_env_runners": 0, "iterations": 4000,
        "num_prompts_per_batch": 2, "group_size": 2, "max_episode_tokens": 256, "max_turn_tokens": 8,
        "compute_dtype": "float32", "checkpoint_every": 1,
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    out, log = tmp_path / "out", tmp_path / "log"
    slurm = {"SLURM_SUBMIT_DIR": tmp_path, "SLURM_JOB_NODELIST": "localhost", "SLURM_CPUS_PER_TASK": "2",
             "SLURM_JOB_ID": str(os.getpid())}  # fmt: skip
    slurm["PATH"] = f"{tools}:{os.environ['PATH']}"
    given = {**os.environ, **{name: str(value) for name, value in slurm.items()}}
    given.pop("RAY_ADDRESS", None)

    def start() -> subprocess.Popen[bytes]:
        words = ["bash", ROOT / "deploy/slurm.sh", tmp_path / "run.yaml", out]
        with log.open("ab") as file:
            return subprocess.Popen(words, cwd=tmp_path, env=given, stdout=file, stderr=file, start_new_session=True)

    first = start()
    try:
        _wait_for(lambda: len(list(out.glob("checkpoint_*/manifest.json"))) > 0, first, log)
        first.send_signal(signal.SIGTERM)
        assert first.wait(120) == 143, _told_by(log)
    finally:
        _end(first)
    assert (tmp_path / "scontrol.log").read_text().split("\n")[1] == f"requeue {os.getpid()}"
    done = _iterations(out)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**settings, "iterations": done + 2}))
    second = start()
    try:
        assert second.wait(240) == 0, _told_by(log)
    finally:
        _end(second)
        shutil.rmtree(f"/tmp/ray-{os.getpid()}", ignore_errors=True)
    assert _iterations(out) == done + 2
    assert "requeue" not in (tmp_path / "scontrol.log").read_text().split("\n")[2:]


def _iterations(out: Path) -> int:
    numbers = [json.loads(line)["iteration"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert numbers == list(range(1, len(numbers) + 1))  # none twice, none left out
    return len(numbers)


def _wait_for(is_there: Any, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 240
    while not is_there():
        assert process.poll() is None and time.monotonic() < end, _told_by(log)
        time.sleep(0.2)


def _told_by(log: Path) -> str:
    """Return the log without the state that Ray writes when it ends, which would hide the reason."""
    return "\n".join(line for line in log.read_text().splitlines() if "[state-dump]" not in line)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what a job has left, as Slurm would."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)
