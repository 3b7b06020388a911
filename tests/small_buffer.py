"""Buffers by hand for tests of what looks into them, and what its script says."""

import re
from pathlib import Path

import numpy as np
import pytest

from rllib_srl.cli import memory as script
from rllib_srl.replay.buffer import SRLReplayBuffer
from rllib_srl.types import Group
from tests.replay.groups import SCHEDULED, a_prompt, group_of


def a_group(number: int, rewards: tuple[float, ...], now: int, ids: list[int] | None = None) -> Group:
    """Return a group of one-token answers to prompt `number`, or with `ids` as every answer."""
    return group_of(
        *(([1], ids or [7 + number + g]) for g in range(len(rewards))),
        group_id=f"{now}.{number}",
        prompt=a_prompt(number),
        rewards_G=np.array(rewards, np.float32),
        versions_G2=np.full((len(rewards), 2), now - 1),
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
