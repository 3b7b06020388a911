"""srl chat DIR: a conversation through the gateway, and ratings of its answers."""

from __future__ import annotations

import asyncio
import io
import os

from rllib_srl.cli.serving.dialogue import ServedDialogue
from rllib_srl.cli.serving.job import write_json
from rllib_srl.cli.serving.served_directory import SERVER, TOKEN, ServedDirectory
from tests.cli.serving import small_engine
from tests.cli.serving.small_engine import served_with


def talked(served, text):
    out, notes = io.StringIO(), io.StringIO()
    ServedDialogue(served, "Be short.", {"max_tokens": 8, "temperature": None}, io.StringIO(text), out, notes).run()
    return out.getvalue().splitlines(), notes.getvalue().splitlines()


def test_a_conversation_is_sent_whole_and_its_last_answer_is_rated(tmp_path):
    async def talk():
        async with served_with(tmp_path) as parts:
            (parts.served.path / TOKEN).write_text(small_engine.TOKEN)
            write_json(parts.served.path / SERVER, {"url": f"http://127.0.0.1:{parts.port}/v1", "pid": os.getpid()})
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
            free = await parts.stores.run(parts.stores.free_ratings)
            assert list(free.values()) == ["bad"]  # of the first answer

    asyncio.run(asyncio.wait_for(talk(), 120))


def test_without_a_server_there_is_one_line(tmp_path):
    served = ServedDirectory(tmp_path / "served")
    served.fix_settings(small_engine.FIXED)
    assert talked(served, "Which?\n") == ([], ["(the server is starting, or none runs; try again in a minute)"])
