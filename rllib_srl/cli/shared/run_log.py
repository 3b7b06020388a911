"""The log of a run: metrics.jsonl and TensorBoard scalars, beside the transcripts; written here, and read.

    metrics.jsonl       {"iteration": 3, "env_runners/episode_return_mean": 0.53, ...}     numbers only
    transcripts.jsonl   {"iteration": 3, "env_id": "compare", "turns": [...], ...}         SRL writes it

    settings.yaml, metrics.jsonl ──RunFacts.read──> facts ──warnings──> lines
    transcripts.jsonl ──episodes_in──> episodes

An iteration has a line of metrics, and another if it was evaluated apart (`srl quickstart`); both are read as one. A
line from before the first iteration is that of iteration 0, which has no other metrics. A resumed run removes the lines
about iterations after its checkpoint: it trains them again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rllib_srl.cli.shared.runs import METRICS, SETTINGS_FILE, RunError
from rllib_srl.cli.shared.settings import read_yaml
from rllib_srl.common.metric_names import numbers_of
from rllib_srl.storage.disk import append, writing
from rllib_srl.storage.paths import TRANSCRIPTS
from rllib_srl.types import StopReason

if TYPE_CHECKING:
    from rllib_srl.storage.event_file import EventFile  # loads torch

T = TypeVar("T")

# Parts of an iteration that `SRL.training_step` times.
PARTS = ("plan", "rollout", "remember", "batch", "learn", "sync", "look_back")
REWARD, ACCURACY = "env_runners/episode_return_mean", "evaluation/accuracy"
LIVE_TOKENS = "env_runners/live_token_share"
LEARNER = "learners/default_policy"
MANY_UNTRAINED, MANY_UNPARSED, MANY_CUT = 0.8, 0.1, 0.1  # shares above which there is a warning
# Counts that are 0 in a run without errors: of each iteration, and since the start of the run.
ERRORS = {
    "env_runners/num_episodes_lost": "episodes ended by failures of environment or engine, or late",
    "env_runners/num_groups_dropped": "groups with too few valid episodes",
    f"{LEARNER}/num_nonfinite_gradients": "optimiser steps skipped for a gradient that is not finite",
    f"{LEARNER}/num_nonfinite_logps": "tokens with a log-prob that is not finite",
}
LIFETIME_ERRORS = {
    "num_runner_restarts": "restarts of env runners that died or timed out",
    "num_empty_batches": "iterations with nothing to train on",
    "replay/num_restarts": "restarts of actors of the memory",
    "replay/num_groups_lost": "groups lost before they were stored",
    "replay/num_refused_bad_logp": "groups that the memory refused for log-probs that are not finite",
    "replay/num_refused_invalid": "groups that the memory refused as invalid",
    "replay/num_refused_secret": "groups that the memory refused for a secret",
}


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
                value = form(json.loads(line))
            except (ValueError, LookupError, TypeError, AttributeError, OverflowError):
                value = None
            yield value


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


@dataclass(frozen=True)
class RunFacts:
    """A run. Invariant: `iterations` ascends and has at least one; every column is as long."""

    directory: Path
    settings: Mapping[str, Any]
    iterations: np.ndarray
    columns: Mapping[str, np.ndarray]  # metric -> its value in each iteration, nan where it is missing
    num_damaged: int = 0  # lines of the metrics, left out

    @classmethod
    def read(cls, directory: Path) -> RunFacts:
        """Read metrics and settings, which may be missing; RunError: there is no finished iteration."""
        lines = list(json_lines(directory / METRICS, _numbers))
        row_of: dict[float, dict[str, float]] = {}
        for row in filter(None, lines):
            row_of.setdefault(row["iteration"], {}).update(row)
        num_damaged = lines.count(None)
        if not row_of:
            damaged = f" and {num_damaged} damaged lines" if num_damaged else ""
            raise RunError(f"{directory / METRICS} has no finished iteration{damaged}; expected at least one")
        rows = [row_of[number] for number in sorted(row_of)]
        names = dict.fromkeys(name for row in rows for name in row)
        columns = {name: np.array([row.get(name, math.nan) for row in rows]) for name in names}
        path = directory / SETTINGS_FILE
        settings = read_yaml(path) if path.is_file() else {}
        return cls(directory, settings, columns["iteration"].astype(int), columns, num_damaged)

    def values(self, metric: str) -> np.ndarray:
        """Return a metric in each iteration; nan where it is missing."""
        return self.columns.get(metric, np.full(len(self.iterations), math.nan))

    def known(self, metric: str) -> np.ndarray:
        """Return the values of a metric in the iterations that have it."""
        values = self.values(metric)
        known: np.ndarray = values[~np.isnan(values)]
        return known

    def total(self, metric: str) -> float:
        return float(self.known(metric).sum())

    def last(self, metric: str) -> float:
        """Return the newest value of a metric; nan without one."""
        return float(known[-1]) if len(known := self.known(metric)) else math.nan

    def by_name(self, first: str, last: str = "") -> dict[str, str]:
        """Return name -> metric of the metrics `first` + name + `last`, by name."""
        metrics = [metric for metric in self.columns if metric.startswith(first) and metric.endswith(last)]
        return {metric.removeprefix(first).removesuffix(last): metric for metric in sorted(metrics)}

    @property
    def endings(self) -> dict[str, float]:
        """Return the number of episodes by the reason of their end, those that occurred."""
        counts = {reason.value: self.total(f"env_runners/stop_reason/{reason.value}") for reason in StopReason}
        return {name: num for name, num in counts.items() if num}

    def warnings(self) -> Iterator[str]:
        if self.num_damaged:
            yield f"{METRICS} has {self.num_damaged:,} damaged lines, which are left out"
        counts = {meaning: self.last(metric) for metric, meaning in LIFETIME_ERRORS.items()}
        counts |= {meaning: self.total(metric) for metric, meaning in ERRORS.items()}
        yield from (f"{meaning}: {count:,.0f}" for meaning, count in counts.items() if count > 0)
        if len(rewards := self.known(REWARD)) and not (rewards > 0).any():
            yield "every reward is 0: nothing is learned (docs/grading.md)"
        if len(live := self.known(LIVE_TOKENS)) and (share := 1.0 - float(live.mean())) > MANY_UNTRAINED:
            yield f"{share:.0%} of the generated tokens are in groups that are not trained on"
        endings = self.endings
        num = sum(endings.values()) - self.total("env_runners/num_episodes_lost")
        for text, count, most in (
            ("of the answers could not be parsed", self.total("env_runners/num_unparsed"), MANY_UNPARSED),
            ("of the episodes ran out of tokens", endings.get(StopReason.OUT_OF_TOKENS.value, 0.0), MANY_CUT),
        ):
            if num > 0 and count / num > most:
                yield f"{count / num:.0%} {text}"
        accuracy, high = self.values(ACCURACY), self.last("evaluation/accuracy_high")
        if len(self.known(ACCURACY)) and high < np.nanmax(accuracy):
            best = int(np.nanargmax(accuracy))
            before = f"{accuracy[best]:.3f} in iteration {self.iterations[best]}"
            after = f"{self.last(ACCURACY):.3f}, whose interval ends at {high:.3f}"
            yield f"held-out accuracy fell from {before} to {after}"


def _numbers(line: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in line.items()} | {"iteration": int(line["iteration"])}


def episodes_in(directory: Path) -> tuple[list[Mapping[str, Any]], int]:
    """Return the transcripts of a run and the number of damaged lines."""

    def form(line: Mapping[str, Any]) -> Mapping[str, Any]:
        if not all(isinstance(turn["text"], str) for turn in line["turns"]):
            raise ValueError("a turn without a text")
        int(line["iteration"]), float(line["reward"]), line["env_id"], line["stop_reason"]  # raise if one is missing
        return line

    lines = list(json_lines(directory / TRANSCRIPTS, form))
    return [line for line in lines if line is not None], lines.count(None)
