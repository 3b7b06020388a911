"""The live report: who may read it, that it follows a run, no text becomes markup, the command's server."""

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
from html import unescape
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from rllib_srl.cli import dashboard
from rllib_srl.cli.dashboard import application, check_can_be_shown, html_of
from rllib_srl.cli.report import page_in
from rllib_srl.cli.serving.served_directory import SETTINGS
from rllib_srl.cli.shared.access import Access
from rllib_srl.cli.shared.runs import RunError
from scripts.page.browser import CHROMIUM, PATIENCE_S, opened_tab
from tests.cli.test_script_report import episode, evaluation, row
from tests.conftest import ROOT
from tests.studies.synthetic import small_study, write_synthetic

TOKEN = "the-token-of-this-test"
EVIL = "<script>alert(1)</script>"  # the browser must not run it


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "settings.yaml").write_text("iterations: 9\nmodel: tiny\nenv: sums\n")
    rows = [row(1, 0.125, **evaluation(0.8, **{"a": 0.9, EVIL: 0.7})), row(4, 0.75)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    evil = episode(4, 0, 1.0, f"{EVIL}\ud83d\x1b[31m") | {"env_id": "<b>env"}
    (directory / "transcripts.jsonl").write_text(json.dumps(evil) + "\n")
    return directory


def test_the_page_follows_the_run(run: Path) -> None:
    """Who may read it is in tests/cli/serving/test_page.py."""
    with TestClient(application(run, Access(TOKEN, port=0))) as client:
        assert client.get("/").text.startswith("401: expected the address with its token")
        assert client.get(f"/?token={TOKEN}").status_code == client.get("/page.css").status_code == 200
        first = client.get("/").text
        assert EVIL in unescape(first) and "<script" not in first and ", <b>env" not in first and "\x1b" not in first
        assert "tiny on sums: 4 of 9 iterations" in first
        assert f'<meta http-equiv="refresh" content="{dashboard.REFRESH_S};url=/">' in first
        with (run / "metrics.jsonl").open("a") as stream:
            stream.write(json.dumps(row(5, 1.0)) + "\n" + json.dumps(row(6, 0.9))[:20])  # the second is being written
        assert "tiny on sums: 5 of 9 iterations" in client.get("/").text


def test_the_page_of_a_study_is_that_of_its_report(tmp_path: Path) -> None:
    directory = write_synthetic(tmp_path / "study", small_study(range(1, 4)))
    check_can_be_shown(directory)
    assert page_in(directory).title.encode() in html_of(directory)


def test_what_cannot_be_shown_yet_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("iterations: 9\n")
    assert b"metrics.jsonl has no finished iteration" in html_of(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row(1, 1.0)) + "\n")
    (tmp_path / "settings.yaml").write_text("no_such_setting: 1\n")
    assert b"unknown names: no_such_setting" in html_of(tmp_path)


@pytest.mark.parametrize(
    ("file", "line"),
    [("", "has neither; expected the directory of a run"), (SETTINGS, "srl serve prints the address of its page")],
)
def test_what_is_not_a_run_is_one_line(tmp_path: Path, file: str, line: str) -> None:
    (tmp_path / (file or "other")).write_text("{}")
    with pytest.raises(RunError, match=line):
        check_can_be_shown(tmp_path)


@contextmanager
def served(run: Path) -> Iterator[str]:
    """Start the command, yield the address that it prints, and end it by Ctrl-C."""
    command = [sys.executable, "-m", "rllib_srl.cli", "dashboard", str(run), "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            title, address = process.stdout.readline(), process.stdout.readline().strip()
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{43}", address), title + address
            yield address
            process.send_signal(signal.SIGINT)
            rest = process.communicate(timeout=PATIENCE_S)[0]
            assert process.returncode == 0 and rest == ""
        finally:
            process.kill()


@pytest.mark.slow
def test_the_command_in_a_browser(run: Path) -> None:
    async def look(address: str) -> None:
        async with opened_tab() as tab:
            await tab.open(address, 390)
            await tab.until("[...document.querySelectorAll('.charts img')].every((one) => one.naturalWidth > 0)")
            assert await tab.value("document.documentElement.scrollWidth") == 390  # nothing sticks out
            with (run / "metrics.jsonl").open("a") as stream:
                stream.write(json.dumps(row(5, 1.0)) + "\n")
            await tab.until("document.body.innerText.includes('5 of 9 iterations')")
            assert await tab.value("location.search") == ""  # the token is gone from the address
            assert tab.errors == []

    with served(run) as address:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(address.partition("?")[0], timeout=PATIENCE_S)
        with urllib.request.urlopen(address, timeout=PATIENCE_S) as answer:
            assert b"Reward of training episodes" in answer.read() and "server" not in answer.headers
        if CHROMIUM is not None:
            asyncio.run(look(address))
