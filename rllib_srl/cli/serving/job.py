"""What the gateway and the trainer of a version hand to each other, as files of the version's directory.

    job.json       to the trainer: model, parent, answers with their tokens and rewards, settings, held-out domains
    checkpoint_*/  of the run after its last slice, with its memory: where a killed trainer and the next version go on
    progress.json  slices done, for the status
    result.json    verdicts of the gates and metrics

The trainer opens no database: the gateway may stop it at any instant, and a stopped writer would block others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rllib_srl.people.gates import Change, Verdict
from rllib_srl.studies.records import write_whole

CONTEXT = 4096  # most tokens of a conversation


class FileError(ValueError):
    """A file of a served model is missing, damaged or of another model; the message names it."""


class JsonFile(BaseModel):
    """A JSON file of a served model. Invariant: a reader sees it whole or not at all."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: ClassVar[str]

    def write(self, directory: Path) -> None:
        write_whole(directory / self.name, self.model_dump_json())

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read the file of a directory; FileError: it cannot be read, or holds something else."""
        path = directory / cls.name
        try:
            return cls.model_validate_json(path.read_bytes(), strict=True)
        except OSError as error:
            raise FileError(f"{path} cannot be read: {error.strerror}") from error
        except ValidationError as error:
            fault = error.errors(include_url=False, include_context=False)[0]
            where = ".".join(map(str, fault["loc"]))
            raise FileError(f"{path} is damaged: {where or 'its text'}: {fault['msg']}") from None


class TrainingSettings(BaseModel):
    """How a version is trained; the descriptions are those of the flags of `srl serve`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lr: float = Field(default=3e-4, ge=1e-8, le=1, description="learning rate")
    rank: int = Field(default=16, ge=1, le=64, description="rank of the adapters")
    passes: int = Field(
        default=4, ge=1, le=100,
        description="passes over the new answers of a version; earlier answers take a part of them",
    )  # fmt: skip
    slice_answers: int = Field(
        default=16, ge=1, le=1024, description="answers of a slice: one update, after which the state is saved"
    )
    kl: float = Field(default=0.05, ge=0, le=100, description="coefficient of the KL to the model that was given")
    retain: float = Field(
        default=0.0, ge=0, le=1000,
        description="weight of the KL that holds answers rated good at the version that learned them; 0: none is held",
    )  # fmt: skip
    revisits: int = Field(
        default=0, ge=0, le=1024,
        description="prompts of the environments to keep that each slice plays and trains on, too",
    )  # fmt: skip
    gate_prompts: int = Field(
        default=256, ge=8, le=100_000, description="held-out prompts of each environment to keep"
    )
    max_drop: float = Field(
        default=0.05, ge=0.001, le=0.99, description="largest drop of the share of right answers that the gate allows"
    )
    confidence: float = Field(default=0.95, ge=0.5, le=0.9999, description="confidence of the gate's interval")
    max_kl: float = Field(
        default=1.0, ge=1e-6, le=1e6, description="largest KL to the active version, nats per token"
    )


class ServedSettings(JsonFile):
    """What holds for all versions of a served model."""

    name: ClassVar[str] = "settings.json"

    model: str  # its directory
    rank: int
    context: int  # most tokens of a conversation
    temperature: float
    dtype: str = "float32"  # bfloat16: on a card

    @property
    def is_on_card(self) -> bool:
        return self.dtype == "bfloat16"


class RatedTokens(BaseModel):
    """An answer to train on. Invariant: one log-prob for each token of the answer."""

    id: str
    version: int  # of the model that wrote it
    prompt_ids: list[int]
    ids: list[int]
    logps: list[float]
    reward: float  # of its rating


class KeptDomain(BaseModel):
    """A domain that must not be lost: an environment and its settings."""

    env: str
    domain: str
    env_config: dict[str, Any] = {}


class Job(JsonFile):
    """One version to train."""

    name: ClassVar[str] = "job.json"

    version: int = 0
    served: ServedSettings
    parent: str = ""  # directory of the parent's adapter, "" for the model itself
    seed: int = 0  # of held-out prompts, the same ones for all versions, and of the order of the answers
    settings: TrainingSettings = TrainingSettings()
    keep: list[KeptDomain] = []
    answers: list[RatedTokens] = []
    level: float = 0.5  # mean reward of all ratings, one neutral rating among them
    good: float = 0.75  # lowest reward of a good one
    changed: list[str] = []  # ids of answers that the parent remembers with another rating


class Progress(JsonFile):
    """How many slices of a version are done, and of how many."""

    name: ClassVar[str] = "progress.json"

    done: int
    of: int | None


class Result(JsonFile):
    """What a trainer that has ended says of its version."""

    name: ClassVar[str] = "result.json"

    verdicts: list[Verdict]
    changes: dict[str, Change]  # by domain
    metrics: dict[str, float]
    trained: dict[str, int]  # answer -> slices that trained on it
