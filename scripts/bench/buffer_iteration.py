"""Measure the time of the buffer's actor per iteration at the quick-start's sizes: due, add, sample and stats.

The groups are the quick-start's: its questions and few shots, in tokens of its model, answered with short numbers.
All defaults are on: n-gram vectors, the search for secrets in decoded text, durable commits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from rllib_srl.replay.actor import ReplayBufferActor
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.types import Group, GroupMeta, Prompt, StopReason

NUM_PROMPTS, GROUP_SIZE = 16, 8
NUM_VISITS, NUM_REUSES = 4, 5
CALLS = ("due", "add", "sample_apart", "stats")


@dataclass
class Iterations:
    """Milliseconds an iteration. Invariant: entry i of every list is of the same iteration."""

    num_tokens: float = 0.0  # of an episode, on average
    busy: list[float] = field(default_factory=list)  # all calls, in the actor's process
    cpu: list[float] = field(default_factory=list)  # processor time of that process
    waited: list[float] = field(default_factory=list)  # all calls, as the driver sees them
    parts: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in CALLS})  # busy, by call


class TimedActor(ReplayBufferActor):
    """The actor, with its process's clock."""

    def cpu_s(self) -> float:
        """Return the processor time of the process so far."""
        import time

        return time.process_time()

    def take_busy_s(self) -> float:
        """Return the seconds spent in calls since the last call of this method."""
        busy_s, self._busy_s = self._busy_s, 0.0
        return busy_s


class Player:
    """Produces groups for the quick-start's prompts without a model: random numbers as answers."""

    def __init__(self, model_dir: Path, seed: int) -> None:
        """Use the tokenizer of the model in `model_dir`."""
        from rllib_srl.cli.quickstart import SETTINGS
        from rllib_srl.engine.model_dir import load_tokenizer
        from rllib_srl.envs.math.compare import Compare

        self._world = Compare(SETTINGS["env_config"])
        self._tokenizer = load_tokenizer(model_dir)
        self._fresh = self._world.prompt_ids("train", seed)
        self._generator = np.random.default_rng(seed)

    def fresh(self, num: int) -> list[Prompt]:
        """Return new prompts."""
        return [Prompt("compare", next(self._fresh), "compare") for _ in range(num)]

    def play(self, prompt: Prompt, group_id: str, version: int) -> Group:
        """Return a group of answers, some of them right."""
        text, _ = self._world.reset(options={"prompt_id": prompt.prompt_id})
        asked = self._tokenizer.encode(text)
        gold = self._world.gold_turns(prompt.prompt_id)[0]
        is_right_G = self._generator.random(GROUP_SIZE) < self._generator.random()
        wrong = [f" {number}, I think\n" for number in self._generator.integers(10, 100, GROUP_SIZE)]
        answers = [self._tokenizer.encode(gold if right else other) for right, other in zip(is_right_G, wrong)]
        ids_N = np.concatenate([[*asked, *answer] for answer in answers]).astype(np.int32)
        mask_N = np.concatenate([np.arange(len(asked) + len(answer)) >= len(asked) for answer in answers])
        lengths = [len(asked) + len(answer) for answer in answers]
        return Group(
            group_id=group_id,
            prompt=prompt,
            token_ids_N=ids_N,
            loss_mask_N=mask_N,
            behaviour_logp_N=np.where(mask_N, -self._generator.random(len(ids_N)), 0).astype(np.float32),
            offsets=np.concatenate([[0], np.cumsum(lengths)]),
            rewards_G=is_right_G.astype(np.float32),
            versions_G2=np.full((GROUP_SIZE, 2), version),
            stop_reasons=(StopReason.TERMINATED,) * GROUP_SIZE,
        )


def measure(model_dir: Path, directory: Path, num_iterations: int) -> Iterations:
    """Run an actor through some iterations, after as many warm-up iterations that fill it."""
    import ray

    arguments = {"directory": str(directory / "iteration"), "model_dir": model_dir, "run": "bench"}
    actor = ray.remote(TimedActor).options(num_cpus=0).remote(ReplaySettings(), **arguments)
    ray.get(actor.check_started.remote())
    found, player = Iterations(), Player(model_dir, 0)
    lengths: list[float] = []
    warm_up = max(5, num_iterations // 4)
    for now in range(1, warm_up + num_iterations + 1):
        measured = dict(_iteration(actor, player, now, lengths))
        if now > warm_up:
            for name in CALLS:
                found.parts[name].append(measured[name])
            found.busy.append(sum(measured[name] for name in CALLS))
            found.cpu.append(measured["cpu"])
            found.waited.append(measured["waited"])
    found.num_tokens = float(np.mean(lengths))
    ray.get(actor.close.remote())
    ray.kill(actor)
    return found


def _iteration(actor: Any, player: Player, now: int, lengths: list[float]) -> Iterator[tuple[str, float]]:
    """Yield the time of each call of an iteration in milliseconds, then "cpu" and "waited" of all together."""
    import time

    import ray

    total = {"cpu": 0.0, "waited": 0.0}

    def call(name: str, *given: Any) -> tuple[Any, tuple[str, float]]:
        begin_cpu, begin = ray.get(actor.cpu_s.remote()), time.perf_counter()
        refs = getattr(actor, name).remote(*given)
        answer = ray.get(refs[0] if isinstance(refs, list) else refs)  # the driver does not fetch drawn groups
        total["waited"] += 1e3 * (time.perf_counter() - begin)
        total["cpu"] += 1e3 * (ray.get(actor.cpu_s.remote()) - begin_cpu)
        busy_s = answer["busy_s"] if name == "stats" else ray.get(actor.take_busy_s.remote())
        return answer, (name, 1e3 * busy_s)

    drawn, took = call("due", NUM_VISITS, now, f"{now}.due")
    yield took
    prompts = [*drawn, *player.fresh(NUM_PROMPTS - len(drawn))]
    groups = [player.play(prompt, f"{now}.{i}", now) for i, prompt in enumerate(prompts)]
    metas = [GroupMeta.of(group, ray.put(group)) for group in groups]
    lengths.extend(meta.lengths_G.mean() for meta in metas)
    _, took = call("add", [meta.ref for meta in metas], now, f"{now}.add")
    yield took
    _, took = call("sample_apart", NUM_REUSES, now, f"{now}.sample")
    yield took
    _, took = call("stats", now)
    yield took
    ray.get(actor.tidy.remote())  # in a run the driver calls it while it waits
    yield from total.items()


def summary(found: Iterations) -> str:
    """Return the medians by call."""
    return ", ".join(f"{name} {median(times):.1f}" for name, times in found.parts.items())
