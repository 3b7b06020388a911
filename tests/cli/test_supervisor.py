"""The parent of `srl train`: small children that end as told stand in for runs; then real runs that lose processes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rllib_srl.cli import supervisor
from tests.conftest import ROOT

PATIENCE_S, RUNS_S = 60.0, 880.0
PROGRAM = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from rllib_srl.cli import supervisor

place = Path(sys.argv[1])
if supervisor.is_needed(sys.argv[2:]):
    sys.exit(supervisor.supervise([sys.executable, *sys.orig_argv[1:]]))
supervisor.begin()
lives = json.loads((place / "lives").read_text())
now, *rest = lives
(place / "lives").write_text(json.dumps(rest))
with (place / "log").open("a") as log:
    print(" ".join(sys.argv[2:]), file=log)
if "max_failures" in now:
    supervisor.report(place / "run", now["max_failures"])
if "checkpoint" in now:
    (place / "run" / now["checkpoint"]).mkdir(parents=True)
    (place / "run" / now["checkpoint"] / "manifest.json").touch()
if "leaves" in now:  # a process in a session of its own, which ignores everything but SIGKILL
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    left.send_signal(signal.SIGSTOP)
    (place / "left").write_text(str(left.pid))
if "left" in now:
    state = Path(f"/proc/{(place / 'left').read_text()}")
    print("left over" if state.exists() else "nothing is left", flush=True)
if "counts" in now:  # signals, and ends after a while
    seen = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: seen.append(number))
    print("ready", flush=True)
    deadline = time.monotonic() + 60
    while not seen and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.5)
    print("seen", *seen, flush=True)
print("a line", flush=True)
if now["end"] < 0:
    os.kill(os.getpid(), -now["end"])
sys.exit(now["end"])
"""
LOST = {"end": supervisor.LOST, "max_failures": 2}
DONE = {"end": 0, "max_failures": 2}


@pytest.fixture
def start(tmp_path):
    """Return a function that starts the program with the ends of its lives; all is ended with the test."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "run").mkdir()
    started = []

    def begin(*lives, argv=(), **options):
        (tmp_path / "lives").write_text(json.dumps(lives))
        command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path), *argv]
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        started.append(subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, **how))
        return started[-1]

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait(PATIENCE_S)


def ended(process: subprocess.Popen) -> tuple[int, str, list[str]]:
    out, errors = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, errors.splitlines()


def log_of(place: Path) -> list[str]:
    return (place / "log").read_text().splitlines()


def test_a_lost_run_is_started_again_from_its_newest_checkpoint(start, tmp_path):
    status, out, errors = ended(start(LOST, {**LOST, "checkpoint": "checkpoint_000004"}, DONE, argv=["--lr", "1"]))
    run = tmp_path / "run"
    assert (status, out) == (0, "a line\n" * 3)
    assert log_of(tmp_path) == ["--lr 1", f"--lr 1 --again {run}", f"--lr 1 --again {run}"]
    assert errors == [
        "starting again from the beginning (new start 1 of 2 without a newer checkpoint)",
        f"starting again from {run}/checkpoint_000004 (new start 1 of 2 without a newer checkpoint)",
    ]


def test_a_run_without_progress_is_given_up_and_progress_forgives(start, tmp_path):
    lives = [LOST, LOST, {**LOST, "checkpoint": "checkpoint_000001"}, LOST, LOST, DONE]
    status, _, errors = ended(start(*lives))
    assert status == 1 and [line.rpartition(" (")[2] for line in errors[:4]] == [
        f"new start {number} of 2 without a newer checkpoint)" for number in (1, 2, 1, 2)
    ]
    assert errors[4:] == [
        "gave up after 2 new starts without a newer checkpoint (max_failures); "
        f"to continue, add --resume {tmp_path}/run"
    ]
    assert len(log_of(tmp_path)) == 5


def test_a_killed_run_is_named_by_its_signal_and_what_it_leaves_is_ended_before_the_next_start(start):
    first = {"end": -9, "max_failures": 1, "leaves": True}
    status, out, errors = ended(start(first, {"end": -11, "max_failures": 1, "left": True}))
    assert (status, out) == (128 + 11, "a line\nnothing is left\na line\n")
    assert errors[0].startswith("the run was ended by SIGKILL; starting again from the beginning (new start 1 of 1 ")
    assert errors[1].startswith("the run was ended by SIGSEGV; gave up after 1 new starts ")


@pytest.mark.parametrize(("life", "status"), [
    ({**LOST, "end": 143}, 143), ({"end": supervisor.LOST}, 1), ({"end": -9}, 137),  # the last two never began
])  # fmt: skip
def test_other_ends_are_passed_on(start, tmp_path, life, status):
    assert ended(start(life, DONE))[0] == status and log_of(tmp_path) == [""]


def test_a_directory_that_is_gone_ends_with_one_line(start, tmp_path):
    (tmp_path / "run").rmdir()
    status, _, errors = ended(start(LOST, DONE))
    assert (status, errors) == (1, [f"error: the run's directory {tmp_path}/run no longer exists; start a new run"])


@pytest.mark.parametrize("to_the_group", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_parent_reaches_the_child_once_and_nothing_is_started_after_it(
    start, tmp_path, number, to_the_group
):
    process = start({**LOST, "counts": True}, DONE, start_new_session=True)
    assert process.stdout.readline() == "ready\n"
    (os.killpg if to_the_group else os.kill)(process.pid, number)
    assert ended(process) == (1, f"seen {number}\na line\n", []) and log_of(tmp_path) == [""]


def test_the_child_dies_with_a_parent_that_is_killed(start):
    process = start({**DONE, "counts": True})
    assert process.stdout.readline() == "ready\n"
    (child,) = psutil.Process(process.pid).children()
    process.kill()
    assert psutil.wait_procs([child], timeout=PATIENCE_S)[1] == []


@pytest.mark.parametrize(("argv", "is_needed"), [
    (["--max-failures", "2"], True), (["--max-failures", "0"], False), (["--help"], False),
])  # fmt: skip
def test_help_and_no_new_starts_need_no_parent(monkeypatch, argv, is_needed):
    assert supervisor.is_needed(argv) is is_needed
    monkeypatch.setenv(supervisor.PIPE, "3")
    assert not supervisor.is_needed(argv)


HELP = "from rllib_srl.cli import train\ntry: train.main(['--help'])\nexcept SystemExit: pass"
MODULES = "import importlib\nfrom rllib_srl.cli.main import COMMANDS, module_of\nfor name in COMMANDS: "
MODULES += "importlib.import_module(module_of(name))"


@pytest.mark.parametrize(("code", "heavy"), [
    ("import rllib_srl.cli.main", "numpy psutil"), (HELP, "numpy"), (MODULES, "transformers"),
])  # fmt: skip
def test_the_parent_and_the_help_import_nothing_heavy(code, heavy):
    code = f"{code}\nimport sys; print([m for m in ('ray', 'torch', *{heavy.split()}) if m in sys.modules])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert said.stdout.splitlines()[-1] == "[]"


def killed(tmp_path: Path, kinds: list[str], phases: tuple[str, ...]) -> list[int]:
    """Kill each of these in each phase of a real run; return the number of new starts of each run."""
    where = ["--out", str(tmp_path / "kills"), "--kinds", *kinds, "--phases", *phases]
    said = subprocess.run(
        [sys.executable, "scripts/kills.py", "--times", "1", *where],
        cwd=ROOT, capture_output=True, text=True, timeout=RUNS_S, check=False,
    )  # fmt: skip
    rows = [json.loads(line) for line in said.stdout.splitlines()]
    print(said.stdout, said.stderr)  # whole where it fails: a run that ends otherwise says why
    assert [(row["kind"], row["kills"], row["errors"]) for row in rows] == [(kind, len(phases), []) for kind in kinds]
    assert said.returncode == 0
    return [row["new_starts"] for row in rows]


@pytest.mark.slow
@pytest.mark.timeout(RUNS_S + 20)
def test_runs_that_lose_a_process_end_as_an_undisturbed_one(tmp_path):
    """Bit for bit, in weights and metrics; a learner or the driver costs a new start. The script has more phases."""
    assert killed(tmp_path, ["runner", "buffer", "learner", "driver"], ("sync",)) == [0, 0, 1, 1]


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(RUNS_S + 20)
def test_a_run_survives_the_death_of_an_engines_worker(tmp_path):
    """One of the two workers of vLLM's tensor parallelism; its runner is restarted."""
    assert killed(tmp_path, ["engine"], ("play",)) == [0]
