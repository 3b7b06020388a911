"""The page of a served model: who may open it, its addresses, and a person at it with Chromium and the real gateway."""

import asyncio

import pytest

from rllib_srl.cli.serving.serving import DRAIN_TIMEOUT_S
from rllib_srl.people.served_store import FILE, Conversation, ServedStore, Tokens
from scripts.page.browser import CHROMIUM
from scripts.page.hands import PHONE, WIDE, PageHands
from tests.cli.serving.small_engine import TOKEN, gateway, run

EVIL = "<script>alert(1)</script>"
ADDRESSES = ("/", "/page.js", "/page.css", "/v1/conversations", "/v1/status", "/metrics", "/nothing")
LOST = {"gate": "kept", "is_passed": False, "reason": f"fell by 9 points {EVIL}", "domain": "compare"}


def conversation(number, question, answer="A pear.", version=0, why=""):
    tokens = None if why else Tokens([1, 2], [3, 4], [-0.5, -0.25])
    at = f"2026-11-01T10:{number // 60:02d}:{number % 60:02d}+00:00"
    said = [{"role": "user", "content": question}]
    return Conversation(f"chatcmpl-{number:04d}", version, at, said, answer, "stop", tokens, why)


async def fill(parts):
    """Write version 1 (active), version 2 (rejected), and four conversations, one of them rated."""
    store = parts.db.store

    def write():
        said = [
            conversation(1, "Name a fruit."),
            conversation(2, f"What is {EVIL}?", '"><img src=x onerror=alert(2)>', 1),
            conversation(3, "Name a Straße.", "Hauptstraße", 1, why="sampled with temperature = 0.2"),
            conversation(4, "Name a colour.", "Red.", 1),
        ]
        for one in said:
            store.log(one)
        store.rate(said[0].as_answer(), "good", "ann")
        store.begin({"chatcmpl-0001/0": "good"}, {"lr": 0.001})
        store.finish(1, {"adapter": "ab" * 32}, {"metrics": {"reuse/kl": 0.0125}})
        store.activate(1, "it passed all gates; canary gap 1e-06 nats")
        store.reject(store.begin({"x/0": "bad"}, {}).number, f"kept compare: {EVIL}", {"verdicts": [LOST]})

    await parts.db.run(write)
    parts.serving.number = 1


@gateway()
async def test_nothing_is_read_without_the_token_which_sets_a_cookie_that_is_enough(parts):
    get = parts.client.get
    cookie = f"srl_dashboard_{parts.port}"
    for wrong in ("", f"{cookie}=wrong", f"{cookie}={TOKEN}x", f"srl_dashboard_1={TOKEN}"):
        for address in ADDRESSES:
            reply = await get(address, headers={"cookie": wrong})
            assert reply.status_code == 401 and "small" not in reply.text and "set-cookie" not in reply.headers
            assert "in a browser the address that srl serve printed" in reply.json()["error"]["message"]
    assert (await get("/?token=wrong")).status_code == 401
    for token in ("", TOKEN[:-1], "é"):
        assert (await parts.ask(token=token)).status_code == 401 and parts.engine.bodies == []
    reply = await get(f"/?token={TOKEN}")
    assert reply.status_code == 200 and "<title>Served model</title>" in reply.text
    assert reply.headers["set-cookie"] == f"{cookie}={TOKEN}; HttpOnly; SameSite=Strict; Path=/"
    policy = reply.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'") and "unsafe" not in policy
    assert [(await get(address)).status_code for address in ADDRESSES] == [200, 200, 200, 200, 200, 200, 404]


@gateway()
async def test_with_the_cookie_other_sites_change_nothing(parts):
    await parts.client.get(f"/?token={TOKEN}")
    for headers, status in (
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"authorization": f"Bearer {TOKEN}", "origin": "http://a.client"}, 200),
    ):
        parts.training.pause(False)
        reply = await parts.client.post("/v1/training", json={"paused": True}, headers=headers)
        assert reply.status_code == status and parts.training.is_paused == (status == 200)


@gateway()
async def test_conversations_come_newest_first_with_search_and_pages(parts):
    async def found(query=""):
        return (await parts.send("GET", f"/v1/conversations{query}")).json()

    async def ids(query):
        return [one["id"][-1] for one in (await found(query))["conversations"]]

    assert (await found())["conversations"] == []
    await fill(parts)
    assert await ids("?q=") == ["4", "3", "2", "1"]
    assert [await ids(f"?q={one}") for one in ("NAME", "HAUPTstra", "nosuch")] == [["4", "3", "1"], ["3"], []]
    newest, *_, oldest = (await found())["conversations"]
    assert (oldest["rating"], oldest["reward"], oldest["rater"]) == ("good", 1.0, "ann")
    assert (newest["rating"], newest["reward"], newest["tokens"]) == ("none", None, None)

    def log():
        for number in range(100, 150):
            parts.db.store.log(conversation(number, f"Question {number}"))

    await parts.db.run(log)
    seen, query = [], "?q=question"
    while query:
        page = await found(query)
        seen += [int(one["id"][-4:]) for one in page["conversations"]]
        query = f"?q=question&before={page['before']}" if page["before"] else ""
    assert seen == list(range(149, 99, -1))
    for name, value in (("before", "-1"), ("before", "x"), ("q", "x" * 201)):
        reply = await parts.send("GET", f"/v1/conversations?{name}={value}")
        assert reply.status_code == 400 and reply.json()["error"]["param"] == name


def at_the_page(tmp_path, do, is_filled=True, **how):
    """Let `do(hands, parts)` use the page of the real gateway, whose engine has other replies than vLLM's."""

    async def body(parts):
        if is_filled:
            await fill(parts)

        def use():
            with PageHands(f"http://127.0.0.1:{parts.port}/?token={TOKEN}") as hands:
                do(hands, parts)
                assert [one for one in hands.errors if "502 (Bad Gateway)" not in str(one)] == []

        await asyncio.to_thread(use)

    run(tmp_path, body, **how)


def values(parts):
    with ServedStore(parts.served.path / FILE) as store:
        return {one.answer.group_id: (one.value, one.rater) for one in store.all()}


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_person_asks_rates_undoes_searches_pauses_and_rolls_back(tmp_path):
    def do(hands, parts):
        assert hands.value("location.search") == ""  # the token is gone from the address
        hands.wait("by('state').textContent === 'version 1 answers'")
        hands.wait("by('training').textContent.startsWith('version 3: 0 of 32 ratings')")
        hands.value("by('rater').value = 'bob'")
        name = hands.ask("Which is largest?")
        assert hands.value("document.querySelector('.answer').textContent") == " 93"
        for key, value in (("+", "good"), ("4", "4"), ("u", "good"), ("-", "bad"), ("-", "none")):
            hands.press(key)
            hands.wait(f"now.answers.at(-1).rating === '{value}' && !by('said').textContent")
            assert values(parts)[name] == (value, "bob")
        hands.press("Enter")
        assert hands.value("document.activeElement.id") == "prompt"
        second = hands.ask("And now?")
        roles = [one["role"] for one in parts.engine.bodies[-1]["messages"]]
        assert second != name and roles == ["user", "assistant", "user"]

        hands.value("by('q').value = 'hauptstr'; by('find').requestSubmit()")
        hands.wait("document.querySelectorAll('#conversations button').length === 1")
        hands.value("document.querySelector('#conversations button').click()")
        hands.wait("document.querySelector('.marks + p')?.textContent.includes('not trained on: sampled with temp')")
        hands.rate("chatcmpl-0002", is_good=True)
        assert EVIL in hands.value("document.body.innerText")  # a text, no script
        assert hands.value("textOf({tool_calls: [{function: {name: 'add', arguments: '{}'}}]})") == "add {}"
        assert hands.value("document.querySelectorAll('img, body script').length") == 0
        hands.wait("by('training').textContent.startsWith('version 3: 1 of 32 ratings')")

        hands.pause(True)
        assert parts.training.is_paused
        hands.pause(False)
        assert "fell by 9 points" in hands.value("by('versions').textContent")
        hands.value("AbortSignal.timeout = (ms) => { now.longest = Math.max(now.longest || 0, ms); }")
        done = hands.roll_back("it is rude")
        assert hands.value("now.longest") > 1000 * DRAIN_TIMEOUT_S  # answers of version 1 could have taken that long
        assert done == "Version 1 was rolled back; version 0 answers; 1 rating withdrawn."
        hands.wait("by('state').textContent === 'version 0 answers' && !by('reason')")
        pictures = hands.shoot(tmp_path / "pictures")
        assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
        assert hands.value("document.documentElement.scrollWidth") == PHONE < WIDE  # nothing sticks out

    at_the_page(tmp_path, do, after=32)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_halves_of_a_rating_and_what_fails_are_said_on_the_page(tmp_path):
    def do(hands, parts):
        name = hands.ask("Which?")
        hands.press("-")
        hands.wait("document.querySelector('.marks + p').textContent === 'now the stars, 1 to 5'")
        assert name not in values(parts)
        hands.press("2")
        hands.wait("document.querySelector('.marks + p').textContent.includes('rated bad 2: reward -0.4')")
        parts.engine.error = "500"
        hands.value("by('prompt').value = 'Again?'; by('ask').requestSubmit()")
        hands.wait("by('said').textContent === 'the engine failed: out of order'")
        assert hands.value("by('prompt').value") == "Again?"

    at_the_page(tmp_path, do, scheme="hybrid", is_filled=False)
