"""What an iteration leaves behind: metrics for RLlib, transcripts for people.

Every name is explained in docs/metrics.md. Counts of groups and episodes add up:
    prompts played = groups with signal + groups without + groups dropped
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    EPISODE_LEN_MEAN,
    EPISODE_RETURN_MEAN,
    NUM_AGENT_STEPS_SAMPLED_LIFETIME,
    NUM_ENV_STEPS_SAMPLED,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    NUM_EPISODES_LIFETIME,
)
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger
from tensorboardX import SummaryWriter

from rllib_srl.advantages import has_signal
from rllib_srl.engine.canary import CanaryGap
from rllib_srl.env_runner import RunnerBatch
from rllib_srl.replay.client import Memory
from rllib_srl.replay.no_memory import NoMemory
from rllib_srl.replay.realised import age_counts, counts_of, shares_of, visit_counts
from rllib_srl.replay.visits import Visit
from rllib_srl.types import GroupMeta, StopReason

logger = logging.getLogger(__name__)

REPLAY_RESULTS = "replay"
TRANSCRIPTS = "transcripts.jsonl"


class Report:
    """Writes metrics and transcripts of one run.

    Invariant: each call to `iteration` logs every name, so that a count of zero is a zero and not a gap.
    """

    def __init__(self, metrics: MetricsLogger, directory: Path) -> None:
        """Log to RLlib's `metrics`, and write files into `directory`."""
        self._metrics, self._directory = metrics, directory
        self._writer: SummaryWriter | None = None

    def iteration(
        self,
        iteration: int,
        batches: Sequence[RunnerBatch],
        groups: Sequence[GroupMeta],
        advantages: Sequence[np.ndarray],
    ) -> None:
        """Log what was played and learned from in one iteration."""
        for batch in batches:
            if batch.metrics:
                self._metrics.aggregate([batch.metrics], key=ENV_RUNNER_RESULTS)
            for line in batch.errors:
                self.warn(f"an episode was lost: {line}")
        rewards = np.concatenate([group.rewards_G for group in groups]) if groups else np.zeros(0)
        tokens = int(sum(group.num_loss_tokens_G.sum() for group in groups))
        with_signal = [has_signal(group.rewards_G) for group in groups]
        self._value(EPISODE_RETURN_MEAN, float(rewards.mean()) if len(rewards) else float("nan"))
        self._value(EPISODE_LEN_MEAN, float(np.mean([n for g in groups for n in g.lengths_G])) if groups else 0.0)
        self._value("num_groups", len(groups))
        self._value("num_groups_with_signal", sum(with_signal))
        self._value("num_groups_without_signal", len(groups) - sum(with_signal))
        self._value("num_groups_dropped", sum(batch.num_dropped_groups for batch in batches))
        self._value("num_generated_tokens", tokens)
        self._value("num_generated_tokens_lifetime", tokens, reduce="lifetime_sum")
        for name in ("play_s", "engine_s", "environment_s"):
            self._value(name, max((batch.seconds.get(name, 0.0) for batch in batches), default=0.0))
        self._reasons(batches)
        self._lifetimes(len(rewards), sum(batch.num_turns for batch in batches))
        self._age(groups, batches)
        self._transcripts(iteration, batches, groups, advantages)

    def memory(
        self,
        memory: Memory | NoMemory,
        groups: Sequence[GroupMeta],
        reused: Sequence[GroupMeta],
        visits: Mapping[str, Visit],
        now: int,
    ) -> None:
        """Log what the memory did in one iteration, intended against realised."""
        if not memory.num_shards:
            return
        counts = counts_of([*groups, *reused])
        memory.counts.update(counts)
        grades = [visit.grade for visit in visits.values() if visit.grade]
        values = {
            **memory.stats(now),
            **counts,
            **shares_of(memory.counts),
            **visit_counts(visits.values()),
            **age_counts(reused, now),
            "revisit_share_intended": memory.settings.revisit_fraction,
            "reuse_share_intended": memory.settings.reuse_fraction,
            "grade_mean": float(np.mean(grades)) if grades else float("nan"),
        }
        for name, value in values.items():
            self._metrics.log_value((REPLAY_RESULTS, name), value, reduce="mean", window=1)

    def sync(self, gap: CanaryGap | None, version: int, seconds: Mapping[str, float]) -> None:
        """Log how far engines and learner are apart after a sync (None: no engine answered), and its times."""
        for name, value in seconds.items():
            self._metrics.log_value(("weight_sync", name), value, reduce="mean", window=1)
        if gap is not None:
            self._metrics.log_value(("weight_sync", "canary_mean"), gap.mean, reduce="mean", window=1)
            self._metrics.log_value(("weight_sync", "canary_max"), gap.max, reduce="mean", window=1)
        self._metrics.log_value(("weight_sync", "version"), version, reduce="mean", window=1)

    def count(self, name: str, number: int) -> None:
        """Add to a lifetime count."""
        self._metrics.log_value(name, number, reduce="lifetime_sum")

    def warn(self, line: str) -> None:
        """Say something once, where the user sees it."""
        logger.warning(line)

    def close(self) -> None:
        """Flush what is open."""
        if self._writer is not None:
            self._writer.close()

    def _value(self, name: str, value: float, reduce: str | None = None) -> None:
        how = {"reduce": reduce} if reduce else {"reduce": "mean", "window": 1}
        self._metrics.log_value((ENV_RUNNER_RESULTS, name), value, **how)

    def _reasons(self, batches: Sequence[RunnerBatch]) -> None:
        counts: Counter = Counter()
        for batch in batches:
            counts.update(batch.stop_reasons)
        for reason in StopReason:
            self._value(f"stop_reason/{reason.value}", counts.get(reason.value, 0))
        self._value("num_episodes_lost", sum(n for name, n in counts.items() if StopReason(name).is_infrastructure))

    def _lifetimes(self, num_episodes: int, num_steps: int) -> None:
        self._metrics.log_value((ENV_RUNNER_RESULTS, NUM_EPISODES_LIFETIME), num_episodes, reduce="lifetime_sum")
        self._metrics.log_value((ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED), num_steps, reduce="sum")
        self._metrics.log_value((ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME), num_steps, reduce="lifetime_sum")
        per_agent = {"default_agent": num_steps}
        for agent, steps in per_agent.items():
            key = (ENV_RUNNER_RESULTS, NUM_AGENT_STEPS_SAMPLED_LIFETIME, agent)
            self._metrics.log_value(key, steps, reduce="lifetime_sum")

    def _age(self, groups: Sequence[GroupMeta], batches: Sequence[RunnerBatch]) -> None:
        newest = max((batch.version for batch in batches), default=0)
        ages = [newest - int(group.versions_G2.min()) for group in groups]
        self._value("version_age_max", max(ages, default=0))

    def _transcripts(
        self,
        iteration: int,
        batches: Sequence[RunnerBatch],
        groups: Sequence[GroupMeta],
        advantages: Sequence[np.ndarray],
    ) -> None:
        by_group = {g.group_id: (g, a) for g, a in zip(groups, advantages, strict=True)}
        lines = [self._line(iteration, t, by_group) for batch in batches for t in batch.transcripts]
        if not lines:
            return
        with (self._directory / TRANSCRIPTS).open("a", encoding="utf-8") as stream:
            stream.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        if self._writer is None:
            self._writer = SummaryWriter(str(self._directory))
        text = "".join(turn["text"] for turn in lines[0]["turns"])
        self._writer.add_text("transcript", f"reward {lines[0]['reward']:g}\n\n```\n{text}\n```", iteration)

    @staticmethod
    def _line(iteration: int, transcript: dict[str, Any], by_group: dict[str, Any]) -> dict[str, Any]:
        group, advantage_G = by_group.get(transcript["group_id"], (None, None))
        # Lost episodes are not in the group, so an index alone would point at a neighbour's advantage.
        is_whole = group is not None and group.num_dropped == 0
        advantage = float(advantage_G[transcript["index"]]) if is_whole else None
        return {"iteration": iteration, **transcript, "advantage": advantage, "origin": group.origin if group else None}
