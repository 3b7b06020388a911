"""The live page as a person meets it: the command's own server, and a browser without a window."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rllib_srl.people.rating_store import RATINGS, RatingStore
from scripts.page.browser import CHROMIUM, PATIENCE_S, BrowserError, opened_tab
from scripts.page.hands import PageHands
from tests.cli.dashboard_run import EVIL, memory_of, write_files
from tests.cli.test_script_report import row

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    directory.mkdir()
    write_files(directory)
    memory_of(directory).close()
    return directory


@contextmanager
def served(*words: object) -> Iterator[str]:
    """Start a command of srl that serves, yield the address that it prints, and end it by Ctrl-C."""
    command = [sys.executable, "-m", "rllib_srl.cli", *map(str, words), "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            title, address = process.stdout.readline(), process.stdout.readline().strip()
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+/(rate)?\?token=[\w-]{43}", address), title + address
            yield address
            process.send_signal(signal.SIGINT)
            rest = process.communicate(timeout=PATIENCE_S)[0]
            assert process.returncode == 0 and rest == ""
        finally:
            process.kill()


def test_the_server_starts_answers_and_ends(run: Path) -> None:
    with served("dashboard", run) as address:
        with urllib.request.urlopen(address, timeout=PATIENCE_S) as answer:
            assert answer.status == 200 and "Reward of training episodes" in answer.read().decode()
            assert "server" not in answer.headers
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(address.partition("?")[0], timeout=PATIENCE_S)
    assert not (run / RATINGS).exists()


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_page_in_a_browser(run: Path, tmp_path: Path) -> None:
    async def look(address: str) -> None:
        async with opened_tab() as tab:
            await tab.open(address.replace("/rate", "/"), 1280)
            assert await tab.value("location.search") == ""  # the token is gone from the address
            await tab.until("[...document.querySelectorAll('.charts img')].every((one) => one.naturalWidth > 0)")
            with (run / "metrics.jsonl").open("a") as stream:
                stream.write(json.dumps(row(5, 1.0)) + "\n")
            await tab.until("document.getElementById('state').textContent.startsWith('5 of 9')")
            await tab.until("document.querySelector('.charts img').alt.endsWith('reward: 0.125 to 1')")
            base = address.partition("rate?")[0]
            for name in ("", "episodes", "rate"):
                await tab.open(base + name, 390)
                assert await tab.value("document.documentElement.scrollWidth") == 390, name  # nothing sticks out
                assert name != "episodes" or EVIL in await tab.value("document.body.innerText")  # a text, no script
            await tab.open(base + "rate", 390)
            await tab.value("document.querySelector('.marks button[value=good]').click()")
            await tab.until("document.querySelector('.marks [aria-pressed=true]')?.value === 'good'")
            assert tab.faults == []

    with served("rate", run, "--web", "--model", "tiny", "--rater", "ann") as address:
        asyncio.run(look(address))
    with RatingStore(run / RATINGS) as store:
        assert [(one.answer.answer_id, one.value, one.rater) for one in store.all()] == [("8.1/0", "good", "ann")]


def test_without_a_browser_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.page.browser.CHROMIUM", None)
    with pytest.raises(BrowserError, match="no browser found; install Chromium"):
        PageHands("http://127.0.0.1:9/").__enter__()
