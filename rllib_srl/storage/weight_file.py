"""Reads and writes the weights of a module in a checkpoint: one safetensors file, which cannot contain code."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from rllib_srl.storage.checkpoints import CheckpointError

WEIGHTS = "weights.safetensors"  # in the module's directory, instead of RLlib's pickle


def write_weights(path: Path, weights: Mapping[str, np.ndarray]) -> None:
    """Write arrays by name, atomically; `OSError` if the file cannot be written."""
    scratch = path.with_name(f"{path.name}.tmp")
    try:
        save_file({name: np.ascontiguousarray(array) for name, array in weights.items()}, scratch)
        scratch.replace(path)
    except SafetensorError as error:  # also raised for a full disk
        scratch.unlink(missing_ok=True)
        code = re.search(r"code: (\d+)", str(error))
        raise OSError(int(code[1]) if code else 0, f"weights cannot be written: {error}", str(path)) from error


def read_weights(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays that `write_weights` wrote, by name.

    Raises:
        CheckpointError: the file is missing, unreadable or empty.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; use another checkpoint")
    try:
        weights = load_file(path)
    except (SafetensorError, KeyError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); use another checkpoint") from error
    if not weights:
        raise CheckpointError(f"{path} contains no weights; use another checkpoint")
    return weights
