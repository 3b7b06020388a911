"""Files of a trainer that are damaged: training pauses with the reason, and the server answers on."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from rllib_srl.cli.serving import training
from rllib_srl.cli.serving.process import _until_stopped
from tests.cli.serving.small_engine import gateway


async def paused(parts):
    """Rate an answer, serve until training is paused; return its error and what the server says about it."""
    await parts.rate((await parts.ask()).json()["id"], rating="good")
    serving = asyncio.create_task(_until_stopped(parts.serving, parts.training))
    while not parts.training.is_paused and not serving.done():
        await asyncio.sleep(0.02)
    assert not serving.done()
    status = (await parts.send("GET", "/v1/status")).json()["training"]
    assert (await parts.ask()).status_code == 200  # it serves
    os.kill(os.getpid(), signal.SIGTERM)
    assert await serving == 0
    return parts.training.error, status


def trainer_that(writes, says):
    """Return a trainer that writes files, and ends with a last word or without."""

    def start(directory, log):
        for name, text in writes.items():
            (directory / name).write_text(text)
        return subprocess.Popen([sys.executable, "-c", f"raise SystemExit({says!r})"], process_group=0, stderr=log)

    return start


@pytest.mark.parametrize(("writes", "says", "said"), [
    ({"progress.json": "{"}, "no room", "status 1: no room"),
    ({"result.json": '{"metrics": {}}'}, None, "result.json is damaged: verdicts"),
])  # fmt: skip
@gateway(after=1)
async def test_a_trainer_that_fails_pauses_training_with_the_reason(parts, monkeypatch, writes, says, said):
    monkeypatch.setattr(training, "POLL_S", 0.01)
    monkeypatch.setattr(training, "start_trainer", trainer_that(writes, says))
    error, shown = await paused(parts)
    assert error.startswith("version 1: the trainer failed 3 times, ") and said in error
    assert shown["error"] == error and shown["slices"] == {"done": 0, "of": None}
    assert (await parts.db.run(parts.db.store.in_training)).number == 1  # no rating is lost


@gateway(after=1)
async def test_what_nobody_has_thought_of_pauses_training_and_not_the_server(parts, monkeypatch):
    def broken(*_):
        raise KeyError("logps")
    monkeypatch.setattr(parts.db.store, "rated", broken)
    assert (await paused(parts))[0] == "training failed: KeyError: 'logps'"
