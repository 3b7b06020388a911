"""One trial of a study: SRL that measures every domain, writes rows, and stops when its budget of tokens is spent.

    before training   rows, stage -1
    iteration         ... until a stage of the stream has generated its tokens
    end of a stage    rows, then a checkpoint; after the last stage: the end line

    tune.Tuner(StudyTrial, param_space={"trial": tune.grid_search([settings of a trial, ...])})

A trial's settings hold "_study": {"directory", "arm", "seed", "settings"}; the study lies in the directory. Where the
directory has a checkpoint of the trial it goes on from there, else it starts anew. Rows reach the disk before the
checkpoint does: what a kill leaves is at most rows that are written again, never a gap.

Held-out prompts depend on the seed alone, so that arms answer the same ones. Tokens and seconds of measuring are
counted apart, and measuring draws from random streams of its own: it changes nothing that is trained.
"""

from __future__ import annotations

import math
import resource
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import ray

from rllib_srl import checkpoints
from rllib_srl.continual.recording import TrialWriter, open_trial
from rllib_srl.continual.results import Row, read_study, read_trial, trial_path
from rllib_srl.continual.study import Study
from rllib_srl.evaluation import RIGHT
from rllib_srl.shard import TrainingShard
from rllib_srl.srl import SRL
from rllib_srl.streams import Stages
from rllib_srl.types import GroupMeta, StopReason

RUNS = "runs"  # in a results directory: checkpoints of trials that are not finished
CONFIG = "trial"  # what Tune varies: all settings of a trial at once
MEASURES = {  # of a row -> metric of the memory
    "median_reviews": "reviews_median",
    "revisit_share": "revisit_share_prompts",
    "reuse_share": "reuse_share_prompts",
    "reuse_share_tokens": "reuse_share_tokens",
    "load_ratio": "load_ratio",
    "observed_recall": "observed_recall_mean",
    "predicted_recall": "predicted_recall_mean",
}


@dataclass
class Spent:
    """What a trial has cost so far; only grows."""

    num_trained_tokens: int = 0
    seconds: float = 0.0
    num_probe_tokens: int = 0
    probe_s: float = 0.0
    peak_bytes: int = 0


class StudyTrial(SRL):
    """An arm with a seed. Invariant: rows on the disk are those of the evaluations up to this iteration."""

    def __init__(self, config: Any = None, **kwargs: Any) -> None:
        """Take a trial's settings, alone or as Tune varies them."""
        super().__init__(_unpacked(config), **kwargs)

    @classmethod
    def default_resource_request(cls, config: Any) -> Any:
        """Say what the trial needs: what SRL does with its settings."""
        return super().default_resource_request(_unpacked(config))

    def setup(self, config: Any) -> None:
        """Start, and go on from the trial's checkpoint where there is one."""
        start = time.perf_counter()
        told = dict(self.config._study)
        self._directory, self._arm, self._seed = Path(told["directory"]), told["arm"], told["seed"]
        self._every, self._num_rehearsed = told.get("checkpoint_every", 0), told.get("num_rehearsed", 0)
        self._told_settings = told.get("settings", {})
        self._spent, self._memory_metrics, self._longest = Spent(), dict[str, float](), 0.0
        self._writer: TrialWriter | None = None
        self._study = read_study(self._directory)
        self._follow_arm()
        super().setup(self.config)
        self._run = self._directory / RUNS / f"{self._arm}--{self._seed}"
        found = [] if self._num_rehearsed else checkpoints.checkpoints_in(self._run)
        if found:
            self.restore_from_path(str(found[-1]))
        self._start_s = time.perf_counter() - start

    def step(self) -> dict[str, Any]:
        """Run one iteration, and measure before the first one and after each stage."""
        if self._writer is None and not self._num_rehearsed:
            settings = {**self._told_settings, **self._met}
            where = (self._directory, self._study, self._arm, self._seed)
            self._writer = open_trial(*where, settings, self.iteration)
        if self.iteration == 0:
            self._measure(-1, 0)
        stage, start = self.stage, time.perf_counter()
        results = super().step()
        self._spent.seconds += time.perf_counter() - start
        if self.stage > stage + 1:
            raise ValueError(f"an iteration ran through all of stage {stage + 1}; expected a longer stage")
        self._memory_metrics = dict(results.get("replay", {}))
        now, is_spent = self.iteration + 1, self.num_generated_tokens >= self._study.budget
        about: dict[str, Any] = {"stage": stage, "num_generated_tokens": self.num_generated_tokens}
        if self.stage > stage or is_spent:
            about["accuracy"] = self._measure(stage, now)
            self._save(now)
        elif self._every and now % self._every == 0:
            self._save(now)
        if is_spent and self._writer is not None:
            self._writer.finish()
            shutil.rmtree(self._run, ignore_errors=True)
        size = self.config.num_prompts_per_batch * self.config.group_size
        about["largest_iteration"] = size * self._longest  # tokens, in the domain of the longest answers
        about |= {**asdict(self._spent), "start_s": self._start_s, "arm": self._arm, "seed": self._seed}
        return results | {"study": about, "done": is_spent or 0 < self._num_rehearsed <= now}

    @property
    def num_generated_tokens(self) -> int:
        """Return the tokens that the policy wrote in training so far."""
        return self.source.progress.tokens

    @property
    def stage(self) -> int:
        """Return the stage of the stream that is trained now."""
        stream = self.config.task_stream()
        assert isinstance(stream, Stages)
        return stream.stage(self.source.progress)

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return SRL's state and what the trial has cost."""
        return {**super().get_state(*args, **kwargs), "study_trial": asdict(self._spent)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Take SRL's state and what the trial had cost."""
        super().set_state(state)
        if "study_trial" in state:
            self._spent = Spent(**state["study_trial"])

    def cleanup(self) -> None:
        """Close the trial's file, and end as SRL does."""
        if (writer := getattr(self, "_writer", None)) is not None:
            writer.close()
        super().cleanup()

    # --- rows ------------------------------------------------------------------------------------

    def _measure(self, stage: int, iteration: int) -> float:
        """Play held-out prompts of every domain greedily, write the rows, and return the mean accuracy."""
        start = time.perf_counter()
        share = -(-self.config.evaluation_duration // len(self.source.world_ids))
        prompts = self.source.heldout(share * len(self.source.world_ids))
        greedy: dict[str, Any] = {"group_size": 1, "temperature": 0.0, "as_groups": False, "num_transcripts": 0}
        played = [group for batch in self.play(prompts, "greedy", **greedy) for group in batch.groups]
        self._spent.num_probe_tokens += int(sum(group.num_loss_tokens_G.sum() for group in played))
        self._spent.probe_s += time.perf_counter() - start
        self._spent.peak_bytes = max(self._spent.peak_bytes, self._peak_bytes())
        self._longest = max(answer_lengths(played), default=0.0)
        rows = rows_of(played, self._study, stage, iteration, self.num_generated_tokens, self._spent, self._extras())
        if self._writer is not None:
            self._writer.add(rows)
        return float(np.mean([row.accuracy for row in rows]))

    def _extras(self) -> dict[str, float]:
        found = {name: self._memory_metrics.get(metric, math.nan) for name, metric in MEASURES.items()}
        return {name: float(value) for name, value in found.items() if math.isfinite(value)}

    def _save(self, iteration: int) -> None:
        if self._writer is None:
            return
        self._iteration += 1  # Trainable counts up after step(); the checkpoint must say what it holds
        self.save_to_path(checkpoints.place_for(self._run, self._iteration))
        self._iteration -= 1
        checkpoints.prune(self._run, 1)

    def _peak_bytes(self) -> int:
        """Return the most memory of this process and the runners; of the device if this process uses one."""
        import torch

        if torch.cuda.is_available() and torch.cuda.max_memory_reserved():
            return int(torch.cuda.max_memory_reserved())
        asked = [actor.__ray_call__.remote(_resident_bytes) for actor in self.runners.actors()]
        return _resident_bytes() + sum(ray.get(asked, timeout=self.config.sync_timeout_s) if asked else [])

    # --- arms that are matched to what another one realised ---------------------------------------

    def _follow_arm(self) -> None:
        """Take from the finished run of another arm, with the same seed, what this arm is to meet.

        Raises:
            ValueError: that run is not finished.
        """
        matched = next(arm for arm in self._study.arms if arm.name == self._arm).matched
        self._met: dict[str, Any] = {}
        self._target: tuple[np.ndarray, np.ndarray] | None = None
        if not matched:
            return
        self.config = self.config.copy(copy_frozen=False)
        for name, other in matched.items():
            path = trial_path(self._directory, other, self._seed)
            trial = read_trial(path, self._study) if path.exists() else None
            if trial is None or not trial.is_finished:
                if self._num_rehearsed:
                    continue
                raise ValueError(f"{path}: is not finished; expected arm {other!r}, which {self._arm!r} is matched to")
            self._met[f"{name} of {other}"] = trial.rows[-1].measures.get("reuse_share", 0.0)
            if name == "replay_reuse_fraction":
                self.config.replay_reuse_fraction = trial.rows[-1].measures["reuse_share"]
            else:
                self._met[f"{name} of {other}"] = "as many trained tokens"
                pairs = [(row.num_generated_tokens, row.num_trained_tokens) for row in trial.rows]
                generated, trained = np.array(pairs, float).T
                self._target = (generated, trained)

    def _learn(self, shards: Sequence[TrainingShard]) -> bool:
        """Update, over as many epochs as bring the trained tokens nearest to the other arm's, and count them."""
        num_tokens = shards[0].num_tokens + shards[0].num_reused_tokens
        if self._target is not None and num_tokens:
            self.config.num_epochs = self._epochs_for(num_tokens)
        is_updated = super()._learn(shards)
        if is_updated:
            self._spent.num_trained_tokens += num_tokens * self.config.num_epochs
        return is_updated

    def _epochs_for(self, num_tokens: int) -> int:
        assert self._target is not None
        goal = float(np.interp(self.num_generated_tokens + num_tokens, *self._target))
        return max(1, round((goal - self._spent.num_trained_tokens) / num_tokens))


def rows_of(
    played: Sequence[GroupMeta],
    study: Study,
    stage: int,
    iteration: int,
    num_generated_tokens: int,
    spent: Spent,
    measures: Mapping[str, float],
) -> list[Row]:
    """Return a row for each domain, from greedy episodes, one a group.

    An answer is right from reward `RIGHT` on; it was read if it earned something, or the world ended the episode and
    did not call it unreadable.

    Raises:
        ValueError: a domain was not played, or one is none of the study's.
    """
    by_domain: dict[str, list[tuple[bool, bool]]] = defaultdict(list)
    for group in played:
        reward, reason = float(group.rewards_G[0]), group.stop_reasons[0]
        by_domain[group.prompt.domain].append((reward >= RIGHT, reward > 0 or reason is StopReason.TERMINATED))
    expected = [domain.name for domain in study.domains]
    if set(by_domain) != set(expected):
        raise ValueError(f"answered domains are {sorted(by_domain)}; expected {sorted(expected)}")
    cost = {field.name: getattr(spent, field.name) for field in fields(spent)}
    return [
        Row(
            stage=stage,
            iteration=iteration,
            domain=name,
            accuracy=float(np.mean([is_right for is_right, _ in by_domain[name]])),
            parse_rate=float(np.mean([is_read for _, is_read in by_domain[name]])),
            num_prompts=len(by_domain[name]),
            num_generated_tokens=num_generated_tokens,
            measures=dict(measures),
            **cost,
        )
        for name in expected
    ]


def answer_lengths(played: Sequence[GroupMeta]) -> list[float]:
    """Return the mean tokens of an answer in each domain, in the order in which domains were played."""
    by_domain: dict[str, list[int]] = defaultdict(list)
    for group in played:
        by_domain[group.prompt.domain] += group.num_loss_tokens_G.tolist()
    return [float(np.mean(tokens)) for tokens in by_domain.values()]


def _unpacked(config: Any) -> Any:
    return config[CONFIG] if isinstance(config, Mapping) and CONFIG in config else config


def _resident_bytes(actor: Any = None) -> int:
    """Return the most memory this process has had, in bytes; `actor` is what Ray hands over."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
