"""Parse paths of the command line."""

from __future__ import annotations

import argparse
from pathlib import Path

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
