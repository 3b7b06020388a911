"""Tools of an MCP server: listed once, checked against their schemas, called with limits of time and size.

    McpTools({"command": ["uvx", "mcp-server-time"]}, 5.0).tools()      a process of this runner
    McpTools({"url": "http://127.0.0.1:8000/mcp"}, 5.0).tools()         a server that runs already

What a server answers to a call, an error included, is the tool's result. A server that hangs, dies, floods or breaks
the protocol loses the episode, which is counted and has no reward, and is started again for the next one.

Source: Model Context Protocol, https://modelcontextprotocol.io, through the package mcp.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from rllib_srl.envs.allowed import error_of
from rllib_srl.envs.optional import imported
from rllib_srl.envs.settings import Settings, Within, read_settings
from rllib_srl.envs.tools.calls import CallError, ToolServerError
from rllib_srl.envs.tools.tool import Tool

_RELAY = Path(__file__).with_name("mcp_relay.py")
_MOST_TOOLS = 1000  # after which no further page of them is asked for
_END_S = 10.0  # for a server to end


@dataclass(frozen=True)
class McpSettings(Settings):
    """Where the server is. Invariant: as in `Settings`."""

    command: list[str] = field(default_factory=list)  # program and arguments of a server over stdin and stdout
    url: str = ""  # in place of it, of a server over HTTP
    env: dict[str, str] = field(default_factory=dict)  # further environment variables of the program
    per_episode: bool = False  # a server an episode, for tools with a state; else one a runner
    start_timeout_s: Annotated[float, Within(0, 600, is_open=True)] = 8.0  # until the tools are listed
    max_bytes: Annotated[int, Within(1024)] = 1 << 20  # of a message of a program

    def errors(self) -> list[str]:
        """Return one error message for each setting that does not fit the others."""
        errors = []
        if bool(self.command) == bool(self.url):
            errors.append(f"command = {self.command}, url = {self.url!r}; expected one of them")
        if not all(isinstance(text, str) for text in [*self.command, *self.env.values()]):
            errors.append("command, env; expected texts in them")
        if self.url and not self.url.startswith(("http://", "https://")):
            errors.append(f"url = {self.url!r}; expected http://host:port/path")
        elif self.url and (error := error_of("url", self.url)):
            errors.append(error)
        return errors


class McpTools:
    """The tools of a server. Invariant: all of them have schemas that can be checked."""

    def __init__(self, settings: Mapping[str, Any], call_timeout_s: float):
        """Start the server and list its tools.

        Raises:
            ValueError: a setting, a server that does not start, or a tool whose schema cannot be used.
        """
        imported("mcp", "mcp", "mcp")
        self._settings: McpSettings = read_settings(McpSettings, settings, "mcp")
        self._call_timeout_s = call_timeout_s
        self._session = _Session(self._settings)
        if not self._settings.per_episode:
            with _lock:
                key = json.dumps(vars(self._settings), sort_keys=True)
                self._session = _shared.setdefault(key, self._session)
        try:
            self.tools = [self._tool(tool) for tool in self._session.listed()]
        except ToolServerError as error:
            raise ValueError(str(error)) from error

    def begin_episode(self) -> None:
        """Start the server if it has ended, and with `per_episode` anew."""
        if self._settings.per_episode:
            self._session.close()
        self._session.start()

    def close(self) -> None:
        """End a server of this environment's own; a shared one ends with the process."""
        if self._settings.per_episode:
            self._session.close()

    def _tool(self, listed: Any) -> Tool:
        import jsonschema

        schema = listed.input_schema
        try:
            jsonschema.Draft202012Validator.check_schema(schema)
            if schema.get("type") != "object" or not isinstance(schema.get("properties", {}), dict):
                raise jsonschema.SchemaError("it does not describe an object")
        except jsonschema.SchemaError as error:
            said = " ".join(str(error.message).split())[:200]
            raise ToolServerError(f"mcp: the schema of the tool {listed.name!r} cannot be used: {said}") from error
        about = {"name": listed.name, "description": listed.description or "", "parameters": schema}
        checker = jsonschema.Draft202012Validator(schema)
        return Tool.declared(about, partial(self._call, listed.name, checker), is_bounded=True)

    def _call(self, tool_name: str, checker: Any, /, **arguments: Any) -> str:
        for error in checker.iter_errors(arguments):
            raise CallError(f"{tool_name}: {'.'.join(map(str, error.path))}: {error.message[:200]}")
        return self._session.call(tool_name, arguments, self._call_timeout_s)


class _Session:
    """A connection, held by a thread with its own loop. Invariant: a call ends within its time, or ends the session."""

    def __init__(self, settings: McpSettings):
        self._settings, self._lock = settings, threading.Lock()
        self._thread: threading.Thread | None = None
        self._error = ""
        atexit.register(self.close)

    def start(self) -> None:
        """Connect, unless that is done."""
        with self._lock:
            if self._thread is not None and self._thread.is_alive() and not self._error:
                return
            self._ready, self._loop, self._error = threading.Event(), asyncio.new_event_loop(), ""
            self._task = self._loop.create_task(self._serve())
            self._thread = threading.Thread(target=self._run, daemon=True, name="mcp")
            self._thread.start()
            if not self._ready.wait(timeout_s := self._settings.start_timeout_s):
                self._error = f"it did not start within start_timeout_s = {timeout_s:g}"
            if self._error:
                raise self._lost()

    def listed(self) -> list[Any]:
        """Return the descriptions of the tools."""
        self.start()
        page = self._within(self._client.list_tools(), self._settings.start_timeout_s)
        tools: list[Any] = page.tools
        while page.next_cursor is not None and len(tools) < _MOST_TOOLS:
            page = self._within(self._client.list_tools(cursor=page.next_cursor), self._settings.start_timeout_s)
            tools += page.tools
        return tools

    def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> str:
        """Return the result of a call as text.

        Raises:
            CallError: the server says that the call failed.
            ToolServerError: the server failed.
        """
        result = self._within(self._client.call_tool(name, arguments), timeout_s)
        parts = [getattr(block, "text", None) or f"[{block.type}]" for block in result.content]
        written = "\n".join(parts) if parts else json.dumps(result.structured_content)
        if result.is_error:
            raise CallError(written)
        return written

    def _within(self, coroutine: Any, timeout_s: float) -> Any:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        try:
            if self._error:
                coroutine.close()
                raise ConnectionError(self._error)
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)
        except TimeoutError:
            self._error = f"it did not answer within {timeout_s:g} s"
        except Exception as error:  # whatever the package raises at what a server sends
            if isinstance(error, MCPError) and error.code not in (CONNECTION_CLOSED, REQUEST_TIMEOUT):
                raise CallError(error.message) from error
            self._error = self._error or f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise self._lost()

    def _lost(self) -> ToolServerError:
        """End the session; return its error, with what the relay said at the server's end."""
        is_late, said = self._error.startswith("it did not"), ""
        self.close()
        if self._settings.command and not is_late:
            self._log.seek(0)
            said = " ".join(self._log.read()[-500:].split())
        place = self._settings.url or " ".join(self._settings.command)
        return ToolServerError(f"MCP server {place[:200]!r} failed: {said or self._error}")

    def close(self) -> None:
        """End the server."""
        if self._thread is not None:
            self._error = self._error or "it was closed"
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._task.cancel)
            self._thread.join(_END_S)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._task)
        except BaseException as error:  # groups of tasks raise groups of any errors
            self._error = self._error or f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        finally:
            self._ready.set()
            self._loop.close()

    async def _serve(self) -> None:
        from mcp import Client, StdioServerParameters, stdio_client

        server: Any = self._settings.url
        if self._settings.command:
            self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
            arguments = ["-S", str(_RELAY), str(self._settings.max_bytes), *self._settings.command]
            program = StdioServerParameters(command=sys.executable, args=arguments, env=self._settings.env or None)
            server = stdio_client(program, errlog=self._log)
        async with Client(server) as self._client:
            self._ready.set()
            await asyncio.Event().wait()


_lock = threading.Lock()
_shared: dict[str, _Session] = {}  # settings -> the session of this process
