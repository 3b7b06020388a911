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
MAX_TOKENS = 256  # of an answer, unless a request says otherwise
RANK = 16  # of the adapters, unless a flag says otherwise


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
            detail = error.errors(include_url=False, include_context=False)[0]
            where = ".".join(map(str, detail["loc"]))
            raise FileError(f"{path} is damaged: {where or 'its text'}: {detail['msg']}") from None


def bounded(default: float, least: float, most: float, meaning: str) -> Any:
    """Return a field of settings; its meaning is the help of its flag of `srl serve`."""
    return Field(default=default, ge=least, le=most, description=meaning)


class TrainingSettings(BaseModel):
    """How a version is trained."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lr: float = bounded(3e-4, 1e-8, 1, "learning rate")
    passes: int = bounded(4, 1, 100, "passes over the new answers of a version; earlier answers take a part of them")
    slice_answers: int = bounded(16, 1, 1024, "answers of a slice: one update, after which the state is saved")
    kl: float = bounded(0.05, 0, 100, "coefficient of the KL to the model that was given")
    retain: float = bounded(
        0.0, 0, 1000, "weight of the loss with which later versions train on answers rated good; 0: they do not"
    )
    revisits: int = bounded(0, 0, 1024, "prompts of the environments to keep that each slice plays and trains on, too")
    gate_prompts: int = bounded(256, 8, 100_000, "held-out prompts of each environment to keep")
    max_drop: float = bounded(0.05, 0.001, 0.99, "largest drop of the share of right answers that the gate allows")
    confidence: float = bounded(0.95, 0.5, 0.9999, "confidence of the gate's interval")
    max_kl: float = bounded(1.0, 1e-6, 1e6, "largest KL to the active version, nats per token")


class ServedSettings(JsonFile):
    """What holds for all versions of a served model."""

    name: ClassVar[str] = "settings.json"

    model: str  # its directory
    rank: int = RANK  # of the adapters
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
