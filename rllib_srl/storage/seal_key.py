"""The key that signs checkpoints: a file that only its owner can read, created on first use.

    seal_key_file                  the setting, else
    $RLLIB_SRL_SEAL_KEY_FILE       the environment variable, else
    ~/.config/rllib_srl/seal.key   ($XDG_CONFIG_HOME/rllib_srl/seal.key), one per user

Anyone who can read the key can write checkpoints that run code when they are restored. Machines that restore each
other's checkpoints share one key. The file is created atomically: if two processes create it at the same time, both
use the key of the first.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from pathlib import Path

VARIABLE = "RLLIB_SRL_SEAL_KEY_FILE"
NUM_BYTES = 32  # random bytes; the file has two hexadecimal digits for each
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class SealKeyError(ValueError):
    """The key cannot be used; the message explains the reason and the fix."""


def key_place(setting: str | Path | None = None) -> Path:
    """Return the path of the key, given the setting `seal_key_file`; the file need not exist.

    Raises:
        SealKeyError: the path starts with "~" and the user has no home directory.
    """
    named = setting or os.environ.get(VARIABLE)
    base = Path(named) if named else Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config") / "rllib_srl" / "seal.key"
    try:
        return base.expanduser().absolute()
    except RuntimeError as error:
        raise SealKeyError(f"the path of the seal key, {base}, cannot be resolved ({error}); {_ELSEWHERE}") from error


def read_key(setting: str | Path | None = None) -> bytes | None:
    """Return the key, None if it does not exist yet.

    Raises:
        SealKeyError: the file cannot be read, other users can access it, or it is too short.
    """
    place = key_place(setting)
    try:
        with place.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read().strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SealKeyError(f"the seal key {place} cannot be read ({error.strerror}); {_ELSEWHERE}") from error
    if mode & _OTHERS:
        raise SealKeyError(
            f"the seal key {place} has mode {stat.S_IMODE(mode):04o}, so other users can seal checkpoints in your "
            f"name; expected 0600: remove it (a new one is created), or, if nobody else has read it, chmod 600 {place}"
        )
    if len(content) < 2 * NUM_BYTES:
        raise SealKeyError(
            f"the seal key {place} has {len(content)} characters; expected at least {2 * NUM_BYTES}: remove it, and "
            "a new one is created"
        )
    return content


def make_key(setting: str | Path | None = None) -> bytes:
    """Return the key; create it if it does not exist.

    Raises:
        SealKeyError: the key cannot be created or read.
    """
    place = key_place(setting)
    if (key := read_key(place)) is not None:
        return key
    scratch = place.with_name(f"{place.name}.{secrets.token_hex(8)}.new")
    try:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_hex(NUM_BYTES) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.link(scratch, place)  # unlike a rename, never replaces an existing key
        except FileExistsError:
            pass  # another process was first
        finally:
            scratch.unlink(missing_ok=True)
    except OSError as error:
        raise SealKeyError(f"the seal key {place} cannot be created ({error.strerror}); {_ELSEWHERE}") from error
    return read_key(place) or make_key(setting)


def key_id(key: bytes) -> str:
    """Return a short id of a key (16 hex digits), from which the key cannot be derived."""
    return hashlib.sha256(b"rllib_srl seal key " + key).hexdigest()[:16]


_ELSEWHERE = f"set another path by seal_key_file or ${VARIABLE}"
