"""Record the steps of an upgrade on disk, and restore its progress after a stop or a kill.

    DIR/ledger.jsonl    every step, one JSON object per line; the first holds the order
    DIR/before.json     which held-out prompts the starting model answered correctly
    DIR/checkpoints/    the last good checkpoint, once there is one; older ones are deleted

A resumed upgrade continues from the last good checkpoint, on the rung that the ladder had reached; iterations after
that checkpoint are trained again.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rllib_srl.cli.shared.runs import RunError
from rllib_srl.cli.upgrading.attempts import CHECKPOINTS, Answers
from rllib_srl.cli.upgrading.order import Order, World
from rllib_srl.storage.checkpoints import checkpoints_in, place_for
from rllib_srl.studies.gates import Outcome, Verdict
from rllib_srl.studies.ladder import Action, Ladder, Rehearsal
from rllib_srl.studies.recording import write_whole

LEDGER, BEFORE, MODEL = "ledger.jsonl", "before.json", "model"


class Ledger:
    """The log of an upgrade, one JSON object per line. Invariant: a line is on disk when `write` returns."""

    def __init__(self, path: Path) -> None:
        """Create `path`, or append after its last complete line."""
        self._file, self._began = path.open("ab"), time.monotonic()
        self._file.truncate(len(b"".join(_whole_lines(path))))

    def write(self, kind: str, **facts: Any) -> None:
        """Append a line; its `seconds` count from when this process opened the ledger."""
        line = {"kind": kind, "seconds": round(time.monotonic() - self._began, 3), **facts}
        self._file.write(json.dumps(line, default=str, allow_nan=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass
class Past:
    """The progress of an upgrade. Invariant: `good` is None until the starting model has filled a memory."""

    rehearsal: Rehearsal
    ladder: Ladder
    num_attempts: int = 0
    is_halted: bool = False
    good: Path | None = None  # the newest checkpoint that passed all checks, initially the starting one

    @classmethod
    def none(cls, order: Order) -> Past:
        """Return the progress of an upgrade that has not started."""
        return cls(order.rehearsal, Ladder(order.limits["patience"]))

    @classmethod
    def of(cls, order: Order, lines: Sequence[Mapping[str, Any]]) -> Past:
        """Return the progress in the lines of a ledger: replay its checks on a new ladder."""
        past = cls.none(order)
        for line in lines:
            past.num_attempts += line["kind"] == "attempt"
            if line["kind"] == "check":
                step = past.ladder.after([_verdict(values) for values in line["verdicts"]])
                past.is_halted = step.action is Action.HALT
                if step.action is Action.CLIMB:
                    past.rehearsal = past.rehearsal.after(step.rung, step.fallen)
        past.ladder.went_back()
        past.good = next(reversed(checkpoints_in(order.out / CHECKPOINTS)), None)
        return past


def first_checkpoint(order: Order) -> Path:
    """Return the path of the first checkpoint: the starting model with the memory that it filled."""
    return place_for(order.out / CHECKPOINTS, 0)


def earlier(directory: Path) -> tuple[Order, Past]:
    """Return the order and the progress of the upgrade in a directory.

    Raises:
        RunError: the directory holds no upgrade, a damaged one, or a finished one.
    """
    path = directory / LEDGER
    if not path.is_file():
        raise RunError(f"--resume {directory} has no {LEDGER}; expected the directory of an upgrade")
    try:
        lines = read_ledger(path)
        order = _order(lines, directory)
        past = Past.of(order, lines)
    except (ValueError, LookupError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise RunError(f"{path} is damaged ({why}); expected the ledger of an upgrade") from error
    if (directory / MODEL).exists():
        raise RunError(f"--resume {directory} is finished: {directory / MODEL} is its model; start another with --out")
    return order, past


def read_ledger(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a ledger.

    Raises:
        ValueError: a line is not JSON.
    """
    return [json.loads(line) for line in _whole_lines(path)]


def write_before(directory: Path, answers: Mapping[str, Answers]) -> None:
    """Write the starting model's answers atomically."""
    write_whole(directory / BEFORE, json.dumps(answers))


def read_before(directory: Path) -> dict[str, Answers]:
    """Return the starting model's answers: domain -> key of a prompt -> whether it was right.

    Raises:
        RunError: the file cannot be read.
    """
    try:
        return dict(json.loads((directory / BEFORE).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise RunError(f"{directory / BEFORE} cannot be read ({error}); start the upgrade again with --out") from error


def facts_of(order: Order) -> dict[str, Any]:
    """Return the fields of an order for the first line of a ledger."""
    return {**asdict(order), "checkpoint": order.checkpoint}


def _order(lines: Sequence[Mapping[str, Any]], directory: Path) -> Order:
    if not lines:
        raise ValueError("it is empty")
    if (line := lines[0])["kind"] != "start":
        raise ValueError(f"its first line is {line['kind']!r}")
    checkpoint = None if line["checkpoint"] is None else Path(line["checkpoint"])
    worlds = [World(**world) for world in (line["new"], *line["old"])]
    return Order(
        line["what"], checkpoint, line["model"], worlds[0], tuple(worlds[1:]), directory.absolute(),
        line["iterations"], line["values"], line["limits"], tuple(line.get("health", ())),
    )  # fmt: skip


def _verdict(values: Mapping[str, Any]) -> Verdict:
    return Verdict(**{**values, "outcome": Outcome(values["outcome"])})


def _whole_lines(path: Path) -> list[bytes]:
    """Return the complete lines; a kill may have truncated the last one."""
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
