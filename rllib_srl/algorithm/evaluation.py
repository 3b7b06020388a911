"""Evaluation on the training engines: greedy accuracy and pass@k on held-out prompts.

Evaluation samples from a separate random stream, and training reseeds each iteration, so evaluation
never changes the samples of training.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, Unpack

import numpy as np
from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS, EPISODE_RETURN_MEAN, NUM_EPISODES

from rllib_srl.algorithm.config import SRLConfig
from rllib_srl.common.statistics import answer_diversity, pass_at_k, pass_hat_k, wilson_interval
from rllib_srl.curriculum.prompts import PromptSource
from rllib_srl.rollout.batches import PlayOptions, RunnerBatch
from rllib_srl.types import GroupMeta, Prompt

GREEDY: PlayOptions = {"group_size": 1, "temperature": 0.0, "as_groups": False, "num_transcripts": 0}


class Play(Protocol):
    """Plays prompts on the training engines: `SRL.play`."""

    def __call__(
        self, prompts: Sequence[Prompt], stream: str, **options: Unpack[PlayOptions]
    ) -> Iterator[RunnerBatch]:
        """Yield each runner's batch."""


def evaluate(config: SRLConfig, source: PromptSource, play: Play) -> dict[str, Any]:
    """Evaluate on `evaluation_duration` held-out prompts.

    Returns:
        Under RLlib's "env_runners": `episode_return_mean`, `num_episodes`. At the top level: `accuracy` (share of
        greedy answers that are right, by `GroupMeta.is_right_G`) with `accuracy_low` and `accuracy_high` (95 % Wilson
        interval), `num_prompts`, `num_lost` (episodes that infrastructure ended), `by_domain/<domain>/accuracy` and
        `by_domain/<domain>/num_prompts` (without the lost ones), and the metrics of `several_answers`.
    """
    prompts = source.heldout(config.evaluation_duration)
    batches = play(prompts, "greedy", **GREEDY)
    groups = [group for batch in batches for group in batch.groups]
    return summary(groups, len(prompts)) | several_answers(config.evaluation_pass_k, prompts, play)[0]


def several_answers(k: int, prompts: Sequence[Prompt], play: Play) -> tuple[dict[str, float], list[GroupMeta]]:
    """Return the metrics of k sampled answers per prompt, and the groups that were played for them; nothing with k = 0.

    `pass_at_1`, `pass_at_k` (one of k is right), `pass_hat_k` (all k are right), `answer_diversity` (two differ).
    """
    if not k:
        return {}, []
    options: PlayOptions = {"group_size": k, "with_answers": True, "as_groups": False, "num_transcripts": 0}
    batches = list(play(prompts, "pass@k", **options))
    groups = [group for batch in batches for group in batch.groups]
    figures = {
        "pass_at_1": _mean_pass(groups, 1, pass_at_k),
        "pass_at_k": _mean_pass(groups, k, pass_at_k),
        "pass_hat_k": _mean_pass(groups, k, pass_hat_k),
        "answer_diversity": diversity_of([texts for batch in batches for texts in batch.answers.values()]),
    }
    return figures, groups


def diversity_of(answers: Sequence[Sequence[str]]) -> float:
    """Return the mean over prompts of the probability that two answers differ, whitespace ignored."""
    diversities = [answer_diversity([" ".join(text.split()) for text in of_prompt]) for of_prompt in answers]
    known = [value for value in diversities if not np.isnan(value)]
    return float(np.mean(known)) if known else float("nan")


def summary(groups: Sequence[GroupMeta], num_prompts: int) -> dict[str, Any]:
    """Summarise greedy episodes, one per prompt; see `evaluate`."""
    rewards = np.array([group.rewards_G[0] for group in groups], np.float64)
    is_right = np.array([group.is_right_G()[0] for group in groups], bool)
    by_domain: dict[str, list[bool]] = defaultdict(list)
    for group, right in zip(groups, is_right, strict=True):
        by_domain[group.prompt.domain].append(bool(right))
    low, high = wilson_interval(int(is_right.sum()), len(groups)) if len(groups) else (0.0, 1.0)
    return {
        ENV_RUNNER_RESULTS: {
            EPISODE_RETURN_MEAN: float(rewards.mean()) if len(groups) else float("nan"),
            NUM_EPISODES: len(groups),
        },
        "accuracy": float(is_right.mean()) if len(groups) else float("nan"),
        "accuracy_low": low,
        "accuracy_high": high,
        "num_prompts": num_prompts,
        "num_lost": num_prompts - len(groups),
        "by_domain": {
            domain: {"accuracy": float(np.mean(right)), "num_prompts": len(right)}
            for domain, right in sorted(by_domain.items())
        },
    }


def _mean_pass(groups: Sequence[GroupMeta], k: int, estimate: Callable[[int, int, int], float]) -> float:
    counts = [(len(g.rewards_G), int(g.is_right_G().sum())) for g in groups if len(g.rewards_G) >= k]
    return float(np.mean([estimate(n, right, k) for n, right in counts])) if counts else float("nan")
