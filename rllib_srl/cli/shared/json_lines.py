"""Read a file of JSON lines that a run may be writing: metrics.jsonl, transcripts.jsonl."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def json_lines(path: Path, form: Callable[[Any], T]) -> Iterator[T | None]:
    """Yield the lines of a file as `form` reads them, None for a damaged one; nothing if there is no file.

    A last line without its end is being written, or a kill has cut it: it is left out.
    """
    if not path.is_file():
        return
    with path.open("rb") as stream:
        for line in stream:
            if not line.endswith(b"\n"):
                return
            try:
                found = form(json.loads(line))
            except (ValueError, LookupError, TypeError, AttributeError, OverflowError):
                found = None
            yield found
