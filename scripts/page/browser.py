"""A tab of Chromium without a window, driven by its own protocol (Chrome DevTools Protocol)."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HEIGHT = 844  # pixels of the window
PATIENCE_S = 60
_FAULTS = ("Runtime.exceptionThrown", "Log.entryAdded", "Page.javascriptDialogOpening")


class BrowserError(ValueError):
    """There is no browser, it does not answer, or the page does not do what is waited for."""


class NavigatedError(BrowserError):
    """The tab went to another page while a script was asked for its value."""


class Tab:
    """A tab. Invariant: `errors` has every error of a script and every blocked resource so far."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Drive the tab behind an open DevTools connection."""
        self._socket = socket
        self._num = 0
        self.errors: list[dict[str, Any]] = []

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the result of a method of the protocol.

        Raises:
            BrowserError: the browser refuses it, or is gone.
        """
        self._num += 1
        await self._socket.send_json({"id": self._num, "method": method, "params": parameters})
        while True:
            received = await self._socket.receive(timeout=PATIENCE_S)
            if received.type != aiohttp.WSMsgType.TEXT:
                raise BrowserError(f"the browser closed its connection during {method}")
            message = json.loads(received.data)
            if message.get("method") in _FAULTS:
                self.errors.append(message["params"])
            if message.get("id") == self._num:
                if "error" in message:
                    why = str(message["error"].get("message"))
                    kind = NavigatedError if "navigated" in why else BrowserError
                    raise kind(f"the browser refuses {method}: {why}")
                result: dict[str, Any] = message["result"]
                return result

    async def value(self, script: str) -> Any:
        """Return the value of a JavaScript expression; None if it has none."""
        reply = await self.call("Runtime.evaluate", expression=script, returnByValue=True)
        return reply["result"].get("value")

    async def until(self, script: str) -> None:
        """Wait until a JavaScript expression is true.

        Raises:
            BrowserError: it does not become true within `PATIENCE_S`; the message has the text of the page.
        """
        for _ in range(PATIENCE_S * 10):
            try:
                if await self.value(script):
                    return
            except NavigatedError:
                pass  # the next page is asked instead
            await asyncio.sleep(0.1)
        text = await self.value("document.body.innerText")
        raise BrowserError(f"{script} did not become true within {PATIENCE_S} s; the page says: {text}")

    async def resize(self, width: int) -> None:
        """Set the width of the window, pixels; below 600 it is a phone's."""
        size = {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.call("Emulation.setDeviceMetricsOverride", **size)

    async def open(self, address: str, width: int) -> None:
        """Load a page of srl in a window of that width."""
        await self.resize(width)
        await self.call("Page.navigate", url=address)
        await self.until("document.readyState === 'complete' && !!document.getElementById('state')")

    async def press(self, key: str) -> None:
        """Press a key: one character, or a name such as Enter."""
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    async def shoot(self, path: Path) -> None:
        """Write a picture of the whole page, PNG."""
        reply = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(reply["data"]))


@asynccontextmanager
async def opened_tab() -> AsyncIterator[Tab]:
    """Start Chromium with a profile of its own, yield its tab, and end it.

    Raises:
        BrowserError: Chromium is not installed or does not start.
    """
    if CHROMIUM is None:
        raise BrowserError("no browser found; install Chromium (Debian: apt-get install chromium)")
    words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "about:blank"]
    with tempfile.TemporaryDirectory(prefix="srl-browser-", ignore_cleanup_errors=True) as profile:
        command = [CHROMIUM, f"--user-data-dir={profile}", *words]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port = await _port_of(process, Path(profile) / "DevToolsActivePort")
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE_S)) as session:
                async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                    page = next(target for target in await answer.json() if target["type"] == "page")
                async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    tab = Tab(socket)
                    for part in ("Log", "Runtime", "Page"):
                        await tab.call(f"{part}.enable")
                    yield tab
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


async def _port_of(process: subprocess.Popen[bytes], file: Path) -> int:
    for _ in range(PATIENCE_S * 10):
        if file.is_file() and file.read_text().count("\n"):
            return int(file.read_text().splitlines()[0])
        if process.poll() is not None:
            raise BrowserError(f"{CHROMIUM} has ended with status {process.returncode}")
        await asyncio.sleep(0.1)
    raise BrowserError(f"{CHROMIUM} did not open its DevTools port within {PATIENCE_S} s")
