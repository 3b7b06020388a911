"""Logs each iteration: metrics to RLlib, transcripts to files.

All metrics are explained in docs/metrics.md. The counts of groups add up:
    prompts played = groups with variance + zero-variance groups + groups dropped
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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

from rllib_srl.algorithm.zero_variance import ZeroVarianceGroups
from rllib_srl.batch.advantages import AdvantageBatch, AdvantageEstimator, has_variance
from rllib_srl.batch.posterior import predicted
from rllib_srl.engine.canary import CanaryGap
from rllib_srl.replay.admission import detector_of, redact_turns
from rllib_srl.replay.client import ReplayClient
from rllib_srl.replay.intake import Visit
from rllib_srl.replay.metrics import by_domain
from rllib_srl.rollout.batches import RunnerBatch
from rllib_srl.rollout.episodes import MAX_SHOWN_ANSWERS
from rllib_srl.storage.disk import append
from rllib_srl.storage.event_file import EventFile
from rllib_srl.storage.paths import TRANSCRIPTS
from rllib_srl.types import GroupMeta, StopReason

logger = logging.getLogger(__name__)
stages = logging.getLogger("rllib_srl.stages")  # a line at the end of each stage of a stream

REPLAY_RESULTS = "replay"
ROLLOUT_RESULTS = "rollout"
# Number of batches without any reward at the start of a run after which a warning shows sample answers. One such batch
# may be chance; a wrong answer format or a broken grader should be visible before hours are spent.
NUM_UNREWARDED_BATCHES = 2
NUM_SHOWN_LOSSES = 4  # per iteration
ORIGINS = ("fresh", "revisit", "reuse")  # of groups


class Report:
    """Writes metrics and transcripts of one run.

    Invariant: each call to `iteration` logs every metric, so a count of zero is logged as zero, not left out.
    """

    def __init__(self, metrics: MetricsLogger, directory: Path, admit: Any = "secrets") -> None:
        """Log to RLlib's `metrics`, and write files into `directory`.

        Args:
            metrics: the algorithm's metrics logger.
            directory: an existing directory.
            admit: the setting `replay_admit`; transcripts are redacted if "secrets" or "credentials" is in it.
        """
        self._metrics, self._directory = metrics, directory
        self._detector = detector_of(admit)
        self._writer: EventFile | None = None
        self._num_unrewarded = 0  # batches without any reward
        self._has_warned_of_late_groups = False
        self._zero_variance = ZeroVarianceGroups()
        self._domains: dict[str, dict[str, float]] = {}  # metrics of the memory by domain, after the last iteration

    @property
    def writer(self) -> EventFile:
        """The only TensorBoard event file of this process: TensorBoard hides some of several in a directory."""
        if self._writer is None:
            self._writer = EventFile(self._directory)
        return self._writer

    def iteration(
        self,
        iteration: int,
        batches: Sequence[RunnerBatch],
        groups: Sequence[GroupMeta],
        advantages: Sequence[np.ndarray],
    ) -> None:
        """Log the rollouts of one iteration and write its transcripts."""
        for batch in batches:
            if batch.metrics:
                self._metrics.aggregate([batch.metrics], key=ENV_RUNNER_RESULTS)
        rewards = np.concatenate([np.zeros(0), *(group.rewards_G for group in groups if group.has_reward_G is None)])
        tokens = int(sum(group.num_loss_tokens_G.sum() for group in groups))
        with_variance = [has_variance(group.rewards_G) for group in groups]
        self._value(EPISODE_RETURN_MEAN, float(rewards.mean()) if len(rewards) else float("nan"))
        self._value(EPISODE_LEN_MEAN, float(np.mean([n for g in groups for n in g.lengths_G])) if groups else 0.0)
        self._value("num_groups", len(groups))
        self._value("num_groups_with_variance", sum(with_variance))
        self._value("num_groups_zero_variance", len(groups) - sum(with_variance))
        self._value("num_groups_dropped", sum(batch.num_dropped_groups for batch in batches))
        self._value("num_generated_tokens", tokens)
        self._value("num_generated_tokens_lifetime", tokens, reduce="lifetime_sum")
        for name in ("play_s", "engine_s", "environment_s"):
            self._value(name, max((batch.seconds.get(name, 0.0) for batch in batches), default=0.0))
        self._value("num_unparsed", sum(batch.num_unparsed for batch in batches))
        self._reward_parts(batches)
        self._warn_of_zero_rewards(iteration, rewards, batches)
        self._warn_of_losses([line for batch in batches for line in batch.errors])
        self._reasons(batches)
        self._lifetimes(sum(len(group.rewards_G) for group in groups), sum(batch.num_turns for batch in batches))
        self._age(groups, batches)
        self._transcripts(iteration, batches, groups, advantages)

    def memory(
        self,
        memory: ReplayClient,
        groups: Sequence[GroupMeta],
        reused: Sequence[GroupMeta],
        trained: Sequence[GroupMeta],
        visits: Mapping[str, Visit],
        now: int,
    ) -> None:
        """Log the memory's work in one iteration, with intended and realised shares.

        Args:
            memory: the run's memory.
            groups: played groups.
            reused: stored groups that were drawn.
            trained: the groups of both kinds that are trained on.
            visits: the memory's visits of the played groups, by group id.
            now: the training iteration.
        """
        if not memory.is_on:
            return
        counts = counts_of([*groups, *reused], trained)
        memory.counts.update(counts)
        graded = [g for g in groups if g.origin == "revisit" and g.has_reward_G is None]
        revisits = [visits[group.group_id].pass_rate for group in graded if group.group_id in visits]
        values = {
            **memory.stats(now),
            **counts,
            **shares_of(memory.counts),
            "revisit_share_intended": memory.revisit_fraction,
            "reuse_share_intended": memory.reuse_fraction,
            "revisit_pass_rate": float(np.mean(revisits)) if revisits else float("nan"),
        }
        if memory.settings.reads_recall:
            grades = [visit.grade for visit in visits.values() if visit.grade]
            values["num_lapses"] = sum(visit.is_lapse for visit in visits.values())
            values["grade_mean"] = float(np.mean(grades)) if grades else float("nan")
        for name, value in values.items():
            if not name.startswith("domains/"):
                key = tuple(name.split("/")) if "/" in name else (REPLAY_RESULTS, name)  # ratings/...
                self._metrics.log_value(key, value, reduce="mean", window=1)
        self._domains = by_domain(values)
        for domain, of_domain in self._domains.items():
            for name, value in of_domain.items():
                self._metrics.log_value(("domains", domain, name), value, reduce="mean", window=1)

    def retention(
        self, values: Mapping[str, float], by_domain: Mapping[str, Mapping[str, float]], warnings: Sequence[str]
    ) -> None:
        """Log the stored answers that an update held."""
        for line in warnings:
            self.warn(line)
        rows: list[tuple[tuple[str, ...], float]] = [(("retention", name), value) for name, value in values.items()]
        for domain, of_domain in by_domain.items():
            rows += [(("retention", "by_domain", domain, name), value) for name, value in of_domain.items()]
        for key, value in rows:
            self._metrics.log_value(key, value, reduce="mean", window=1)

    def stages(self, ended: Sequence[str]) -> None:
        """Log, for each domain whose stage ended, what the memory holds and how often it was drawn."""
        for domain in ended:
            if of := {name: int(num) for name, num in self._domains.get(domain, {}).items()}:
                stages.info(
                    f"stage of {domain} ended: {of['num_items']} prompts and {of['num_stored_groups']} groups stored; "
                    f"{of['num_groups']} groups played, {of['num_groups_zero_variance']} of them of equal rewards; "
                    f"{of['num_revisits']} revisits, {of['num_reuses']} reuses"
                )

    def trained(
        self,
        groups: Sequence[GroupMeta],
        batch: AdvantageBatch,
        visits: Mapping[str, Visit],
        estimator: AdvantageEstimator,
    ) -> None:
        """Log how many played groups are trained on and, with a memory, how well history predicted their rewards."""
        played = {group.group_id for group in groups}
        num_live = sum(int(g.num_loss_tokens_G.sum()) for g in batch.groups if g.group_id in played)
        num_tokens = sum(int(group.num_loss_tokens_G.sum()) for group in groups)
        self._value("live_token_share", num_live / num_tokens if num_tokens else float("nan"))
        if not visits:
            return
        weight = estimator.settings.prior_weight
        surprises = [
            np.abs(group.rewards_G - predicted(visits[group.group_id].history, weight))
            for group in groups
            if group.group_id in visits and group.has_reward_G is None
        ]
        mean = float(np.concatenate(surprises).mean()) if surprises else float("nan")
        self._metrics.log_value((REPLAY_RESULTS, "surprise_mean"), mean, reduce="mean", window=1)

    def pool(self, groups: Sequence[GroupMeta], pass_reward: float, rule: str) -> None:
        """Warn once if choosing among the run's prompts can gain little; see `zero_variance.py`.

        Args:
            groups: the played groups.
            pass_reward: the lowest reward of a success, unless the environment defines its own.
            rule: the advantage rule.
        """
        self._zero_variance.count(groups, pass_reward)
        if line := self._zero_variance.warning(rule):
            self.warn(line)

    def ahead(self, lags: Sequence[int], num_late: int, num_dropped_tokens: int) -> None:
        """Log rollouts that are ahead of training.

        Args:
            lags: updates between the start of each group and its training.
            num_late: groups with more lag than `max_lag`.
            num_dropped_tokens: generated tokens of late groups that are never trained on.
        """
        values = {
            "lag_mean": float(np.mean(lags)) if lags else float("nan"),
            "lag_max": max(lags, default=0),
            "late_share": num_late / len(lags) if lags else 0.0,
        }
        for name, value in values.items():
            self._metrics.log_value((ROLLOUT_RESULTS, name), value, reduce="mean", window=1)
        self.count("num_tokens_dropped_late", num_dropped_tokens)

    def warn_of_late_groups(self, num: int) -> None:
        """Warn once that late groups are stored and never trained on."""
        if not self._has_warned_of_late_groups:
            self._has_warned_of_late_groups = True
            self.warn(
                f"late groups ({num} so far) lag more than max_lag updates. They are graded and stored, but never "
                "trained on, as replay_reuse_fraction is 0: set it above 0, such as 0.25, raise max_lag, or set "
                "late = 'drop'"
            )

    def sync(self, gap: CanaryGap | None, version: int, seconds: Mapping[str, float]) -> None:
        """Log a weight sync: the canary's log-prob gap between engines and learner (None: no answer) and timings."""
        for name, value in seconds.items():
            self._metrics.log_value(("weight_sync", name), value, reduce="mean", window=1)
        if gap is not None:
            self._metrics.log_value(("weight_sync", "canary_mean"), gap.mean, reduce="mean", window=1)
            self._metrics.log_value(("weight_sync", "canary_max"), gap.max, reduce="mean", window=1)
        self._metrics.log_value(("weight_sync", "version"), version, reduce="mean", window=1)

    def count(self, name: str, number: int) -> None:
        """Add to a lifetime count."""
        self._metrics.log_value(name, number, reduce="lifetime_sum")

    def _warn_of_losses(self, lines: Sequence[str]) -> None:
        for line in lines[:NUM_SHOWN_LOSSES]:
            self.warn(f"an episode was lost: {line}")
        if (num_more := len(lines) - NUM_SHOWN_LOSSES) > 0:
            self.warn(f"{num_more} more episodes of this iteration were lost; num_episodes_lost counts them")

    def warn(self, line: str) -> None:
        """Log a warning for the user."""
        logger.warning(line)

    def _value(self, name: str, value: float, reduce: str | None = None) -> None:
        reduction = {"reduce": reduce} if reduce else {"reduce": "mean", "window": 1}
        self._metrics.log_value((ENV_RUNNER_RESULTS, name), value, **reduction)

    def _warn_of_zero_rewards(self, iteration: int, rewards: np.ndarray, batches: Sequence[RunnerBatch]) -> None:
        """Warn once, with sample answers, if no episode of the first `NUM_UNREWARDED_BATCHES` batches has a reward."""
        if len(rewards) and not (rewards > 0).any():
            self._num_unrewarded += 1
        if not self._num_unrewarded == iteration == NUM_UNREWARDED_BATCHES:
            return
        answers = [answer for batch in batches for answer in batch.unpaid][:MAX_SHOWN_ANSWERS]
        if answers:
            lines = [f"answer {a['answer']!r}: parsed {a['parsed']!r}, expected {a['expected']!r}" for a in answers]
            samples = "\n    ".join(lines)
            self.warn(
                f"all rewards of the first {NUM_UNREWARDED_BATCHES} iterations are 0, so nothing is learned. "
                f"{len(answers)} sample answers:\n    {samples}\n  Check that the prompt, max_turn_tokens and the "
                "expected format suit the model; see docs/grading.md."
            )

    def _reward_parts(self, batches: Sequence[RunnerBatch]) -> None:
        for name in sorted({name for batch in batches for name in batch.reward_sums}):
            parts = [batch.reward_sums[name] for batch in batches if name in batch.reward_sums]
            self._value(name, sum(total for total, _ in parts) / sum(number for _, number in parts))

    def _reasons(self, batches: Sequence[RunnerBatch]) -> None:
        counts: Counter[str] = Counter()
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
        append(self._directory / TRANSCRIPTS, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
        text = "".join(turn["text"] for turn in lines[0]["turns"])
        self.writer.add_text("transcript", f"reward {lines[0]['reward']:g}\n\n```\n{text}\n```", iteration)
        self.writer.flush()

    def _line(self, iteration: int, transcript: dict[str, Any], by_group: dict[str, Any]) -> dict[str, Any]:
        group, advantage_G = by_group.get(transcript["group_id"], (None, None))
        # Dropped episodes are missing from the group, so the index would select another episode's advantage.
        is_whole = group is not None and group.num_dropped == 0
        advantage = float(advantage_G[transcript["index"]]) if is_whole else None
        about = {"advantage": advantage, "origin": group.origin if group else None}
        return {"iteration": iteration, **transcript, "turns": self._redacted(transcript["turns"]), **about}

    def _redacted(self, turns: Sequence[dict[str, str]]) -> list[dict[str, str]]:
        if self._detector is None:
            return list(turns)
        texts = redact_turns([turn["text"] for turn in turns], self._detector)
        return [{**turn, "text": text} for turn, text in zip(turns, texts, strict=True)]


def counts_of(groups: Iterable[GroupMeta], trained: Iterable[GroupMeta]) -> Counter[str]:
    """Count by origin: groups and their generated tokens, groups that are trained on and their loss tokens."""
    units = ("groups", "trained", "tokens", "generated")
    counts: Counter[str] = Counter({f"num_{unit}_{origin}": 0 for unit in units for origin in ORIGINS})
    for name, of_tokens, metas in (("groups", "generated", groups), ("trained", "tokens", trained)):
        for group in metas:
            counts[f"num_{name}_{group.origin}"] += 1
            counts[f"num_{of_tokens}_{group.origin}"] += int(group.num_loss_tokens_G.sum())
    return counts


def shares_of(counts: Mapping[str, float]) -> dict[str, float]:
    """Return revisit / (fresh + revisit) and reuse / (fresh + revisit + reuse) of counts over any period, in each unit.

    They are nan where nothing was counted. Each unit can hide a shift that another shows: prompts played (revisits cost
    generation), groups trained on ("trained"), their loss tokens (what trains).
    """
    fractions = {}
    for unit, name in (("groups", "prompts"), ("trained", "trained"), ("tokens", "tokens")):
        fresh, revisit, reuse = (counts.get(f"num_{unit}_{origin}", 0) for origin in ORIGINS)
        played, everything = fresh + revisit, fresh + revisit + reuse
        fractions[f"revisit_share_{name}"] = revisit / played if played else float("nan")
        fractions[f"reuse_share_{name}"] = reuse / everything if everything else float("nan")
    return fractions
