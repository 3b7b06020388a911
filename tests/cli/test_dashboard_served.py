"""The page of a served model over HTTP: what it shows, who may write, ratings, roll-backs and pauses."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from rllib_srl.cli.dashboard.access import Access
from rllib_srl.cli.dashboard.served.app import ServedPages
from rllib_srl.cli.serving.job import write_json
from rllib_srl.cli.serving.served_directory import SERVER, ServedDirectory
from rllib_srl.cli.serving.stores import Stores
from rllib_srl.people.lineage.versions import VERSIONS, Lineage
from rllib_srl.people.rating_store import RATINGS, RatingStore
from tests.cli.served_model import EVIL, conversation, write_served
from tests.cli.serving.small_engine import TOKEN as GATEWAY_TOKEN
from tests.cli.serving.small_engine import served_with
from tests.cli.test_dashboard import Elements, text_of

TOKEN = "the-token-of-this-test"
KEY = Access(TOKEN).form_key
TABS = ["/", "/conversations", "/training"]
ROLL_BACK = {"key": KEY, "version": "2", "reason": "it is rude"}
RATE = {"key": KEY, "id": "chatcmpl-0004", "value": "good", "q": "", "before": ""}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("module") / "served"
    write_served(directory)
    return directory


@pytest.fixture
def served(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "served")


def client_of(directory: Path, may_rate: bool = True, has_cookie: bool = True) -> TestClient:
    access = Access(TOKEN, port=7)
    client = TestClient(ServedPages(directory, access, "ann", may_rate).application())
    if has_cookie:
        client.cookies.set(access.cookie, TOKEN)
    return client


@pytest.fixture
def page(served: Path) -> Iterator[TestClient]:
    with client_of(served) as client:
        yield client


def states(directory: Path) -> list[str]:
    with Lineage(directory / VERSIONS) as lineage:
        return [one.state for one in lineage.all()]


def ratings(directory: Path) -> dict[str, tuple[str, str]]:
    with RatingStore(directory / RATINGS) as store:
        return {one.answer.group_id: (one.value, one.rater) for one in store.all()}


# --- reading


@pytest.mark.parametrize("address", [*TABS, "/nothing", "/?token=wrong"])
def test_nothing_is_read_without_the_token(served: Path, address: str) -> None:
    with client_of(served, has_cookie=False) as client:
        assert client.get(address).status_code == 401
        client.cookies.set("srl_dashboard_7", TOKEN + "x")
        assert client.get(address).status_code == 401 and client.post(address, data=ROLL_BACK).status_code == 401
    assert states(served) == ["superseded", "active", "rejected"]


def test_versions_are_listed_with_gates_canary_and_reasons(page: TestClient) -> None:
    text = text_of(page.get("/").text)
    assert "version 2 is active, no server runs in the directory" in text
    assert "Version 2 is active: trained from version 1 on 1 rating." in text
    passed = r"it passed all gates; canary gap mean 1e-06, max 2e-06 nats 1 compare 0\.800 → 0\.780 "
    assert re.search(r" 2 parent 1 active 20\d\d-\d\d-\d\d \d\d:\d\d UTC " + passed, text)
    assert re.search(r" 3 parent 2 rejected 20\d\d-\S+ \S+ UTC kept compare: fell by 9 points ", text)
    assert "kept compare harmful fell by 9 points" in text and "Training: reuse/kl 0.0125." in text
    assert "compare 0.800 0.780 -2.0 [-5.0, +1.0] 200" in text
    assert text.index("Version 3: gates") < text.index("Version 1: gates")


def test_conversations_come_newest_first_with_search_and_pages(page: TestClient, served: Path) -> None:
    def ids(query: str = "") -> list[str]:
        return re.findall(r'id="chatcmpl-(\d+)"', page.get(f"/conversations{query}").text)

    assert ids() == ["0004", "0003", "0002", "0001"]
    assert ids("?q=NAME") == ["0004", "0003", "0001"] and ids("?q=hauptSTRASSE") == ["0003"] and ids("?q=nosuch") == []
    text = text_of(page.get("/conversations").text)
    assert "chatcmpl-0003; answered by version 2; ended as stop; not trained on: sampled with temperature = 0.2" in text
    assert "answered by version 0, the model that was given" in text and "2 What is &" not in text
    stores = Stores(ServedDirectory(served))
    stores.now(lambda: [stores.conversations.log(conversation(n, f"Question {n}")) for n in range(100, 340)])
    stores.close()
    assert "244 conversations" in page.get("/conversations").text
    seen, address = [], "/conversations?q=question"
    while address:
        html = page.get(address).text
        seen += re.findall(r'id="chatcmpl-(\d+)"', html)
        address = "".join(re.findall(r'href="(/conversations\?[^"]*)">Older', html)).replace("&amp;", "&")
    assert seen == [f"{n:04d}" for n in range(339, 99, -1)]


def test_no_text_becomes_markup(page: TestClient) -> None:
    for address in [*TABS, "/conversations?q=%22%3E%3Cimg&opened=%22%3E%3Cb%3E"]:
        answer = page.get(address)
        elements = Elements(answer.text).found
        scripts = [attributes for tag, attributes in elements if tag == "script"]
        assert scripts in ([], [{"src": "/static/dashboard.js", "defer": None}]), address
        assert not {tag for tag, _ in elements} & {"img", "i", "iframe", "style", "object", "base"}, address
        for _, attributes in elements:
            assert not [name for name in attributes if name == "style" or name.startswith("on")], address
        assert "\x1b" not in answer.text and "unsafe" not in answer.headers["content-security-policy"]
    assert EVIL.replace("<", "&lt;").replace(">", "&gt;") in page.get("/conversations").text
    assert EVIL.replace("<", "&lt;").replace(">", "&gt;") in page.get("/").text


def test_a_directory_that_was_never_started_is_a_page_and_no_file(tmp_path: Path) -> None:
    served = ServedDirectory(tmp_path / "served")
    served.fix_settings({"model": "small"})
    with client_of(served.path) as client:
        assert "the model that was given" in client.get("/").text and client.get("/training").status_code == 200
        assert "Nothing has been asked yet." in client.get("/conversations").text
        assert client.post("/conversations", data=RATE).status_code == 404
    assert os.listdir(served.path) == ["settings.json"]


# --- writing


def test_answers_are_rated_changed_and_taken_back(page: TestClient, served: Path) -> None:
    for value in ("good", "good", "5", "none"):  # a second click changes nothing
        answer = page.post("/conversations", data={**RATE, "q": "red", "value": value}, follow_redirects=False)
        assert answer.status_code == 303 and ratings(served)["chatcmpl-0004"] == (value, "ann")
        location = "/conversations?q=red&opened=chatcmpl-0004#chatcmpl-0004"
        assert answer.headers["location"] == location
        pressed = re.findall(r'value="(\w+)" aria-pressed="true"', page.get("/conversations?q=red").text)
        assert pressed == ([value] if value != "none" else [])
    with RatingStore(served / RATINGS) as store:
        assert store.newest_change() == 2 + 3
    page.post("/conversations", data={**RATE, "id": "chatcmpl-0002", "value": "4"})  # version 2 has learned from a 2
    assert re.search(r" 2 parent 1 active, stale .* 1 1 changed since ", text_of(page.get("/").text))


def test_a_version_is_rolled_back_once(page: TestClient, served: Path) -> None:
    assert "Roll version 2 back to 1" in page.get("/").text
    first, second = (page.post("/", data=ROLL_BACK) for _ in range(2))
    assert first.status_code == 200
    done = "Version 2 was rolled back; version 1 is active; 1 rating is withdrawn: chatcmpl-0002/0."
    assert done in text_of(first.text)
    assert second.status_code == 409
    assert "Not done: version 2 is not active, version 1 is; nothing was rolled back." in text_of(second.text)
    assert states(served) == ["active", "rolled_back", "rejected"] and "it is rude" in second.text
    assert page.post("/", data={**ROLL_BACK, "version": "1"}).status_code == 200
    assert "<form" not in page.get("/").text


def test_a_page_without_leave_to_write_writes_nothing(served: Path) -> None:
    with client_of(served, may_rate=False) as client:
        for address, form in (("/", ROLL_BACK), ("/conversations", RATE), ("/training", {"key": KEY, "paused": "yes"})):
            html = client.get(address).text
            assert 'method="post"' not in html and "Read-only" in html
            answer = client.post(address, data=form)
            assert answer.status_code == 403 and "read-only; start it with --allow-rating" in answer.text
    assert states(served) == ["superseded", "active", "rejected"] and "chatcmpl-0004" not in ratings(served)


@pytest.mark.parametrize(
    ("address", "headers", "change", "status"),
    [
        ("/", {"origin": "http://evil.example"}, {}, 403),
        ("/", {"sec-fetch-site": "cross-site"}, {}, 403),
        ("/", {}, {"key": "0" * 64}, 403),
        ("/", {}, {"version": "0"}, 400),
        ("/", {}, {"version": "2; DROP"}, 400),
        ("/", {}, {"version": "99"}, 409),
        ("/", {}, {"reason": "  "}, 400),
        ("/", {}, {"reason": "x" * 301}, 400),
        ("/", {}, {"reason": "x" * 9000}, 413),
        ("/conversations", {"origin": "null"}, {}, 403),
        ("/conversations", {}, {"key": ""}, 403),
        ("/conversations", {}, {"value": "6"}, 400),
        ("/conversations", {}, {"id": "../x"}, 400),
        ("/conversations", {}, {"id": "chatcmpl-9999"}, 404),
        ("/training", {}, {"paused": "maybe"}, 400),
    ],
)
def test_malformed_requests_change_nothing(
    page: TestClient, served: Path, address: str, headers: Any, change: Any, status: int
) -> None:
    form = {**ROLL_BACK, **RATE, **change} if address != "/training" else {"key": KEY, **change}
    assert page.post(address, data=form, headers=headers).status_code == status
    assert states(served) == ["superseded", "active", "rejected"] and "chatcmpl-0004" not in ratings(served)


# --- with a server


def test_a_running_server_rolls_back_and_pauses(tmp_path: Path) -> None:
    """The gateway is the real one; only vLLM's replies are not vLLM's."""

    async def look() -> None:
        async with served_with(tmp_path) as parts:
            stores, served = parts.stores, parts.served
            (served.path / "token").write_text(GATEWAY_TOKEN)
            url = str(parts.client.base_url.join("/v1"))
            write_json(served.path / SERVER, {"url": url, "pid": os.getpid()})

            def fill() -> None:
                stores.lineage.begin({"a/0": "good"}, {})
                stores.lineage.finish(1, {}, {})
                stores.lineage.activate(1)

            await stores.run(fill)
            parts.serving.number = 1
            with served.locked():
                await asyncio.to_thread(click, served.path)
            assert parts.training.is_paused is False and parts.serving.number == 0

    def click(directory: Path) -> None:
        with client_of(directory) as page:
            assert "version 1 is active, the server runs" in text_of(page.get("/").text)
            for paused, said in (("yes", "Training is paused."), ("yes", "Training is paused."), ("no", "goes on.")):
                answer = page.post("/training", data={"key": KEY, "paused": paused})
                assert answer.status_code == 200 and said in answer.text
                assert f"training {'paused' if paused == 'yes' else 'on'} ratings waiting 0" in text_of(answer.text)
            form = {**ROLL_BACK, "version": "1"}
            assert "version 0 is active" in page.post("/", data=form).text
            again = page.post("/", data=form)
            assert again.status_code == 409 and "version 1 is not active, version 0 is" in again.text
            (directory / "token").write_text("another-token-of-16-characters")
            answer = page.post("/training", data={"key": KEY, "paused": "yes"})
            assert answer.status_code == 409 and "expected the header" in answer.text

    asyncio.run(asyncio.wait_for(look(), 60))
    assert states(tmp_path / "served") == ["rolled_back"]
