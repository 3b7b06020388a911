"""Checks that output paths are on a mounted file system, which memories and checkpoints need.

`Path("s3://bucket/run")` is a relative folder named "s3:": files meant for a bucket would be written beside the script.
Ray Tune's `storage_path` takes URIs and copies a trial's files there.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # two letters at least: "c:/" is a drive


def local_path(text: str | Path) -> Path:
    """Return the path that `text` names; "file:///data/run" names /data/run.

    Raises:
        ValueError: `text` is a URI other than that of a local file.
    """
    found = SCHEME.match(str(text))
    if not found:
        return Path(text)
    if found[1].lower() == "file":
        parts = urlsplit(str(text))
        if parts.netloc in ("", "localhost") and parts.path:
            return Path(unquote(parts.path))
    raise ValueError(
        f"{text} is a URI; expected a path on this machine, such as that of a mounted bucket (under Ray Tune, "
        "storage_path takes URIs)"
    )
