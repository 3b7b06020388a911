"""Several datasets of reasoning-gym in one environment, drawn by weight.

    ReasoningGymMixture({"datasets": {"chain_sum": 2.0, "gcd": 1.0, "leg_counting": 1.0}})

    Question: State the final answer to the following arithmetic problem: 4 + 3 =
    Answer: 7                                       graded by the dataset's own grader: reward 1

A dataset may have settings beside its weight: {"gcd": {"weight": 1.0, "level": 2, "pool_size": 500}}, named as in
reasoning_gym_env.py. Each prompt has the transcript and shots of its dataset, and its domain is the dataset
(`domain_of`). A weight is the frequency with which a dataset is drawn while it has questions left; after that the
other datasets continue.

Source: Stojanovski et al., 2025, arXiv 2505.24760; the mixture replaces the package's `composite`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium
from gymnasium.error import ResetNeeded

from rllib_srl.envs import text
from rllib_srl.envs.math.reasoning_gym_env import ReasoningGym
from rllib_srl.envs.question import Question, read_settings


@dataclass(frozen=True)
class ReasoningGymMixtureSettings:
    """Settings of `ReasoningGymMixture`. Invariant: `faults` is empty for the settings of a built environment."""

    datasets: dict[str, Any] = field(default_factory=dict)  # name -> weight > 0, or {"weight": ..., further settings}
    shared: dict[str, Any] = field(default_factory=dict)  # settings of all datasets, such as num_shots and pool_size
    multiline: bool = False  # answers have several lines and end with a blank one, in all datasets
    domain: str = "reasoning_gym_mixture"

    def faults(self) -> list[str]:
        """Return one error message for each setting out of its range."""
        faults = [] if self.datasets else ["datasets = {}; expected names of reasoning-gym with weights"]
        for name, wanted in self.datasets.items():
            weight = wanted.get("weight") if isinstance(wanted, dict) else wanted
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < float("inf"):
                faults.append(f"datasets[{name!r}] = {wanted!r}; expected a weight > 0, or a dict that holds one")
        both = sorted({"multiline", "dataset"} & {key for one in self._own() for key in one})
        return faults + [f"{key} is set for a single dataset; expected it in the mixture's settings" for key in both]

    def _own(self) -> list[dict[str, Any]]:
        return [self.shared, *(one for one in self.datasets.values() if isinstance(one, dict))]


class ReasoningGymMixture(gymnasium.Env[str, str]):
    """A `gymnasium.Env` with questions of several datasets.

    Invariant: a prompt id is the inner environment's, which names its dataset, so weights do not change questions.
    """

    metadata: dict[str, Any] = {"render_modes": []}

    def __init__(self, env_config: Mapping[str, Any] | None = None):
        self.observation_space = text.TextSpace()
        self.action_space = text.TextSpace()
        settings = read_settings(ReasoningGymMixtureSettings, env_config, type(self).__name__)
        self.settings: ReasoningGymMixtureSettings = settings
        self.domain = settings.domain
        self.worlds: dict[str, ReasoningGym] = {}
        self.weights: dict[str, float] = {}
        for name, wanted in settings.datasets.items():
            own = dict(wanted) if isinstance(wanted, dict) else {"weight": wanted}
            self.weights[name] = float(own.pop("weight"))
            merged = {**settings.shared, **own, "dataset": name, "multiline": settings.multiline}
            self.worlds[name] = ReasoningGym(merged)
        self.stop_strings = next(iter(self.worlds.values())).stop_strings
        self._world: ReasoningGym | None = None

    @property
    def system_prompt(self) -> str:
        """Return the system prompt of the episode under way."""
        return self._world.system_prompt if self._world is not None else ""

    @property
    def num_questions(self) -> int:
        """Return the exact number of distinct questions in the pools, without the shots."""
        return sum(world.num_questions for world in self.worlds.values())

    def prompt_ids(self, split: str, seed: int) -> Iterator[str]:
        """Yield the prompt ids of `split`, each question once, the datasets drawn by weight.

        Args:
            split: "train" or "heldout"; the two share no question, whatever the seeds
            seed: of the order
        """
        text.check_split(split)
        left = {name: world.prompt_ids(split, seed) for name, world in self.worlds.items()}
        generator = random.Random(f"{split}:{seed}")
        while left:
            (name,) = generator.choices(list(left), [self.weights[one] for one in left])
            prompt_id = next(left[name], None)
            if prompt_id is None:
                del left[name]
            else:
                yield prompt_id

    def domain_of(self, prompt_id: str) -> str:
        """Return the dataset of a prompt."""
        return self._of(prompt_id).domain

    def split_of(self, prompt_id: str) -> str:
        """Return "train", "heldout" or "shots"."""
        return self._of(prompt_id).split_of(prompt_id)

    def question(self, prompt_id: str) -> Question:
        """Return the question of `prompt_id`."""
        return self._of(prompt_id).question(prompt_id)

    def gold_turns(self, prompt_id: str) -> list[str]:
        """Return the turns that earn reward 1."""
        return self._of(prompt_id).gold_turns(prompt_id)

    def vote(self, prompt_id: str, turns: Sequence[str]) -> str | None:
        """Return the final answer of an episode; see `QuestionWorld.vote`."""
        return self._of(prompt_id).vote(prompt_id, turns)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Ask a question and return the transcript so far; see `QuestionWorld.reset`."""
        super().reset(seed=seed)
        options = dict(options or {})
        if options.get("prompt_id") is None and not options.get("history"):
            drawn = next(self.prompt_ids("train", int(self.np_random.integers(2**31))), None)
            if drawn is None:
                raise ValueError("the mixture has no training question; expected larger pools")
            options["prompt_id"] = drawn
        self._world = self._of(options["prompt_id"]) if options.get("prompt_id") is not None else None
        first = next(iter(self.worlds.values()))
        return (self._world or first).reset(options=options)  # the inner environment validates the options

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Pass one turn to the dataset's environment."""
        if self._world is None:
            raise ResetNeeded("step was called on an episode that has not begun; call reset first")
        return self._world.step(action)

    def _of(self, prompt_id: str) -> ReasoningGym:
        try:
            parts = json.loads(prompt_id)
        except (TypeError, ValueError, RecursionError):
            parts = None
        name = parts.get("dataset") if isinstance(parts, dict) else None
        if not isinstance(name, str) or name not in self.worlds:
            raise ValueError(f"prompt_id = {prompt_id!r}; expected one that names one of {', '.join(self.worlds)}")
        return self.worlds[name]
