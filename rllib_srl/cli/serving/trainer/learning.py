"""Learn from rated answers: the project's learner and loss without any runner, a slice at a time.

    rated answers -> groups of one episode -> posterior advantages -> reused side of the loss -> one update a slice

The answers were written by earlier versions, so they are trained on as stored groups are: the ratio is to the log-probs
that were recorded when they were sampled, clipped, and an answer from which the policy has moved too far is left out
(`replay_max_logp_gap`). The reference of the KL is the active version, from which the training starts.

Source: Xu and Ding 2025 (SPO), arXiv 2509.13232 (a baseline for single answers).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_srl.batch.posterior import posterior
from rllib_srl.batch.shard import REUSE, build_shards
from rllib_srl.cli.serving.adapter import read_adapter, read_json, write_adapter
from rllib_srl.cli.serving.job import Job, RatedTokens, write_json
from rllib_srl.cli.shared.settings import build_config
from rllib_srl.engine.model_dir import load_config
from rllib_srl.engine.models import local_model
from rllib_srl.learner.model_setup import policy_weights
from rllib_srl.learner.reference import Reference
from rllib_srl.learner.rl_module import load_causal_lm
from rllib_srl.people.lineage.conversations import SERVED
from rllib_srl.rollout.token_space import TokenSpace
from rllib_srl.storage.checkpoints import CheckpointError, seal, verify_sealed
from rllib_srl.types import Group, GroupMeta, History, Prompt, StopReason

PRIOR_WEIGHT = 1.0  # of the reward 1/2, in answers, beside the ratings of the other answers
OPTIMIZER, METRICS = "optimizer.pt", "metrics.json"
_METRICS = ("reuse/kl", "reuse/ratio", "reuse/clip_fraction", "reuse/left_out")
FETCH_S = 60.0
_SLICE = "slice_"


class SliceLearner:
    """A learner of one job. Invariant: after `step` number k state and `metrics` are those of the first k slices."""

    def __init__(self, job: Job, directory: Path) -> None:
        """Build the learner and continue with the newest slice in `directory`, else with the parent's adapter.

        Raises:
            AdapterError: the parent's adapter is of another model or rank.
        """
        self._job, self._directory = job, directory
        config = learner_config(job)
        config.validate()
        space = TokenSpace(int(load_config(local_model(job.model)).get_text_config().vocab_size))
        self.learner = config.build_learner(spaces={DEFAULT_MODULE_ID: (space, space)})
        if job.parent:
            read_adapter(self.learner.model, Path(job.parent))
        if job.settings.kl:
            self.learner.reference = self._active_version(config.compute_dtype)
        self._parent_logps = self._logps()
        self.metrics: dict[str, float] = {}  # of the last slice; "num_nonfinite": of all
        self.num_done = self._continue()
        self._groups = [group_of(one) for one in job.answers]
        self._advantages = advantages_of([one.reward for one in job.answers], job.neutral)
        self._slices = slices_of(len(job.answers), job)

    @property
    def num_slices(self) -> int:
        """Return the number of slices of the job."""
        return len(self._slices)

    def step(self) -> None:
        """Train on the next slice and save."""
        chosen = self._slices[self.num_done]
        metas = [replace(GroupMeta.of(self._groups[i], self._groups[i]), origin=REUSE) for i in chosen]
        (shard,) = build_shards(metas, [self._advantages[i] for i in chosen], 1, FETCH_S)
        found = self.learner.update(batch=shard, timesteps={}, num_epochs=1)[DEFAULT_MODULE_ID]
        values = {name: float(one.peek()) for name, one in found.items()}
        num_bad = values["num_nonfinite_gradients"] + values["num_nonfinite_logps"]
        num_bad += self.metrics.get("num_nonfinite", 0.0)
        self.metrics = {**{name: values[name] for name in _METRICS}, "num_nonfinite": num_bad}
        self.num_done += 1
        self._save()

    def kl(self) -> float:
        """Return the KL from the parent to the present policy on the tokens of the rated answers, nats per token.

        k3 = ratio - 1 - log ratio, whose mean over tokens of the parent is KL(parent || policy).
        """
        pairs = zip(self._logps(), self._parent_logps, strict=True)
        log_ratio_N = np.concatenate([now - before for now, before in pairs]).astype(np.float64)
        return float(np.mean(np.exp(log_ratio_N) - 1 - log_ratio_N))

    def _logps(self) -> list[np.ndarray]:
        """Return the log-probs of the tokens of each answer under the present policy."""
        found = []
        for one in self._job.answers:
            (logp,) = self.learner.scorer.score([[*one.prompt_ids, *one.ids]])
            found.append(logp[len(one.prompt_ids) - 1 :])
        return found

    def write(self, directory: Path) -> None:
        """Write the adapter."""
        rank = self._job.settings.rank
        write_adapter(self.learner.model, directory, rank, 2.0 * rank, Path(self._job.model).name)

    def _active_version(self, dtype: str) -> Reference:
        """Return the reference: a model of its own with the parent's adapter merged, before any update."""
        model = load_causal_lm(self._job.model).requires_grad_(False)
        model.load_state_dict(dict(policy_weights(self.learner.model)), strict=False)
        return Reference(model, torch.device("cpu"), dtype)

    # --- slices on disk --------------------------------------------------------------------------

    def _save(self) -> None:
        saved = self._directory / f"{_SLICE}{self.num_done:04d}"
        scratch = saved.with_name(f"{saved.name}.new")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        self.write(scratch)
        states = {name: one.state_dict() for name, one in self.learner._named_optimizers.items()}
        torch.save(states, scratch / OPTIMIZER)
        write_json(scratch / METRICS, self.metrics)
        seal(scratch)
        os.rename(scratch, saved)
        for older in self._saved()[1:]:
            shutil.rmtree(older)

    def _saved(self) -> list[Path]:
        """Return the saved slices, the newest first."""
        return sorted((one for one in self._directory.glob(f"{_SLICE}*[0-9]") if one.is_dir()), reverse=True)

    def _continue(self) -> int:
        """Load the newest slice that is whole; return its number, 0 without one."""
        for saved in self._saved():
            try:
                verify_sealed(saved)
            except CheckpointError:  # a kill or a full disk cut it off; an older one may be whole
                continue
            read_adapter(self.learner.model, saved)
            states = torch.load(saved / OPTIMIZER, weights_only=True)
            for name, one in self.learner._named_optimizers.items():
                one.load_state_dict(states[name])
            self.metrics = read_json(saved / METRICS)
            return int(saved.name.removeprefix(_SLICE))
        return 0

    def forget_slices(self) -> None:
        """Delete the saved slices: the version's own files are complete."""
        for saved in self._directory.glob(f"{_SLICE}*"):
            shutil.rmtree(saved)


def learner_config(job: Job) -> Any:
    """Return the config of the learner, not yet validated; its environment is the first domain to keep."""
    settings, first = job.settings, job.keep[0]
    values: dict[str, Any] = {"env": first.world, "env_config": dict(first.env_config), "model": job.model}
    values |= {"engine": "transformers", "compute_dtype": "float32", "max_episode_tokens": job.context_length}
    values |= {"num_env_runners": 0, "num_learners": 0, "num_gpus_per_learner": 0, "num_gpus_per_env_runner": 0}
    values |= {"replay_capacity": 0, "replay_revisit_fraction": 0.0, "replay_reuse_fraction": 0.0}
    values |= {"lr": settings.lr, "lora": {"rank": settings.rank}, "temperature": job.temperature, "seed": job.seed}
    values |= {"kl": {"coeff": settings.kl, "on_reused": "weighted"}} if settings.kl else {}
    return build_config(values)


def group_of(answer: RatedTokens) -> Group:
    """Return a rated answer as a group of one episode."""
    num_prompt, num_all = len(answer.prompt_ids), len(answer.prompt_ids) + len(answer.ids)
    mask_N = np.arange(num_all) >= num_prompt
    logp_N = np.zeros(num_all, np.float32)
    logp_N[num_prompt:] = np.minimum(answer.logps, 0.0)
    group = Group(
        group_id=answer.id,
        prompt=Prompt(SERVED, answer.id, SERVED),
        token_ids_N=np.array([*answer.prompt_ids, *answer.ids], np.int32),
        loss_mask_N=mask_N,
        behaviour_logp_N=logp_N,
        offsets=np.array([0, num_all]),
        rewards_G=np.array([answer.reward], np.float32),
        versions_G2=np.full((1, 2), answer.version, np.int64),
        stop_reasons=(StopReason.TERMINATED,),
    )
    group.check_valid()
    return group


def advantages_of(rewards: Sequence[float], neutral: float = 0.5) -> list[np.ndarray]:
    """Return the advantage of each answer, [1] each: its reward above the mean of the others, in units of its rms.

    The mean is drawn towards `neutral` with the weight of one answer, so that a single rating has an advantage, too.
    """
    total, num = float(np.sum(rewards)), len(rewards)
    histories = [History(total - reward, num - 1, neutral) for reward in rewards]
    return posterior([np.array([reward]) for reward in rewards], histories, PRIOR_WEIGHT)


def slices_of(num_answers: int, job: Job) -> list[list[int]]:
    """Return the answers of each slice: every pass has all of them once, in an order of the job's seed."""
    slices: list[list[int]] = []
    for number in range(job.settings.passes):
        order = np.random.default_rng([job.seed, job.version, number]).permutation(num_answers).tolist()
        size = job.settings.slice_answers
        slices += [order[at : at + size] for at in range(0, num_answers, size)]
    return slices
