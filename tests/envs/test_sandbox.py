"""The sandbox as its users see it: results, limits, guarantees, threads, and what is left when all ends badly."""

import ast
import os
import resource
import signal
import time
from functools import partial

import pytest

from rllib_srl.envs.sandbox import exchange, seccomp
from rllib_srl.envs.sandbox.calls import Call, Limits, Returned
from rllib_srl.envs.sandbox.guarantees import NAMES, Guarantee, Guarantees, probe
from rllib_srl.envs.sandbox.pool import ENVIRONMENT, close_all, pool_of
from rllib_srl.envs.sandbox.run import Sandbox
from tests.machine import CAN_ISOLATE, OFFERS, outlived_by, still_alive
from tests.waiting import at_once


@pytest.fixture(scope="module", name="sandbox")
def _sandbox():
    return Sandbox(Limits(timeout_s=20.0), allow_weak_sandbox=True)


def test_what_code_reads_prints_and_is_worth(sandbox):
    result = sandbox.run("import sys\nprint('out')\nprint('err', file=sys.stderr)\n6 * 7")
    assert (result.stop, result.stdout, result.stderr, result.value) == ("ok", "out\n", "err\n", "42")
    assert (result.exit_code, result.error, result.returned, result.is_leaking) == (0, "", (), False)
    assert sandbox.run("x = 6 * 7").value is None and sandbox.run("None").value is None
    assert sandbox.run("").stop == "ok"
    assert sandbox.run("if __name__ == '__main__': print(__name__)").stdout == "__main__\n"
    code = "import sys\nprint(input(), sys.stdin.read(), open('a/b.txt').read(), sorted(__import__('os').listdir('.')))"
    result = sandbox.run(code, stdin="one\ntwo", files={"a/b.txt": "ä\r\n", "c": ""})
    assert result.stdout == "one two ä\n ['a', 'c']\n"  # open() reads \r\n as \n


def test_exceptions_and_calls_are_told_as_python_tells_them(sandbox):
    result = sandbox.run("def f():\n    return 1 / 0\nprint('before')\nf()")
    assert (result.stop, result.stdout, result.exit_code) == ("error", "before\n", 1)
    assert result.error == "ZeroDivisionError: division by zero"
    lines = result.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1] == '  File "<code>", line 4, in <module>'  # no frame of the sandbox's own
    assert "    return 1 / 0" in lines and lines[-1] == result.error
    assert sandbox.run("x = (").error.startswith("SyntaxError")
    assert (sandbox.run("import sys; sys.exit(3)").stop, sandbox.run("import sys; sys.exit(0)").stop) == ("error", "ok")
    code = "import math\ndef f(x): return {'a': (x, None, True, math.inf)}\ndef g(x): return 1 / x\nh = {1, 2}"
    result = sandbox.run(code, calls=[Call("f", [1.5]), Call("g", [0]), Call("g", [4]), Call("h"), Call("none")])
    assert result.returned == (
        Returned({"a": [1.5, None, True, float("inf")]}),
        Returned(error="ZeroDivisionError: division by zero"),
        Returned(0.25),
        Returned(error="TypeError: 'set' object is not callable"),
        Returned(error="NameError: the code defines no none"),
    )
    assert sandbox.run("def f(): return object()", calls=[Call("f")]).returned[0].error.startswith("TypeError")
    assert sandbox.run("1 / 0", calls=[Call("f")]).returned == ()


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "", "x\0y", "n" * 300])
def test_file_names_that_lead_outside_are_refused(sandbox, name):
    with pytest.raises(ValueError, match="expected a relative path inside"):
        sandbox.run("1", files={name: "x"})


@pytest.mark.slow
def test_limits_are_kept():
    limits = Limits(timeout_s=30.0, output_bytes=100, value_bytes=2000, code_bytes=500)
    sandbox = Sandbox(limits, allow_weak_sandbox=True)
    assert sandbox.run("print('x' * 99)").stop == "ok"  # 100 bytes with the newline
    result = sandbox.run("print('x' * 100)")
    assert (result.stop, len(result.stdout)) == ("output", 100)
    assert sandbox.run("'x' * 3000").stop == "output"
    assert sandbox.run("#" * 600).stop == "too_long"
    began = time.monotonic()
    result = sandbox.run("print(1, flush=True)\nwhile True: pass", timeout_s=3.0)
    assert (result.stop, result.stdout, result.exit_code) == ("timeout", "1\n", -signal.SIGKILL)
    assert 3.0 <= result.duration_s <= time.monotonic() - began < 60.0
    sandbox = Sandbox(Limits(timeout_s=0.3), allow_weak_sandbox=True)
    assert sandbox.run("import time; time.sleep(0.5); 1", timeout_s=20.0).value == "1"


@pytest.mark.slow
@pytest.mark.skipif(not CAN_ISOLATE, reason="this machine has neither namespaces nor landlock")
def test_nothing_runs_as_root_and_no_secret_is_inside(sandbox, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    close_all()  # the next zygote starts while the secret is there
    code = "import os\n[os.getresuid(), os.getresgid(), os.getgroups(), sorted(os.environ)]"
    user_ids, group_ids, groups, names = ast.literal_eval(sandbox.run(code).value)
    assert 0 not in (*user_ids, *group_ids, *groups)
    assert {*names} <= {*ENVIRONMENT, "LC_CTYPE"}
    status = "import ctypes\nctypes.CDLL(None).prctl(39, 0, 0, 0, 0)"  # PR_GET_NO_NEW_PRIVS is not on the list
    assert sandbox.run(status).value == "-1"


def test_the_probe_says_what_holds():
    assert not CAN_ISOLATE or probe().missing == []
    assert [row.name for row in probe().rows] == list(NAMES)
    rows = tuple(Guarantee(name, name != "files", "landlock", "seen") for name in NAMES)
    assert Guarantees(rows).missing == ["files"] and "files       NO   landlock" in str(Guarantees(rows))


@pytest.mark.skipif(not OFFERS["filters"], reason="this machine has no filters")
def test_the_filter_alone_stops_datagrams_and_signals_to_processes_of_the_same_user():
    """As in a container, on a kernel whose landlock has no scopes, where nothing but the filter stands in between."""
    found = {row.name: row for row in probe(("namespaces", "landlock", "uid")).rows}
    refused = "refused: PermissionError"
    assert found["network"].holds and f"to a path {refused}, to a name {refused}" in found["network"].seen
    assert found["processes"].holds and f"SIGKILL by a pipe's owner {refused}" in found["processes"].seen
    found = {row.name: row for row in probe(("namespaces", "landlock", "seccomp", "uid")).rows}
    assert not found["network"].holds and "to a path done, to a name done" in found["network"].seen
    assert not found["processes"].holds and "SIGKILL by a pipe's owner done" in found["processes"].seen


@pytest.mark.parametrize("without", [(), ("namespaces",)])
def test_what_programs_need_of_sockets_and_descriptors_is_allowed(without):
    sandbox = Sandbox(without=without, allow_weak_sandbox=True)
    code = (
        "import os, socket, threading\na, b = socket.socketpair()\na.setblocking(False)\na.sendall(b'x' * 10)\n"
        "c = b.dup()\nos.set_inheritable(c.fileno(), True)\nthread = threading.Thread(target=print, args=('t',))\n"
        "thread.start(); thread.join()\n"
        "[c.recv(10, socket.MSG_PEEK), b.recv(10, socket.MSG_WAITALL), a.shutdown(socket.SHUT_WR), b.recv(1)]"
    )
    result = sandbox.run(code)
    assert (result.value, result.stdout) == ("[b'xxxxxxxxxx', b'xxxxxxxxxx', None, b'']", "t\n"), result.error
    if not without and OFFERS["namespaces"]:  # elsewhere a home's standard library cannot be read
        code = (
            "import asyncio, fcntl, os\nasync def f(): return await asyncio.to_thread(lambda: 7)\n"
            "flags = fcntl.fcntl(0, fcntl.F_GETFL)\nfcntl.fcntl(0, fcntl.F_SETFL, flags | os.O_NONBLOCK)\n"
            "with open('x', 'w') as file: fcntl.lockf(file, fcntl.LOCK_EX)\nasyncio.run(f())"
        )
        assert sandbox.run(code).value == "7"


def test_many_threads_get_their_own_answers(sandbox):
    def answers(first: int) -> list[str]:
        return [sandbox.run(f"print({number})").stdout for number in range(first, first + 12)]

    found = at_once([partial(answers, 100 * n) for n in range(8)])
    assert found == [[f"{100 * n + more}\n" for more in range(12)] for n in range(8)]


def test_a_dead_zygote_is_replaced(sandbox):
    pool = pool_of((), ())
    before = pool._process.pid
    os.kill(before, signal.SIGKILL)
    pool._process.wait(timeout=60)  # until then a worker of the old one may still answer
    assert sandbox.run("5").value == "5"
    assert pool._process.pid != before


WEAK = ("namespaces", "landlock", "seccomp", "uid")  # where the zygote is an ordinary process of the same user
KILLER = "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nwhile True: pass"


def test_code_that_ends_the_zygote_is_to_blame_and_nobody_else():
    """It is run again alone; those whose zygote it ended get their answers."""
    sandbox = Sandbox(without=WEAK, allow_weak_sandbox=True)
    calls = [partial(sandbox.run, f"import time\ntime.sleep(0.5)\n{number}") for number in range(3)]
    *others, killer = at_once([*calls, lambda: time.sleep(0.2) or sandbox.run(KILLER)])
    assert (killer.stop, killer.value, killer.exit_code) == ("crashed", None, -9)
    assert "in a call and again alone" in killer.error
    assert [one.value for one in others] == ["0", "1", "2"]
    assert sandbox.run("7").value == "7"


def test_a_stopped_zygote_is_ended_and_the_time_limit_counts(monkeypatch):
    monkeypatch.setattr(exchange, "END_S", 0.3)
    sandbox = Sandbox(Limits(timeout_s=3.0), without=WEAK, allow_weak_sandbox=True)
    stopper = "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)\n"
    before = pool_of((), WEAK)._process.pid
    for code in (stopper, stopper + "while True: pass"):  # nobody tells that the first one has ended
        result = sandbox.run(code)
        assert (result.stop, result.value, result.exit_code) == ("timeout", None, -9)
        assert still_alive([before]) == []
        before = pool_of((), WEAK)._process.pid
    monkeypatch.undo()
    assert sandbox.run("7", timeout_s=20.0).value == "7"


def test_code_has_no_more_of_what_users_share_than_its_part():
    limits = "import resource as r\n[r.getrlimit(r.RLIMIT_SIGPENDING), r.getrlimit(r.RLIMIT_NPROC)]"
    signals, processes = ast.literal_eval(Sandbox(without=WEAK, allow_weak_sandbox=True).run(limits).value)
    ours = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    assert signals == (64, 64)
    assert processes == (2 * (ours if ours == resource.RLIM_INFINITY else ours * 3 // 4,))


SCRIPT = """
import threading, time
from rllib_srl.envs.sandbox.run import Sandbox
from rllib_srl.envs.sandbox.pool import pool_of
sandbox = Sandbox(allow_weak_sandbox=True)
thread = threading.Thread(target=lambda: sandbox.run("while True: pass", timeout_s=60), daemon=True)
thread.start()
time.sleep(0.3)
print(pool_of((), ())._process.pid, flush=True)
{ending}
"""


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["time.sleep(60)", "import os; os._exit(0)"])
def test_no_process_outlives_the_parent(ending):
    """Killed in the middle of a call, or ended in any other way."""
    is_killed = ending.startswith("time")
    assert outlived_by(SCRIPT.replace("{ending}", ending), is_killed) >= is_killed


ALLOWED, REFUSED, KILLED, NO_SUCH_CALL = 0x7FFF0000, 0x00050001, 0x80000000, 0x00050026


def test_the_filter_is_what_it_says_and_reads_arguments():
    """Every rule jumps inside the program, and known calls come out as the list says, by a small BPF machine."""
    program = seccomp.program(own_pid=7)
    allowed = seccomp.allowed_numbers()
    for number in (allowed["read"], allowed["mmap"], allowed["futex"]):
        assert _verdict(program, number) == ALLOWED
    x86 = {"fork": 57, "vfork": 58, "execve": 59, "socket": 41, "connect": 42, "ptrace": 101, "mount": 165,
           "setuid": 105, "chmod": 90, "memfd_create": 319, "io_uring_setup": 425, "unshare": 272, "sendmsg": 46,
           "sendmmsg": 307, "bind": 49, "rt_sigqueueinfo": 129, "tkill": 200, "pidfd_open": 434, "setpgid": 109,
           "get_robust_list": 274, "splice": 275}  # fmt: skip
    if seccomp._CLONE == 56:
        for name, number in x86.items():
            assert _verdict(program, number) == REFUSED, name
        assert _verdict(program, 0x40000000) == REFUSED  # x32
    assert _verdict(program, seccomp._CLONE3) == NO_SUCH_CALL
    assert _verdict(program, allowed["read"], arch=1) == KILLED
    assert len(program) < 4096
    program = seccomp.program(own_pid=7)
    for name, number, arguments, expected in ARGUMENTS:
        assert _verdict(program, getattr(seccomp, number), *arguments) == expected, name


HIGH = 1 << 32  # a bit of an argument's upper half
ARGUMENTS = [  # what it is, call, arguments, verdict
    ("a thread", "_CLONE", (0x3D0F00,), ALLOWED), ("a process", "_CLONE", (17,), REFUSED),
    ("a thread in a namespace", "_CLONE", (0x3D0F00 | 0x10000000,), REFUSED),
    ("a signal to oneself", "_KILL", (7, 9), ALLOWED), ("a signal to another", "_KILL", (8, 9), REFUSED),
    ("a signal to all", "_KILL", (0xFFFFFFFF, 9), REFUSED), ("to another's thread", "_TGKILL", (8, 7, 9), REFUSED),
    ("limits of another", "_PRLIMIT", (8,), REFUSED), ("TCGETS", "_IOCTL", (1, 0x5401), ALLOWED),
    ("TIOCSTI", "_IOCTL", (0x5401, 0x5412), REFUSED), ("FIOSETOWN", "_IOCTL", (1, 0x8901), REFUSED),
    ("to the other end", "_SENDTO", (3, 4096, 1, 0x4000, 0, 0), ALLOWED),
    ("to an address", "_SENDTO", (3, 4096, 1, 0, 4096, 110), REFUSED),
    ("to an address above 4 GiB", "_SENDTO", (3, 4096, 1, 0, 5 * HIGH, 110), REFUSED),
    ("to an address, no length", "_SENDTO", (3, 4096, 1, 0, HIGH, 0), REFUSED),
    ("out of band", "_SENDTO", (3, 4096, 1, 1, 0, 0), REFUSED),
    ("receive", "_RECVFROM", (3, 4096, 1, 0x42, 0, 0), ALLOWED),
    ("receive errors", "_RECVFROM", (3, 4096, 1, 0x2000, 0, 0), REFUSED),
    ("a stream as Python makes it", "_SOCKETPAIR", (1, 1 | 0x80000 | 0x800), ALLOWED),
    ("datagrams", "_SOCKETPAIR", (1, 2 | 0x80000), REFUSED), ("another family", "_SOCKETPAIR", (30, 1), REFUSED),
    ("F_SETLK", "_FCNTL", (3, 6, 4096), ALLOWED), ("O_NONBLOCK", "_FCNTL", (3, 4, 0x800), ALLOWED),
    ("O_NONBLOCK and O_ASYNC", "_FCNTL", (3, 4, 0x2800), REFUSED), ("F_SETOWN", "_FCNTL", (3, 8, 1), REFUSED),
    ("F_SETLEASE", "_FCNTL", (3, 1024, 1), REFUSED), ("F_SETPIPE_SZ", "_FCNTL", (3, 1031, 1 << 20), REFUSED),
    ("F_SETOWN with a high half", "_FCNTL", (3, HIGH | 8, 1), REFUSED),  # the kernel reads the low one
]  # fmt: skip


def _verdict(program, number, *arguments, arch=None):
    words = {0: number, 4: seccomp._ARCH if arch is None else arch}
    for place, argument in enumerate(arguments):
        words |= {16 + 8 * place: argument & 0xFFFFFFFF, 20 + 8 * place: argument >> 32}
    at, accumulator = 0, 0
    while True:
        code, if_true, if_false, value = program[at]
        at += 1
        if code == 0x06:
            return value
        if code == 0x20:
            accumulator = words.get(value, 0)
        elif code == 0x54:
            accumulator &= value
        elif code == 0x05:
            at += value
        else:
            holds = {0x15: accumulator == value, 0x35: accumulator >= value}[code]
            at += if_true if holds else if_false
