"""Train the policy with GRPO: sum gradients over micro-batches and learners, one optimiser step per epoch.

    shard -> groups -> episodes -> micro-batches, reused and played separately   batch/layout.py
    for each reused micro-batch: forward, loss, backward                         scoring.py, objective.py
    the same for each micro-batch of held answers                                retention.py
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

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import ray
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.utils.numpy import convert_to_numpy
from ray.rllib.utils.torch_utils import convert_to_torch_tensor

from rllib_srl.batch.layout import Episode, MicroBatch, bare_episode, episodes_of, micro_batch, micro_batches
from rllib_srl.batch.shard import TrainingShard
from rllib_srl.engine.sync import WeightBundle, pack_stream
from rllib_srl.learner.gradients import apart, gradients_of, norm, set_gradients, summed
from rllib_srl.learner.model_setup import export, make_optimizer, sent_weights, set_up_model
from rllib_srl.learner.objective import SUMS, Sums, first_pass, played_loss, reused_loss, statistics
from rllib_srl.learner.reference import FrozenPolicies, FrozenPolicy, Home
from rllib_srl.learner.rl_module import CausalLMModule
from rllib_srl.learner.scoring import Scorer
from rllib_srl.learner.sharding import (
    clipped_shards,
    decoder_layers,
    most,
    norm_of_shards,
    sharded_optimizer_state,
    summed_shards,
    whole_optimizer_state,
)
from rllib_srl.learner.trie_attention import compiled_flex, is_sharing_exact
from rllib_srl.types import Group

if TYPE_CHECKING:  # at run time imported only if a run needs it
    from rllib_srl.learner.regularisers.regularisers import Regularisers
    from rllib_srl.learner.retention import Conflict, HeldAnswers, HeldReport

TIMERS = ("layout_s", "forward_backward_s", "reduce_s", "optimizer_s")


class Sent(NamedTuple):
    """A bundle of weights in the object store."""

    ref: Any  # ObjectRef of a WeightBundle
    seconds: dict[str, float]  # pack_s, put_s


class GRPOTorchLearner(TorchLearner):
    """Trains one `CausalLMModule`. Invariant: after `update` all learners have equal weights."""

    scorer: Scorer
    frozen: FrozenPolicies  # policies that score but are not trained, including the reference
    reference: FrozenPolicy | None  # of the KL; None without a KL term
    regularisers: Regularisers | None  # terms that keep the policy near what it has learned; None without any
    retention: HeldAnswers | None  # stored answers that are held; None if there are never any
    conflict: Conflict  # compares their gradient with the rest; set if they are held
    can_share_prefixes: bool  # whether micro-batches are tries; False pads

    # --- build --------------------------------------------------------------------------------

    def build(self) -> None:
        """Build module and optimiser, load the reference model if a KL term needs it, and check prefix sharing."""
        super().build()
        config, device = self.config, self._device
        self.settings = settings = config.loss_settings()
        # Without `fsdp` all learners have whole weights, and only one is called.
        self._is_first = not config.fsdp or torch.distributed.get_rank() == 0
        self.scorer = Scorer(self.policy, device, config.compute_dtype, config.fsdp)
        home = Home(device, config.compute_dtype, config.fsdp, config.offload_frozen)
        self.frozen = FrozenPolicies(self.policy, home)
        self.reference = self.frozen.load() if settings.needs_reference else None
        self.regularisers = None
        if named := config.made_regularisers():
            from rllib_srl.learner.regularisers.regularisers import Regularisers
            from rllib_srl.learner.regularisers.rule import Training

            parameters = dict(self.policy.saved_parameters())
            of_run = (config.num_learners, config.fsdp, self.frozen.load)
            training = Training(self.policy, parameters, self.scorer, device, *of_run)
            self.regularisers = Regularisers(named, training)
        self._gathered: dict[str, Any] | None = None  # whole states of the optimisers, from `gather` to the next update
        self._bundle: WeightBundle | None = None  # the last one sent, its buffer is reused; the object store has a copy
        self._micro_batches: dict[bool, list[MicroBatch[torch.Tensor]]] = {}  # key: is_reused
        self._group_of_B: list[str] = []  # group id by `Episode.index`
        self._left_out: Counter[str] = Counter()  # reused episodes beyond `replay_max_logp_gap`, by group id
        self._is_saved = False
        self._save_error: Exception | None = None
        is_exact = config.prefix_sharing and is_sharing_exact(self.scorer.score, self.model, config.max_episode_tokens)
        self.can_share_prefixes = bool(is_exact)
        self.retention = None
        if config.may_hold():
            from rllib_srl.learner.retention import Conflict, HeldAnswers

            last = decoder_layers(self.model)[-1]
            self.conflict = Conflict(list(self._params.values()), last, self._summed_gradients)
            self.retention = HeldAnswers(config, self.scorer, self.can_share_prefixes, self._empty_passes)

    def _make_module(self) -> Any:
        module = super()._make_module()
        set_up_model(module[DEFAULT_MODULE_ID], self.config, self._device)
        return module

    def _make_modules_ddp_if_necessary(self) -> None:
        """Do not wrap in DDP: `gradients` does the communication."""

    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        """Register the optimiser over the trained parameters, with RLlib's learning-rate schedule."""
        params = [p for p in self.module[module_id].parameters() if p.requires_grad]
        optimizer = make_optimizer(config.optimizer_name, params, tuple(config.adam_betas), config.weight_decay)
        self.register_optimizer(module_id=module_id, optimizer=optimizer, params=params, lr_or_lr_schedule=config.lr)

    @property
    def policy(self) -> CausalLMModule:
        """The module in training."""
        policy: CausalLMModule = self.module[DEFAULT_MODULE_ID]
        return policy

    @property
    def model(self) -> Any:
        """The Hugging Face model in training."""
        return self.policy.model

    # --- one update ---------------------------------------------------------------------------

    def _create_iterator_if_necessary(
        self, *, training_data: Any, num_epochs: int = 1, **kwargs: Any
    ) -> Iterable[TrainingShard]:
        """Lay the shard out once; each epoch is one `_update`, over all its micro-batches."""
        shard: TrainingShard = training_data.batch
        self._seconds = dict.fromkeys(TIMERS if self.retention is None else (*TIMERS, "retention_s"), 0.0)
        with self._timed("layout_s"), ExitStack() as stack:
            for frozen in self.frozen.loaded.values():
                stack.enter_context(frozen.on_device())
            groups = shard.groups()
            self._group_of_B = [group.group_id for group in groups for _ in range(group.size)]
            self._left_out.clear()
            episodes = episodes_of(groups, shard.advantages, shard.scales)
            if self.regularisers is not None:
                self.regularisers.begin(groups, shard.origins)
            sizes = [group.size for group in groups]
            is_reused_B = np.repeat(shard.is_reused_P, sizes)
            for is_reused in (True, False):
                side = [episode for episode in episodes if is_reused_B[episode.index] == is_reused]
                passes = micro_batches(side, self.config.micro_batch_tokens, self.can_share_prefixes)
                has_others = self.regularisers is not None and self.regularisers.run_passes and not is_reused
                are_scored = self._has_kl(is_reused) or has_others
                num_empty = self._num_empty(len(passes)) if are_scored else 0
                self._micro_batches[is_reused] = [self._training_tensors(arrays, is_reused) for arrays in passes]
                self._run_empty_of_reference(num_empty, also_others=not is_reused)
        if self.retention is not None:
            with self._timed("retention_s"):
                self._has_held = self.retention.begin(shard)
        # A count of the whole batch: a learner without reused groups must still join the all-reduce.
        self._has_reused = shard.num_reused_tokens > 0
        return [shard] * num_epochs

    def _training_tensors(self, arrays: MicroBatch[np.ndarray], is_reused: bool) -> MicroBatch[torch.Tensor]:
        batch = self.scorer.tensors(arrays, self.config.temperature)
        if self.reference is not None and self._has_kl(is_reused):
            batch["ref_logp"] = self.reference.logp(batch)
        if self.regularisers is not None:
            self.regularisers.prepare(batch, is_reused)
        batch["is_reused"] = is_reused
        return batch

    def _has_kl(self, is_reused: bool) -> bool:
        is_weighted = not is_reused or self.settings.kl_on_reused == "weighted"
        return self.reference is not None and is_weighted

    def _num_empty(self, num_passes: int) -> int:
        """Return how many passes this learner must add so that all learners run equally many.

        A collective: call it before the passes, which are collectives themselves.
        """
        return most(num_passes, self._device) - num_passes if self.config.fsdp else 0

    def _run_empty_of_reference(self, num_empty: int, also_others: bool = False) -> None:
        """Run passes of sharded frozen policies, of the regularisers too, for learners with more micro-batches."""
        for _ in range(num_empty):
            if self.reference is not None:
                self.reference.logp(self._empty_pass())
            if also_others and self.regularisers is not None:
                self.regularisers.idle(self._empty_pass())

    def _empty_passes(self, num_passes: int) -> list[MicroBatch[torch.Tensor]]:
        """Return the empty passes that this learner must add to `num_passes`; a collective, as is `_num_empty`."""
        return [self._empty_pass()] * self._num_empty(num_passes)

    def _empty_pass(self) -> MicroBatch[torch.Tensor]:
        """Return a micro-batch for a pass in which this learner only contributes its shard of the weights."""
        return self.scorer.tensors(micro_batch([bare_episode([0, 0], 0)], self.can_share_prefixes))

    def _update(self, batch: dict[str, Any], **kwargs: Any) -> tuple[Any, Any, Any]:
        for optimizer in self._optimizer_parameters:
            optimizer.zero_grad(set_to_none=True)
        self._forget_gathered()
        sums = self._accumulate_gradients()
        with self._timed("reduce_s"):
            gradients = self._summed_gradients()
        self._compare(gradients)
        with self._timed("reduce_s"):
            sums = self._sums_over_learners(sums)
            stats = statistics(sums)
            if self.regularisers is not None:
                gradients, values = self.regularisers.add_to(gradients, sums)
                stats |= values
            if self.retention is not None:
                norm = float(self._norm(gradients)) if self._has_held else 0.0
                stats["retention/gradient_share"] = self._held_norm / norm if norm else 0.0
        with self._timed("optimizer_s"):
            self.apply_gradients(self.postprocess_gradients(dict(zip(self._params, gradients, strict=True))))
        total_loss = stats.pop("total_loss")
        self._log_stats(stats | self._seconds)
        return {}, {DEFAULT_MODULE_ID: total_loss}, {}

    def _accumulate_gradients(self) -> Sums:
        """Run all micro-batches, reused ones first; return the sums for the metrics."""
        names = SUMS if self.regularisers is None else (*SUMS, *self.regularisers.sums)
        sums: Sums = dict.fromkeys(names, 0.0)
        reused_norm = 0.0
        if self._has_reused:
            self._run(self._micro_batches[True], sums)
            with self._timed("reduce_s"):
                reused_norm = float(self._norm(self._summed_gradients()))
        self._log("reuse/gradient_norm", reused_norm)
        if self.retention is not None and self._has_held:
            with self._timed("retention_s"), apart(self._params.values()):
                self.retention.backward()
                held = self._summed_gradients()
                self._held_norm = float(self._norm(held))
                if self.retention.compared():
                    self.conflict.note(held)
                del held  # their sum over learners is a copy, which the played passes need not keep
        self._run(self._micro_batches[False], sums)
        return sums

    def _run(self, batches: Sequence[MicroBatch[torch.Tensor]], sums: Sums) -> None:
        with self._timed("forward_backward_s"):
            num_empty = self._num_empty(len(batches))
            for batch in batches:
                fwd_out = self._forward(batch)
                loss = self.compute_loss_for_module(
                    module_id=DEFAULT_MODULE_ID, config=self.config, batch=batch, fwd_out=fwd_out
                )
                if self.regularisers is not None:
                    loss = self.regularisers.loss(batch, loss, fwd_out)
                loss.backward()
                for name, value in batch.pop("stats").items():
                    sums[name] = sums[name] + value
            for _ in range(num_empty):
                (0.0 * self.scorer.forward(self._empty_pass())["logp"].sum()).backward()

    def _forward(self, batch: MicroBatch[torch.Tensor]) -> dict[str, torch.Tensor]:
        fwd_out = self.scorer.forward(batch)
        if "prox_logp" not in batch:
            self._take_first_pass(batch, fwd_out)
        return fwd_out

    def _take_first_pass(self, batch: MicroBatch[torch.Tensor], fwd_out: dict[str, torch.Tensor]) -> None:
        """Store the values that stay fixed for all epochs: `prox_logp` and drift; no extra pass."""
        first_pass(batch, fwd_out["logp"], self.settings.max_logp_gap)
        if batch["is_reused"]:
            self._left_out.update(self._group_of_B[b] for b in batch["episode"][~batch["is_kept"]].unique().tolist())

    def compute_loss_for_module(
        self, *, module_id: str, config: Any, batch: MicroBatch[torch.Tensor], fwd_out: dict[str, Any]
    ) -> torch.Tensor:
        """Return this micro-batch's share of the loss and set `batch["stats"]` to its sums; see `objective`."""
        loss_of = reused_loss if batch["is_reused"] else played_loss
        loss, batch["stats"] = loss_of(batch, fwd_out, self.settings)
        return loss

    def _compare(self, gradients: Sequence[torch.Tensor]) -> None:
        """Compare the gradients of held answers with that of the rest, if the update asks for it."""
        if self.retention is not None and (domains := self.retention.compared()):
            with self._timed("retention_s"):
                self.retention.note(self.conflict.cosines(gradients, domains, self.retention.backward_of))

    def _summed_gradients(self) -> list[torch.Tensor]:
        gradients = gradients_of(self._params.values())
        return summed_shards(gradients) if self.config.fsdp else summed(gradients, self.config.num_learners)

    def _norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        return norm_of_shards(gradients) if self.config.fsdp else norm(gradients)

    def _sums_over_learners(self, sums: Sums) -> dict[str, float]:
        values = torch.tensor([float(value) for value in sums.values()], dtype=torch.float64, device=self._device)
        (total,) = summed([values], self.config.num_learners)
        return dict(zip(sums, total.tolist(), strict=True))

    def postprocess_gradients(self, gradients_dict: dict[str, Any]) -> dict[str, Any]:
        """Clip as RLlib does, and log the norm by its name; with `fsdp` by the global norm over all shards."""
        if self.config.fsdp:
            norm = float(norm_of_shards(list(gradients_dict.values())))
            self._log("gradients_default_optimizer_global_norm", norm)
            return clipped_shards(gradients_dict, norm, self.config.grad_clip)
        return super().postprocess_gradients(gradients_dict)

    def apply_gradients(self, gradients_dict: dict[str, Any]) -> None:
        """Step the optimiser; a non-finite gradient skips the step on every learner and is counted."""
        is_finite = bool(torch.isfinite(self._norm(list(gradients_dict.values()))))
        self._log("num_nonfinite_gradients", 0 if is_finite else 1)
        if not is_finite:
            return
        set_gradients((self._params[ref] for ref in gradients_dict), gradients_dict.values())
        for optimizer in self._optimizer_parameters:
            optimizer.step()

    # --- between updates ------------------------------------------------------------------------

    def num_left_out(self) -> dict[str, int]:
        """Return how many episodes of each reused group the last update left out, by group id; see `first_pass`."""
        return dict(self._left_out)

    def retention_report(self) -> HeldReport | None:
        """Return and clear the update's report on held answers; see `HeldAnswers.report`."""
        return self.retention.report() if self.retention is not None else None

    def episode_kl(self, shard: TrainingShard) -> list[list[float]]:
        """Return for each group the KL to the reference of each episode, nats; see `FrozenPolicy.episode_kl`.

        The KL in the reward needs it before advantages are computed.
        """
        assert self.reference is not None  # `kl_coeff` is above 0
        groups = shard.groups()
        episodes = _scored(groups)
        passes = micro_batches(episodes, self.config.micro_batch_tokens, self.can_share_prefixes)
        batches = (self.scorer.tensors(arrays, self.config.temperature) for arrays in passes)
        num_empty = self._num_empty(len(passes))
        with self.reference.on_device():
            sums_B = self.reference.episode_kl(batches, len(episodes), self.settings.kl_estimator)
            self._run_empty_of_reference(num_empty)
        ends = np.cumsum([group.size for group in groups])
        return [sums_B[end - group.size : end].tolist() for group, end in zip(groups, ends, strict=True)]

    def end_stages(self, domains: list[str], shard: TrainingShard) -> int:
        """Let the regularisers record what was learned in stages that ended; advantages are not read."""
        if self.regularisers is None:
            return 0
        episodes = _scored(shard.groups())
        return self.regularisers.end_stages(domains, episodes, self.config.temperature, self.can_share_prefixes)

    def send(self, version: int) -> Sent:
        """Put the weights, or only the adapters, into the object store, in the engines' number format."""
        start = time.perf_counter()
        layout, weights = sent_weights(self.model, self.config.sends_adapter())
        if not self._is_first:  # this learner only takes part in gathering them
            for _ in weights:
                pass
            return Sent(None, {})
        memory = self._bundle.buffer if self._bundle is not None else None
        self._bundle = pack_stream(layout, weights, version, self.config.compute_dtype, memory)
        packed = time.perf_counter()
        ref = ray.put(self._bundle)
        return Sent(ref, {"pack_s": packed - start, "put_s": time.perf_counter() - packed})

    def score_canary(self, sequences: list[list[int]]) -> list[np.ndarray]:
        return self.scorer.score(sequences)

    def offload(self) -> None:
        """Offload the optimiser state to host memory and free the gradients, for an engine on the same GPU."""
        for optimizer in self._optimizer_parameters:
            optimizer.zero_grad(set_to_none=True)
        self._move_optimizers("cpu")
        self._micro_batches = {}
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Move the optimiser state back to the device (undoes `offload`)."""
        self._move_optimizers(self._device)

    def _move_optimizers(self, device: torch.device | str) -> None:
        for optimizer in self._optimizer_parameters:
            for state in optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, torch.Tensor) and value.dim():  # step counts stay where the optimiser put them
                        state[name] = value.to(device)

    # --- state and checkpoints ------------------------------------------------------------------

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return RLlib's state plus that of regularisers; the reference is loaded from the model's files."""
        state = super().get_state(*args, **kwargs)
        if self.regularisers is not None and (kept := self.regularisers.get_state()):
            state["regularisers"] = kept
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        """Load a state of any age: RLlib alone would ignore weights with an older sequence number."""
        self._weights_seq_no = -1
        super().set_state(state)
        if self.regularisers is not None:
            self.regularisers.set_state(state.get("regularisers", {}))

    def gather(self) -> None:
        """Gather weights and optimiser state on the first learner, from which RLlib reads them; a collective."""
        if self.config.fsdp:
            self.policy.gather(self._is_first)
            states = {name: optimizer.state_dict() for name, optimizer in self._named_optimizers.items()}
            self._gathered = {name: whole_optimizer_state(state, self._is_first) for name, state in states.items()}

    def _forget_gathered(self) -> None:
        self.policy.gathered = self._gathered = None

    def _get_optimizer_state(self) -> dict[str, Any]:
        if not self.config.fsdp:
            return super()._get_optimizer_state()
        if self._gathered is None:
            raise RuntimeError("the optimiser is spread over learners; call gather on all of them first")
        rows = {"module_id": DEFAULT_MODULE_ID}
        return {name: {**rows, "state": convert_to_numpy(state)} for name, state in self._gathered.items()}

    def _set_optimizer_state(self, state: dict[str, Any]) -> None:
        """Load a state of any number of learners, with or without `fsdp`; with it each keeps its own rows.

        Options such as `betas` stay those of the settings, which may differ from the checkpoint's; so does the learning
        rate, unless a schedule has set it.
        """
        for name, optimizer in self._named_optimizers.items():
            saved, groups = state[name]["state"], optimizer.param_groups
            kept = ("params", "lr") if self._optimizer_lr_schedules[optimizer].use_schedule else ("params",)
            pairs = zip(groups, saved["param_groups"], strict=True)
            own = [{**group, **{key: old[key] for key in kept}} for group, old in pairs]
            entries = convert_to_torch_tensor(saved["state"], device=self._device)
            if self.config.fsdp:
                entries = sharded_optimizer_state(entries, [p for group in groups for p in group["params"]])
            optimizer.load_state_dict({"state": entries, "param_groups": own})

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
            self._save_error = error
            return None
        self._is_saved = True
        self._forget_gathered()
        return written

    def take_saved(self) -> bool:
        """Return whether `save_to_path` succeeded since the last call of `take_saved`.

        Raises:
            Exception: the exception that `save_to_path` kept.
        """
        is_saved, error = self._is_saved, self._save_error
        self._is_saved, self._save_error = False, None
        if error is not None:
            raise error
        return is_saved

    def take_weights(self, weights: dict[str, Any]) -> None:
        """Load the weights of a checkpoint and keep the optimiser state; see `CausalLMModule.set_state`."""
        self.policy.set_state(weights)

    def export(self, directory: str) -> None:
        """Write model and tokenizer as a Hugging Face directory; with `fsdp` call it on every learner."""
        export(self.policy, directory, self._is_first)

    def sees(self, file: str) -> bool:
        """Return whether a file that the driver wrote is visible on this learner's node."""
        return os.access(file, os.F_OK)

    # --- timers and metrics ---------------------------------------------------------------------

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
        self._log("is_prefix_sharing", float(self.can_share_prefixes))
        if self._device.type == "cuda":
            self._log("num_attention_graphs", compiled_flex.num_graphs)

    def _log(self, name: str, value: float) -> None:
        # Already equal on all learners, so RLlib's mean over learners does not change it.
        self.metrics.log_value((DEFAULT_MODULE_ID, name), value, reduce="mean", window=1)


def _scored(groups: Sequence[Group]) -> list[Episode]:
    """Return the episodes of groups that are scored, not trained on."""
    return episodes_of(groups, [np.zeros(group.size) for group in groups])
