"""What scripts print and log: progress, tables, numbers, memory, errors."""

import io
import json
import logging
import math
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rllib_srl.cli.shared.cluster import message_of
from rllib_srl.cli.shared.display import Progress, showing_progress
from rllib_srl.cli.shared.run_log import RunLog, keep_until
from rllib_srl.common.metric_names import numbers_of
from rllib_srl.storage.event_file import EventFile
from tests.waiting import wait_until

SECONDS = {"plan": 0.1, "rollout": 2.0, "remember": 0.2, "batch": 0.1, "learn": 1.0, "sync": 0.5, "look_back": 0.05}
RESULT = {
    "training_iteration": 3, "time_this_iter_s": 5.0,
    "env_runners": {"episode_return_mean": np.float64(0.5), "num_generated_tokens": 800.0},
    "timers": {**SECONDS, "training_step": 4.0}, "replay": {"num_items": np.float64(12.0)},
    "learners": {"default_policy": {"loss": np.float32(0.25), "kl": float("nan")}}, "config": {"lr": 1.0},
    "done": False, "experiment": "text",
}  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_line_each_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    progress = Progress(3, stream)
    progress.begin("starting ...")
    for number, seconds in ((1, 10.0), (2, 20.0), (3, 15.0)):
        progress.iteration(number, 0.5, 812.4, seconds)
    progress.end()
    assert stream.getvalue().splitlines() == [
        "starting ...",
        "iteration 1/3  reward 0.50  812 tokens/s  20s left",  # 2 iterations of 10 s
        "iteration 2/3  reward 0.50  812 tokens/s  15s left",  # 1 iteration of (10 + 20) / 2 s
        "iteration 3/3  reward 0.50  812 tokens/s  done",
    ]


def test_progress_rewrites_its_line_on_a_terminal_and_notes_stay_above_it(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    progress = Progress(2, stream)
    progress.begin("starting Ray ...")
    progress.iteration(1, math.nan, 10, 1.0, num_resampled=12)
    progress.note("a warning [bold]")
    progress.end()
    plain = re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", stream.getvalue()).replace("\r", "\n")
    assert "a warning [bold]\n" in plain and "starting Ray ..." in plain
    assert plain.rstrip().splitlines()[-1].strip() == "iteration 1/2  reward -  10 tokens/s  12 resampled  1s left"


def test_an_action_that_takes_long_is_shown_again_in_a_log() -> None:
    stream = io.StringIO()
    progress = Progress(2, stream, beat_s=0.01)
    progress.begin("starting Ray ...")
    assert wait_until(lambda: stream.getvalue().count("starting Ray ... 0s\n") >= 2, 60)
    progress.end()


def test_nothing_is_written_after_the_run_so_that_its_stream_can_be_closed() -> None:
    stream, before = io.StringIO(), set(threading.enumerate())
    logger = logging.getLogger("rllib_srl")
    state = (logger.handlers, logger.propagate, logging.getLogger("rllib_srl.start").level)

    def fail() -> None:
        with showing_progress(1, stream) as progress:
            progress.begin("starting Ray ...")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert set(threading.enumerate()) <= before  # nobody is left who writes
    assert (logger.handlers, logger.propagate, logging.getLogger("rllib_srl.start").level) == state
    stream.close()
    logging.getLogger("rllib_srl.start").info("another run of the same process")


def test_the_log_keeps_finite_numbers_only(tmp_path: Path) -> None:
    events = EventFile(tmp_path)
    log = RunLog(tmp_path, events)
    log.write(3, RESULT)
    log.write(4, {"a": {"b": 1}})
    first, second = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert second == {"iteration": 4, "a/b": 1.0}
    assert first["learners/default_policy/loss"] == 0.25
    assert {"learners/default_policy/kl", "config/lr", "experiment"}.isdisjoint(first)
    RunLog(tmp_path, events).write(5, {"a": {"b": 3.0}})
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 1  # several logs of a run share its event file
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("a/b")
    assert [(event.step, event.value) for event in events] == [(4, 1.0), (5, 3.0)]
    resumed = EventFile(tmp_path)
    resumed.hide_from(5)
    RunLog(tmp_path, resumed).write(5, {"a": {"b": 7.0}})
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("a/b")
    assert [(event.step, event.value) for event in events] == [(4, 1.0), (5, 7.0)]
    assert dict(numbers_of({"x": True, "y": None})) == {"x": 1.0}


def test_a_resumed_run_removes_what_it_trains_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert keep_until(path, 2) == 0 and not path.exists()
    lines = [b'{"iteration": 0}\n', b"damaged\n", b'{"iteration": 2}\n', b'{"iteration": 3}\n', b'{"iteration": 2}\n']
    path.write_bytes(b"".join(lines) + b'{"iteration": 2')  # a kill has cut the last one
    assert keep_until(path, 2) == 1
    assert path.read_bytes().splitlines(keepends=True) == [*lines[:3], lines[4]]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
    before = path.stat()
    assert keep_until(path, 2) == 0
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)  # it was not written


def test_a_remote_traceback_is_cut_to_what_it_says() -> None:
    text = "ray::f() died\nTraceback (most recent call last):\n  File 'x', line 1\nRuntimeError: no vLLM here"
    assert message_of(RuntimeError(text)) == "RuntimeError: no vLLM here"
