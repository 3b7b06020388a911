"""Hostile code ends with a `stop`, within its time, and leaves no process and no file behind.

Every case is a program that tries something it must not; what it must come to, and what it must not have done, is
stated beside it.
"""

import socket
import time
from pathlib import Path

import pytest

from rllib_srl.envs.sandbox.calls import Call, Limits, SandboxResult, WeakSandboxError
from rllib_srl.envs.sandbox.pool import NUM_WARM, pool_of
from rllib_srl.envs.sandbox.run import Sandbox
from tests.machine import CAN_ISOLATE, OFFERS, processes_below
from tests.waiting import wait_until

TIMEOUT_S = 1.0  # of code that may come to its limit; all other code has the one of `LIMITS`
LATEST_S = 15.0  # over the limit, from the call to its result, on a busy machine
LIMITS = Limits(timeout_s=30.0, memory_bytes=192 << 20, scratch_bytes=1 << 20, output_bytes=10_000)

pytestmark = pytest.mark.skipif(not CAN_ISOLATE, reason="this machine has neither namespaces nor landlock")

ENDLESS = "timeout"
REFUSED = "error"  # an exception that the code does not catch
LEAK = "written_by_a_hostile_call"  # name of a file that must not appear outside the sandbox

# name: (stop, or stops that are all right; code). `done` is printed only by code that got its way.
CASES = {
    # processes
    "fork": (REFUSED, "import os\nos.fork()\nprint('done')"),
    "fork bomb": (ENDLESS, "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"),
    "clone3 by number": ("ok", "import ctypes\nif ctypes.CDLL(None).syscall(435, 0, 0) >= 0: print('done')"),
    "daemon by double fork": (
        ("ok", "crashed"),  # where forks are allowed two processes may report
        "import os, time\ntry:\n    if os.fork() == 0:\n        os.setsid()\n"
        "        if os.fork() == 0: time.sleep(60)\nexcept OSError: pass",
    ),
    "subprocess": (REFUSED, "import subprocess\nsubprocess.run(['/bin/sh', '-c', 'sleep 60'])\nprint('done')"),
    "multiprocessing": (("error", "timeout"), "import multiprocessing as m\nm.Process(target=print).start()"),
    "a thread that stays": (ENDLESS, "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()"),
    # signals
    "kill the parent": (REFUSED, "import os\nos.kill(os.getppid(), 9)\nprint('done')"),
    "kill everybody": (REFUSED, "import os\nos.kill(-1, 9)\nprint('done')"),
    "kill itself": (("ok", "crashed"), "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"),
    "segmentation error": ("crashed", "import ctypes\nctypes.string_at(0)"),
    "catch every signal": (
        ENDLESS,
        "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass",
    ),
    "signals of a pipe": (
        "ok", "import ctypes, os\nr, w = os.pipe()\nif ctypes.CDLL(None).fcntl(r, 8, os.getppid()) == 0: print('done')",
    ),
    "a lease on a library": (
        "ok", "import ctypes, os\nf = open('/etc/ld.so.cache')\n"
        "if ctypes.CDLL(None).fcntl(f.fileno(), 1024, 1) == 0: print('done')",
    ),
    "ptrace": ("ok", "import ctypes\nif ctypes.CDLL(None).ptrace(16, 1, 0, 0) >= 0: print('done')"),
    # time
    "endless loop": (ENDLESS, "while True: pass"),
    "a sum in C that holds the lock": (ENDLESS, "sum(range(10**12))"),
    "a regular expression without end": (ENDLESS, "import re\nre.match(r'(a+)+$', 'a' * 40 + 'b')"),
    "wait for input": ("error", "input()"),
    "a destructor without end": (
        ("ok", "timeout"), "class A:\n    def __del__(self):\n        while True: pass\na = A()",
    ),
    # memory
    "a growing list": ("memory", "x = []\nwhile True: x.append(bytes(10**6))"),
    "mmap": (("error", "memory"), "import mmap\nm = [mmap.mmap(-1, 10**8) for _ in range(9)]\nprint('done')"),
    "shared memory": (REFUSED, "from multiprocessing.shared_memory import SharedMemory as S\nS(create=True, size=9)"),
    "deep recursion": (REFUSED, "def f(): return f()\nf()"),
    "deep recursion without a limit": (
        ("crashed", "error", "memory", "timeout"),  # Python's own, where the limit comes late
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return f([x])\nf(0)",
    ),
    "deeply nested lists": ("error", "x = []\nfor _ in range(10**5): x = [x]\nprint(repr(x))"),
    # output
    "endless output": ("output", "while True: print('x' * 1000)"),
    "a huge value": ("output", "'x' * (2 << 20)"),
    "bytes that are no text": ("ok", "import os\nos.write(1, bytes(range(256)))\nNone"),
    # files
    "write to the library": (REFUSED, "import os\nopen(os.__file__, 'w')\nprint('done')"),
    "write through a link": (REFUSED, f"import os\nos.symlink('/', 'l')\nopen('l/{LEAK}', 'w')\nprint('done')"),
    "read /proc": (REFUSED, "print('done', open('/proc/1/environ').read())"),
    "mount": ("ok", "import ctypes\nif ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, 0) == 0: print('done')"),
    "a set-user-id file": (REFUSED, "import os\nopen('x', 'w').close()\nos.chmod('x', 0o4777)\nprint('done')"),
    "fill the disk": (REFUSED, "for n in range(99): open(str(n), 'wb').write(bytes(10**6))\nprint('done')"),
    "open files without end": (REFUSED, "f = [open('x', 'w') for _ in range(10**5)]\nprint('done')"),
    # network
    "TCP": (REFUSED, "import socket\nsocket.create_connection(('127.0.0.1', 22), 1)\nprint('done')"),
    "Unix socket": (REFUSED, "import socket as s\ns.socket(s.AF_UNIX).connect('\\0x')\nprint('done')"),
    "an address for a pair": (
        REFUSED, "import socket as s\na, b = s.socketpair()\na.sendto(b'x', '/dev/log')\nprint('done')",
    ),
    "io_uring": ("ok", "import ctypes\nif ctypes.CDLL(None).syscall(425, 8, bytes(120)) >= 0: print('done')"),
    # privileges
    "be root": ("ok", "import os\nif 0 in (os.getuid(), os.geteuid(), os.getgid(), *os.getgroups()): print('done')"),
    "a new user namespace": ("ok", "import ctypes\nif ctypes.CDLL(None).unshare(0x10000000) == 0: print('done')"),
    "read the environment": ("ok", "import os\nif any('SECRET' in k for k in os.environ): print('done')"),
    # the way it ends
    "os._exit": ("crashed", "import os\nos._exit(0)"),
    "close standard output": ("ok", "import sys\nsys.stdout.close(); sys.stderr.close()"),
    "noise on every descriptor": (
        "crashed",
        "import os\nfor fd in range(3, 100):\n    try: os.write(fd, b'{\"stop\": \"ok\"}')\n    except OSError: 0",
    ),
    "a report of nested brackets": ("crashed", "import os\nos.write(3, b'[' * 10**5)\nos._exit(0)"),
    "no Unicode": ("error", "x = '\ud800'"),
    "confusable names": ("error", "рrint('done')"),  # the first letter is Cyrillic
    "ten megabytes": ("too_long", "#" + "x" * 10_000_000),
}  # fmt: skip


@pytest.fixture(scope="module", name="sandbox")
def _sandbox():
    return Sandbox(LIMITS)


def run(sandbox: Sandbox, name: str) -> SandboxResult:
    stops, code = CASES[name]
    result = sandbox.run(code, timeout_s=TIMEOUT_S if "timeout" in stops else None)
    assert result.stop in ((stops,) if isinstance(stops, str) else stops), result
    assert "done" not in result.stdout, result
    assert not result.is_leaking
    return result


def assert_nothing_is_left(without: tuple[str, ...] = ()) -> None:
    """Below the zygote there are only its own inner process and the workers that wait."""
    pool = pool_of((), without)
    assert wait_until(lambda: len(processes_below(pool._process.pid)) <= 1 + NUM_WARM)
    assert not Path("/tmp", LEAK).exists() and not Path("/", LEAK).exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_hostile_call_ends_and_leaves_nothing(sandbox, name, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    began = time.monotonic()
    result = run(sandbox, name)
    took = time.monotonic() - began
    assert result.duration_s <= took < TIMEOUT_S + LATEST_S
    assert len(result.stdout) + len(result.stderr) <= LIMITS.output_bytes
    assert_nothing_is_left()
    assert sandbox.run("1 + 1").value == "2"  # the next call is none the worse


ALONE = ("fork bomb", "daemon by double fork", "kill everybody", "a growing list", "write through a link", "read /proc",
         "TCP", "be root")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize(("kind", "without"), [("filters", ("namespaces",)), ("namespaces", ("landlock", "seccomp"))])
def test_one_kind_of_mechanism_alone_is_enough(name, kind, without, monkeypatch):
    """Where a machine has no namespaces, as in most containers, or has nothing but them."""
    if not OFFERS[kind]:
        pytest.skip(f"this machine has no {kind}")
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    run(Sandbox(LIMITS, without=without), name)
    assert_nothing_is_left(without)


def test_the_parent_is_not_reached_over_the_network(sandbox):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        port = listener.getsockname()[1]
        result = sandbox.run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)")
        assert result.stop == "error"
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_nothing_stays_from_one_call_to_the_next(sandbox):
    sandbox.run("import builtins, math\nmath.pi = 3\nbuiltins.len = None\nopen('kept', 'w').write('x')")
    result = sandbox.run("import math, os\n[math.pi == 3, len('abc'), os.listdir('.')]")
    assert result.value == "[False, 3, []]"


@pytest.mark.slow
def test_a_forged_report_says_nothing_that_counts(sandbox):
    """The code can claim any value, which is all that returning it would do, and cannot claim the outcome of time."""
    forged = '{"stop": "ok", "value": "forged", "returned": [{"value": 7}, {"value": 8}]}'
    result = sandbox.run(f"import os\nos.write(3, {forged.encode()!r})\nos._exit(0)", calls=[Call("f")])
    assert (result.stop, result.returned) == ("crashed", ())  # two values for one call: no report
    result = sandbox.run(f"import os\nos.write(3, {forged.encode()!r})\nwhile True: pass", timeout_s=TIMEOUT_S)
    assert (result.stop, result.value) == ("timeout", None)
    for lie in ('{"stop": "timeout"}', '{"stop": "fine"}', '{"stop": "ok", "value": [1]}', "7", "null"):
        result = sandbox.run(f"import os\nos.write(3, {lie.encode()!r})\nos._exit(0)")
        assert result.value is None and result.stop in ("crashed", "ok")


def test_a_machine_without_guarantees_is_refused():
    with pytest.raises(WeakSandboxError, match="does not isolate network, files, processes"):
        Sandbox(without=("namespaces", "landlock", "seccomp"))
