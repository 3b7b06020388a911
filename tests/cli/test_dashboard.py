"""The live page over HTTP: who may read it, what it shows, that it follows a run, ratings, and malformed requests."""

from __future__ import annotations

import json
import math
import random
import re
import stat
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from rllib_srl.cli.dashboard.access import Access
from rllib_srl.cli.dashboard.run_pages import RunPages, check_is_run
from rllib_srl.cli.serving.served_directory import SETTINGS
from rllib_srl.cli.shared.runs import RunError
from rllib_srl.people.rating_store import RATINGS, RatingStore
from rllib_srl.replay.buffer import SRLReplayBuffer
from rllib_srl.studies.results import STUDY_FILE
from tests.cli.dashboard_run import EVIL, decode, memory_of, write_files
from tests.cli.test_script_report import episode, row
from tests.small_buffer import a_group

TOKEN = "the-token-of-this-test"
ADDRESSES = ["/", "/episodes", "/rate", "/static/page.css"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    directory.mkdir()
    write_files(directory)
    return directory


@pytest.fixture
def buffer(run: Path) -> Iterator[SRLReplayBuffer]:
    found = memory_of(run)
    yield found
    found.close()


def pages_of(run: Path, may_rate: bool = True) -> RunPages:
    return RunPages(run, Access(TOKEN, port=7), lambda: decode, rater="ann", may_rate=may_rate)


def client_of(pages: RunPages, has_cookie: bool = True) -> TestClient:
    client = TestClient(pages.application(), raise_server_exceptions=True)
    if has_cookie:
        client.cookies.set("srl_dashboard_7", TOKEN)
    return client


@pytest.fixture
def page(run: Path, buffer: SRLReplayBuffer) -> Iterator[TestClient]:
    with client_of(pages_of(run)) as client:
        yield client


def text_of(html: str) -> str:
    """Return what a person reads of a page, in one line."""
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split())


# --- who may read


WRONG = ["/nothing", "/?token=", "/?token=wrong", "/?token=%ff%00é", "/?" + "a=1&" * 99]


@pytest.mark.parametrize("address", [*ADDRESSES, *WRONG])
def test_nothing_is_read_without_the_token(run: Path, buffer: SRLReplayBuffer, address: str) -> None:
    with client_of(pages_of(run), has_cookie=False) as client:
        for cookie in (None, "wrong", TOKEN + "x", 'bad"; é'):
            headers = {"cookie": f"srl_dashboard_7={cookie}".encode()} if cookie else {}
            answer = client.get(address, headers=headers)
            assert answer.status_code == 401 and answer.text.startswith("401: expected the address with its token")
            assert "set-cookie" not in answer.headers and "run" not in answer.text.replace("printed", "")
        assert client.post("/rate?token=" + TOKEN, data={"value": "good"}).status_code == 401


def test_the_token_sets_a_cookie_that_is_enough(run: Path) -> None:
    with client_of(pages_of(run), has_cookie=False) as client:
        answer = client.get(f"/episodes?token={TOKEN}")
        assert answer.status_code == 200
        assert answer.headers["set-cookie"] == f"srl_dashboard_7={TOKEN}; HttpOnly; SameSite=Strict; Path=/"
        assert client.get("/").status_code == 200
        others = f'theirs={{"a": [1]}}; x; =; srl_dashboard_7={TOKEN}; y="'  # of other pages on this machine
        client.cookies.clear()
        assert client.get("/", headers={"cookie": others}).status_code == 200
        expected = {"x-frame-options": "DENY", "x-content-type-options": "nosniff", "cache-control": "no-store"}
        assert {name: answer.headers[name] for name in expected} == expected
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'") and "unsafe" not in policy


# --- what it shows


def test_the_overview_has_the_facts_of_the_report(page: TestClient) -> None:
    html = page.get("/").text
    text = text_of(html)
    assert "4 of 9 iterations, the last one less than a minute ago" in text
    assert "Mean reward 0.188 at the start, 0.625 at the end" in text
    assert "Held-out accuracy fell from 0.800 in iteration 1 to 0.600" in text
    assert "a 0.900 0.900 0.400 0.500" in text  # first, best, last, lost
    titles = ("Reward of training episodes", "Accuracy by domain", "Live tokens")
    alts = re.findall(r'<img src="data:image/svg[^"]*" alt="([^"]*)"', html)
    charts = [alt for alt in alts if alt.startswith(titles)]
    expected = ["Reward of training episodes. reward: 0.125 to 0.75", "Live tokens. live tokens: 0.5 to 0.5"]
    assert list(map(unescape, charts)) == [*expected, f"Accuracy by domain. {EVIL}: 0.7 to 0.8; a: 0.9 to 0.4"]


class Elements(HTMLParser):
    """The elements of a page, as a browser finds them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_no_text_becomes_markup(page: TestClient) -> None:
    for address in [*ADDRESSES, "/episodes?q=%3Cscript%3E&stop=%22%3E%3Cb%3E"]:
        html = page.get(address).text
        elements = Elements(html).found
        scripts = [attributes for tag, attributes in elements if tag == "script"]
        assert scripts in ([], [{"src": "/static/dashboard.js", "defer": None}]), address
        assert not {tag for tag, _ in elements} & {"i", "iframe", "style", "object", "base"}, address
        for tag, attributes in elements:
            assert not [name for name in attributes if name == "style" or name.startswith("on")], address
            if tag == "img":
                assert (attributes["src"] or "").startswith("data:image/svg+xml;base64,"), address
                continue
            links = [attributes.get(name) for name in ("href", "src", "action")]
            assert all(link is None or re.match(r"/(?!/)", link) for link in links), address  # nothing from elsewhere
        assert "\x1b" not in html
    assert EVIL in unescape(page.get("/episodes").text) and "\\ud83d" in page.get("/episodes").text
    assert EVIL in unescape(page.get("/rate").text)


# --- transcripts


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("q=ANSWER+3", ["3 1", "3 0"]),
        ("iteration=2-3&reward=%3E0.5", ["3 1", "2 1"]),
        ("reward=0&env=sums", ["4 0", "3 0", "2 0", "1 0"]),
        ("stop=truncated", []),
        ("skip=6", ["1 1", "1 0"]),
        ("q=no+such+text", []),
    ],
)
def test_episodes_are_found(page: TestClient, query: str, expected: list[str]) -> None:
    html = page.get(f"/episodes?{query}").text
    assert re.findall(r"answer (\d \d)</pre>", html) == expected
    assert ("No episode fits." in html) == (not expected)


def test_episodes_come_in_pages(page: TestClient, run: Path) -> None:
    with (run / "transcripts.jsonl").open("a") as stream:
        stream.writelines(json.dumps(episode(n, 0, 0.0)) + "\n" for n in range(5, 28))
    html = page.get("/episodes?env=sums").text
    older = re.findall(r'href="(/episodes\?[^"]*)">Older', html)
    assert html.count('class="episode"') == 20 and older == ["/episodes?env=sums&amp;skip=20"]
    last = page.get(unescape(older[0])).text
    assert last.count('class="episode"') == 10 and "Older" not in last and "30 episodes fit" in html


# --- while the run goes on


def test_the_page_follows_the_run(run: Path, buffer: SRLReplayBuffer) -> None:
    pages = pages_of(run)
    with client_of(pages) as client:
        seen: dict[str, str] = {}

        def text(address: str) -> str:
            """Return the text of a page if it has changed since, else ""."""
            pages.next_at = pages.memory._next_at = 0.0
            answer = client.get(address, headers={"if-none-match": seen.get(address, "")})
            seen[address] = answer.headers.get("etag", seen.get(address, ""))
            assert answer.status_code == (200 if answer.text else 304)
            return text_of(answer.text)

        assert "4 of 9 iterations" in text("/") and text("/") == ""
        assert "9.5/0" not in text("/rate")
        with (run / "metrics.jsonl").open("a") as stream:
            stream.write(json.dumps(row(5, 1.0)) + "\n" + json.dumps(row(6, 0.9))[:20])
            stream.flush()
            assert "5 of 9 iterations" in text("/")
            stream.write(json.dumps(row(6, 0.9))[20:] + "\n")
        assert "6 of 9 iterations" in text("/")
        buffer.add([a_group(5, (0, 1), 9)], 9, "9.add")
        assert "9.5/0" in text("/rate")


def test_an_overview_is_not_drawn_again_at_once(run: Path) -> None:
    pages = pages_of(run)
    html = pages.html_of("")
    pages.next_at = math.inf
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps(row(5, 1.0)) + "\n")
    assert pages.html_of("") == html
    pages.next_at = 0.0
    assert pages.html_of("") != html and pages.next_at > 0


def test_a_run_that_has_just_begun_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("iterations: 9\n")
    with client_of(pages_of(tmp_path)) as client:
        assert "No iteration has finished yet" in client.get("/").text
        assert "This run has no transcripts yet" in client.get("/episodes").text
        assert "This run has no memory" in client.get("/rate").text
        assert not (tmp_path / RATINGS).exists()


def test_settings_that_cannot_be_read_are_told_again_and_again(run: Path) -> None:
    (run / "settings.yaml").write_text("no_such_setting: 1\n")
    pages = pages_of(run)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"unknown names:\s+no_such_setting"):
            pages.state()
        assert "unknown names: no_such_setting" in pages.html_of("")


def test_files_that_cannot_be_read_leave_the_rest(run: Path, buffer: SRLReplayBuffer) -> None:
    buffer.close()
    (run / "replay/memory.db").write_bytes(b"damaged" * 1000)
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write("{damaged}\n")
    with client_of(pages_of(run)) as client:
        text = text_of(client.get("/").text)
        assert "Metrics.jsonl has 1 damaged lines, which are left out." in text and "Reward and accuracy" in text
        assert client.get("/rate").status_code == 409


# --- ratings


def forms_of(html: str) -> dict[str, dict[str, str]]:
    """Return the hidden fields of the forms that rate, by the id of the answer."""
    forms = [dict(re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', one)) for one in html.split("<form")[1:]]
    return {one["id"]: one for one in forms}


def stored(run: Path) -> dict[str, str]:
    with RatingStore(run / RATINGS) as store:
        return {one.answer.answer_id: one.value for one in store.all()}


def test_answers_are_rated_changed_and_taken_back(page: TestClient, run: Path) -> None:
    forms = forms_of(page.get("/rate").text)
    assert list(forms)[:3] == ["8.1/0", "8.1/1", "1.2/0"]  # the newest first
    for value in ("good", "good", "2", "none"):  # a second click changes nothing
        answer = page.post("/rate", data={**forms["8.1/0"], "value": value}, follow_redirects=False)
        assert answer.status_code == 303 and answer.headers["location"] == "/rate?opened=8.1%2F0#8.1/0"
        assert stored(run) == {"8.1/0": value}
        html = page.get(answer.headers["location"]).text
        pressed = re.findall(r'value="(\w+)" aria-pressed="true"', html)
        assert pressed == ([value] if value != "none" else []) and "by ann: waits for the next iteration" in html
    assert stat.S_IMODE((run / RATINGS).stat().st_mode) == 0o600


def test_a_scheme_has_its_own_buttons(page: TestClient, run: Path) -> None:
    RatingStore(run / RATINGS, "hybrid").close()
    html = page.get("/rate").text
    assert html.count('value="good ') == html.count('value="bad ') == 5 * len(forms_of(html)) and 'e="good"' not in html
    form = forms_of(html)["8.1/0"]
    assert "rated bad 2 (reward -0.4)" in page.post("/rate", data={**form, "value": "bad 2"}).text
    assert page.post("/rate", data={**form, "value": "good"}).status_code == 400 and stored(run) == {"8.1/0": "bad 2"}


def test_answers_come_in_pages(page: TestClient, buffer: SRLReplayBuffer) -> None:
    buffer.add([a_group(n, (0, 1), 9) for n in range(10, 21)], 9, "9.add")
    seen, address = list[str](), "/rate"
    while address:
        html = page.get(address).text
        seen += forms_of(html)
        address = "".join(re.findall(r'href="(/rate\?[^"]*)">Older', html))
    assert len(seen) == 28 and seen[-2:] == ["1.1/0", "1.1/1"] and len(set(seen)) == 28


def test_a_page_without_leave_to_rate_writes_nothing(run: Path, buffer: SRLReplayBuffer) -> None:
    with client_of(pages_of(run, may_rate=False)) as client:
        html = client.get("/rate").text
        assert "Read-only" in html and "<form" not in html and "8.1/0" in html and not (run / RATINGS).exists()
        form = {"key": Access(TOKEN).form_key, "id": "8.1/0", "value": "good"}
        assert client.post("/rate", data=form).status_code == 403
    assert not (run / RATINGS).exists()


@pytest.mark.parametrize(
    ("headers", "change", "status"),
    [
        ({"origin": "http://evil.example"}, {}, 403),
        ({"origin": "null"}, {}, 403),
        ({"sec-fetch-site": "cross-site"}, {}, 403),
        ({"sec-fetch-site": "same-site"}, {}, 403),
        ({}, {"key": "0" * 64}, 403),
        ({}, {"key": ""}, 403),
        ({}, {"value": "6"}, 400),
        ({}, {"value": ""}, 400),
        ({}, {"id": "8.1"}, 400),
        ({}, {"id": "9.9/0"}, 409),
        ({}, {"id": "8.1/7"}, 409),
        ({}, {"mark": "of another answer"}, 409),
        ({}, {"mark": "x" * 9000}, 413),
        ({"origin": "http://testserver", "sec-fetch-site": "same-origin"}, {}, 200),
    ],
)
def test_only_the_forms_of_the_page_rate(page: TestClient, run: Path, headers: Any, change: Any, status: int) -> None:
    form = {**forms_of(page.get("/rate").text)["8.1/0"], "value": "good", **change}
    assert page.post("/rate", data=form, headers=headers).status_code == status
    assert bool(stored(run)) == (status == 200)


# --- malformed requests


@pytest.mark.parametrize(
    ("file", "line"),
    [("", "holds no run"), (STUDY_FILE, "is a study"), (SETTINGS, "srl serve prints the address of its page")],
)
def test_what_is_not_a_run_is_one_line(tmp_path: Path, file: str, line: str) -> None:
    (tmp_path / (file or "other")).write_text("{}")
    with pytest.raises(RunError, match=line):
        check_is_run(tmp_path)


def test_mutated_requests_are_refused_or_answered(page: TestClient) -> None:
    draw = random.Random(3)
    names = ["q", "iteration", "reward", "stop", "env", "skip", "before", "opened", "token", "key", "id", "value"]
    values = ["%00", "%ff%fe", "%ud800", "-1", "9" * 40, "NaN", "1e999", "../..", "%F0%9F%92%A9", "<script>", "%"]
    values += ["=&=", "a" * 500, "good", "memory", "%0d%0aX-A:1", "3-1", "<=", "١", "²"]
    addresses = [*ADDRESSES, "/rate/x", "//", "/static/../x", "/static/%2e%2e"]
    seen = set()
    for _ in range(150):
        address = draw.choice(addresses)
        query = "&".join(f"{draw.choice(names)}={draw.choice(values)}" for _ in range(draw.randrange(4)))
        method = draw.choice(["GET", "GET", "GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS"])
        body = draw.choice([b"", b"action=good&key=1", b"\xff\xfe=%", b"&" * 5000, b"a=1&" * 30])
        body = body if method == "POST" else None
        kinds = ["application/json", "multipart/form-data", "application/x-www-form-urlencoded"]
        headers = {"content-type": draw.choice(kinds)}
        answer = page.request(method, f"{address}?{query}", content=body, headers=headers, follow_redirects=False)
        assert answer.status_code in (200, 303, 307, 400, 403, 404, 405, 409, 413), (method, address, query)
        assert answer.headers["x-frame-options"] == "DENY" and "x-a" not in answer.headers
        seen.add(answer.status_code)
    assert {200, 400, 404, 405} <= seen
