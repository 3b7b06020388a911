"""Where a run may write: on a mounted file system, which memories and checkpoints need; its memory, on a local disk.

    OUT/replay/memory.db                           without a local directory
    OUT/replay --> LOCAL/3f2a.../memory.db         with one: OUT may lie on a network file system

`Path("s3://bucket/run")` is a relative folder named "s3:": files meant for a bucket would be written beside the script.
Ray Tune's `storage_path` takes URIs and copies a trial's files there.

SQLite's log needs the shared memory of one machine, which network file systems do not give. With a local directory only
the checkpoints' snapshots go to OUT. A run that continues on the same machine finds its memory by the link. On another
machine the link leads nowhere: a new directory is made there, and the snapshot of the checkpoint fills it.
"""

from __future__ import annotations

import re
import uuid
from pathlib import Path
from urllib.parse import unquote, urlsplit

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # two letters at least: "c:/" is a drive
MEMORY = "replay"  # paths within the directory of a run
STATE = "state_"  # beginning of a directory in that of the memory: the copy that belongs to a state of `SRL.get_state`
TRANSCRIPTS = "transcripts.jsonl"


def local_path(text: str | Path) -> Path:
    """Return the path that `text` names; "file:///data/run" names /data/run.

    Raises:
        ValueError: `text` is a URI other than that of a local file.
    """
    match = SCHEME.match(str(text))
    if not match:
        return Path(text)
    if match[1].lower() == "file":
        parts = urlsplit(str(text))
        if parts.netloc in ("", "localhost") and parts.path:
            return Path(unquote(parts.path))
    raise ValueError(
        f"{text} is a URI; expected a path on this machine, such as that of a mounted bucket (under Ray Tune, "
        "storage_path takes URIs)"
    )


def memory_directory(run: Path, local: str | None) -> Path:
    """Return the directory of a run's memory; with `local` it is made there, and the run gets a link to it.

    Raises:
        ValueError: the memory lies in `run`, or in a local directory that is not here, and `local` says otherwise; or
            it cannot be written to.
    """
    link = run / MEMORY
    if local is None:
        if link.is_symlink() and not link.exists():
            raise ValueError(
                f"replay_local_directory = None, but the memory of this run is in {link.readlink()}, which does not "
                "exist on this machine; expected a local directory, as at the start of the run"
            )
        return link
    if link.exists() and not link.is_symlink():
        raise ValueError(
            f"replay_local_directory = {local!r}, but the memory of this run is in {link}; expected None, as at the "
            "start of the run"
        )
    if link.exists() and link.resolve().parent == Path(local).resolve():
        return link.resolve()
    made = Path(local) / uuid.uuid4().hex
    scratch = run / f"{MEMORY}.{made.name}"
    try:
        made.mkdir(parents=True, mode=0o700)
        run.mkdir(parents=True, exist_ok=True)
        scratch.symlink_to(made.resolve())
        scratch.replace(link)
    except OSError as error:
        raise ValueError(f"replay_local_directory = {local!r} cannot be used: {error}") from error
    return made.resolve()
