"""Evaluation on the training engines: greedy accuracy, pass@k and self-iteration on held-out prompts, and on a pool.

Evaluation samples from a separate random stream, and training reseeds each iteration, so evaluation
never changes the samples of training.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, Unpack

import numpy as np
from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS, EPISODE_RETURN_MEAN, NUM_EPISODES

from rllib_srl.algorithm.answers import answer_diversity, corrections, iteration_gain
from rllib_srl.algorithm.config import SRLConfig
from rllib_srl.common.environments import Environment
from rllib_srl.common.statistics import pass_at_k, pass_hat_k, wilson_interval
from rllib_srl.curriculum.prompts import PromptSource
from rllib_srl.rollout.batches import PlayOptions, RunnerBatch
from rllib_srl.types import GroupMeta, Prompt


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
        `by_domain/<domain>/num_prompts` (without the lost ones), and the metrics of `beyond_greedy`.
    """
    prompts = source.heldout(config.evaluation_duration)
    greedy = list(play(prompts, "greedy", **greedily(config)))
    groups = [group for batch in greedy for group in batch.groups]
    results = summary(groups, len(prompts))
    return results | beyond_greedy(config, source, play, prompts, greedy)[0]


def evaluate_pool(config: SRLConfig, source: PromptSource, play: Play) -> tuple[dict[str, Any], list[GroupMeta]]:
    """Evaluate greedily on the pool itself: the training prompts of environments that list them (`pool_ids`).

    They are graded by right answers, even where training uses a wrong one.

    Returns:
        The metrics of `summary`, {} if no environment lists a pool, and the groups that were played.
    """
    prompts = source.measured_pool()
    if not prompts:
        return {}, []
    groups = [group for batch in play(prompts, "pool", **greedily(config)) for group in batch.groups]
    return summary(groups, len(prompts)), groups


def refuse_without_pool(environments: Mapping[str, Environment]) -> None:
    """Check that an environment lists its own prompts for measurement.

    Raises:
        ValueError: none does.
    """
    if not any(hasattr(env.unwrapped, "pool_ids") for env in environments.values()):
        named = ", ".join(map(repr, environments))
        have = f"environment {named} has" if len(environments) == 1 else f"environments {named} have"
        raise ValueError(
            f"{have} no pool to evaluate; expected 'pool', 'recall' or another environment that lists its training "
            "prompts with right answers (pool_ids)"
        )


SINGLE: PlayOptions = {"as_groups": False, "num_transcripts": 0}


def greedily(config: SRLConfig) -> PlayOptions:
    """Return the options of `SRL.play` for greedy answers; with their text if self-iteration needs it."""
    options: PlayOptions = {"group_size": 1, "temperature": 0.0, **SINGLE}
    return {**options, "with_answers": True} if config.evaluation_iterations else options


def beyond_greedy(
    config: SRLConfig, source: PromptSource, play: Play, prompts: Sequence[Prompt], greedy: Sequence[RunnerBatch]
) -> tuple[dict[str, float], list[GroupMeta]]:
    """Return metrics that need more than one answer per prompt, and the groups that were played for them.

    With `evaluation_pass_k` = k sampled answers: `pass_at_1`, `pass_at_k` (one of k is right), `pass_hat_k` (all k
    are right) and `answer_diversity` (two of them differ). With `evaluation_iterations` = K greedy answers, each
    improving the previous one: `iteration_gain` (mean reward of the last minus the first answer), `net_corrections`
    (chains that turn a wrong answer right, minus the reverse) and `num_chains`, the number of chains.

    Raises:
        ValueError: no environment supports self-iteration, or an episode took several turns.
    """
    figures: dict[str, float] = {}
    played: list[GroupMeta] = []
    if k := config.evaluation_pass_k:
        options: PlayOptions = {"group_size": k, "with_answers": True, **SINGLE}
        batches = list(play(prompts, "pass@k", **options))
        sampled = [group for batch in batches for group in batch.groups]
        answers = [answers for batch in batches for answers in batch.answers.values()]
        figures |= {"pass_at_1": _mean_pass(sampled, 1, pass_at_k), "pass_at_k": _mean_pass(sampled, k, pass_at_k)}
        figures |= {"pass_hat_k": _mean_pass(sampled, k, pass_hat_k), "answer_diversity": diversity_of(answers)}
        played += sampled
    if num := config.evaluation_iterations:
        can_iterate = source.iterating(prompts, num)
        chains, is_right, more = _chains(play, greedily(config), can_iterate, greedy, num)
        figures |= figures_of_chains(chains, is_right)
        played += more
    return figures, played


def diversity_of(answers: Sequence[Sequence[str]]) -> float:
    """Return the mean over prompts of the probability that two answers differ, whitespace ignored."""
    found = [answer_diversity([" ".join(text.split()) for text in of_prompt]) for of_prompt in answers]
    known = [value for value in found if not np.isnan(value)]
    return float(np.mean(known)) if known else float("nan")


def figures_of_chains(reward_AK: np.ndarray, is_right_AK: np.ndarray) -> dict[str, float]:
    """Return gain and net corrections of chains of answers, NaN without any chain; see `beyond_greedy`.

    Args:
        reward_AK: rewards of each chain.
        is_right_AK: whether each answer is right.
    """
    if not len(reward_AK):
        return {"iteration_gain": float("nan"), "net_corrections": float("nan"), "num_chains": 0}
    gain, net = float(iteration_gain(reward_AK)[-1]), corrections(is_right_AK).net
    return {"iteration_gain": gain, "net_corrections": net, "num_chains": len(reward_AK)}


def _chains(
    play: Play, options: PlayOptions, prompts: Sequence[Prompt], greedy: Sequence[RunnerBatch], num: int
) -> tuple[np.ndarray, np.ndarray, list[GroupMeta]]:
    """Return rewards [A, num + 1] and correctness [A, num + 1] of the completed chains, and all groups played."""
    steps_of: dict[str, list[tuple[float, bool]]] = {}  # by the key of the first prompt
    played: list[GroupMeta] = []
    asked: dict[str, tuple[Prompt, tuple[str, ...]]]  # first prompt and its answers so far
    asked = {prompt.key: (prompt, ()) for prompt in prompts}
    for step in range(num + 1):
        steps = {key: replace(p, history=h, step="improve" if h else "") for key, (p, h) in asked.items()}
        keys = {prompt.key: key for key, prompt in steps.items()}
        batches = greedy
        if step:
            batches = list(play(list(steps.values()), f"iteration {step}", **options))
            played += [group for batch in batches for group in batch.groups]
        found = [(group, batch.answers[group.group_id][0]) for batch in batches for group in batch.groups]
        going: dict[str, tuple[Prompt, tuple[str, ...]]] = {}
        for group, answer in found:
            if (key := keys.get(group.prompt.key)) is None:
                continue
            if group.num_turns_G[0] > 1:
                raise ValueError(f"{group.prompt.env_id} [{group.prompt.prompt_id}] took {group.num_turns_G[0]} turns; "
                                 f"expected one turn, as evaluation_iterations = {num} requires")  # fmt: skip
            steps_of.setdefault(key, []).append((float(group.rewards_G[0]), bool(group.is_right_G()[0])))
            going[key] = (asked[key][0], (*asked[key][1], answer))
        asked = going
    whole = np.array([steps_of[key] for key in asked], np.float64).reshape(len(asked), num + 1, 2)
    return whole[..., 0], whole[..., 1].astype(bool), played


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
