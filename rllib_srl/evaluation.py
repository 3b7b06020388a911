"""Held-out prompts on the training engines: greedy accuracy, and pass@k.

Evaluation's sampling has a random stream of its own, and training reseeds each iteration, so that
evaluating or not never changes what training samples.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from ray.rllib.callbacks.utils import make_callback
from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS, EPISODE_RETURN_MEAN, NUM_EPISODES

from rllib_srl.statistics import pass_at_k, wilson_interval
from rllib_srl.types import GroupMeta

if TYPE_CHECKING:
    from rllib_srl.srl import SRL

RIGHT = 0.999  # a reward of at least this counts as a right answer


def evaluate(algo: SRL) -> dict[str, Any]:
    """Play `evaluation_duration` held-out prompts.

    Returns:
        Under RLlib's "env_runners": `episode_return_mean`, `num_episodes`; beside it `accuracy` (share of right
        greedy answers) with `accuracy_low` and `accuracy_high` (95 % Wilson interval), `num_prompts`,
        `num_lost` (episodes that infrastructure ended), `by_domain/<domain>/accuracy`, and with
        `evaluation_pass_k` = k `pass_at_1` and `pass_at_k` of k sampled answers a prompt.
    """
    config = algo.config
    _callback(algo, "on_evaluate_start")
    prompts = algo.source.heldout(config.evaluation_duration)
    single = {"as_groups": False, "num_transcripts": 0}
    greedy = [g for b in algo.play(prompts, "greedy", group_size=1, temperature=0.0, **single) for g in b.groups]
    results = summary(greedy, len(prompts))
    if config.evaluation_pass_k:
        k = config.evaluation_pass_k
        sampled = [g for b in algo.play(prompts, "pass@k", group_size=k, **single) for g in b.groups]
        results |= {"pass_at_1": _pass(sampled, 1), "pass_at_k": _pass(sampled, k)}
    _callback(algo, "on_evaluate_end", evaluation_metrics=results)
    return results


def summary(groups: Sequence[GroupMeta], num_prompts: int) -> dict[str, Any]:
    """Summarise greedy episodes, one a prompt; see `evaluate`."""
    rewards = np.array([group.rewards_G[0] for group in groups], np.float64)
    is_right = rewards >= RIGHT
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
        "by_domain": {domain: {"accuracy": float(np.mean(right))} for domain, right in sorted(by_domain.items())},
    }


def _pass(groups: Sequence[GroupMeta], k: int) -> float:
    counts = [(len(g.rewards_G), int((g.rewards_G >= RIGHT).sum())) for g in groups if len(g.rewards_G) >= k]
    return float(np.mean([pass_at_k(n, right, k) for n, right in counts])) if counts else float("nan")


def _callback(algo: SRL, name: str, **kwargs: Any) -> None:
    make_callback(
        name,
        algo.callbacks,
        getattr(algo.config, f"callbacks_{name}"),
        kwargs={"algorithm": algo, "metrics_logger": algo.metrics, **kwargs},
    )
