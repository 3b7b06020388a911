"""Linux system calls without a Python function: namespaces, mounts, privileges, landlock.

Each function makes one call and raises `OSError` with the kernel's reason. The zygote imports this module, and the
sandboxed code inherits its memory: it imports little and holds no secrets.

Sources: man pages unshare(2), mount(2), mount_setattr(2), pivot_root(2), prctl(2), capset(2), landlock(7).
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

NEW_NS, NEW_UTS, NEW_IPC, NEW_USER, NEW_PID, NEW_NET = 1 << 17, 1 << 26, 1 << 27, 1 << 28, 1 << 29, 1 << 30
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 24, 36, 38

_ARM = platform.machine() == "aarch64"
_PIVOT_ROOT = 41 if _ARM else 155
_MOUNT_SETATTR, _LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 442, 444, 445, 446
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_LAST_CAPABILITY = 63  # beyond the kernel's last one PR_CAPBSET_DROP fails, which ends the loop

# landlock: access rights by the version of the interface that brought them
_READ = 1 << 2 | 1 << 3  # READ_FILE, READ_DIR
_WRITE_V1 = 1 << 1 | sum(1 << bit for bit in range(4, 13))  # WRITE_FILE, remove, make of every kind
_ALL_V1, _REFER_V2, _TRUNCATE_V3, _IOCTL_V5 = (1 << 13) - 1, 1 << 13, 1 << 14, 1 << 15
_NET_V4, _SCOPES_V6 = 0b11, 0b11  # bind and connect TCP; abstract Unix sockets and signals

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result


def _syscall(number: int, *arguments: object) -> int:
    longs = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    return _checked(_libc.syscall(ctypes.c_long(number), *longs), f"system call {number}")


def unshare(flags: int) -> None:
    """Move this process into new namespaces; with `NEW_PID` the next child."""
    _checked(_libc.unshare(flags), f"unshare {flags:#x}")


def setns(fd: int, kind: int) -> None:
    """Move this process (for `NEW_PID`: its next children) into the namespace that `fd` refers to."""
    _checked(_libc.setns(fd, kind), f"setns {kind:#x}")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Mount `source` on `target`."""
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    _checked(_libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]), f"mount {target}")


def bind_read_only(source: str, target: str, flags: int = MS_NOSUID | MS_NODEV) -> None:
    """Show `source` and all mounts below it at `target`, read-only."""
    mount(source, target, None, MS_BIND | MS_REC)
    restrict_mount(target, MS_RDONLY | flags)


def restrict_mount(target: str, flags: int) -> None:
    """Add `flags` to a mount and all below it; what is already forbidden there stays so."""
    attributes = struct.pack("=QQQQ", flags & 0xF, 0, 0, 0)  # MOUNT_ATTR_RDONLY .. NOEXEC have the bits of MS_*
    _syscall(_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(target), _AT_RECURSIVE, attributes, len(attributes))


def pivot_root(new_root: str, put_old: str) -> None:
    """Make `new_root` the root and move the old one to `put_old`."""
    _syscall(_PIVOT_ROOT, os.fsencode(new_root), os.fsencode(put_old))


def detach(target: str) -> None:
    """Unmount `target` as soon as no process uses it."""
    _checked(_libc.umount2(os.fsencode(target), MNT_DETACH), f"umount2 {target}")


def prctl(option: int, *arguments: int) -> None:
    """Set an attribute of this process."""
    longs = [ctypes.c_ulong(argument) for argument in (*arguments, 0, 0, 0, 0)[:4]]
    _checked(_libc.prctl(option, *longs), f"prctl {option}")


def drop_bounding_set() -> None:
    """Give up every capability that a later program could gain."""
    for capability in range(_LAST_CAPABILITY + 1):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:
            break  # no such capability, or none of ours to drop: no_new_privs covers the rest


def drop_capabilities() -> None:
    """Give up every capability this process has."""
    header, nothing = struct.pack("=Ii", 0x20080522, 0), bytes(24)  # _LINUX_CAPABILITY_VERSION_3, this thread
    _checked(_libc.capset(header, nothing), "capset")


def landlock_version() -> int:
    """Return the version of landlock's interface, 0 where the kernel has none."""
    try:
        return _syscall(_LANDLOCK_CREATE, None, 0, 1)
    except OSError:
        return 0


def landlock(version: int, readable: list[str], writable: list[str]) -> None:
    """Forbid permanently: opening files outside `readable` and `writable`, TCP, and signals to processes outside."""
    handled = _ALL_V1 | (version >= 2 and _REFER_V2) | (version >= 3 and _TRUNCATE_V3) | (version >= 5 and _IOCTL_V5)
    fields = (handled, _NET_V4, _SCOPES_V6)[: 1 + (version >= 4) + (version >= 6)]
    ruleset = _syscall(_LANDLOCK_CREATE, struct.pack(f"={len(fields)}Q", *fields), 8 * len(fields), 0)
    everything = _READ | _WRITE_V1 | (handled & (_REFER_V2 | _TRUNCATE_V3))
    for paths, access in ((readable, _READ), (writable, everything)):
        for path in paths:
            _landlock_allow(ruleset, path, access)
    _syscall(_LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)


def _landlock_allow(ruleset: int, path: str, access: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except PermissionError:
        return  # a path that this user cannot open needs no rule
    try:
        if not os.path.isdir(path):
            access &= _READ & ~(1 << 3) | 1 << 1 | _TRUNCATE_V3  # a file has no rights of directories
        _syscall(_LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", access, fd), 0)
    finally:
        os.close(fd)
