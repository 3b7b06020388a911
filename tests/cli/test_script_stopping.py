"""How scripts end when they are asked to: SIGTERM to one process or to a whole group, while starting and in a run."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from rllib_srl.cli.shared.stopping import ended_by_sigterm, spared_from_sigterm, stop_between_iterations
from tests.cli.killing import ROOT, are_gone, end, family

LAST = 10  # iteration: a second or two of a stopped process must not be the whole run
FINISHED = rf"iteration \d+/{LAST}  reward"
PATIENCE_S = 240.0  # for a start on two busy cores
TINY = [
    *("--model", "tiny", "--engine", "transformers", "--compute_dtype", "float32", "--seed", "5", "--lr", "3e-4"),
    *("--env", "compare", "--env_config", "num_shots=0", "--max_turn_tokens", "8", "--max_episode_tokens", "128"),
    *("--num_prompts_per_batch", "48", "--group_size", "4"),
    *("--iterations", str(LAST), "--checkpoint_every", "1"),
    *("--num_cpus_per_env_runner", "0.5", "--num_cpus_for_main_process", "0.5"),
]


@contextmanager
def running(command: list[str], home: Path, **options: object) -> Iterator[subprocess.Popen]:
    """Start a command in a session of its own, without the repository on its path; nothing of it is left behind."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RAY_ADDRESS")}
    options = {"cwd": home, "env": environment, "start_new_session": True, "text": True, **options}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
    try:
        yield process
    finally:
        end(process)
        process.stdout.close()


def read_until(process: subprocess.Popen, text: str) -> str:
    said = ""
    for line in process.stdout:
        said += line
        if text in line:
            return said
    raise AssertionError(f"{text!r} was never written:\n{said}")


def rest_of(process: subprocess.Popen, timeout_s: float) -> str:
    """Return what a process writes until it ends; `communicate` would lose lines that `read_until` has read ahead."""
    killer = threading.Timer(timeout_s, process.kill)
    killer.start()
    try:
        said = process.stdout.read()
        process.wait(timeout_s)
        return said
    finally:
        killer.cancel()


SCRIPT = f"""
import subprocess, sys, time
sys.path.insert(0, {str(ROOT)!r})
from rllib_srl.cli.shared.cluster import run_cleanly
from rllib_srl.cli.shared.stopping import ENDING
def work():
    ENDING.last_words = lambda: "continue with: X"
    child = subprocess.Popen(["sleep", "600"])
    print(child.pid, flush=True)
    time.sleep(600)
sys.exit(run_cleanly(work, debug=True))
"""


def test_sigterm_ends_a_script_and_what_it_started(tmp_path):
    with running([sys.executable, "-c", SCRIPT], tmp_path) as process:
        child = int(process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)  # a second one changes nothing
        output = process.communicate(timeout=80)[0]
        assert (process.returncode, output) == (143, "\nstopped by SIGTERM\ncontinue with: X\n")
        assert are_gone([child])


def test_a_request_is_made_once_and_says_how_the_script_ends() -> None:
    said: list[str] = []
    usual = signal.getsignal(signal.SIGTERM)
    with ended_by_sigterm(), stop_between_iterations(said.append) as request:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.is_made and request.status == 143
    assert said == ["stopping after this iteration (SIGTERM)"]
    assert signal.getsignal(signal.SIGTERM) is usual


def test_the_first_ctrl_c_asks_and_the_second_interrupts() -> None:
    said: list[str] = []

    def press_twice() -> None:
        with stop_between_iterations(said.append) as request:
            os.kill(os.getpid(), signal.SIGINT)
            assert request.is_made and said == ["stopping after this iteration (press Ctrl-C again to stop now)"]
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        press_twice()


def test_what_is_started_apart_outlives_the_signal_and_handlers_stay() -> None:
    usual = signal.getsignal(signal.SIGTERM)
    with spared_from_sigterm():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as ray.init puts its own handler there
        spared = subprocess.Popen(["sleep", "600"])
    other = subprocess.Popen(["sleep", "600"])
    assert signal.getsignal(signal.SIGTERM) is usual
    try:
        spared.terminate()
        other.terminate()
        assert other.wait(timeout=60) == -signal.SIGTERM
        assert spared.poll() is None
    finally:
        spared.kill()
        spared.wait(timeout=60)


def train(*flags: str) -> list[str]:
    return [sys.executable, str(ROOT / "tests/cli/srl_here.py"), "train", *flags]


def iterations_in(directory: Path) -> list[int]:
    return [json.loads(line)["iteration"] for line in (directory / "metrics.jsonl").read_text().splitlines()]


def listeners_beyond_this_machine(pids: list[int]) -> list[str]:
    local = ("127.", "::1", "::ffff:127.")
    found = []
    for pid in pids:
        for socket in psutil.Process(pid).net_connections(kind="inet"):
            if socket.status == psutil.CONN_LISTEN and not socket.laddr.ip.startswith(local):
                found.append(f"{psutil.Process(pid).name()} {socket.laddr}")
    return found


def open_to_others(directory: Path) -> list[str]:
    modes = {path: path.stat().st_mode for path in [directory, *directory.rglob("*")]}
    return [f"{path} {mode:o}" for path, mode in modes.items() if mode & 0o77]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_ended_by_sigterm_keeps_to_itself_and_goes_on_by_the_command_that_it_prints(tmp_path):
    """That a resumed run is the unbroken one, bit for bit, is in tests/algorithm/test_resume.py."""
    with running(train(*TINY, "--out", "run", "--export", "model"), tmp_path) as process:
        said = read_until(process, f"iteration 1/{LAST}  reward")
        started = [one.pid for one in family(process)]
        assert listeners_beyond_this_machine([process.pid, *started]) == []
        os.killpg(process.pid, signal.SIGTERM)  # as Slurm and systemd do
        said += rest_of(process, 120)
    assert process.returncode == 143 and "Traceback" not in said, said
    assert are_gone(started)
    before, after = said.split("stopping after this iteration")
    done, finished = len(re.findall(FINISHED, before)), len(re.findall(FINISHED, after))
    assert 1 <= done < LAST - 1 and finished <= 1  # none where the signal came between two iterations
    assert iterations_in(tmp_path / "run") == list(range(1, done + finished + 1))
    (command,) = re.findall(r"continue with: (.*)", said)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with running(["bash", "-c", command], elsewhere) as process:  # as printed
        said = process.communicate(timeout=PATIENCE_S)[0]
    assert process.returncode == 0, said
    assert iterations_in(tmp_path / "run") == list(range(1, LAST + 1))
    assert open_to_others(tmp_path / "run") == [] == open_to_others(tmp_path / "model")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sigterm_while_starting_leaves_nothing(tmp_path: Path) -> None:
    for _ in range(3):
        with running(train(*TINY, "--out", "run"), tmp_path) as process:
            read_until(process, "starting engine and learner ...")
            started = [one.pid for one in family(process)]
            process.send_signal(signal.SIGTERM)
            said = rest_of(process, 80)
        if "iteration 1/" not in said:
            break
        shutil.rmtree(tmp_path / "run")  # this process had to wait, and the start was over: once more
    said = re.sub(r"starting .*\n", "", said)  # every ten seconds of a slow start, and where this process had to wait
    assert (process.returncode, said.strip()) == (143, "stopped by SIGTERM")
    assert are_gone(started)
    assert not list(tmp_path.iterdir())
