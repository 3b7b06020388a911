"""The gateway: what it forwards, logs and refuses; ratings; versions that change while answers are under way."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from contextlib import asynccontextmanager

import pytest

from rllib_srl.cli.serving import version_files
from rllib_srl.cli.serving.job import FileError, Job, Result
from rllib_srl.cli.serving.process import _until_stopped, explained
from rllib_srl.cli.serving.version_files import Canary, Continuation, checksums
from rllib_srl.engine.sync import WeightSyncError
from rllib_srl.people.gates import Change, Verdict
from scripts.broken_requests import may_wait, request_of, with_other_bytes
from tests.cli.serving.small_engine import TOKEN, gateway

RATING = '{"rating": "good", "rater": "ann"}'
CANARY = Canary(
    continuations=[Continuation([1, 2], [3, 4, 5, 6, 7, 8, 9], [-0.5] * 7), Continuation([2], [4] * 7, [-0.25] * 7)]
)


async def candidate(parts, uses):
    """Store a candidate with files that have the right checksums."""
    lineage = parts.db.store
    version = await parts.db.run(lineage.begin, uses, {})
    directory = parts.served.version(version.number)
    directory.mkdir(parents=True)
    for name in version_files.FILES:
        (directory / name).write_text(CANARY.model_dump_json())
    return await parts.db.run(lineage.finish, version.number, checksums(directory), {})


def trainer_that_ends_with(about):
    """Return a trainer that writes the files of a version and a result, and ends."""

    def start(directory, log):
        for name in version_files.FILES:
            (directory / name).write_text(CANARY.model_dump_json())
        Result(**{"metrics": {}, "verdicts": [], "changes": {}, **about}).write(directory)
        return subprocess.Popen([sys.executable, "-c", ""], process_group=0)

    return start


@gateway()
async def test_an_answer_is_logged_with_its_tokens_and_shows_none(parts):
    reply = await parts.ask(temperature=None)
    value = reply.json()
    assert reply.status_code == 200 and value["choices"][0]["message"]["content"] == " 93"
    assert "token_ids" not in json.dumps(value) and "prompt_token_ids" not in value
    assert reply.headers["X-SRL-Version"] == "0" and value["system_fingerprint"] == "version-0"
    logged = await parts.db.run(parts.db.store.find, value["id"])
    assert (logged.tokens.prompt_ids, logged.tokens.ids, logged.tokens.logps) == ([1, 2], [5, 6], [-0.5, -0.25])
    assert logged.answer == " 93" and logged.finish_reason == "stop"
    (sent,) = parts.engine.bodies
    assert sent["model"] == "v0" and sent["temperature"] == 1.0 and sent["return_token_ids"] is True
    assert os.stat(parts.served.path / "served.db").st_mode & 0o777 == 0o600


@gateway()
async def test_a_stream_has_the_same_text_and_is_logged_before_it_ends(parts):
    text, last = "", ""
    async with parts.stream() as reply:
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                value = json.loads(line[6:])
                text, name = text + value["choices"][0]["delta"]["content"], value["id"]
                if value["choices"][0].get("finish_reason"):
                    assert (await parts.db.run(parts.db.store.find, name)).tokens.ids == [5, 6]
            assert "token_ids" not in line
            last = line or last
    assert text == " 93" and last == "data: [DONE]" and reply.headers["X-SRL-Conversation"] == name


@gateway()
async def test_ratings_are_idempotent_change_and_are_counted_once(parts):
    name = (await parts.ask()).json()["id"]
    replies = [(await parts.rate(name, **one)).json() for one in (
        {"rating": "good", "rater": "ann"}, {"rating": "good", "rater": "bob"}, {"rating": 2}, {"rating": None},
    )]  # fmt: skip
    assert [one["is_changed"] for one in replies] == [True, False, True, True]
    assert (await parts.send("GET", f"/v1/conversations/{name}")).json()["rating"] == "none"
    await asyncio.gather(*(parts.rate(name, rating=value, rater=value) for value in ("good", "bad")))
    assert await parts.db.run(parts.db.store.free_ratings) in ({f"{name}/0": "good"}, {f"{name}/0": "bad"})


@gateway(scheme="hybrid", after=1)
async def test_a_scheme_has_its_own_values_and_rewards(parts):
    name = (await parts.ask()).json()["id"]
    refused = await parts.rate(name, rating="good")
    assert refused.status_code == 400 and "expected good 1 to good 5" in refused.json()["error"]["message"]
    assert (await parts.rate(name, rating="bad 2", rater="ann")).json()["reward"] == -0.4
    shown = (await parts.send("GET", f"/v1/conversations/{name}")).json()
    assert (shown["rating"], shown["reward"]) == ("bad 2", -0.4)
    version = await parts.db.run(parts.db.store.begin, {f"{name}/0": "bad 2"}, {})
    job = await parts.db.run(parts.training.job_of, version)
    assert ([one.reward for one in job.answers], job.level) == ([-0.4], -0.2)


@gateway()
async def test_bad_requests_have_clear_answers(parts):
    name = (await parts.ask()).json()["id"]
    for reply, status, message in (
        (await parts.ask(n=0), 400, "n"),
        (await parts.ask(response_format={"type": "xml"}), 400, "response_format"),
        (await parts.ask(min_p=1.5), 400, "min_p"),
        (await parts.ask(logit_bias={"5": 1}), 400, "logit_bias"),
        (await parts.ask(top_k=2**64), 400, "top_k"),
        (await parts.ask(messages=[{"role": "tool", "content": "7", "tool_call_id": "1"}]), 400, "shows no tools"),
        (await parts.rate("chatcmpl-none", rating="good"), 404, "is not a conversation of this server"),
        (await parts.rate(name, rating="great"), 400, "rating = 'great'; expected good, bad, 1 to 5"),
        (await parts.rate(name, rating=True), 400, "rating"),
        (await parts.rate(name, rating=6), 400, "rating = '6'"),
        (await parts.rate(name, value="good"), 400, "rating: Field required"),
        (await parts.rate(name, rating="good", rater="x" * 101), 400, "at most 100 characters"),
        (await parts.send("POST", "/v1/rollback", json={}), 409, "expected a trained version to roll back"),
        (await parts.send("POST", "/v1/training", json={"paused": 1}), 400, "paused"),
        (await parts.send("POST", "/v1/chat/completions", content=b"{"), 400, "the body is not JSON"),
        (await parts.send("DELETE", "/v1/versions"), 405, "Method Not Allowed"),
    ):
        assert reply.status_code == status
        assert message in reply.json()["error"]["message"]


@gateway()
async def test_failures_of_the_engine_are_clear_and_an_answer_that_was_cut_is_logged_as_such(parts):
    for error, status in (("500", 502), ("400", 400)):
        parts.engine.error = error
        assert (await parts.ask()).status_code == status
    parts.engine.error, parts.serving.num_restarts = "cut", 2
    text = (await parts.ask(stream=True)).text
    assert parts.serving.num_restarts == 2  # half an answer is none
    assert "the engine failed in mid-answer" in text and "[DONE]" not in text
    (name,) = {json.loads(line[6:])["id"] for line in text.split("\n") if line.startswith('data: {"id"')}
    logged = await parts.db.run(parts.db.store.find, name)
    assert (logged.finish_reason, logged.tokens, logged.answer) == ("cut", None, " 9")
    parts.engine.error = ""
    assert (await parts.ask()).status_code == 200 and parts.serving.num_under_way == parts.serving.num_restarts == 0


async def limit(parts, more):
    """Let the SQLite file of the model grow by so many pages and no further; None: as it likes."""

    def set_limit():
        database = parts.db.store._db
        (num,) = database.execute("PRAGMA page_count").fetchone()
        database.execute(f"PRAGMA max_page_count = {2**30 if more is None else num + more}").fetchall()

    await parts.db.run(set_limit)


async def until_full(send):
    """Send until the answer is 507; return the replies before it."""
    taken = []
    while (reply := await send(len(taken))).status_code == 200:
        taken.append(reply.json())
        assert len(taken) < 200
    assert (reply.status_code, reply.json()["error"]["code"]) == (507, "disk_full")
    return taken


@gateway()
async def test_a_full_database_refuses_loses_nothing_and_works_again_with_room(parts):
    """SQLite itself is full, at a limit of its pages."""
    store = parts.db.store

    def ask(number):
        return parts.ask(f"Which is number {number}? {'x' * 1000}")

    names = [(await ask(number)).json()["id"] for number in range(20)]
    await limit(parts, 2)
    names += [one["id"] for one in await until_full(ask)]
    text = (await parts.ask("y" * 50_000, stream=True)).text
    assert "disk full" in text and "[DONE]" not in text
    assert len((await parts.db.run(store.search, "", None, 1000))[0]) == len(names)

    values = ["good", "bad", "4"]
    await limit(parts, 2)
    num = len(await until_full(lambda n: parts.rate(names[n], rating=values[n % 3])))
    await limit(parts, None)
    assert 0 < num < 20 and (await parts.rate(names[num], rating="5")).json()["is_changed"]
    free = {f"{names[n]}/0": values[n % 3] for n in range(num)} | {f"{names[num]}/0": "5"}
    assert await parts.db.run(store.free_ratings) == free  # all that was acknowledged, and no more
    assert {(await parts.db.run(store.find, name)).answer for name in names} == {" 93"}
    assert await parts.db.run(store._read, "PRAGMA integrity_check") == [("ok",)]


@gateway()
async def test_a_client_that_stops_reading_does_not_hold_up_training(parts, monkeypatch):
    monkeypatch.setattr("rllib_srl.envs.agents.web.WRITE_TIMEOUT_S", 0.3)
    parts.engine.error = "long"
    said = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Which?"}], "stream": True}).encode()
    async with raw(parts) as (_, writer):
        writer.write(request_of("POST /v1/chat/completions", TOKEN, said))
        while not parts.engine.bodies:
            await asyncio.sleep(0.01)
        deadline = asyncio.get_running_loop().time() + 40
        while parts.serving.num_under_way and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        assert parts.serving.num_under_way == 0
    assert len((await parts.db.run(parts.db.store.search, "", None, 2))[0]) == 1


@gateway()
async def test_a_version_is_pushed_serves_and_is_rolled_back(parts):
    await parts.serving.push(await candidate(parts, {"a/0": "good"}))
    assert (await parts.ask()).headers["X-SRL-Version"] == "1" and parts.engine.bodies[-1]["model"] == "v1"
    await parts.serving.push(await candidate(parts, {"b/0": "good"}))
    assert parts.engine.loaded == ["v2"]  # the one before was unloaded
    reply = (await parts.send("POST", "/v1/rollback", json={"reason": "rude"})).json()
    assert reply == {"rolled_back": 2, "active": 1, "withdrawn_ratings": ["b/0"]}
    assert (await parts.ask()).headers["X-SRL-Version"] == "1" and parts.engine.loaded == ["v1"]
    states = [one["state"] for one in (await parts.send("GET", "/v1/versions")).json()["versions"]]
    assert states == ["active", "rolled_back"]


@gateway(after=1)
async def test_a_version_that_fails_its_gate_is_rejected_and_the_one_before_answers_on(parts, monkeypatch):
    monkeypatch.setattr("rllib_srl.cli.serving.training.POLL_S", 0.01)
    change = Change(256, 30, 7, 0.8, 0.71, -0.12, -0.06)
    verdicts = [Verdict("kept", False, "fell by 9.0 points", "compare"), Verdict("drift", False, "KL 2")]
    about = {"verdicts": [Verdict("sanity", True, "all numbers finite"), *verdicts], "changes": {"compare": change}}
    monkeypatch.setattr("rllib_srl.cli.serving.training.start_trainer", trainer_that_ends_with(about))
    store = parts.db.store
    await parts.serving.push(await candidate(parts, {"a/0": "good"}))
    task = asyncio.create_task(parts.training.run())
    await parts.rate((await parts.ask()).json()["id"], rating="bad")
    while [one.state for one in await parts.db.run(store.versions)] != ["active", "rejected"]:
        await asyncio.sleep(0.3)  # the trainer is stopped while an answer is under way
        assert (await parts.ask()).headers["X-SRL-Version"] == "1"
    version = await parts.db.run(store.version, 2)
    assert (version.parent, version.reason) == (1, "kept compare: fell by 9.0 points; drift: KL 2")
    assert version.metrics["changes"]["compare"]["after"] == 0.71 and version.files == {}
    while parts.served.version(2).exists():
        await asyncio.sleep(0.01)
    assert parts.served.version(1).exists() and parts.engine.loaded == ["v1"] and not parts.training.is_paused
    assert await parts.db.run(store.free_ratings) == {}  # used up, unless it is changed
    task.cancel()


@gateway(after=2)
async def test_ratings_of_the_answers_of_a_version_that_was_rolled_back_are_trained_on(parts, monkeypatch):
    """What it learned from is withdrawn; what people think of its answers is not."""
    monkeypatch.setattr("rllib_srl.cli.serving.training.POLL_S", 0.01)
    monkeypatch.setattr("rllib_srl.cli.serving.training.start_trainer", trainer_that_ends_with({}))
    store = parts.db.store
    taught = (await parts.ask("Before?")).json()["id"]
    await parts.rate(taught, rating="good")
    await parts.serving.push(await candidate(parts, {f"{taught}/0": "good"}))
    names = [(await parts.ask(f"Which {number}?")).json()["id"] for number in range(2)]
    await parts.rate(names[0], rating="bad")  # one before the rollback, one after it
    assert (await parts.send("POST", "/v1/rollback", json={"reason": "rude"})).status_code == 200
    rated = (await parts.rate(names[1], rating="2")).json()
    assert (rated["rating"], rated["reward"]) == ("2", 0.25) and rated["is_changed"] and rated["is_trained_on"]
    task = asyncio.create_task(parts.training.run())
    while parts.serving.number != 2:
        await asyncio.sleep(0.01)
    assert (await parts.db.run(store.version, 2)).parent == 0  # and not trained on what version 1 learned from
    assert await parts.db.run(store.uses, 2) == {f"{names[0]}/0": "bad", f"{names[1]}/0": "2"}
    job = Job.read(parts.served.version(2))
    assert {one.id: (one.version, one.reward) for one in job.answers} == {names[0]: (1, 0.0), names[1]: (1, 0.25)}
    assert all((one.ids, one.logps) == ([5, 6], [-0.5, -0.25]) for one in job.answers)
    task.cancel()


@gateway(after=1)
async def test_a_rollback_ends_what_is_trained_from_the_version_that_goes(parts, monkeypatch):
    monkeypatch.setattr("rllib_srl.cli.serving.training.POLL_S", 0.01)
    processes = []

    def start(directory, log):
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        processes.append(subprocess.Popen(command, process_group=0))
        return processes[-1]

    monkeypatch.setattr("rllib_srl.cli.serving.training.start_trainer", start)
    await parts.serving.push(await candidate(parts, {"a/0": "good"}))
    await parts.rate((await parts.ask()).json()["id"], rating="good")
    task = asyncio.create_task(parts.training.run())
    while not processes:
        await asyncio.sleep(0.01)
    await parts.send("POST", "/v1/rollback", json={})
    assert await asyncio.to_thread(processes[0].wait, 60) == -signal.SIGKILL
    while len(processes) < 2:  # the rating is free, and trains a child of version 0
        await asyncio.sleep(0.01)
    states = [(one.state, one.parent) for one in await parts.db.run(parts.db.store.versions)]
    assert states == [("rolled_back", 0), ("stale", 1), ("training", 0)]
    task.cancel()
    assert await asyncio.to_thread(processes[1].wait, 60) == -signal.SIGKILL


@pytest.mark.parametrize("how", ["checksum", "canary"])
@gateway()
async def test_no_answer_comes_from_a_version_that_fails_its_check(parts, how):
    version = await candidate(parts, {"a/0": "good"})
    if how == "checksum":
        (parts.served.version(1) / version_files.WEIGHTS).write_text("changed")
    parts.engine.canary_shift = 0.5
    with pytest.raises(FileError if how == "checksum" else WeightSyncError):
        await parts.serving.push(version)
    assert parts.engine.loaded == [] and (await parts.ask()).headers["X-SRL-Version"] == "0"
    assert (await parts.db.run(parts.db.store.version, 1)).state == "candidate"


@gateway()
async def test_answers_under_way_end_on_the_version_that_began_them(parts):
    await parts.serving.push(await candidate(parts, {"a/0": "good"}))
    with parts.serving.answering() as (number, _):
        pushed = asyncio.create_task(parts.serving.push(await candidate(parts, {"b/0": "good"})))
        while parts.serving.number != 2:
            await asyncio.sleep(0.01)
        assert number == 1 and set(parts.engine.loaded) == {"v1", "v2"}
    await pushed
    assert parts.engine.loaded == ["v2"]


@gateway()
async def test_an_engine_that_ended_is_started_again_with_the_active_version(parts, monkeypatch):
    monkeypatch.setattr("rllib_srl.cli.serving.serving.WATCH_S", 0.01)
    await parts.serving.push(await candidate(parts, {"a/0": "good"}))
    watch = asyncio.create_task(parts.serving.watch())
    parts.engine.is_dead, parts.engine.loaded = True, []
    while parts.engine.num_starts < 2 or not parts.serving.is_ready:
        await asyncio.sleep(0.01)
    assert parts.engine.loaded == ["v1"] and (await parts.ask()).headers["X-SRL-Version"] == "1"
    watch.cancel()


@gateway()
async def test_a_rollback_whose_client_has_gone_is_done_to_its_end(parts, monkeypatch):
    await parts.serving.push(await candidate(parts, {"a/0": "good"}))
    lineage, begun, released = parts.db.store, threading.Event(), threading.Event()
    roll_back = lineage.roll_back

    def slow(*given):
        begun.set()
        assert released.wait(60)
        return roll_back(*given)

    monkeypatch.setattr(lineage, "roll_back", slow)
    asking = asyncio.create_task(parts.send("POST", "/v1/rollback", json={"reason": "rude"}))
    await asyncio.to_thread(begun.wait, 60)
    asking.cancel()
    await asyncio.sleep(0.1)  # the server notices that the connection is closed
    released.set()
    while parts.engine.loaded:
        await asyncio.sleep(0.01)
    assert await parts.db.run(lineage.active) is None and parts.serving.number == 0
    assert (await parts.ask()).headers["X-SRL-Version"] == "0"


@gateway()
async def test_a_candidate_that_the_engine_does_not_take_waits_for_a_new_engine_or_a_person(parts, monkeypatch):
    monkeypatch.setattr("rllib_srl.cli.serving.training.POLL_S", 0.01)
    monkeypatch.setattr("rllib_srl.cli.serving.training.PUSH_AGAIN_S", 0.01)
    async def state():
        return (await parts.db.run(parts.db.store.version, 1)).state

    await candidate(parts, {"a/0": "good"})
    parts.engine.is_dead, parts.engine.load_error = True, "vLLM does not answer"
    task = asyncio.create_task(parts.training.run())
    await asyncio.sleep(0.1)
    assert await state() == "candidate" and not parts.training.is_paused  # the engine is started again
    parts.engine.is_dead, parts.engine.load_error = False, "vLLM answers with 400: bad rank"
    while not parts.training.is_paused:
        await asyncio.sleep(0.01)
    assert parts.training.error == "version 1: pushing failed 3 times, vLLM answers with 400: bad rank"
    assert await state() == "candidate"
    parts.engine.load_error = ""
    reply = await parts.send("POST", "/v1/training", json={"paused": False})
    assert reply.json() == {"is_paused": False} and not parts.training.error
    while parts.serving.number != 1:
        await asyncio.sleep(0.01)
    task.cancel()


@gateway()
async def test_a_version_that_fails_its_check_after_a_restart_of_the_engine_ends_the_server_with_a_way_out(
    parts, monkeypatch
):
    monkeypatch.setattr("rllib_srl.cli.serving.serving.WATCH_S", 0.01)
    await parts.serving.push(await candidate(parts, {"a/0": "good"}))
    parts.engine.is_dead, parts.engine.loaded, parts.engine.canary_shift = True, [], 0.5
    message = r"it fails its check: .*; go back to its parent: srl"
    with pytest.raises(ValueError, match=message), explained(parts.served):
        await _until_stopped(parts.serving, parts.training)
    assert (await parts.ask()).status_code == 503


@asynccontextmanager
async def raw(parts):
    reader, writer = await asyncio.open_connection("127.0.0.1", parts.port)
    yield reader, writer
    writer.close()


@gateway()
async def test_mutated_requests_get_4xx_or_an_answer(parts, monkeypatch, caplog):
    """Bytes of real requests are changed, doubled, dropped: a 4xx or an answer, unless more bytes are announced."""
    monkeypatch.setattr("rllib_srl.envs.agents.web.BODY_TIMEOUT_S", 0.2)
    said = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Which?"}], "max_tokens": 5})
    seeds = [
        request_of(first, TOKEN, body.encode())
        for first, body in (("POST /v1/chat/completions", said), ("PUT /v1/conversations/x/rating", RATING),
                            ("POST /v1/training", '{"paused": false}'), ("GET /v1/status", ""))
    ]  # fmt: skip
    rng, statuses = random.Random(11), Counter()
    for _ in range(60):
        data = with_other_bytes(rng, rng.choice(seeds))
        async with raw(parts) as (reader, writer):
            writer.write(data)
            try:
                reply = await asyncio.wait_for(reader.readline(), 0.3 if may_wait(data) else 60)
            except TimeoutError:
                assert may_wait(data)
                continue
        statuses[int(reply.split()[1])] += 1
    assert not {one for one in statuses if one >= 500}, statuses
    assert statuses[200] > 1 and statuses[400] > 10 and statuses[401] > 1
    assert (await parts.ask()).status_code == 200
    assert not [one for one in caplog.records if one.name.startswith("uvicorn")]
