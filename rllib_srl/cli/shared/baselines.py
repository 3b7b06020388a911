"""Baselines of an accuracy without a model: the majority answer and guessing.

The majority answer is the most frequent gold answer among training prompts; it is played on the held-out
prompts and graded by the environment itself. Chance is the environment's attribute `chance`, the expected accuracy of
a well-formed guess.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from rllib_srl.curriculum.prompts import prompts_of
from rllib_srl.rollout.replies import attribute, reset, step
from rllib_srl.types import RIGHT, Prompt, passed

if TYPE_CHECKING:
    from rllib_srl.algorithm.config import SRLConfig

NUM_TRAINING_PROMPTS = 5000  # sample for counting the majority answer


@dataclass(frozen=True)
class Baselines:
    """Accuracies on the same held-out prompts. Invariant: None if an environment does not provide one."""

    majority: float | None
    majority_answers: dict[str, str]  # environment id -> the answer
    chance: float | None


def baselines(config: SRLConfig, prompts: Sequence[Prompt], seed: int) -> Baselines:
    """Play the majority answer of each environment on its held-out prompts, and average the environments' chances."""
    creators, env_configs = config.env_creators(), config.env_configs()
    envs = {env_id: creators[env_id](env_configs[env_id]) for env_id in {prompt.env_id for prompt in prompts}}
    answers = {env_id: majority_turns(env, seed) for env_id, env in envs.items()}
    chances = {env_id: getattr(env.unwrapped, "chance", None) for env_id, env in envs.items()}
    right = [_is_right(envs[p.env_id], p, turns) for p in prompts if (turns := answers[p.env_id]) is not None]
    known = [chance for p in prompts if (chance := chances[p.env_id]) is not None]
    return Baselines(
        majority=sum(right) / len(right) if prompts and len(right) == len(prompts) else None,
        majority_answers={env_id: "".join(turns).strip() for env_id, turns in answers.items() if turns is not None},
        chance=sum(known) / len(known) if prompts and len(known) == len(prompts) else None,
    )


def majority_turns(env: Any, seed: int) -> tuple[str, ...] | None:
    """Return the most frequent gold turns among training prompts; None if the environment has no gold turns."""
    plain = env.unwrapped
    if not hasattr(plain, "gold_turns") or not hasattr(plain, "prompt_ids"):
        return None
    ids = islice(prompts_of(env, "train", seed), NUM_TRAINING_PROMPTS)
    counts = Counter(tuple(plain.gold_turns(prompt_id)) for prompt_id in ids)
    counts.pop((), None)  # prompts without a right answer, which a reward function grades
    # Ties are broken by the text, so that every run returns the same.
    return min(counts, key=lambda turns: (-counts[turns], turns)) if counts else None


def played(env: Any, prompt: Prompt, turns: Sequence[str]) -> float:
    """Return the sum of rewards of an episode with these turns."""
    reset(env, prompt)
    total = 0.0
    for turn in turns:
        reply = step(env, turn)
        total += reply.reward
        if reply.is_terminated or reply.is_truncated:
            break
    return total


def _is_right(env: Any, prompt: Prompt, turns: Sequence[str]) -> bool:
    rewards = np.array([played(env, prompt, turns)], np.float32)
    return bool(passed(rewards, attribute(env, "pass_reward", None), RIGHT)[0])


def rows_of(reference: Baselines) -> Iterator[tuple[str, str]]:
    named = ", ".join(repr(answer) for answer in reference.majority_answers.values())
    majority = f"majority answer{f' ({named})' if named and len(named) < 30 else ''}"
    for name, accuracy in ((majority, reference.majority), ("chance", reference.chance)):
        yield name, "-" if accuracy is None else f"{accuracy:.3f}"
