"""What the files of a run say: settings, metrics by iteration, transcripts, and the faults among them.

    settings.yaml, metrics.jsonl ──RunFacts.read──> facts ──warnings──> lines
    transcripts.jsonl ──episodes_in──> episodes

An iteration that was trained again after a resume has several lines in the files; the last one counts. An evaluation
before the first iteration is that of iteration 0, which has no other metrics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rllib_srl.algorithm.metrics import TRANSCRIPTS
from rllib_srl.cli.shared.json_lines import json_lines
from rllib_srl.cli.shared.run_log import METRICS
from rllib_srl.cli.shared.runs import SETTINGS_FILE, RunError
from rllib_srl.cli.shared.settings import read_yaml
from rllib_srl.replay.metrics import by_domain
from rllib_srl.types import StopReason

REWARD, ACCURACY = "env_runners/episode_return_mean", "evaluation/accuracy"
DOMAIN = ("evaluation/by_domain/", "/accuracy")
LEARNER = "learners/default_policy"
NUM_AVERAGED = 5  # iterations at the start and at the end
MANY_UNTRAINED, MANY_UNPARSED, MANY_CUT = 0.8, 0.1, 0.1  # shares above which there is a warning
LIVE_TOKENS = "env_runners/live_token_share"


class Fault(NamedTuple):
    """A count that is 0 in a run without faults; `is_lifetime`: the metric counts since the start."""

    metric: str
    is_lifetime: bool
    meaning: str


class DomainChange(NamedTuple):
    """The held-out accuracy of a domain: in its first, its best and its last evaluation."""

    first: float
    best: float
    last: float

    @classmethod
    def of(cls, values: np.ndarray) -> DomainChange:
        """Return the change over evaluations; nan stands for none."""
        known = values[~np.isnan(values)]
        return cls(float(known[0]), float(known.max()), float(known[-1])) if len(known) else cls(*[math.nan] * 3)

    @property
    def lost(self) -> float:
        """Return how much was lost since the best evaluation: forgetting, or chance."""
        return self.best - self.last


FAULTS = (
    Fault("num_runner_restarts", True, "restarts of env runners that died or timed out"),
    Fault("env_runners/num_episodes_lost", False, "episodes ended by failures of environment or engine, or late"),
    Fault("env_runners/num_groups_dropped", False, "groups with too few valid episodes"),
    Fault("num_empty_batches", True, "iterations with nothing to train on"),
    Fault(f"{LEARNER}/num_nonfinite_gradients", False, "optimiser steps skipped for a gradient that is not finite"),
    Fault(f"{LEARNER}/num_nonfinite_logps", False, "tokens with a log-prob that is not finite"),
    Fault("replay/num_restarts", True, "restarts of actors of the memory"),
    Fault("replay/num_groups_lost", True, "groups lost before they were stored"),
    Fault("replay/num_refused_bad_logp", True, "groups that the memory refused for log-probs that are not finite"),
    Fault("replay/num_refused_invalid", True, "groups that the memory refused as invalid"),
    Fault("replay/num_refused_secret", True, "groups that the memory refused for a secret"),
)


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
        """Read settings and metrics of a run; the settings may be missing.

        Raises:
            RunError: there is no finished iteration.
        """
        lines = list(json_lines(directory / METRICS, _numbers))
        row_of: dict[float, dict[str, float]] = {}
        for row in filter(None, lines):
            row_of.setdefault(row["iteration"], {}).update(row)
        num_damaged = len(lines) - sum(row is not None for row in lines)
        if not row_of:
            damaged = f" and {num_damaged} damaged lines" if num_damaged else ""
            raise RunError(f"{directory / METRICS} has no finished iteration{damaged}; expected at least one")
        rows = [row_of[number] for number in sorted(row_of)]
        names = dict.fromkeys(name for row in rows for name in row)
        columns = {name: np.array([row.get(name, math.nan) for row in rows]) for name in names}
        return cls(directory, settings_in(directory), columns["iteration"].astype(int), columns, num_damaged)

    def values(self, metric: str) -> np.ndarray:
        """Return a metric in each iteration; nan where it is missing."""
        return self.columns.get(metric, np.full(len(self.iterations), math.nan))

    def has(self, metric: str) -> bool:
        """Return whether a metric was logged in an iteration."""
        return metric in self.columns

    def total(self, metric: str) -> float:
        """Return the sum of a metric over all iterations."""
        return float(np.nansum(self.values(metric)))

    def last(self, metric: str) -> float:
        """Return the newest value of a metric; nan without one."""
        known = self.values(metric)
        known = known[~np.isnan(known)]
        return float(known[-1]) if len(known) else math.nan

    def span(self, metric: str) -> tuple[float, float]:
        """Return the means over the first and the last `NUM_AVERAGED` iterations with the metric; nan without one."""
        known = self.values(metric)
        known = known[~np.isnan(known)]
        num = max(1, min(NUM_AVERAGED, len(known) // 2))
        return (float(known[:num].mean()), float(known[-num:].mean())) if len(known) else (math.nan, math.nan)

    @cached_property
    def domains(self) -> list[str]:
        """Return the domains with a held-out accuracy."""
        first, last = DOMAIN
        names = [name for name in self.columns if name.startswith(first) and name.endswith(last)]
        return sorted(name.removeprefix(first).removesuffix(last) for name in names)

    @cached_property
    def domain_changes(self) -> dict[str, DomainChange]:
        """Return how the held-out accuracy of each domain changed."""
        first, last = DOMAIN
        return {name: DomainChange.of(self.values(f"{first}{name}{last}")) for name in self.domains}

    @cached_property
    def domain_counts(self) -> dict[str, dict[str, float]]:
        """Return domain -> name -> newest value of the memory's metrics by domain."""
        return by_domain({metric: self.last(metric) for metric in self.columns if metric.startswith("domains/")})

    @property
    def endings(self) -> dict[str, float]:
        """Return the number of episodes by the reason of their end, those that occurred."""
        found = {reason.value: self.total(f"env_runners/stop_reason/{reason.value}") for reason in StopReason}
        return {name: num for name, num in found.items() if num}

    @property
    def faults(self) -> dict[str, tuple[int, str]]:
        """Return metric -> its count and meaning, for each count of `FAULTS` above 0."""
        counts = {one: self.last(one.metric) if one.is_lifetime else self.total(one.metric) for one in FAULTS}
        return {one.metric: (int(num), one.meaning) for one, num in counts.items() if num > 0}

    def warnings(self) -> list[str]:
        """Return a line for each fault and each sign that little is learned."""
        damaged = [f"{METRICS} has {self.num_damaged:,} damaged lines, which are left out"] * bool(self.num_damaged)
        return [*damaged, *(f"{meaning}: {num:,}" for num, meaning in self.faults.values()), *self._signs()]

    def _signs(self) -> Iterator[str]:
        if self.has(REWARD) and not (self.values(REWARD) > 0).any():
            yield "every reward is 0: nothing is learned (docs/grading.md)"
        live = self.values(LIVE_TOKENS)
        if not np.isnan(live).all() and (share := 1.0 - float(np.nanmean(live))) > MANY_UNTRAINED:
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
        if not np.isnan(accuracy).all() and high < np.nanmax(accuracy):
            best = int(np.nanargmax(accuracy))
            before = f"{accuracy[best]:.3f} in iteration {self.iterations[best]}"
            after = f"{self.last(ACCURACY):.3f}, whose interval ends at {high:.3f}"
            yield f"held-out accuracy fell from {before} to {after}"


def settings_in(directory: Path) -> Mapping[str, Any]:
    """Return the settings of a run, {} without their file."""
    path = directory / SETTINGS_FILE
    return read_yaml(path) if path.is_file() else {}


def _numbers(line: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in line.items()} | {"iteration": int(line["iteration"])}


def episodes_in(
    directory: Path, is_wanted: Callable[[Mapping[str, Any]], bool] = bool
) -> tuple[list[Mapping[str, Any]], int]:
    """Return the transcripts of a run that are wanted, and the number of damaged lines.

    Of an episode that was played again after a resume the newest counts.
    """

    def form(line: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any] | None]:
        if not all(isinstance(turn["text"], str) for turn in line["turns"]):
            raise ValueError("a turn without a text")
        name = (int(line["iteration"]), str(line["group_id"]), int(line["index"]))
        float(line["reward"]), line["env_id"], line["stop_reason"]  # raise if one is missing
        return name, line if is_wanted(line) else None

    found: dict[Any, Mapping[str, Any] | None] = {}
    num_damaged = 0
    for pair in json_lines(directory / TRANSCRIPTS, form):
        if pair is None:
            num_damaged += 1
        else:
            found.pop(pair[0], None)
            found[pair[0]] = pair[1]
    return [episode for episode in found.values() if episode is not None], num_damaged
