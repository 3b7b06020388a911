"""Buffers by hand for tests of what looks into them, and what its script says."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from rllib_srl.cli import memory as script
from rllib_srl.replay.buffer import SRLReplayBuffer
from rllib_srl.types import Group, Prompt, StopReason
from tests.replay.groups import SCHEDULED


def a_group(number: int, rewards: tuple[float, ...], now: int, ids: list[int] | None = None) -> Group:
    """Return a group of one-token answers to prompt `number`, or with `ids` as every answer."""
    ids = ids or [7 + number]
    size, length = len(rewards), 1 + len(ids)
    mask_N = np.tile([False] + [True] * len(ids), size)
    tokens_N = np.tile([1, *ids], size)
    tokens_N[length - 1 :: length] += np.arange(size) if ids == [7 + number] else 0
    return Group(
        f"{now}.{number}",
        Prompt("world", f"p{number}", domain="sums"),
        tokens_N.astype(np.int32),
        mask_N,
        np.where(mask_N, -0.5, 0).astype(np.float32),
        np.arange(size + 1) * length,
        np.array(rewards, np.float32),
        np.full((size, 2), now - 1),
        (StopReason.TERMINATED,) * size,
    )


def by_hand(directory: Path, **settings: object) -> SRLReplayBuffer:
    """Return a buffer whose items are due every four iterations, with the rest of the schedule on."""
    values = {"admit": None, "min_buffer_size": 1, "spacing": "fixed", "spacing_config": {"interval": 4.0}}
    return SRLReplayBuffer(directory=directory, **{**SCHEDULED, **values, "diversity_coeff": 0.0, **settings})


def said(capsys: pytest.CaptureFixture, *argv: object, status: int = 0) -> str:
    """Return what a command prints, on standard output if it succeeds, else on standard error."""
    capsys.readouterr()
    found = script.main([str(word) for word in argv])
    shown = capsys.readouterr()
    assert found == status, shown
    return shown.out if status == 0 else shown.err


def cells(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())
