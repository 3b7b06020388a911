"""The worker process of one call: drops all privileges, runs one piece of code, reports the result, and exits.

    fork -> own mounts -> wait for the request -> scratch, files, limits, uid, landlock, seccomp -> "S" -> run -> report

Output before "S" is ours; everything after it may come from the code, the report included.
"""

from __future__ import annotations

import ast
import io
import json
import linecache
import os
import random
import resource
import signal
import struct
import sys
import traceback
import types
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TextIO

from rllib_srl.envs.sandbox import kernel, rooms, seccomp

NOBODY = 65534
STARTED = b"S"
NAME = "<code>"
_CHANNEL = 3
_LINE_CHARS = 400  # of a traceback
_MOST_THREADS, _MOST_FILES, _MOST_SIGNALS, _STACK_BYTES = 64, 128, 64, 8 << 20
_FIRST_UID, _NUM_UIDS = 1_000_000_000, 1_000_000_000  # beyond the ids of real users


@dataclass(frozen=True)
class Setting:
    """The isolation mechanisms that the zygote found on this machine."""

    mechanisms: frozenset[str]  # of user, pid, mount, network, landlock, seccomp, uid
    landlock: int  # version of its interface
    readable: list[str]


def main(channel: int, out: int, err: int, folder: str, setting: Setting) -> None:
    """Serve one request and exit; the descriptors belong to this process alone."""
    try:
        _take_descriptors(channel, out, err)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        if "mount" in setting.mechanisms:
            kernel.unshare(kernel.NEW_NS | kernel.NEW_IPC)
        request = _received()
        if request is not None:
            _lock_up(request, folder, setting)
            os.write(_CHANNEL, STARTED)
            _run_and_report(request)
    except BaseException as error:  # on any error: this process must not continue as a second zygote
        os.write(2, f"sandbox: {type(error).__name__}: {error}\n".encode(errors="replace"))
    finally:
        os._exit(70)


def become(uid: int) -> None:
    """Change to `uid` permanently, without any of our groups."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def _take_descriptors(channel: int, out: int, err: int) -> None:
    """Make channel, out and err 3, 1 and 2, and close all else."""
    null = os.open(os.devnull, os.O_RDONLY)
    high = [os.dup(fd) for fd in (null, out, err, channel)]
    while min(high) <= _CHANNEL:
        high = [os.dup(fd) for fd in high]
    for fd, place in zip(high, (0, 1, 2, _CHANNEL)):
        os.dup2(fd, place)
    os.closerange(_CHANNEL + 1, 65536)


def _received() -> dict[str, Any] | None:
    header = _read_exactly(8)
    return None if header is None else json.loads(_read_exactly(struct.unpack("=Q", header)[0]) or b"null")


def _read_exactly(size: int) -> bytes | None:
    chunks = bytearray()
    while len(chunks) < size:
        chunk = os.read(_CHANNEL, min(size - len(chunks), 1 << 20))
        if not chunk:
            return None  # the parent closed it: this worker is not needed
        chunks += chunk
    return bytes(chunks)


def _lock_up(request: dict[str, Any], folder: str, setting: Setting) -> None:
    mechanisms, limits = setting.mechanisms, request["limits"]
    becomes_another = os.geteuid() == 0 and "uid" in mechanisms
    uid = NOBODY if "user" in mechanisms else _free_uid() if becomes_another else os.geteuid()
    scratch = folder or rooms.SCRATCH
    if "mount" in mechanisms:
        rooms.mount_scratch(limits["scratch_bytes"], uid)
    else:
        os.mkdir(scratch, 0o700)
        if becomes_another:
            os.chown(scratch, uid, uid)
    os.chdir(scratch)
    kernel.drop_bounding_set()
    if becomes_another:
        uid = _become_one_of(uid, scratch)
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user cleared it
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    _write_files(request["files"])
    _give_input(request["stdin"])
    _limit(limits, is_own_uid=uid >= _FIRST_UID, can_write="mount" in mechanisms)
    if "landlock" in mechanisms:
        has_mounts = "mount" in mechanisms
        readable = ["/"] if has_mounts else [*setting.readable, scratch]
        kernel.landlock(setting.landlock, readable, [scratch] if has_mounts else [])
    if "seccomp" in mechanisms:
        seccomp.restrict(os.getpid())


def _free_uid() -> int:
    return _FIRST_UID + int.from_bytes(os.urandom(8), "big") % _NUM_UIDS


def _become_one_of(uid: int, scratch: str) -> int:
    """Become `uid`, or `NOBODY` if this container does not map that number."""
    try:
        become(uid)
    except OSError:
        os.chown(scratch, NOBODY, NOBODY)
        become(NOBODY)
        return NOBODY
    return uid


def _write_files(files: dict[str, str]) -> None:
    for name, content in files.items():
        if os.path.dirname(name):
            os.makedirs(os.path.dirname(name), exist_ok=True)
        with open(name, "w", encoding="utf-8", errors="surrogatepass", newline="") as file:
            file.write(content)


def _give_input(stdin: str) -> None:
    fd = os.memfd_create("stdin")
    os.write(fd, stdin.encode(errors="surrogatepass"))
    os.lseek(fd, 0, os.SEEK_SET)
    os.dup2(fd, 0)
    os.close(fd)


def _limit(limits: dict[str, Any], is_own_uid: bool, can_write: bool) -> None:
    cpu_s = 4 * int(limits["timeout_s"] + 2)  # of all threads; the wall clock outside is the real limit
    bounds = [
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, limits["scratch_bytes"] if can_write else 0),
        (resource.RLIMIT_NOFILE, _MOST_FILES),
        (resource.RLIMIT_STACK, _STACK_BYTES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, _MOST_SIGNALS),  # the kernel counts those of a user
    ]
    # The kernel limits processes per user. This user has no others, or else those that run the sandbox: for these,
    # the zygote's forks among them, a quarter of the user's share is left.
    num_processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if is_own_uid:
        bounds.append((resource.RLIMIT_NPROC, _MOST_THREADS))
    elif num_processes != resource.RLIM_INFINITY:
        bounds.append((resource.RLIMIT_NPROC, num_processes * 3 // 4))
    for which, bound in bounds:
        hard = resource.getrlimit(which)[1]
        bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(which, (bound, bound))


def _run_and_report(request: dict[str, Any]) -> None:
    sys.stdin, out, err = _stream(0, "r"), _stream(1, "w"), _stream(2, "w")
    sys.stdout, sys.stderr = out, err
    random.seed(0)  # same output of the same code in every call, as far as possible
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(0)
    module = types.ModuleType("__main__")
    sys.modules["__main__"], sys.argv = module, [NAME]
    try:
        report = {"stop": "ok", **_ran(request, module.__dict__)}
    except MemoryError:
        report = {"stop": "memory", "error": "MemoryError"}
    except SystemExit as error:
        report = _exited(error)
    except BaseException as error:
        report = {"stop": "error", "error": _traced(error, err)}
    for stream in (out, err):
        _quietly(stream.flush)
    _send(json.dumps(report).encode())
    os._exit(0 if report["stop"] == "ok" else 1)


def _stream(fd: int, mode: str) -> TextIO:
    stream = os.fdopen(fd, mode, encoding="utf-8", errors="backslashreplace", closefd=False)
    assert isinstance(stream, io.TextIOWrapper)
    return stream


def _quietly(write: Callable[..., Any], *texts: str) -> None:
    with suppress(OSError, ValueError):  # the code closed it
        write(*texts)


def _send(data: bytes) -> None:
    while data:
        data = data[os.write(_CHANNEL, data) :]


def _exited(error: SystemExit) -> dict[str, Any]:
    if error.code in (None, 0):
        return {"stop": "ok"}
    return {"stop": "error", "error": f"SystemExit: {error.code}"}


def _traced(error: BaseException, err: TextIO) -> str:
    """Write the traceback as Python would, without our own frames, and return its last line."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != NAME:
        trace = trace.tb_next
    lines = [line[:_LINE_CHARS] for text in traceback.format_exception(type(error), error, trace)
             for line in text.splitlines()]  # fmt: skip
    _quietly(err.write, "\n".join(lines) + "\n")
    return lines[-1].strip() if lines else type(error).__name__


def _ran(request: dict[str, Any], names: dict[str, Any]) -> dict[str, Any]:
    """Run the code, then the calls that were asked for."""
    code = request["code"]
    linecache.cache[NAME] = (len(code), None, code.splitlines(keepends=True), NAME)
    tree = ast.parse(code, NAME)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    # The only place that runs the policy's code; all available isolation is in effect here.
    exec(compile(tree, NAME, "exec"), names)  # noqa: S102
    value = None
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), NAME, "eval"), names)  # noqa: S307
    _join_threads()
    return {
        "value": None if value is None else repr(value),
        "returned": [_returned(call, names) for call in request["calls"]],
    }


def _join_threads() -> None:
    threading = sys.modules.get("threading")
    if threading is not None:
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()


def _returned(call: list[Any], names: dict[str, Any]) -> dict[str, Any]:
    name, arguments = call
    try:
        if name not in names:
            return {"error": f"NameError: the code defines no {name}"}
        return {"value": json.loads(json.dumps(names[name](*arguments), default=_as_plain))}
    except MemoryError:
        return {"error": "MemoryError"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def _as_plain(value: Any) -> Any:
    """Convert an array, or a number of an array library, to Python's own types."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is not a JSON value")
