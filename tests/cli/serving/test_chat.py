"""srl chat DIR and srl chat --server URL: a conversation through the gateway, and ratings of its answers."""

import asyncio
import io
import os
import pty
import select
import subprocess
import sys
import time

import pytest

from rllib_srl.cli.chat import ServedModel, talk
from rllib_srl.cli.serving.served_directory import TOKEN, DirectoryError, Running, ServedDirectory, address_in
from tests.cli.serving import small_engine
from tests.cli.serving.small_engine import gateway


def talked(served, text):
    out, notes = io.StringIO(), io.StringIO()
    talk(ServedModel(served, "Be short.", {"max_tokens": 8, "temperature": None}), io.StringIO(text), out, notes)
    return out.getvalue().splitlines(), notes.getvalue().splitlines()


@gateway()
async def test_a_conversation_is_sent_whole_and_its_last_answer_is_rated(parts):
    (parts.served.path / TOKEN).write_text(small_engine.TOKEN)
    Running(url=f"http://127.0.0.1:{parts.port}/v1", pid=os.getpid()).write(parts.served.path)
    text = "+\nWhich?\n-\nAnd now?\n+\n=9\n=none\n/reset\nAgain?\n"
    out, notes = await asyncio.to_thread(talked, parts.served, text)
    assert out == [" 93"] * 3
    assert notes == [
        "(there is no answer to rate yet)", "(bad, reward 0.0)", "(good, reward 1.0)",
        "(rating = '9'; expected good, bad, 1 to 5, or none (taken back))", "(none, reward None)",
        "(new conversation)",
    ]  # fmt: skip
    said = [[one["role"] for one in body["messages"]] for body in parts.engine.bodies]
    first = ["system", "user"]
    assert said == [first, [*first, "assistant", "user"], first] and parts.engine.bodies[0]["max_tokens"] == 8
    free = await parts.db.run(parts.db.store.free_ratings)
    assert list(free.values()) == ["bad"]  # of the first answer


def test_without_a_server_there_is_one_line(tmp_path):
    served = ServedDirectory(tmp_path / "served")
    served.fix_settings(small_engine.FIXED)
    told = "(no server runs there, or it is still starting; try again in a minute)"
    assert talked(served, "Which?\n") == ([], [told])


def test_the_address_of_a_server_has_its_token_or_the_environment_has(monkeypatch):
    monkeypatch.setenv("SRL_TOKEN", "other")
    assert address_in("http://127.0.0.1:8000/?token=x%2Dy#a") == ("http://127.0.0.1:8000/v1", "x-y")
    assert address_in("https://a.example") == ("https://a.example:443/v1", "other")
    monkeypatch.delenv("SRL_TOKEN")
    for text in ("http://127.0.0.1:8000", "results/served", "ftp://a/?token=x", "http://[/?token=x", "http://a:b/"):
        with pytest.raises(DirectoryError, match="--server: .*; expected what srl serve printed"):
            address_in(text)


class Screen:
    """What a terminal shows. Invariant: `rest` begins after the last text that was waited for."""

    def __init__(self, master):
        self.master, self.rest = master, ""

    def until(self, text):
        deadline = time.monotonic() + 120
        while text not in self.rest:
            assert time.monotonic() < deadline, self.rest
            if select.select([self.master], [], [], 1)[0]:
                self.rest += os.read(self.master, 1 << 16).decode("utf-8", "replace")
        self.rest = self.rest.partition(text)[2]


@pytest.mark.slow
@gateway()
async def test_a_conversation_in_a_terminal(parts):
    """The command, at a terminal, with the real gateway."""

    def talk(url):
        master, slave = pty.openpty()
        screen = Screen(master)
        command = [sys.executable, "-m", "rllib_srl.cli", "chat", "--server", url]
        with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True) as process:
            try:
                for typed, shown in (
                    ("Which?\n", "93\r\n> "), ("+\n", "(good, reward 1.0)"), ("-\n", "(bad, reward 0.0)"),
                    ("É una\n", "93\r\n> "), ("\n", "> "), ("-5?\n", "93\r\n> "), ("=4\n", "0.75)"),
                ):  # fmt: skip
                    os.write(master, typed.encode())
                    screen.until(shown)
                screen.until("> ")
                os.write(master, b"\x04")
                assert process.wait(200) == 0
            finally:
                process.kill()
                os.close(slave)
                os.close(master)
    await asyncio.to_thread(talk, f"http://127.0.0.1:{parts.port}/?token={small_engine.TOKEN}")
    said = [one["messages"][-1]["content"] for one in parts.engine.bodies]
    assert said == ["Which?", "É una", "-5?"]
    assert sorted((await parts.db.run(parts.db.store.free_ratings)).values()) == ["4", "bad"]
