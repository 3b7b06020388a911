"""The seccomp filter of sandboxed code: an allowlist of what Python and NumPy need; every other system call is EPERM.

Not on the list, and so refused even if all other isolation is missing: new processes (fork, exec, clone without
CLONE_THREAD), sockets (except connected pairs, which asyncio needs), signals to others, ptrace, mounts, set-id calls,
chmod, io_uring, keyrings.

Some calls are allowed with certain arguments only (`_conditions`), since with others they reach beyond the process:

    sendto, socketpair   a datagram socket sends to any Unix socket whose path it names; MSG_OOB has had kernel bugs
    fcntl                F_SETOWN and F_SETSIG send any signal to any process of the user, F_SETLEASE stalls processes
                         that open a file, F_SETPIPE_SZ uses up the user's share of pipe memory
    ioctl                FIOASYNC and FIOSETOWN do what F_SETFL and F_SETOWN do; TIOCSTI types into a terminal
    clone, kill, prctl   threads without namespaces; signals to this process; the names of threads

A filter sees numbers, never the memory behind a pointer. Arguments are 64 bits wide: of an `int` the kernel reads the
low half, so the high half is ignored; a pointer is compared in both halves.

The filter is classic BPF over `struct seccomp_data` (nr, arch, ip, args[6]); offsets below are into it.
Sources: seccomp(2); the kernel's Documentation/userspace-api/seccomp_filter.rst; numbers from asm/unistd.h.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import socket
import struct
from dataclasses import dataclass

from rllib_srl.envs.sandbox.kernel import prctl

# name, number on x86_64, number on aarch64 (- where the call does not exist)
_ALLOWED = """
read 0 63; write 1 64; readv 19 65; writev 20 66; pread64 17 67; pwrite64 18 68; preadv 295 69; pwritev 296 70
preadv2 327 286; pwritev2 328 287; open 2 -; openat 257 56; openat2 437 437; close 3 57; close_range 436 436
stat 4 -; fstat 5 80; lstat 6 -; newfstatat 262 79; statx 332 291; lseek 8 62; access 21 -; faccessat 269 48
faccessat2 439 439; poll 7 -; ppoll 271 73; select 23 -; pselect6 270 72; epoll_create 213 -; epoll_create1 291 20
epoll_ctl 233 21; epoll_wait 232 -; epoll_pwait 281 22; epoll_pwait2 441 441; eventfd 284 -; eventfd2 290 19
mmap 9 222; mprotect 10 226; munmap 11 215; brk 12 214; mremap 25 216; madvise 28 233; mincore 27 232; msync 26 227
membarrier 324 283; rt_sigaction 13 134; rt_sigprocmask 14 135; rt_sigreturn 15 139; rt_sigpending 127 136
rt_sigsuspend 130 133; rt_sigtimedwait 128 137; sigaltstack 131 132; restart_syscall 219 128; sendfile 40 71
copy_file_range 326 285; pipe 22 -; pipe2 293 59; sched_yield 24 124; dup 32 23; dup2 33 -; dup3 292 24; pause 34 -
nanosleep 35 101; clock_nanosleep 230 115; clock_gettime 228 113; clock_getres 229 114; gettimeofday 96 169
time 201 -; getitimer 36 102; setitimer 38 103; alarm 37 -; getpid 39 172; gettid 186 178; getppid 110 173
getuid 102 174; geteuid 107 175; getgid 104 176; getegid 108 177; getresuid 118 148; getresgid 120 150
getgroups 115 158; getpgrp 111 -; getpgid 121 155; getsid 124 156; exit 60 93; exit_group 231 94; wait4 61 260
waitid 247 95; uname 63 160; sysinfo 99 179; getrusage 98 165; times 100 153; getcpu 309 168; getpriority 140 141
getrlimit 97 163; flock 73 32; fsync 74 82; fdatasync 75 83; ftruncate 77 46; fallocate 285 47
fadvise64 221 223; getdents 78 -; getdents64 217 61; getcwd 79 17; chdir 80 49; fchdir 81 50; rename 82 -
renameat 264 38; renameat2 316 276; mkdir 83 -; mkdirat 258 34; rmdir 84 -; unlink 87 -; unlinkat 263 35; link 86 -
linkat 265 37; symlink 88 -; symlinkat 266 36; readlink 89 -; readlinkat 267 78; umask 95 166; statfs 137 43
fstatfs 138 44; futex 202 98; futex_waitv 449 449; set_robust_list 273 99; rseq 334 293
set_tid_address 218 96; sched_getaffinity 204 123; sched_getparam 143 121; sched_getscheduler 145 120
sched_get_priority_max 146 125; sched_get_priority_min 147 126; getrandom 318 278; shutdown 48 210
"""
_ARM = platform.machine() == "aarch64"
_ARCH = 0xC00000B7 if _ARM else 0xC000003E  # AUDIT_ARCH_AARCH64, AUDIT_ARCH_X86_64
_CLONE, _CLONE3, _KILL, _TGKILL, _IOCTL, _PRCTL, _PRLIMIT, _FCNTL, _SOCKETPAIR, _SENDTO, _RECVFROM = (
    (220, 435, 129, 131, 29, 167, 261, 25, 199, 206, 207) if _ARM else (56, 435, 62, 234, 16, 157, 302, 72, 53, 44, 45)
)
_CLONE_THREAD, _CLONE_SPACES = 0x10000, 0x7E020000
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
_PRCTLS = (15, 16, 0x53564D41)  # set and get the thread's name; name a memory area
# F_DUPFD, GETFD, SETFD, GETFL; locks of a process and of an open file; DUPFD_CLOEXEC, GETPIPE_SZ, GET_SEALS
_FCNTLS = (0, 1, 2, 3, 5, 6, 7, 36, 37, 38, 1030, 1032, 1034)
_F_SETFL, _O_ASYNC = 4, 0x2000
_SENT = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT
_RECEIVED = _SENT | socket.MSG_PEEK | socket.MSG_WAITALL | socket.MSG_TRUNC

_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NR_AT, _ARCH_AT, _ARGS_AT = 0, 4, 16  # an argument's low half comes first: both machines are little-endian
_LOAD, _AND, _JUMP, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x05, 0x15, 0x35, 0x06
_ALL_BITS, _MOST_JUMP = 0xFFFFFFFF, 255
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2

Rule = tuple[int, int, int, int]  # code, jump if true, jump if false, value


@dataclass(frozen=True)
class _If:
    """A condition on one argument: its low half, masked by `mask`, is one of `values`."""

    argument: int
    values: tuple[int, ...]
    mask: int = _ALL_BITS
    is_pointer: bool = False  # the high half is 0 as well


def is_known_machine() -> bool:
    """Return whether the numbers above are valid for this machine."""
    return platform.machine() in ("x86_64", "aarch64") and struct.calcsize("P") == 8


def allowed_numbers() -> dict[str, int]:
    """Return the numbers of the unconditionally allowed calls, by name."""
    rows = [row.split() for line in _ALLOWED.strip().splitlines() for row in line.split(";")]
    return {name: int(arm if _ARM else x86) for name, x86, arm in rows if (arm if _ARM else x86) != "-"}


def _conditions(own_pid: int) -> dict[int, list[tuple[_If, ...]]]:
    """Return, by number, the alternatives under which a call is allowed; in each, all conditions must hold."""
    own_process: list[tuple[_If, ...]] = [(_If(0, (own_pid,)),)]
    is_pair = (_If(0, (socket.AF_UNIX,)), _If(1, (socket.SOCK_STREAM,), ~(socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)))
    return {
        _CLONE: [(_If(0, (_CLONE_THREAD,), _CLONE_THREAD | _CLONE_SPACES),)],
        _KILL: own_process,
        _TGKILL: own_process,
        _PRLIMIT: [(_If(0, (0,)),)],
        _IOCTL: [(_If(1, _IOCTLS),)],
        _PRCTL: [(_If(0, _PRCTLS),)],
        _FCNTL: [(_If(1, _FCNTLS),), (_If(1, (_F_SETFL,)), _If(2, (0,), _O_ASYNC))],
        _SOCKETPAIR: [is_pair],
        _SENDTO: [(_If(4, (0,), is_pointer=True), _If(3, (0,), ~_SENT))],
        _RECVFROM: [(_If(3, (0,), ~_RECEIVED),)],
    }


def program(own_pid: int) -> list[Rule]:
    """Return the filter as (code, jump if true, jump if false, value).

    Args:
        own_pid: the only process that may be signalled
    """
    refuse, allow = (_RETURN, 0, 0, _ERRNO | errno.EPERM), (_RETURN, 0, 0, _ALLOW)
    rules = [(_LOAD, 0, 0, _ARCH_AT), (_EQUAL, 1, 0, _ARCH), (_RETURN, 0, 0, _KILL_PROCESS), (_LOAD, 0, 0, _NR_AT)]
    rules += [(_AT_LEAST, 0, 1, 0x40000000), refuse]  # the x32 calls
    for number in allowed_numbers().values():
        rules += [(_EQUAL, 0, 1, number), allow]
    rules += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]  # glibc then calls clone
    for number, ways in _conditions(own_pid).items():
        inside = [rule for way in ways for rule in _allowed_if(way)] + [refuse]
        assert len(inside) <= _MOST_JUMP, number
        rules += [(_EQUAL, 0, len(inside), number), *inside]
    return [*rules, refuse]


def _allowed_if(way: tuple[_If, ...]) -> list[Rule]:
    """Return the rules that allow a call if all conditions hold, and else continue behind them."""
    rules: list[Rule] = [(_RETURN, 0, 0, _ALLOW)]
    for condition in reversed(way):
        at = _ARGS_AT + 8 * condition.argument
        if condition.is_pointer:
            rules = [*_is_one_of(at + 4, (0,), _ALL_BITS, len(rules)), *rules]
        rules = [*_is_one_of(at, condition.values, condition.mask & _ALL_BITS, len(rules)), *rules]
    return rules


def _is_one_of(at: int, values: tuple[int, ...], mask: int, past: int) -> list[Rule]:
    """Return the rules that continue if the masked word at `at` is one of `values`, else jump over `past` rules."""
    tests = [(_EQUAL, len(values) - place, 0, value) for place, value in enumerate(values)]
    return [(_LOAD, 0, 0, at), (_AND, 0, 0, mask), *tests, (_JUMP, 0, 0, past)]


def restrict(own_pid: int) -> None:
    """Apply the filter to this process permanently; it must have set no_new_privs."""
    packed = b"".join(struct.pack("=HBBI", *rule) for rule in program(own_pid))
    count = len(packed) // 8
    instructions = ctypes.create_string_buffer(packed, len(packed))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", count, ctypes.addressof(instructions)))
    prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(header))
