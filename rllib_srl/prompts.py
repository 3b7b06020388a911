"""Which fresh prompts are played next: drawn on the driver, from a generator that checkpoints remember.

    worlds -> one endless pass over each world's prompt ids -> mixture -> Prompt, Prompt, ...

Drawn here and never in a runner: an engine's seed call resets Python's global generator there, and
every run would play the same tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import gymnasium as gym
import numpy as np

from rllib_srl.types import Prompt
from rllib_srl.worlds import prompts_of


class PromptSource:
    """An endless, seeded, restorable stream of training prompts, and a fixed list of held-out ones.

    Invariant: the prompts drawn after `set_state(s)` are those drawn after `get_state()` returned s.
    """

    def __init__(
        self,
        creators: Mapping[str, Callable[[dict], gym.Env]],
        env_configs: Mapping[str, dict],
        mixture: Mapping[str, float],
        seed: int,
    ) -> None:
        """Open one environment per world, for its prompt ids only.

        Args:
            creators: environment id -> creator.
            env_configs: environment id -> settings for the creator.
            mixture: environment id -> weight > 0; weights need not sum to 1.
            seed: of the run.
        """
        self._envs = {env_id: creators[env_id](env_configs.get(env_id, {})) for env_id in mixture}
        self._ids = list(mixture)
        weights = np.array([mixture[env_id] for env_id in self._ids], float)
        self._probabilities = weights / weights.sum()
        self._seed = seed
        self._start()

    def draw(self, num_prompts: int) -> list[Prompt]:
        """Return the next prompts; a world whose ids are exhausted starts its next pass."""
        worlds = self._generator.choice(len(self._ids), size=num_prompts, p=self._probabilities)
        return [self._next(self._ids[index]) for index in worlds]

    def heldout(self, num_prompts: int) -> list[Prompt]:
        """Return held-out prompts, the same ones each time, the worlds in equal parts; fewer if a world has fewer."""
        share = -(-num_prompts // len(self._ids))
        prompts: list[Prompt] = []
        for env_id in self._ids:
            ids = prompts_of(self._envs[env_id], "heldout", self._seed)
            prompts += [self._prompt(env_id, prompt_id) for prompt_id, _ in zip(ids, range(share), strict=False)]
        return prompts[:num_prompts]

    def get_state(self) -> dict[str, Any]:
        """Return everything the next draws depend on."""
        return {
            "generator": self._generator.bit_generator.state,
            "passes": dict(self._passes),
            "drawn": dict(self._drawn),
            "seed": self._seed,
        }

    @property
    def world_ids(self) -> list[str]:
        """Return the environment ids that prompts come from."""
        return list(self._ids)

    def check_worlds(self, theirs: Iterable[str]) -> None:
        """Check that a state of these worlds can be taken.

        Raises:
            ValueError: the state is of other worlds.
        """
        if sorted(theirs) != sorted(self._ids):
            raise ValueError(f"the checkpoint's worlds are {sorted(theirs)}; this run's are {sorted(self._ids)}")

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue where `get_state` was called.

        Raises:
            ValueError: the state is of other worlds.
        """
        self.check_worlds(state["drawn"])
        self._seed = state["seed"]
        self._start()
        self._generator.bit_generator.state = state["generator"]
        for env_id in self._ids:
            self._passes[env_id] = state["passes"][env_id]
            self._open(env_id)
            for _ in range(state["drawn"][env_id]):
                next(self._streams[env_id])
            self._drawn[env_id] = state["drawn"][env_id]

    def _start(self) -> None:
        self._generator = np.random.default_rng(np.random.SeedSequence([self._seed, 1]))
        self._passes = dict.fromkeys(self._ids, 0)
        self._drawn = dict.fromkeys(self._ids, 0)
        self._streams: dict[str, Iterator[str]] = {}
        for env_id in self._ids:
            self._open(env_id)

    def _open(self, env_id: str) -> None:
        # Each pass has its own seed, so that a second pass comes in another order.
        seed = int(np.random.SeedSequence([self._seed, self._passes[env_id]]).generate_state(1)[0])
        self._streams[env_id] = iter(prompts_of(self._envs[env_id], "train", seed))

    def _next(self, env_id: str) -> Prompt:
        for prompt_id in self._streams[env_id]:
            self._drawn[env_id] += 1
            return self._prompt(env_id, prompt_id)
        if self._drawn[env_id] == 0:
            raise ValueError(f"environment {env_id!r} has no training prompts: prompt_ids('train', seed) is empty")
        self._passes[env_id] += 1
        self._drawn[env_id] = 0
        self._open(env_id)
        return self._next(env_id)

    def _prompt(self, env_id: str, prompt_id: str) -> Prompt:
        return Prompt(env_id, str(prompt_id), str(getattr(self._envs[env_id].unwrapped, "domain", env_id)))
