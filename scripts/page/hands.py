"""Ask, rate, pause and roll back on the page of a served model, by clicks and keys in a browser."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from scripts.page.browser import Tab, opened_tab

WIDE, PHONE = 1280, 390  # pixels


class PageHands:
    """A person at the page. Invariant: inside `with` the browser runs."""

    def __init__(self, address: str) -> None:
        """Prepare to open the page at the address that `srl serve` printed."""
        self._address = address
        self._runner, self._open = asyncio.Runner(), AsyncExitStack()
        self._tab: Tab

    def __enter__(self) -> Self:
        """Start the browser and open the page.

        Raises:
            BrowserError: one of them does not start.
        """
        try:
            self._tab = self._runner.run(self._open.enter_async_context(opened_tab()))
            self._runner.run(self._tab.open(self._address, WIDE))
            self.wait("document.title !== 'Served model'")
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End the browser."""
        self._close()

    def _close(self) -> None:
        try:
            self._runner.run(self._open.aclose())
        finally:
            self._runner.close()

    @property
    def errors(self) -> list[dict[str, Any]]:
        """Errors of scripts and blocked resources so far."""
        return self._tab.errors

    def value(self, script: str) -> Any:
        """Return the value of a JavaScript expression."""
        return self._runner.run(self._tab.value(script))

    def wait(self, script: str) -> None:
        """Wait until a JavaScript expression is true.

        Raises:
            BrowserError: it does not become true.
        """
        self._runner.run(self._tab.until(script))

    def press(self, key: str) -> None:
        """Press a key: one character, or Enter or Escape."""
        self._runner.run(self._tab.press(key))

    def ask(self, question: str) -> str:
        """Type a question and press Enter; return the id of the answer once it is complete."""
        num = self.value("now.answers.length")
        self.value(f"(() => {{ const one = by('prompt'); one.focus(); one.value = {json.dumps(question)}; }})()")
        self.press("Enter")
        self.wait(f"now.answers.length > {num} && now.answers.at(-1).note.textContent !== ''")
        return str(self.value("now.answers.at(-1).id"))

    def rate(self, name: str, is_good: bool) -> None:
        """Open a conversation by its id, and rate its answer."""
        button = f"document.querySelector(\"[id='{name}'] button[value={'good' if is_good else 'bad'}]\")"
        self.value(f"location.hash = '{name}'")
        self.wait(f"{button}?.ariaPressed")
        self.value(f"{button}.click()")
        self.wait(f"{button}.ariaPressed === 'true'")

    def pause(self, is_paused: bool) -> None:
        """Pause training, or continue it."""
        now, then = ("Pause", "Continue") if is_paused else ("Continue", "Pause")
        self.value(f"by('pause').textContent.startsWith('{now}') && by('pause').click()")
        self.wait(f"by('pause').textContent.startsWith('{then}')")

    def roll_back(self, reason: str) -> str:
        """Roll the active version back; return what the page says."""
        self.wait("!!by('reason')")
        self.value(f"by('reason').value = {json.dumps(reason)}")
        self.value("document.querySelector('.rollback button').click()")
        self.wait("by('said').textContent !== ''")
        return str(self.value("by('said').textContent"))

    def shoot(self, directory: Path) -> list[Path]:
        """Write pictures of the page, as on a screen and as on a phone; return their paths."""
        directory.mkdir(parents=True, exist_ok=True)
        paths = [directory / f"page-{width}.png" for width in (WIDE, PHONE)]
        for width, path in zip((WIDE, PHONE), paths, strict=True):
            self._runner.run(self._tab.resize(width))
            self._runner.run(self._tab.shoot(path))
        return paths
