"""Parse paths of the command line, and say what is wrong with them."""

from __future__ import annotations

import argparse
from pathlib import Path

from rllib_srl.common.foreign_names import nearest
from rllib_srl.storage.local_paths import local_path


def local_directory(text: str) -> Path:
    """Return `text` as a local path; an argparse type.

    Raises:
        ArgumentTypeError: `text` is a URI.
    """
    try:
        return local_path(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def missing(path: Path) -> str:
    """Return "does not exist", and the nearest name in the same directory if there is one."""
    beside = [one.name for one in path.absolute().parent.iterdir()] if path.absolute().parent.is_dir() else []
    near = nearest(path.name, beside)
    return "does not exist" + (f"; did you mean {path.with_name(near)}?" if near else "")
