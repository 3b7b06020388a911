"""Rate, pause and roll back on the page of a served model, by clicks in a browser."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from scripts.page.browser import PATIENCE_S, BrowserError, Tab, opened_tab

WIDE, PHONE = 1280, 390  # pixels
_ADDRESS = re.compile(r"(http://127\.0\.0\.1:\d+/)\?token=\S+")


class PageHands:
    """A person at `srl dashboard DIR --allow-rating`. Invariant: inside `with`, server and browser run."""

    def __init__(self, directory: Path, rater: str) -> None:
        """Prepare to open the page.

        Args:
            directory: of the served model.
            rater: name under which the page rates.
        """
        self._directory, self._rater = directory, rater
        self._runner, self._open = asyncio.Runner(), AsyncExitStack()
        self._address = ""
        self._server: subprocess.Popen[str]
        self._tab: Tab

    def __enter__(self) -> Self:
        """Start server and browser, and open the page.

        Raises:
            BrowserError: one of them does not start.
        """
        command = [sys.executable, "-m", "rllib_srl.cli", "dashboard", str(self._directory), "--allow-rating"]
        command += ["--rater", self._rater, "--port", "0"]
        self._server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert self._server.stdout is not None
            self._server.stdout.readline()  # the title
            found = _ADDRESS.match(line := self._server.stdout.readline())
            if found is None:
                raise BrowserError(f"srl dashboard {self._directory} does not start {line}")
            self._address = found[1]
            self._tab = self._runner.run(self._open.enter_async_context(opened_tab()))
            self._runner.run(self._tab.open(line.strip(), WIDE))
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End browser and server."""
        self._close()

    def _close(self) -> None:
        try:
            self._runner.run(self._open.aclose())
        finally:
            self._runner.close()
            self._server.send_signal(signal.SIGINT)
            try:
                self._server.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self._server.kill()

    @property
    def faults(self) -> list[dict[str, Any]]:
        """Errors of scripts and blocked resources so far."""
        return self._tab.faults

    def rate(self, name: str, is_good: bool) -> None:
        """Rate an answer of the newest conversations."""
        mark = "good" if is_good else "bad"
        button = f"[id='{name}'] .marks button[value={mark}]"

        async def click() -> None:
            await self._tab.open(f"{self._address}conversations", WIDE)
            await self._tab.submit(button)
            await self._tab.until(f"document.querySelector(\"{button}\")?.ariaPressed === 'true'")

        self._runner.run(click())

    def pause(self, is_paused: bool) -> None:
        """Pause training, or continue it."""

        async def click() -> None:
            await self._tab.open(f"{self._address}training", WIDE)
            await self._tab.submit(f"button[name=paused][value={'yes' if is_paused else 'no'}]")

        self._runner.run(click())

    def roll_back(self, reason: str) -> str:
        """Roll the active version back; return what the page says."""

        async def click() -> str:
            await self._tab.open(self._address, WIDE)
            await self._tab.value(f"document.querySelector('[name=reason]').value = {json.dumps(reason)}")
            await self._tab.submit("form.once button")
            await self._tab.until("!!document.querySelector('.said')")
            return str(await self._tab.value("document.querySelector('.said').innerText"))

        return self._runner.run(click())

    def shoot(self, directory: Path) -> list[Path]:
        """Write a picture of each tab, as on a screen and as on a phone; return their paths."""

        async def look() -> list[Path]:
            paths = []
            for name in ("", "conversations", "training"):
                for width in (WIDE, PHONE):
                    path = directory / f"{name or 'versions'}-{width}.png"
                    await self._tab.open(self._address + name, width)
                    await self._tab.shoot(path)
                    paths.append(path)
            return paths

        directory.mkdir(parents=True, exist_ok=True)
        return self._runner.run(look())
