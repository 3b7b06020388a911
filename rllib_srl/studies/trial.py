"""Runs one trial of a study: SRL that evaluates every domain, writes rows, and stops when its token budget is spent.

    before training   rows, stage -1
    iteration         ... until a stage of the stream has generated its tokens
    end of a stage    rows, then a checkpoint; after the last stage: the end line

    tune.Tuner(StudyTrial, param_space={"trial": tune.grid_search([settings of a trial, ...])})

A trial's settings contain "_study": {"directory", "arm", "seed", "settings"}; study.json is in the directory. The trial
resumes from its checkpoint in the directory, if there is one. Rows are written to disk before the checkpoint, so after
a kill some rows may be written again, but none is missing.

Held-out prompts depend on the seed only, so all arms are evaluated on the same prompts. Tokens and seconds of
evaluation are counted separately, and evaluation uses separate random streams, so it does not change training.
"""

from __future__ import annotations

import math
import resource
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray

from rllib_srl.algorithm.evaluation import GREEDY, several_answers
from rllib_srl.algorithm.srl import SRL
from rllib_srl.batch.shard import TrainingShard
from rllib_srl.curriculum.streams import Stages
from rllib_srl.rollout.batches import RunnerBatch
from rllib_srl.storage import checkpoints
from rllib_srl.studies.online import FirstAnswers
from rllib_srl.studies.recording import TrialWriter, open_trial
from rllib_srl.studies.results import Row, read_study
from rllib_srl.studies.study import Study
from rllib_srl.types import GroupMeta, StopReason

RUNS = "runs"  # folder in a results directory for the checkpoints of unfinished trials
CONFIG = "trial"  # key of Tune's param_space that holds all settings of a trial
MEASURES = {  # name in a row -> metric of the memory
    "revisit_share": "revisit_share_prompts",
    "reuse_share": "reuse_share_prompts",
    "reuse_share_tokens": "reuse_share_tokens",
    "revisit_pass_rate": "revisit_pass_rate",
}


@dataclass
class Spent:
    """Cost of a trial so far. Invariant: no field decreases."""

    num_trained_tokens: int = 0
    seconds: float = 0.0
    num_probe_tokens: int = 0
    probe_s: float = 0.0
    peak_bytes: int = 0
    num_live_tokens: int = 0  # played tokens with a gradient, once each


def run_path(directory: Path, arm: str, seed: int) -> Path:
    """Return the folder of an unfinished trial's checkpoints in a results directory."""
    return directory / RUNS / f"{arm}--{seed}"


class StudyTrial(SRL):
    """One arm with one seed. Invariant: the rows on disk are those of the evaluations up to this iteration."""

    def __init__(self, config: Any = None, **kwargs: Any) -> None:
        """Take a trial's settings, alone or under Tune's key "trial"."""
        super().__init__(_unpacked(config), **kwargs)

    @classmethod
    def default_resource_request(cls, config: Any) -> Any:
        """Return the resources of the trial, those of SRL with its settings."""
        return super().default_resource_request(_unpacked(config))

    def setup(self, config: Any) -> None:
        """Start, and resume from the trial's checkpoint if there is one."""
        told = dict(self.config._study)
        self._directory, self._arm, self._seed = Path(told["directory"]), told["arm"], told["seed"]
        self._every = told.get("checkpoint_every", 0)
        self._told_settings = told.get("settings", {})
        self._spent, self._memory_metrics = Spent(), dict[str, float]()
        self._domain_counts: dict[str, dict[str, float]] = {}
        self._first_answers = FirstAnswers()
        self._writer: TrialWriter | None = None
        self._study = read_study(self._directory)
        super().setup(self.config)
        self._run = run_path(self._directory, self._arm, self._seed)
        if found := checkpoints.checkpoints_in(self._run):
            try:
                self.restore_from_path(str(found[-1]), trust=told.get("trust", False))
            except Exception:
                self.cleanup()  # no process is left behind; `stop` needs what Trainable makes after this
                raise

    def step(self) -> dict[str, Any]:
        """Run one iteration; evaluate before the first one and after each stage."""
        if self._writer is None:
            where = (self._directory, self._study, self._arm, self._seed)
            self._writer = open_trial(*where, self._told_settings, self.iteration)
        if self.iteration == 0:
            self._measure(-1, 0)
        stage, start = self.stage, time.perf_counter()
        results = super().step()
        self._spent.seconds += time.perf_counter() - start
        if self.stage > stage + 1:
            raise ValueError(f"one iteration was longer than stage {stage + 1}; expected a longer stage")
        self._memory_metrics = dict(results.get("replay", {}))
        self._domain_counts = dict(results.get("domains", {}))
        now, is_spent = self.iteration + 1, self.num_generated_tokens >= self._study.budget
        about: dict[str, Any] = {"stage": stage, "num_generated_tokens": self.num_generated_tokens}
        if self.stage > stage or is_spent:
            about["accuracy"] = self._measure(stage, now)
            self._save(now)
        elif self._every and now % self._every == 0:
            self._save(now)
        if is_spent:
            self._writer.finish()
            shutil.rmtree(self._run, ignore_errors=True)
        about |= {**asdict(self._spent), "arm": self._arm, "seed": self._seed}
        return results | {"study": about, "done": is_spent}

    @property
    def num_generated_tokens(self) -> int:
        """Return the number of tokens generated in training so far."""
        return self.source.progress.tokens

    @property
    def stage(self) -> int:
        """Return the current stage of the stream."""
        stream = self.config.task_stream()
        assert isinstance(stream, Stages)
        return stream.stage(self.source.progress)

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return SRL's state, the cost of the trial and its first answers."""
        own = {"study_trial": asdict(self._spent), "first_answers": self._first_answers.get_state()}
        return {**super().get_state(*args, **kwargs), **own}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore SRL's state, the cost of the trial and its first answers."""
        super().set_state(state)
        if "study_trial" in state:
            self._spent = Spent(**state["study_trial"])
            self._first_answers.set_state(state["first_answers"])

    def cleanup(self) -> None:
        """Close the trial's file and stop SRL."""
        if (writer := getattr(self, "_writer", None)) is not None:
            writer.close()
        super().cleanup()

    # --- rows ------------------------------------------------------------------------------------

    def _measure(self, stage: int, iteration: int) -> float:
        """Play held-out prompts of every domain greedily, write the rows, and return the mean accuracy."""
        start = time.perf_counter()
        share = -(-self.config.evaluation_duration // len(self.source.world_ids))
        prompts = self.source.heldout(share * len(self.source.world_ids))
        played = [group for batch in self.play(prompts, "greedy", **GREEDY) for group in batch.groups]
        figures, more = several_answers(self.config.evaluation_pass_k, prompts, self.play)
        self._spent.num_probe_tokens += int(sum(group.num_loss_tokens_G.sum() for group in [*played, *more]))
        self._spent.probe_s += time.perf_counter() - start
        self._spent.peak_bytes = max(self._spent.peak_bytes, self._peak_bytes())
        measures = self._extras() | {name: value for name, value in figures.items() if math.isfinite(value)}
        rows = rows_of(played, self._study, stage, iteration, self.num_generated_tokens, self._spent, measures)
        rows = with_measures(rows, self._first_answers.measures())
        rows = with_measures(rows, {
            domain: {f"memory_{name}": float(num) for name, num in counts.items()}
            for domain, counts in self._domain_counts.items()
        })  # fmt: skip
        if self._writer is not None:
            self._writer.add(rows)
        return float(np.mean([row.accuracy for row in rows]))

    def _extras(self) -> dict[str, float]:
        found = {name: self._memory_metrics.get(metric, math.nan) for name, metric in MEASURES.items()}
        return {name: float(value) for name, value in found.items() if math.isfinite(value)}

    def _save(self, iteration: int) -> None:
        if self._writer is None:
            return
        self._iteration += 1  # Trainable increments after step(); the checkpoint must contain the new count
        self.save_to_path(checkpoints.place_for(self._run, self._iteration))
        self._iteration -= 1
        checkpoints.prune(self._run, 1)

    def _peak_bytes(self) -> int:
        """Return the peak memory in bytes: of the device if this process uses one, else of this process and runners."""
        import torch

        if torch.cuda.is_available() and torch.cuda.max_memory_reserved():
            return int(torch.cuda.max_memory_reserved())
        asked = [actor.__ray_call__.remote(_resident_bytes) for actor in self.runners.actors()]
        of_runners: list[int] = ray.get(asked, timeout=self.config.sync_timeout_s) if asked else []
        return _resident_bytes() + sum(of_runners)

    def _kept(self, batches: Sequence[RunnerBatch]) -> tuple[list[GroupMeta], frozenset[str]]:
        """Return the played groups as SRL does; count the first answers before anything is learned from them."""
        groups, late = super()._kept(batches)
        self._first_answers.add(groups)
        return groups, late

    def _learn(self, shards: Sequence[TrainingShard]) -> bool:
        """Update, and count the trained tokens."""
        is_updated = super()._learn(shards)
        if is_updated:
            num_tokens = shards[0].num_tokens + shards[0].num_reused_tokens
            self._spent.num_trained_tokens += num_tokens * self.config.num_epochs
            self._spent.num_live_tokens += shards[0].num_tokens
        return is_updated

def rows_of(
    played: Sequence[GroupMeta],
    study: Study,
    stage: int,
    iteration: int,
    num_generated_tokens: int,
    spent: Spent,
    measures: Mapping[str, float],
) -> list[Row]:
    """Return a row for each domain, from groups of one greedy episode each.

    An answer is right by `GroupMeta.is_right_G`. It counts as parsed if its reward is above 0, or if the environment
    terminated the episode with a stop reason other than "unparsable".

    Raises:
        ValueError: the domains played are not those of the study.
    """
    by_domain: dict[str, list[tuple[bool, bool]]] = defaultdict(list)
    for group in played:
        is_right, reward, reason = bool(group.is_right_G()[0]), float(group.rewards_G[0]), group.stop_reasons[0]
        by_domain[group.prompt.domain].append((is_right, reward > 0 or reason is StopReason.TERMINATED))
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


def with_measures(rows: Sequence[Row], found: Mapping[str, Mapping[str, float]]) -> list[Row]:
    """Return the rows with further measures, given by domain."""
    return [replace(row, measures={**row.measures, **found.get(row.domain, {})}) for row in rows]


def _unpacked(config: Any) -> Any:
    return config[CONFIG] if isinstance(config, Mapping) and CONFIG in config else config


def _resident_bytes(actor: Any = None) -> int:
    """Return the peak resident memory of this process in bytes; `actor` is passed by `__ray_call__`, and not used."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
