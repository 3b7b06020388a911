"""Read the tasks and settings of `srl stream`, and make a study of them.

    --tasks compare 'registers#larger={task: larger}' my.jsonl     ->  stages
    stages  ->  a study with the arms memory and no_memory
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllib_srl.algorithm.own_data import ENVIRONMENT as OWN_DATA
from rllib_srl.algorithm.own_data import data_settings
from rllib_srl.cli.shared.runs import RunError
from rllib_srl.cli.shared.settings import build_config, plain
from rllib_srl.common.environments import environment_id, resolve
from rllib_srl.curriculum.prompts import PromptSource
from rllib_srl.curriculum.streams import stream_faults
from rllib_srl.envs.math.data_place import kind_of, stem_of
from rllib_srl.studies.study import Arm, Primary, Study
from rllib_srl.tune_configs.arms import COMMON, NO_REPLAY, REVISITS, domains_of
from rllib_srl.tune_configs.streams import STREAMS

MEMORY, NO_MEMORY = "memory", "no_memory"
OF_MEMORY = "replay_"  # in front of settings that only the arm with memory gets
STREAM = "cpu"  # without tasks


@dataclass(frozen=True)
class World:
    """An environment with settings. Invariant: all its prompts are of `domain`."""

    world: str
    domain: str
    env_config: Mapping[str, Any]

    @property
    def env_id(self) -> str:
        """Return the environment id of its prompts."""
        return environment_id(self.world, self.domain)


def world_named(text: str) -> World:
    """Parse "compare", "compare#large" or "compare#large={lowest: 100, highest: 999}"; construct it once as a check."""
    name, equals, settings = text.partition("=")
    world, _, domain = name.partition("#")
    env_config = plain(settings) if equals else {}
    if not isinstance(env_config, dict):
        raise ValueError(f"environment {text!r}; expected its settings as ENV={{name: value, ...}}")
    env = resolve(world)(env_config)
    env.close()
    return World(world, domain or world, env_config)


def stages_of(tasks: Sequence[str], tokens: int) -> list[dict[str, Any]]:
    """Return the tasks as stages of a stream, each of `tokens` generated tokens; those of `STREAM` without any.

    Raises:
        RunError: tasks are invalid; all of them, one per line.
    """
    if not tasks:
        stages = [{key: value for key, value in stage.items() if key != "iterations"} for stage in STREAMS[STREAM]]
        return [{**stage, "tokens": tokens} for stage in stages]
    stages, faults = [], []
    for text in tasks:
        try:
            stages.append(_stage_of(text) | {"tokens": tokens})
        except (ValueError, OSError) as error:
            faults.append(f"  {text}: {error}")
    if faults:
        raise RunError("invalid --tasks:\n" + "\n".join(faults))
    if len(stages) < 2:
        raise RunError(f"tasks: {len(stages)}; expected at least 2, one after another")
    if faults := stream_faults(stages):
        raise RunError("invalid tasks:\n" + "\n".join(f"  {fault}" for fault in faults))
    names = [domain.name for domain in domains_of(stages)]
    if len(names) < len(stages):
        expected = "expected one each (ENV#NAME={...} names another)"
        raise RunError(f"{len(stages)} tasks have the domains {', '.join(names)}; {expected}")
    return stages


def _stage_of(text: str) -> dict[str, Any]:
    """Return a task: a file of questions, or an environment as ENV, ENV#NAME or ENV#NAME={settings}."""
    path = Path(text).expanduser().absolute()
    if kind_of(text) or ("/" in text and path.is_dir()):  # a bare name is an environment's
        if not path.exists():
            raise ValueError("there is no such file")
        return {"world": OWN_DATA, "domain": stem_of(text), "env_config": data_settings(str(path))}
    world = world_named(text)
    named = {"domain": world.domain} if world.domain != world.world else {}
    return {"world": world.world, **named, "env_config": dict(world.env_config)}


def study_of(name: str, stages: Sequence[Mapping[str, Any]], seeds: Sequence[int], given: Mapping[str, Any]) -> Study:
    """Return a study of GRPO with a memory against plain GRPO, on the same prompts.

    Raises:
        RunError: a task has no prompts to evaluate on.
        ValueError: the settings cannot be used, or a task has no prompts to train on.
    """
    own = {setting: value for setting, value in given.items() if setting.startswith(OF_MEMORY)}
    shared = {setting: value for setting, value in given.items() if setting not in own}
    without = {setting: value for setting, value in NO_REPLAY.items() if setting not in shared}
    study = Study(
        name=re.sub(r"[^A-Za-z0-9_.+-]", "-", name),
        question="Does the memory raise the accuracy on these tasks, before and after they are learned?",
        answered_by="Final and online accuracy are higher with memory, paired by seed.",
        arms=(
            Arm(MEMORY, "with memory", "Old prompts come back.", {**REVISITS, **own}),
            Arm(NO_MEMORY, "without memory", "Nothing is stored: plain GRPO.", without),
        ),
        domains=domains_of(stages),
        num_stages=len(stages),
        seeds=tuple(seeds),
        budget=sum(stage["tokens"] for stage in stages),
        primary=Primary(MEMORY, (NO_MEMORY,), ("average_accuracy", "online_accuracy")),
        settings={**COMMON, **shared, "stream": [dict(stage) for stage in stages]},
    )
    config = build_config(study.settings_of(MEMORY, study.seeds[0]))
    config.validate()
    worlds = (config.world_creators(), config.world_configs(), config.mixture_weights())
    source = PromptSource(*worlds, config.seed, config.task_stream())
    for env_id in source.world_ids:
        source.first(env_id)  # raises if there is none
    measured = {prompt.env_id for prompt in source.heldout(config.evaluation_duration)}
    if missing := [env_id for env_id in source.world_ids if env_id not in measured]:
        raise RunError(f"no held-out prompts to evaluate on: {', '.join(missing)}")
    return study
