"""Runs with a memory, watched: what was played, what the memory said, and what the learner was given."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_srl import SRL, SRLConfig
from rllib_srl.batch.shard import fetched
from rllib_srl.replay.intake import Visit
from rllib_srl.replay.reading import Reading, reading
from rllib_srl.replay.store import SNAPSHOT
from rllib_srl.types import Group, GroupMeta, Prompt
from scripts.memory_laws import check_tables, check_valid
from tests.small_envs import small_config


def memory_config(model_dir: Path, directory: Path, env: str = "Even", **replay: Any) -> SRLConfig:
    """Return `small_config` with 400 prompts and a memory that starts at 4 items; `replay` changes its settings."""
    settings = {"revisit_fraction": 0.25, "reuse_fraction": 0.25, "capacity": 1000, "min_buffer_size": 4}
    return small_config(model_dir, directory, env, num_prompts=400).replay(**{**settings, **replay})


@dataclass
class Iteration:
    """One call of `train()`, as its parts saw it."""

    result: dict[str, Any] = field(default_factory=dict)
    revisits: list[Prompt] = field(default_factory=list)
    metas: list[GroupMeta] = field(default_factory=list)
    played: list[Group] = field(default_factory=list)
    visits: dict[str, Visit] = field(default_factory=dict)
    reused: list[GroupMeta] = field(default_factory=list)
    trained: list[tuple[str, Group, np.ndarray]] = field(default_factory=list)  # origin, group, advantages

    @property
    def replay(self) -> dict[str, float]:
        return self.result["replay"]


@contextmanager
def watched(algo: SRL) -> Iterator[list[Iteration]]:
    """Yield a list that every iteration of an algorithm with a memory, and any learner but a local one, is added to."""
    iterations: list[Iteration] = []
    memory, learner = algo.memory, algo.learner_group._learner
    due, add, sample, train = memory.draw_prompts, memory.add, memory.draw_groups, algo.train

    def watched_due(*args: Any) -> list[Prompt]:
        iterations[-1].revisits = due(*args)
        return iterations[-1].revisits

    def watched_add(groups: list[GroupMeta], now: int) -> dict[str, Visit]:
        iterations[-1].metas, iterations[-1].visits = groups, add(groups, now)
        iterations[-1].played = fetched([meta.ref for meta in groups], 60.0)
        return iterations[-1].visits

    def watched_sample(*args: Any) -> list[GroupMeta]:
        iterations[-1].reused = sample(*args)
        return iterations[-1].reused

    def watched_train() -> dict[str, Any]:
        iterations.append(Iteration())
        iterations[-1].result = train()
        return iterations[-1].result

    names = {"draw_prompts": watched_due, "add": watched_add, "draw_groups": watched_sample}
    vars(memory).update(names)
    vars(algo)["train"] = watched_train
    if learner is not None:
        begin = learner._create_iterator_if_necessary

        def watched_begin(*, training_data: Any, **kwargs: Any) -> Any:
            shard = training_data.batch
            iterations[-1].trained += list(zip(shard.origins, shard.groups(), shard.advantages, strict=True))
            return begin(training_data=training_data, **kwargs)

        learner._create_iterator_if_necessary = watched_begin
    try:
        yield iterations
    finally:
        for name in names:
            del vars(memory)[name]
        del vars(algo)["train"]
        if learner is not None:
            learner._create_iterator_if_necessary = begin


def go(algo: SRL, num_iterations: int) -> list[Iteration]:
    with watched(algo) as iterations:
        for _ in range(num_iterations):
            algo.train()
    return iterations


def weights_of(algo: SRL) -> np.ndarray:
    weights = algo.learner_group.get_weights()[DEFAULT_MODULE_ID]
    return np.concatenate([np.array(weights[name]).ravel() for name in sorted(weights)])


@contextmanager
def stored_of(algo: SRL, directory: Path) -> Iterator[Reading]:
    """Yield what a copy of the memory holds."""
    algo.memory.snapshot(directory)
    with reading(directory / SNAPSHOT) as memory:
        yield memory


def check_memory(algo: SRL) -> None:
    """Check that what the memory stores is valid, and in this process that the buffer holds the same."""
    if algo.memory.process.is_local:
        check_valid(algo.memory.process.actor)
        return
    with TemporaryDirectory() as directory, stored_of(algo, Path(directory)) as memory:
        check_tables(memory.tables, memory.store)
