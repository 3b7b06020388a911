"""Environments for end-to-end tests, so small that a random model learns them, and an `SRLConfig` that plays them."""

import os
import random
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym

from rllib_srl import SRLConfig

MEETING_S = 150.0  # for the start of the other process on a busy machine


def meet(directory: Path) -> None:
    """Return once two processes have come here; both were running at that moment."""
    directory.mkdir(exist_ok=True)
    (directory / str(os.getpid())).touch()
    deadline = time.monotonic() + MEETING_S
    while len(list(directory.iterdir())) < 2:
        if time.monotonic() > deadline:
            raise TimeoutError("no other process came")
        time.sleep(0.05)


class Even(gym.Env):
    """Pays 1 for an answer whose first character has an even code point: a random policy gets about half.

    Invariant: prompt ids are "<name> <number>", train ones even numbers, held-out ones odd.
    """

    domain = "even"

    def __init__(self, env_config: Mapping[str, Any] | None = None):
        """Take `num_prompts` of each split, `pay` (what every answer gets, if set) and `slow_s` (of a step).

        With `meeting`, a directory, no step ends before two processes have begun one.
        """
        usual = {"num_prompts": 40, "pay": None, "slow_s": 0.0, "meeting": None}
        settings = {**usual, **(env_config or {})}
        self.num_prompts, self.pay, self.slow_s = settings["num_prompts"], settings["pay"], settings["slow_s"]
        self.meeting = settings["meeting"]

    def prompt_ids(self, split: str, seed: int) -> Iterator[str]:
        """Yield each prompt of a split once, in the order of the seed."""
        numbers = list(range(split == "heldout", 2 * self.num_prompts, 2))
        random.Random(seed).shuffle(numbers)
        return (f"{self.domain} {number}" for number in numbers)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict]:
        self.prompt_id = str((options or {})["prompt_id"])
        return f"{self.prompt_id}: ", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        time.sleep(self.slow_s)
        if self.meeting:
            meet(Path(self.meeting))
        reward = float(bool(action) and ord(action[0]) % 2 == 0) if self.pay is None else self.pay
        return "", reward, True, False, {}


class Mixed(Even):
    """Pays 1 for an answer whose code points have an even sum, so that nearly every group has both rewards."""

    domain = "mixed"

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        return "", float(sum(map(ord, action)) % 2 == 0), True, False, {}


class Odd(Even):
    """The opposite of `Even`."""

    domain = "odd"

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        observation, reward, *rest = super().step(action)
        return observation, 1.0 - reward, *rest


class Unpaid(Even):
    """Pays nothing: people rate the answers."""

    is_unpaid = True

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        return "", 0.0, True, False, {}


class Straggling(Even):
    """Takes three turns, each after `slow_s` seconds, for every fourth training prompt: the numbers 0 mod 8."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict]:
        """Ask the prompt of `options`, with two more turns for a straggler."""
        asked = super().reset(seed=seed, options=options)
        self.turns_left = 3 if int(self.prompt_id.rsplit(" ", 1)[1]) % 8 == 0 else 1
        return asked

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        self.turns_left -= 1
        if self.turns_left:
            time.sleep(self.slow_s)
            return " Again: ", 0.0, False, False, {}
        reward = float(bool(action) and ord(action[0]) % 2 == 0)
        return "", reward, True, False, {}


def small_config(model_dir: Path, directory: Path, env: str = "Even", **env_config: Any) -> SRLConfig:
    """Return settings under which an iteration takes a fraction of a second, all in one process."""
    return (
        SRLConfig()
        .environment(f"tests.small_envs:{env}", env_config=env_config)
        .rl_module(model_config={"model": str(model_dir)})
        .env_runners(engine="transformers", num_env_runners=0, max_turns=1, max_turn_tokens=3, max_episode_tokens=48)
        .env_runners(num_cpus_per_env_runner=0.25)
        .learners(num_cpus_per_learner=0.25)
        .training(lr=1e-3, num_prompts_per_batch=4, group_size=4, compute_dtype="float32")
        .training(checkpoint_every=0, log_directory=str(directory))
        .replay("none")  # tests of the memory switch it on
        .evaluation(evaluation_duration=8)
        .resources(num_cpus_for_main_process=0.25)
        .debugging(seed=1)
    )


def watch(algo) -> list:
    """Return a list that every batch of groups an algorithm plays is added to."""
    seen, play = [], algo.rollouts.play

    def watched(*args, **kwargs):
        for batch in play(*args, **kwargs):
            seen.append(batch)
            yield batch

    algo.rollouts.play = watched
    return seen
