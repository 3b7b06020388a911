"""The parent's side of one call: send the request, read the output, and end the call in time.

No input is trusted: sizes are bounded while reading, the report is parsed as JSON and checked field by field, and the
zygote, not the worker's pipes, reports the worker's end. A call that was killed for its time or output keeps that
result even if the zygote is lost afterwards.
"""

from __future__ import annotations

import json
import os
import select
import signal
import struct
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rllib_srl.envs.sandbox.calls import SAID_INSIDE, Limits, LostWorkerError, Returned, SandboxError, SandboxResult
from rllib_srl.envs.sandbox.pool import Pool, Worker

START_S = 60.0  # until the worker is locked up and runs the code; then the call's own limit counts
END_S = 20.0  # from the kill until the zygote reports the worker's end
_CHUNK = 1 << 16
_ERROR_CHARS = 2000


@dataclass
class Exchange:
    """One call. Invariant: `stop` is set at most once, to the reason why the call was ended from outside."""

    pool: Pool
    worker: Worker
    limits: Limits
    unsent: memoryview
    texts: dict[int, bytearray] = field(default_factory=dict)  # by descriptor: stdout, stderr, channel
    status: bytes = b""
    is_lost: bool = False  # the zygote is gone or stuck, so that no status comes
    stop: str = ""
    num_calls: int = 0
    asked: float = 0.0  # moments of the monotonic clock, 0 until they have come
    began: float = 0.0
    killed: float = 0.0
    ended: float = 0.0

    def run(self) -> SandboxResult:
        """Run the call to its end.

        Raises:
            LostWorkerError: the worker did not start, or its zygote is gone and the code's result is unknown.
        """
        self.asked = time.monotonic()
        channel = self.worker.channel.fileno()
        self.texts = {self.worker.out: bytearray(), self.worker.err: bytearray(), channel: bytearray()}
        poll = select.poll()
        poll.register(channel, select.POLLIN | select.POLLOUT)
        for fd in (self.worker.out, self.worker.err, self.worker.status):
            poll.register(fd, select.POLLIN)
        while not self.status and not self.is_lost:
            left = self._deadline() - time.monotonic()
            if left <= 0 and self.killed:  # the zygote does not react: end it and all its workers
                self.is_lost, self.ended = True, self.killed
                with suppress(SandboxError):  # a failed restart is raised in the next call
                    self.pool.mend(self.worker.generation, is_stuck=True)
            elif left <= 0:
                self._kill("timeout")
            else:
                for fd, events in poll.poll(left * 1000):
                    self._serve(poll, fd, events)
        leaking = [fd for fd in self.texts if not self._drained(fd)]
        if not self.began:
            failed = json.loads(self.status or b"{}").get("failed", "")
            reason = failed or self.texts[self.worker.err].decode(errors="replace").strip()
            raise LostWorkerError(f"a worker did not start: {reason or 'it took too long'}")
        return self._result(bool(leaking) and not self.is_lost)

    def _deadline(self) -> float:
        """Return the end of the current wait: for the start, for the code, or for its end after the kill."""
        if self.killed:
            return self.killed + END_S
        return self.began + self.limits.timeout_s if self.began else self.asked + START_S

    def _kill(self, stop: str) -> None:
        if not self.killed:
            self.stop, self.killed = self.stop or stop, time.monotonic()
            with suppress(SandboxError):  # a zygote that takes no orders is gone, which its status tells, or stuck
                self.pool.kill(self.worker)

    def _serve(self, poll: select.poll, fd: int, events: int) -> None:
        if fd == self.worker.status:
            self.status = os.read(fd, 4096)
            self.is_lost, self.ended = not self.status, self.killed or time.monotonic()
            if self.is_lost and not self.killed:
                if not self.began:
                    self._read(self.worker.channel.fileno())  # it may have begun since the poll
                raise LostWorkerError("the sandbox's zygote ended during a call", has_begun=bool(self.began))
            return
        if events & select.POLLOUT:
            self._send(poll)
        if events & (select.POLLIN | select.POLLHUP | select.POLLERR) and not self._read(fd):
            poll.unregister(fd)

    def _send(self, poll: select.poll) -> None:
        try:
            self.unsent = self.unsent[self.worker.channel.send(self.unsent[:_CHUNK]) :]
        except BlockingIOError:
            return
        except OSError:
            self.unsent = self.unsent[:0]  # it ended before it had read everything; its status has the reason
        if not self.unsent:
            poll.modify(self.worker.channel.fileno(), select.POLLIN)

    def _read(self, fd: int) -> bool:
        """Take what there is; return False at the end."""
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        if fd == self.worker.channel.fileno() and not self.began:
            self.began, data = time.monotonic(), data[1:]
        room = self._room(fd)
        self.texts[fd] += data[:room]
        if len(data) > room:
            self._kill("output")
        return True

    def _room(self, fd: int) -> int:
        if fd == self.worker.channel.fileno():
            return self.limits.value_bytes - len(self.texts[fd])
        return self.limits.output_bytes - len(self.texts[self.worker.out]) - len(self.texts[self.worker.err])

    def _drained(self, fd: int) -> bool:
        """Read the rest of a pipe; return False if another process still holds its other end."""
        while not self.stop:
            try:
                data = os.read(fd, _CHUNK)
            except BlockingIOError:
                return False
            except OSError:
                return True
            if not data:
                return True
            room = self._room(fd)
            self.texts[fd] += data[:room]
            self.stop = "output" if len(data) > room else ""
        return self._is_closed(fd)

    def _is_closed(self, fd: int) -> bool:
        poll = select.poll()
        poll.register(fd, 0)
        return bool(poll.poll(0))

    def _result(self, is_leaking: bool) -> SandboxResult:
        report = {} if self.stop else report_in(self.texts[self.worker.channel.fileno()], self.num_calls)
        exit_code = int(json.loads(self.status)["exit"]) if self.status else -signal.SIGKILL
        return SandboxResult(
            stop=self.stop or report.get("stop", "crashed"),
            stdout=self.texts[self.worker.out].decode(errors="replace"),
            stderr=self.texts[self.worker.err].decode(errors="replace"),
            value=report.get("value"),
            returned=report.get("returned", ()),
            error=report.get("error", ""),
            exit_code=exit_code,
            duration_s=self.ended - self.began,
            start_s=self.began - self.asked,
            is_leaking=is_leaking,
        )


def packed(request: dict[str, Any]) -> memoryview:
    """Return a request in the worker's format: its length in 8 bytes, then JSON."""
    data = json.dumps(request).encode()
    return memoryview(struct.pack("=Q", len(data)) + data)


def report_in(data: bytes | bytearray, num_calls: int) -> dict[str, Any]:
    """Return the valid fields of a worker's report; an unreadable report has none."""
    try:
        report = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(report, dict) or report.get("stop") not in SAID_INSIDE:
        return {}
    value, returned = report.get("value"), report.get("returned")
    rows = returned if isinstance(returned, list) and all(isinstance(row, dict) for row in returned) else []
    if report["stop"] == "ok" and len(rows) != num_calls:
        return {}
    return {
        "stop": report["stop"],
        "value": _writable(value) if isinstance(value, str) else None,
        "error": _error_in(report, ""),
        "returned": tuple(Returned(row.get("value"), _error_in(row, "no error")) for row in rows),
    }


def _error_in(fields: dict[str, Any], unreadable: str) -> str:
    error = fields.get("error", "")
    return _writable(error)[:_ERROR_CHARS] if isinstance(error, str) else unreadable


def _writable(text: str) -> str:
    """Return text that UTF-8 can encode: JSON may contain half of a surrogate pair."""
    return text.encode("utf-8", "backslashreplace").decode()
