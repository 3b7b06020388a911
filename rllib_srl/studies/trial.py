"""Runs one trial of a study: SRL that evaluates every domain and stops when its token budget is spent.

    before training   an evaluation, stage -1
    iteration         ... until a stage of the stream has generated its tokens
    end of a stage    an evaluation, then a checkpoint

    tune.Tuner(StudyTrial, param_space={"trial": tune.grid_search([settings of a trial, ...])})

A trial's settings contain "_study": {"directory", "arm", "seed"}; study.json is in the directory. The trial resumes
from its checkpoint in the directory, if there is one. An evaluation is on disk before the checkpoint, so after a kill
one may be written again, but none is missing.

Held-out prompts depend on the seed only, so all arms are evaluated on the same prompts. Tokens and seconds of
evaluation are counted separately, and evaluation uses separate random streams, so it does not change training.
"""

from __future__ import annotations

import math
import resource
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray

from rllib_srl.algorithm.evaluation import GREEDY, several_answers, summary
from rllib_srl.algorithm.srl import SRL
from rllib_srl.batch.shard import TrainingShard
from rllib_srl.curriculum.streams import Stages
from rllib_srl.rollout.batches import RunnerBatch
from rllib_srl.storage import checkpoints
from rllib_srl.studies.online import FirstAnswers
from rllib_srl.studies.records import Evaluation, TrialWriter, read_study, run_path
from rllib_srl.types import GroupMeta

CONFIG = "trial"  # key of Tune's param_space that holds all settings of a trial
MEASURES = {  # name of a measure -> metric of the memory
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


class StudyTrial(SRL):
    """One arm with one seed. Invariant: the evaluations on disk are those up to this iteration."""

    def __init__(self, config: Any = None, **kwargs: Any) -> None:
        """Take a trial's settings, alone or under Tune's key "trial"."""
        super().__init__(_unpacked(config), **kwargs)

    @classmethod
    def default_resource_request(cls, config: Any) -> Any:
        """Return the resources of the trial, those of SRL with its settings."""
        return super().default_resource_request(_unpacked(config))

    def setup(self, config: Any) -> None:
        """Start, and resume from the trial's checkpoint if there is one."""
        trial = dict(self.config._study)
        self._directory, self._arm, self._seed = Path(trial["directory"]), trial["arm"], trial["seed"]
        self._every = trial.get("checkpoint_every", 0)
        self._spent, self._memory_metrics = Spent(), dict[str, float]()
        self._domain_counts: dict[str, dict[str, float]] = {}
        self._first_answers = FirstAnswers()
        self._writer: TrialWriter | None = None
        self._study = read_study(self._directory)
        super().setup(self.config)
        self._run = run_path(self._directory, self._arm, self._seed)
        if saved := checkpoints.checkpoints_in(self._run):
            try:
                self.restore_from_path(str(saved[-1]))
            except Exception:
                self.cleanup()  # no process is left behind; `stop` needs what Trainable makes after this
                raise

    def step(self) -> dict[str, Any]:
        """Run one iteration; evaluate before the first one and after each stage."""
        if self._writer is None:
            self._writer = TrialWriter(self._directory, self._study, self._arm, self._seed, self.iteration)
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
        trial_state = {"study_trial": asdict(self._spent), "first_answers": self._first_answers.get_state()}
        return {**super().get_state(*args, **kwargs), **trial_state}

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

    # --- evaluations ------------------------------------------------------------------------------

    def _measure(self, stage: int, iteration: int) -> float:
        """Play held-out prompts of every domain greedily, write the evaluation, and return the mean accuracy.

        Raises:
            ValueError: the domains played are not those of the study.
        """
        start = time.perf_counter()
        share = -(-self.config.evaluation_duration // len(self.source.env_ids))
        prompts = self.source.heldout(share * len(self.source.env_ids))
        played = [group for batch in self.play(prompts, "greedy", **GREEDY) for group in batch.groups]
        figures, more = several_answers(self.config.evaluation_pass_k, prompts, self.play)
        self._spent.num_probe_tokens += int(sum(group.num_loss_tokens_G.sum() for group in [*played, *more]))
        self._spent.probe_s += time.perf_counter() - start
        self._spent.peak_bytes = max(self._spent.peak_bytes, self._peak_bytes())
        accuracy = {name: scores["accuracy"] for name, scores in summary(played, len(prompts))["by_domain"].items()}
        evaluation = Evaluation(
            study=self._study.fingerprint,
            stage=stage,
            iteration=iteration,
            accuracy=accuracy,
            num_generated_tokens=self.num_generated_tokens,
            measures={domain: self._measures_of(domain, figures) for domain in accuracy},
            **asdict(self._spent),
        )
        if self._writer is not None:
            self._writer.add(evaluation)
        return float(np.mean(list(accuracy.values())))

    def _measures_of(self, domain: str, figures: dict[str, float]) -> dict[str, float]:
        """Return the other measures of a domain: of the memory, of several answers, of first answers."""
        memory = {name: self._memory_metrics.get(metric, math.nan) for name, metric in MEASURES.items()}
        stored = {f"memory_{name}": num for name, num in self._domain_counts.get(domain, {}).items()}
        measures = memory | figures | self._first_answers.measures().get(domain, {}) | stored
        return {name: float(value) for name, value in measures.items() if math.isfinite(value)}

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
        asked = [actor.__ray_call__.remote(_resident_bytes) for actor in self.runners.actors.values()]
        of_runners: list[int] = ray.get(asked, timeout=self.config.sync_timeout_s) if asked else []
        return _resident_bytes() + sum(of_runners)

    def _kept(self, batches: Sequence[RunnerBatch]) -> tuple[list[GroupMeta], frozenset[str]]:
        """Return the played groups as SRL does; count the first answers before anything is learned from them."""
        groups, late = super()._kept(batches)
        self._first_answers.add(groups)
        return groups, late

    def _learn(self, shards: Sequence[TrainingShard]) -> bool:
        """Update, and count the trained tokens, those of held answers included."""
        is_updated = super()._learn(shards)
        if is_updated:
            num_held = shards[0].retention.num_held_tokens if shards[0].retention else 0
            num_tokens = shards[0].num_tokens + shards[0].num_reused_tokens + num_held
            self._spent.num_trained_tokens += num_tokens * self.config.num_epochs
        return is_updated


def _unpacked(config: Any) -> Any:
    return config[CONFIG] if isinstance(config, Mapping) and CONFIG in config else config


def _resident_bytes(actor: Any = None) -> int:
    """Return the peak resident memory of this process in bytes; `actor` is passed by `__ray_call__`, and not used."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
