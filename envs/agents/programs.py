"""Run an agent: a function in a thread, or a command in its own process.

    FunctionProgram(run, url, token, task, on_end).start()     run(client, task), sync or async
    CommandProgram(["python", "agent.py"], ...).start()        OPENAI_BASE_URL, OPENAI_API_KEY, SRL_TASK_FILE are set

Both report their end once: a reward, or why there is none. `stop` ends them early; a stopped function ends at its next
call of the policy or instruction of Python, a stopped command with all processes that it has started.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import json
import os
import signal
import ssl
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import IO, Any, Protocol

from rllib_srl.envs.agents.endpoint import CALL_TIMEOUT_S, Ended

MAX_KEPT_BYTES = 64 << 10  # of what a command writes, from the end
# Linux takes 128 KiB for a variable: a task that has more is in its file alone.
MAX_TASK_BYTES = 100_000
_KILL_S = 5.0
_SHOWN_CHARS = 300  # of an error message


def bypass_proxy() -> None:
    """Let the clients of this process and of its children reach this machine directly, whatever proxy is set.

    Libraries read either spelling of the variable first, so both get the hosts of both.
    """
    values = [os.environ.get(name, "") for name in ("NO_PROXY", "no_proxy")]
    hosts = dict.fromkeys(host.strip() for text in values for host in text.split(",") if host.strip())
    value = "*" if "*" in hosts else ",".join([*hosts, *(here for here in _HERE if here not in hosts)])
    for name, old in zip(("NO_PROXY", "no_proxy"), values, strict=True):
        if old != value:
            os.environ[name] = value


_HERE = ("127.0.0.1", "localhost")


class Program(Protocol):
    """An agent at work on one task."""

    def start(self) -> None:
        """Begin; the end is reported through `on_end`."""

    def stop(self) -> None:
        """End it early; may be called from any thread, and more than once."""


class _StoppedError(BaseException):
    """Raised in the thread of a stopped function; not an Exception, so that `except Exception` does not catch it."""


class FunctionProgram:
    """`function(client, task)` in a thread; the client is an `openai.OpenAI`, or `AsyncOpenAI` of an async function."""

    def __init__(
        self,
        function: Callable[..., Any],
        url: str,
        token: str,
        task: Mapping[str, Any],
        on_end: Callable[[Ended], None],
    ) -> None:
        self._function, self._url, self._token, self._task, self._on_end = function, url, token, dict(task), on_end
        self._thread = threading.Thread(target=self._run, daemon=True, name="agent")
        self._cancel: Callable[[], object] | None = None
        self._is_stopped = self._has_ended = False

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Cancel an async function; raise an exception in the thread of another."""
        self._is_stopped = True
        if self._cancel is not None:
            with suppress(RuntimeError):  # its loop has just ended
                self._cancel()
        elif not self._has_ended and self._thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._thread.ident), ctypes.py_object(_StoppedError)
            )

    def _run(self) -> None:
        try:
            ended = self._outcome()
            self._has_ended = True
            self._on_end(ended)
        except _StoppedError:
            return

    def _outcome(self) -> Ended:
        try:
            if inspect.iscoroutinefunction(self._function):
                return Ended(asyncio.run(self._awaited()))
            with self._client() as client:
                return Ended(self._function(client, self._task))
        except _StoppedError:
            raise
        except asyncio.CancelledError:
            return Ended(error="it was cancelled")
        except BaseException as error:  # an agent may raise anything, SystemExit too
            return Ended(error=one_line(error))

    async def _awaited(self) -> Any:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        self._cancel = partial(loop.call_soon_threadsafe, task.cancel)
        if self._is_stopped:
            raise asyncio.CancelledError
        async with async_client(self._url, self._token) as client:
            return await self._function(client, self._task)

    def _client(self) -> Any:
        import openai

        transport = openai.DefaultHttpxClient(verify=_ssl_context(), trust_env=False)
        return openai.OpenAI(http_client=transport, **_access(self._url, self._token))


def async_client(url: str, token: str) -> Any:
    """Return an `openai.AsyncOpenAI` for the endpoint, to be closed by the caller."""
    import openai

    transport = openai.DefaultAsyncHttpxClient(verify=_ssl_context(), trust_env=False)
    return openai.AsyncOpenAI(http_client=transport, **_access(url, token))


def _access(url: str, token: str) -> dict[str, Any]:
    return {"base_url": url, "api_key": token, "timeout": CALL_TIMEOUT_S, "max_retries": 0}


@cache
def _ssl_context() -> ssl.SSLContext:
    """Return a context made once: making one for each client takes longer than an episode, and none is used."""
    return ssl.create_default_context()


_ROOT = str(Path(__file__).resolve().parents[2])  # which a run that is not installed adds to PYTHONPATH


class CommandProgram:
    """A command; its reward is the last line that it prints: a number, or {"reward": number}.

    Its task is JSON in the file `SRL_TASK_FILE`, and in `SRL_TASK` if it has at most `MAX_TASK_BYTES`. The file is
    removed as the command ends.
    """

    def __init__(
        self,
        command: Sequence[str],
        url: str,
        token: str,
        task: Mapping[str, Any],
        on_end: Callable[[Ended], None],
    ) -> None:
        self._command, self._on_end = list(command), on_end
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        self._written = _as_json(task)
        self._task_file: Path | None = None
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("SRL_TASK")}
        self._environment = {
            **inherited,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path != _ROOT),  # it may be another Python
            **dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE"), url),
            "OPENAI_API_KEY": token,
        }
        if len(self._written) <= MAX_TASK_BYTES:
            self._environment["SRL_TASK"] = self._written.decode()
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._is_stopped = False

    def start(self) -> None:
        """Start the process.

        Raises:
            OSError: it cannot be started.
        """
        with self._lock:
            if self._is_stopped:
                return
            handle, name = tempfile.mkstemp(prefix="srl-task-", suffix=".json")  # for this user alone
            self._task_file = Path(name)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(self._written)
                self._process = subprocess.Popen(
                    self._command,
                    env={**self._environment, "SRL_TASK_FILE": name},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            except BaseException:
                self._task_file.unlink(missing_ok=True)
                raise
        threading.Thread(target=self._watch, args=(self._process,), daemon=True, name="agent-command").start()

    def stop(self) -> None:
        """Kill the process and its descendants in the same session."""
        with self._lock:
            self._is_stopped = True
            process = self._process
        if process is not None:
            _kill(process)

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None and process.stderr is not None
        tails: dict[str, bytes] = {}
        readers = [
            threading.Thread(target=_keep_tail, args=(name, pipe, tails), daemon=True, name=f"agent-{name}")
            for name, pipe in (("stdout", process.stdout), ("stderr", process.stderr))
        ]
        for reader in readers:
            reader.start()
        code = process.wait()
        _kill(process)  # what it left running would keep the pipes open
        for reader in readers:
            reader.join(_KILL_S)
        if self._task_file is not None:
            self._task_file.unlink(missing_ok=True)
        ended = _outcome_of(code, tails.get("stdout", b""), tails.get("stderr", b""))
        if ended.error and "SRL_TASK" not in self._environment:
            where = f"its task has {len(self._written)} bytes and is in the file SRL_TASK_FILE alone"
            ended = Ended(error=f"{ended.error} ({where})")
        self._on_end(ended)


def _as_json(task: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(task, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can only escape
        return json.dumps(task).encode()


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _keep_tail(name: str, pipe: IO[bytes], tails: dict[str, bytes]) -> None:
    """Read a pipe to its end, and keep what was last."""
    kept = b""
    with pipe:
        while part := os.read(pipe.fileno(), 1 << 16):
            kept = (kept + part)[-MAX_KEPT_BYTES:]
            tails[name] = kept


def _outcome_of(code: int, stdout: bytes, stderr: bytes) -> Ended:
    if code:
        said = stderr.decode("utf-8", "replace").split("\n")
        last = next((line.strip() for line in reversed(said) if line.strip()), "nothing on stderr")
        return Ended(error=f"the command ended with exit status {code}: {last[-_SHOWN_CHARS:]}")
    lines = [line.strip() for line in stdout.decode("utf-8", "replace").split("\n")]
    last = next((line for line in reversed(lines) if line), "")
    try:
        value = json.loads(last)
    except (ValueError, RecursionError):
        value = None
    reward = value.get("reward") if isinstance(value, dict) else value
    if reward is None:
        return Ended(error=f"the command's last line is {last[:80]!r}; expected its reward, a number from 0 to 1")
    return Ended(reward)


def one_line(error: BaseException) -> str:
    """Return type and message of an exception on one line, shortened, even if its `__str__` raises."""
    try:
        message = " ".join(str(error).split())
    except Exception as nested:
        message = f"(its message cannot be printed: {type(nested).__name__})"
    return f"{type(error).__name__}: {message}"[:_SHOWN_CHARS]
