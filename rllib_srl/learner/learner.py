"""Train the policy with GRPO: sum gradients over micro-batches and learners, one optimiser step per epoch.

    shard -> groups -> episodes -> micro-batches, reused and played separately   batch/layout.py
    for each reused micro-batch: forward, loss, backward                         objective.py
    norm of their gradient over all learners                                     gradients.py
    for each played micro-batch: forward, loss, backward, added to the same gradient
    sum gradients over learners -> clip -> step              RLlib's grad_clip and learning-rate schedule apply

Gradients are *summed*, not averaged, because each token's loss already carries the scale of the whole batch. Any
number of learners, any sharding and any micro-batches therefore give the gradient of a single process.

Differences from RLlib's TorchLearner:
1. No DDP wrapper. It would average gradients, and hang if learners have different numbers of micro-batches.
2. A non-finite gradient skips the step and is counted (`num_nonfinite_gradients`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.learner.torch.torch_learner import TorchLearner

from rllib_srl.batch.layout import MicroBatch, episodes_of, micro_batches, turns_of
from rllib_srl.batch.shard import TrainingShard
from rllib_srl.learner.companions import Companions
from rllib_srl.learner.diagnostics import GroupNotes
from rllib_srl.learner.model_setup import Fitted
from rllib_srl.learner.objective import SUMS, Sums, first_pass, played_loss, reused_loss, statistics
from rllib_srl.learner.rl_module import episode_means
from rllib_srl.learner.scoring import Scorer
from rllib_srl.learner.weight_sender import WeightSender

TIMERS = ("layout_s", "survey_s", "forward_backward_s", "reduce_s", "optimizer_s")


class GRPOTorchLearner(Fitted, Scorer, Companions, WeightSender, TorchLearner):
    """Trains one `CausalLMModule`.

    Invariant: after `update` all learners have equal weights.
    """

    _is_saved = False
    _save_fault: Exception | None = None

    def build(self) -> None:
        """Build module and optimiser, load the reference model if a KL term needs it, and check prefix sharing."""
        super().build()
        self._micro_batches: dict[bool, list[dict[str, Any]]] = {}  # key: is_reused
        self._notes = GroupNotes([])
        self._reference = self._load_reference() if self.config.loss_settings().needs_reference else None
        self._build_critic()
        self._can_share = bool(self.config.prefix_sharing) and self._sharing_is_exact()

    @property
    def model(self) -> torch.nn.Module:  # type: ignore[override]
        """The Hugging Face model in training."""
        return self.module[DEFAULT_MODULE_ID].model

    # --- one update ---------------------------------------------------------------------------

    def _create_iterator_if_necessary(
        self, *, training_data: Any, num_epochs: int = 1, **kwargs: Any
    ) -> Iterable[TrainingShard]:
        shard: TrainingShard = training_data.batch
        self._seconds = dict.fromkeys(TIMERS, 0.0)
        with self._timed("layout_s"):
            groups = shard.groups()
            self._notes = GroupNotes(groups, self.config.replay_pass_reward)
            self._name_episodes(groups)
            episodes = episodes_of(groups, shard.advantages, shard.scales)
            episodes = [turns_of(episode, self.config.turn_mask) for episode in episodes]
            is_reused_B = np.repeat(shard.is_reused_P, [group.size for group in groups])
            for is_reused in (True, False):
                side = [episode for episode in episodes if is_reused_B[episode.index] == is_reused]
                passes = micro_batches(side, self.config.micro_batch_tokens, self._can_share)
                self._micro_batches[is_reused] = [self._training_tensors(one, is_reused) for one in passes]
        # A count of the whole batch: a learner without reused groups must still join the all-reduce.
        self._has_reused = shard.num_reused_tokens > 0
        return [shard] * num_epochs

    def _training_tensors(self, one: MicroBatch, is_reused: bool) -> dict[str, Any]:
        has_kl = not is_reused or self.config.kl_on_reused == "weighted"
        batch = self._tensors(one, with_reference=has_kl)
        batch["is_reused"] = is_reused
        batch["with_hidden"] = not is_reused and self.config.replay_embedding == "policy"
        self._mark(batch)
        return batch

    def _update(self, batch: dict[str, Any], **kwargs: Any) -> tuple[Any, Any, Any]:
        for optimizer in self._optimizer_parameters:
            optimizer.zero_grad(set_to_none=True)
        sums: Sums = dict.fromkeys(SUMS, 0.0)
        self._forget_gathered()
        with self._timed("survey_s"):
            looked = self._look([*self._micro_batches[True], *self._micro_batches[False]])
        self._accumulate_gradients(sums)
        with self._timed("reduce_s"):
            gradients = self._summed_gradients()
            stats = statistics(self._sums_over_learners(sums))
        with self._timed("optimizer_s"):
            self.apply_gradients(self.postprocess_gradients(dict(zip(self._params, gradients, strict=True))))
        total_loss = stats.pop("total_loss")
        self._log_stats(stats | looked | self._seconds)
        return {}, {DEFAULT_MODULE_ID: total_loss}, {}

    def _accumulate_gradients(self, sums: Sums) -> None:
        reused_norm = 0.0
        if self._has_reused:
            self._run(self._micro_batches[True], sums)
            with self._timed("reduce_s"):
                reused_norm = float(self._norm(self._summed_gradients()))
        self._log("reuse/gradient_norm", reused_norm)
        self._run(self._micro_batches[False], sums)

    def _run(self, micro_batches: list[dict[str, Any]], sums: Sums) -> None:
        with self._timed("forward_backward_s"):
            num_missing = self._num_missing(len(micro_batches))
            for one in micro_batches:
                with self._autocast():
                    fwd_out = self.module[DEFAULT_MODULE_ID](one)
                if "prox_logp" not in one:
                    self._take_first_pass(one, fwd_out)
                loss = self.compute_loss_for_module(
                    module_id=DEFAULT_MODULE_ID, config=self.config, batch=one, fwd_out=fwd_out
                )
                self._add_value_loss(loss, one, fwd_out).backward()
                for name, value in one.pop("stats").items():
                    sums[name] = sums[name] + value
            self._run_empty(num_missing)

    def _take_first_pass(self, one: dict[str, Any], fwd_out: dict[str, torch.Tensor]) -> None:
        """Store the log-probs of the first epoch as `prox_logp`, those at the start of the update; no extra pass."""
        first_pass(one, fwd_out["logp"], self.config.replay_max_logp_gap)
        if one["is_reused"]:
            names = ("episode", "prox_logp", "behaviour_logp", "is_kept")
            self._notes.add_drift(*(one[name].cpu().numpy() for name in names))
        self._take_values(one, fwd_out)
        if one["with_embedding"]:
            episode_B, mean_BD = episode_means(fwd_out["hidden"], fwd_out["row"], one["episode"])
            self._notes.add_embeddings(episode_B.cpu().numpy(), mean_BD.cpu().numpy())
            one["with_hidden"] = self._critic is not None

    def compute_loss_for_module(self, *, module_id: str, config: Any, batch: dict, fwd_out: dict) -> torch.Tensor:
        """Return this micro-batch's share of the loss and set `batch["stats"]` to its sums; see `objective`."""
        loss_of = reused_loss if batch["is_reused"] else played_loss
        loss, batch["stats"] = loss_of(batch, fwd_out, config.loss_settings())
        return loss

    def apply_gradients(self, gradients_dict: dict) -> None:
        """Step the optimiser; a non-finite gradient skips the step on every learner and is counted."""
        is_finite = bool(torch.isfinite(self._norm(list(gradients_dict.values()))))
        self._log("num_nonfinite_gradients", 0 if is_finite else 1)
        self._step_critic(is_finite)
        if not is_finite:
            return
        for ref, gradient in gradients_dict.items():
            self._params[ref].grad = gradient
        for optimizer in self._optimizer_parameters:
            optimizer.step()

    def reuse_report(self) -> dict[str, dict[str, float]]:
        """Return and clear the diagnostics of the last update's reused groups.

        Returns:
            By group id, for the reused groups of this learner's shard: `drift`, mean |prox_logp - behaviour_logp|, and
            `nll`, mean -prox_logp, over its loss tokens in nats; `success_change`, mean prox_logp - behaviour_logp over
            the loss tokens of its successes; `num_over_gap`, number of episodes above `replay_max_logp_gap`.
        """
        return self._notes.take_drift()

    def take_embeddings(self) -> dict[str, np.ndarray]:
        """Return and clear the embeddings of this iteration's played groups in this learner's shard.

        Returns:
            Float32 [G, D] by group id: for each episode the mean last hidden state over the rows that predict its
            loss tokens, under the weights at the start of the update, not normalised. {} unless
            `replay_embedding` is "policy".
        """
        return self._notes.take_embeddings()

    # --- offload on a shared GPU ---------------------------------------------------------------

    def make_room(self) -> None:
        """Offload the optimiser state to host memory and free the gradients, for an engine on the same GPU."""
        for optimizer in self._optimizer_parameters:
            optimizer.zero_grad(set_to_none=True)
        self._move_optimizer_state("cpu")
        self._micro_batches = {}
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def take_room(self) -> None:
        """Move the optimiser state back to the device (undoes `make_room`)."""
        self._move_optimizer_state(self._device)

    def _move_optimizer_state(self, device: Any) -> None:
        for optimizer in self._optimizer_parameters:
            for state in optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, torch.Tensor) and value.dim():  # step counts stay where the optimiser put them
                        state[name] = value.to(device)

    def save_to_path(self, *args: Any, **kwargs: Any) -> Any:
        """Write this learner's part of a checkpoint.

        RLlib drops an exception of a remote learner and stops calling that learner. The exception is therefore kept,
        and `take_saved` raises it.
        """
        try:
            written = super().save_to_path(*args, **kwargs)
        except Exception as error:  # any exception: `take_saved` raises it in the driver
            if not self.config.num_learners:
                raise
            self._save_fault = error
            return None
        self._is_saved = True
        return written

    def take_saved(self) -> bool:
        """Return whether `save_to_path` succeeded since the last call of `take_saved`.

        Raises:
            Exception: the exception that `save_to_path` kept.
        """
        is_saved, fault = self._is_saved, self._save_fault
        self._is_saved, self._save_fault = False, None
        if fault is not None:
            raise fault
        return is_saved

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return RLlib's state plus the state of value head and reference."""
        return {**super().get_state(*args, **kwargs), **self._companions_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Load a state of any age: RLlib alone would ignore weights with an older sequence number."""
        self._weights_seq_no = -1
        super().set_state(state)
        self._set_companions(state)

    # --- parts --------------------------------------------------------------------------------

    def _sums_over_learners(self, sums: Sums) -> dict[str, float]:
        values = torch.tensor([float(value) for value in sums.values()], dtype=torch.float64, device=self._device)
        if self.config.num_learners >= 2:
            torch.distributed.all_reduce(values)
        return dict(zip(sums, values.tolist(), strict=True))

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # kernels run asynchronously
        self._seconds[name] += time.perf_counter() - start

    def _log_stats(self, stats: dict[str, float]) -> None:
        for name, value in stats.items():
            self._log(name, value)
        self._log("is_prefix_sharing", float(self._can_share))

    def _log(self, name: str, value: float) -> None:
        # Already equal on all learners, so RLlib's mean over learners does not change it.
        self.metrics.log_value((DEFAULT_MODULE_ID, name), value, reduce="mean", window=1)

    def _make_modules_ddp_if_necessary(self) -> None:
        """Do not wrap in DDP: `gradients` does the communication."""
