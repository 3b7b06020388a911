"""Numbers of each iteration, for programs: metrics.jsonl and TensorBoard scalars beside the transcripts.

    metrics.jsonl   {"iteration": 3, "env_runners/episode_return_mean": 0.53, ...} a line, nothing that is not a number
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tensorboardX import SummaryWriter

METRICS = "metrics.jsonl"
# Of an iteration, as `SRL.training_step` times them.
PARTS = ("plan", "rollout", "remember", "batch", "learn", "sync", "look_back")
LEFT_OUT = ("config", "perf", "timestamp", "pid", "date", "hostname", "node_ip", "trial_id", "fault_tolerance")


@dataclass(frozen=True)
class Iteration:
    """One iteration in the figures that scripts show. Invariant: seconds by part sum to at most `seconds`."""

    number: int
    reward: float  # mean over its episodes, nan without any
    num_tokens: int  # generated
    seconds: float
    seconds_by_part: dict[str, float]
    memory: dict[str, float] = field(default_factory=dict)  # gauges and counts of the memory, {} without one

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> Iteration:
        """Read what `algo.train()` returned."""
        timers, played = result["timers"], result["env_runners"]
        return cls(
            number=int(result["training_iteration"]),
            reward=float(played["episode_return_mean"]),
            num_tokens=int(played["num_generated_tokens"]),
            seconds=float(result["time_this_iter_s"]),
            seconds_by_part={name: float(timers[name]) for name in PARTS},
            memory={name: float(value) for name, value in result.get("replay", {}).items()},
        )

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens generated in a second of playing."""
        return self.num_tokens / self.seconds_by_part["rollout"] if self.seconds_by_part["rollout"] else 0.0


class RunLog:
    """The log of one run's numbers.

    Invariant: only appends; a resumed run writes on where the earlier one stopped.
    """

    def __init__(self, directory: Path) -> None:
        """Write into `directory`, which exists."""
        self._metrics = directory / METRICS
        self._writer = SummaryWriter(str(directory))

    def write(self, iteration: int, result: Mapping[str, Any]) -> None:
        """Append all numbers of a result, nested names joined by "/"."""
        numbers = dict(numbers_of(result))
        with self._metrics.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"iteration": iteration, **numbers}) + "\n")
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, iteration)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def numbers_of(result: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield (name, number) of everything in a nested result that is a finite number."""
    for name, value in result.items():
        if not prefix and name in LEFT_OUT:
            continue
        if isinstance(value, Mapping):
            yield from numbers_of(value, f"{prefix}{name}/")
        elif isinstance(value, bool | int | float | np.number) and math.isfinite(value):
            yield f"{prefix}{name}", float(value)
