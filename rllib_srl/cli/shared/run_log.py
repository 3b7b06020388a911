"""The log of a run: metrics.jsonl and TensorBoard scalars, beside the transcripts; written here, and read.

    metrics.jsonl       {"iteration": 3, "env_runners/episode_return_mean": 0.53, ...}     numbers only
    transcripts.jsonl   {"iteration": 3, "env_id": "compare", "turns": [...], ...}         SRL writes it

An iteration has a line of metrics, and another if it was evaluated apart (`srl quickstart`). A resumed run removes the
lines about iterations after its checkpoint: it trains them again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rllib_srl.common.metric_names import numbers_of
from rllib_srl.storage.disk import append, writing
from rllib_srl.storage.event_file import EventFile

T = TypeVar("T")

METRICS = "metrics.jsonl"
# Parts of an iteration that `SRL.training_step` times.
PARTS = ("plan", "rollout", "remember", "batch", "learn", "sync", "look_back")


class RunLog:
    """The log of one run's metrics.

    Invariant: only appends.
    """

    def __init__(self, directory: Path, writer: EventFile) -> None:
        """Log into a run's directory, which must exist, and its event file."""
        self._metrics = directory / METRICS
        self._writer = writer

    def write(self, iteration: int, result: Mapping[str, Any]) -> None:
        """Append all numbers of a result, nested names joined by "/"."""
        numbers = dict(numbers_of(result))
        append(self._metrics, json.dumps({"iteration": iteration, **numbers}) + "\n")
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, iteration)
        self._writer.flush()


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


def keep_until(path: Path, last: int) -> int:
    """Remove from a file of JSON lines those about iterations after `last`; return their number.

    Damaged lines stay, but for a last one without its end, to which the next would be joined.

    Raises:
        DiskFull: the disk is full; the file is unchanged.
    """
    if not path.is_file():
        return 0
    iterations = list(json_lines(path, lambda line: int(line["iteration"])))
    is_kept = [number is None or number <= last for number in iterations]
    with path.open("rb") as lines:
        if all(is_kept) and sum(1 for _ in lines) == len(is_kept):  # as mostly; the file may be large
            return 0
    scratch = path.with_name(f"{path.name}.new")
    with writing(path), path.open("rb") as lines, scratch.open("wb") as kept:
        kept.writelines(line for line, is_one in zip(lines, is_kept, strict=False) if is_one)
    scratch.replace(path)
    return is_kept.count(False)
