"""The file system of sandboxed code: an empty root with the interpreter's own files in it, read-only.

    /                       a tmpfs of the zygote's, read-only
    /usr/lib, /lib64, ...   shared libraries
    <prefix>/lib/python3.x  the standard library; with packages, the site-packages as well
    /dev/null
    /tmp                    each call's own tmpfs, bounded, removed with the call

There is no /proc, /sys or /home, no /etc beyond the loader's cache, and no writable file of the machine.
If mounts are not allowed, landlock lets the code read the same list of paths.
"""

from __future__ import annotations

import os
import sys
import sysconfig

from rllib_srl.envs.sandbox import kernel

SCRATCH = "/tmp"
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo", "/dev/null")
_HIDDEN, _NEW, _OLD = "/tmp", "new", "old"


def readable_paths(site_folders: list[str]) -> list[str]:
    """Return the paths that imports need, each once and none inside another."""
    wanted = [*_LIBRARIES, sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), *site_folders]
    if sys.base_prefix != "/usr":
        wanted.append(os.path.join(sys.base_prefix, "lib"))  # where its own libpython lies
    kept: list[str] = []
    for path in sorted({os.path.abspath(path) for path in wanted}, key=len):
        if os.path.exists(path) and not any(path == outer or path.startswith(outer + "/") for outer in kept):
            kept.append(path)
    return kept


def enter(paths: list[str]) -> None:
    """Replace this process's root, in its own mount namespace, by one with `paths` read-only, and `SCRATCH`.

    Raises:
        OSError: a mount is not allowed; the process is then unusable and must exit.
    """
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", _HIDDEN, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=64k,mode=755")
    os.chdir(_HIDDEN)
    os.mkdir(_NEW)
    os.mkdir(_OLD)
    kernel.pivot_root(".", _OLD)
    os.chdir("/")
    # The old root is now at /old, so that paths below the old /tmp can be shown as well.
    kernel.mount("tmpfs", f"/{_NEW}", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=256k,mode=755")
    for path in paths:
        _show(path)
    os.makedirs(f"/{_NEW}{SCRATCH}", exist_ok=True)
    kernel.restrict_mount(f"/{_NEW}", kernel.MS_RDONLY)
    os.chdir(f"/{_NEW}")
    kernel.pivot_root(".", ".")
    kernel.detach(".")
    os.chdir("/")


def _show(path: str) -> None:
    source, target = f"/{_OLD}{path}", f"/{_NEW}{path}"
    os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
        return
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    is_device = path.startswith("/dev/")
    kernel.bind_read_only(source, target, kernel.MS_NOSUID | (0 if is_device else kernel.MS_NODEV))


def mount_scratch(size: int, uid: int) -> None:
    """Mount an empty `SCRATCH` of at most `size` bytes in this process's own mount namespace."""
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    kernel.mount("tmpfs", SCRATCH, "tmpfs", flags, f"size={size},nr_inodes=1024,mode=700,uid={uid},gid={uid}")
