"""Measure one model on the health battery.

    tasks          task files of lm-eval                          right or wrong     (harness.py)
    domains        held-out prompts of environments, greedy       right or wrong, and readable or not ("format")
    degeneration   openings of texts, sampled at temperature 1    repetition, length, entropy   (degeneration.py)

The same battery measures a model before and after training, on the same questions, so that changes are paired.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rllib_srl.curriculum.prompts import PromptSource
from rllib_srl.engine.protocol import Sampling
from rllib_srl.rollout.env_runner import LLMEnvRunner
from rllib_srl.studies.health import harness
from rllib_srl.studies.health.degeneration import measures_of
from rllib_srl.types import Prompt, StopReason

TASKS, DOMAINS, DEGENERATION = "tasks", "domains", "degeneration"
PARTS = (TASKS, DOMAINS, DEGENERATION)
OPENINGS = harness.TASKS / "openings.jsonl"
MAX_TOKENS = 64  # of a text
_SEED = 2105  # of sampling, the same for both models


@dataclass(frozen=True)
class Battery:
    """What is measured. Invariant: at least one part."""

    parts: tuple[str, ...] = PARTS
    tasks: tuple[Path, ...] = ()  # task files; (): those of the package
    num_prompts: int = 100  # held-out prompts of each environment

    def check(self) -> None:
        """Check parts, task files and installed packages before anything starts.

        Raises:
            ValueError: the message names what is wrong.
        """
        unknown = [part for part in self.parts if part not in PARTS]
        if unknown or not self.parts:
            raise ValueError(f"parts = {', '.join(self.parts) or 'none'}; expected some of {', '.join(PARTS)}")
        if TASKS in self.parts:
            harness.check_installed()
            harness.read_tasks(self.tasks or harness.own_tasks())
        elif self.tasks:
            raise ValueError(f"tasks = {self.tasks[0]}; expected the part {TASKS!r} with it")
        if self.num_prompts < 1:
            raise ValueError(f"prompts = {self.num_prompts}; expected at least 1")


@dataclass(frozen=True)
class Measured:
    """One model's results. Invariant: `is_right` and `numbers` have an entry for each question that was answered."""

    is_right: dict[str, dict[str, bool]] = field(default_factory=dict)  # task or domain -> question -> right
    is_readable: dict[str, bool] = field(default_factory=dict)  # held-out prompt -> the environment read its answer
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)  # measure of degeneration -> opening -> value
    num_lost: int = 0  # held-out episodes that infrastructure ended


def measure(battery: Battery, config: Any, model_dir: Path, tell: Callable[[str], None]) -> Measured:
    """Return the results of a model.

    Args:
        battery: what is measured, checked.
        config: validated settings of playing: environments, engine, prompt format; its model is `model_dir`.
        model_dir: directory of the model.
        tell: called with a line about what is being done.

    Raises:
        ValueError: the model cannot be measured with these settings.
    """
    is_right: dict[str, dict[str, bool]] = {}
    is_readable: dict[str, bool] = {}
    numbers: dict[str, dict[str, float]] = {}
    num_lost = 0
    if TASKS in battery.parts:
        tasks = harness.read_tasks(battery.tasks or harness.own_tasks())
        tell(f"lm-eval: {sum(task.num for task in tasks)} questions of {len(tasks)} tasks ...")
        is_right |= harness.run_tasks(model_dir, tasks, config.compute_dtype)
    if DOMAINS in battery.parts or DEGENERATION in battery.parts:
        tell("starting the engine ...")
        with _runner(config) as runner:
            if DOMAINS in battery.parts:
                prompts = _heldout(config, battery.num_prompts)
                tell(f"playing {len(prompts)} held-out prompts ...")
                of_domain, is_readable = _played(runner, prompts)
                is_right |= of_domain
                num_lost = len(prompts) - len(is_readable)
            if DEGENERATION in battery.parts:
                openings = read_openings(OPENINGS)
                tell(f"writing {len(openings)} texts ...")
                numbers = _written(runner, openings, config)
    return Measured(is_right, is_readable, numbers, num_lost)


def read_openings(path: Path) -> list[str]:
    """Return the openings of texts in a JSONL file with rows {"text": ...}."""
    return [str(json.loads(line)["text"]) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


@contextmanager
def _runner(config: Any) -> Iterator[LLMEnvRunner]:
    """Start an env runner in this process, without Ray; close it in the end."""
    runner = LLMEnvRunner(config=config, worker_index=0)
    try:
        runner.check_started()
        yield runner
    finally:
        runner.stop()


def _heldout(config: Any, num_prompts: int) -> list[Prompt]:
    worlds = (config.world_creators(), config.world_configs(), config.mixture_weights())
    source = PromptSource(*worlds, config.seed or 0, config.task_stream())
    prompts = source.heldout(num_prompts * len(source.world_ids))
    if missing := set(source.world_ids) - {prompt.env_id for prompt in prompts}:
        raise ValueError(f"environment {', '.join(sorted(missing))} has no held-out prompts; expected some")
    return prompts


def _played(runner: LLMEnvRunner, prompts: Sequence[Prompt]) -> tuple[dict[str, dict[str, bool]], dict[str, bool]]:
    """Play prompts greedily; return which are right, by domain, and which answers the environment could read."""
    asked = {str(number): prompt for number, prompt in enumerate(prompts)}
    batch = runner.play_groups(asked, 1, _SEED, as_groups=False, temperature=0.0)
    if not batch.groups:
        raise ValueError("none of the held-out prompts could be played: " + "; ".join(batch.errors[:1]))
    is_right: dict[str, dict[str, bool]] = defaultdict(dict)
    is_readable = {}
    for group in batch.groups:
        key, reward = group.prompt.key, float(group.rewards_G[0])
        is_right[group.prompt.domain][key] = bool(group.is_right_G()[0])
        is_readable[key] = reward > 0 or group.stop_reasons[0] is StopReason.TERMINATED
    return dict(is_right), is_readable


def _written(runner: LLMEnvRunner, openings: Sequence[str], config: Any) -> dict[str, dict[str, float]]:
    """Continue each opening once, sampled; return each measure of degeneration by opening."""
    runner.engine.reseed(_SEED)
    ids = [runner.transcript.first(text) for text in openings]
    room = (config.max_episode_tokens or runner.engine.context_length) - max(map(len, ids))
    if room < 1:
        raise ValueError(f"max_episode_tokens = {config.max_episode_tokens}; expected room for the openings of texts")
    turns = runner.engine.generate(ids, Sampling(max_tokens=min(MAX_TOKENS, room), temperature=1.0))
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for text, turn in zip(openings, turns, strict=True):
        for name, value in measures_of(turn.token_ids.tolist(), turn.logp).items():
            found[name][text] = value
    return dict(found)

