"""A training job: what the gateway hands to the trainer, and what comes back, as files of the version's directory.

    job.json       model, parent, answers with their tokens and rewards, settings, held-out domains, limits
    checkpoint_*/  of the run after its last slice, with its memory: where a killed trainer and the next version go on
    progress.json  slices done, for the status
    result.json    verdicts of the gates and metrics

The trainer opens no database: the gateway may stop it at any instant, and a stopped writer would block others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rllib_srl.cli.serving.adapter import read_json
from rllib_srl.studies.recording import write_whole

JOB, PROGRESS, RESULT = "job.json", "progress.json", "result.json"
CONTEXT = 4096  # most tokens of a conversation


@dataclass(frozen=True)
class TrainingSettings:
    """How a version is trained. Invariant: `faults` is empty."""

    lr: float = 3e-4
    rank: int = 16  # of the adapter
    passes: int = 4  # over the new answers; so many slices draw from new and earlier ones
    slice_answers: int = 16  # of one slice, which is one update
    kl: float = 0.05  # coefficient of the KL to the model that was given
    retain: float = 0.0  # weight of the KL that holds answers that were rated good
    revisits: int = 0  # prompts of the domains to keep that each slice plays, too
    gate_prompts: int = 256  # held-out prompts of each domain to keep
    max_drop: float = 0.05  # share of right answers that may be lost
    confidence: float = 0.95  # of the gate's interval
    max_kl: float = 1.0  # to the active version at the end, nats per token

    def faults(self) -> list[str]:
        """Return one message for each value out of its range."""
        bounds: dict[str, tuple[float, float]] = {"lr": (1e-8, 1.0), "rank": (1, 64), "passes": (1, 100)}
        bounds |= {"slice_answers": (1, 1024), "kl": (0.0, 100.0), "retain": (0.0, 1000.0), "revisits": (0, 1024)}
        bounds |= {"gate_prompts": (8, 100_000)}
        bounds |= {"max_drop": (0.001, 0.99), "confidence": (0.5, 0.9999), "max_kl": (1e-6, 1e6)}
        values = asdict(self)
        return [
            f"{name} = {values[name]}; expected {least:g} to {most:g}"
            for name, (least, most) in bounds.items()
            if not least <= values[name] <= most
        ]


@dataclass(frozen=True)
class RatedTokens:
    """An answer to train on. Invariant: one log-prob for each token of the answer."""

    id: str
    version: int  # of the model that wrote it
    prompt_ids: list[int]
    ids: list[int]
    logps: list[float]
    reward: float  # of its rating
    rater: str = ""


@dataclass(frozen=True)
class KeptDomain:
    """A domain that must not be lost: an environment and its settings."""

    world: str
    domain: str
    env_config: Mapping[str, Any]


@dataclass(frozen=True)
class Job:
    """One version to train. Invariant: `answers` is not empty."""

    version: int
    model: str
    parent: str  # directory of the parent's adapter, "" for the model itself
    context_length: int
    temperature: float  # at which the answers were sampled
    seed: int
    settings: TrainingSettings
    keep: list[KeptDomain]
    answers: list[RatedTokens]
    neutral: float = 0.5  # reward of an answer that is neither good nor bad
    good: float = 0.75  # lowest reward of a good one
    changed: list[str] = field(default_factory=list)  # ids of answers that the parent remembers with another rating
    dtype: str = "float32"  # bfloat16: on a card

    def write(self, directory: Path) -> None:
        """Write job.json."""
        write_json(directory / JOB, asdict(self))

    @classmethod
    def read(cls, directory: Path) -> Job:
        """Read job.json.

        Raises:
            AdapterError: it cannot be read.
        """
        values = dict(read_json(directory / JOB))
        values["settings"] = TrainingSettings(**values["settings"])
        values["keep"] = [KeptDomain(**one) for one in values["keep"]]
        values["answers"] = [RatedTokens(**one) for one in values["answers"]]
        return cls(**values)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file so that it appears whole or not at all.

    Raises:
        DiskFull: the disk is full; a file that was there stays.
    """
    write_whole(path, json.dumps(value))
