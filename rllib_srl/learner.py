"""The GRPO learner: prefix tries in micro-batches, gradients summed over learners, one step an epoch.

    shard -> groups -> episodes -> micro-batches          batch.py (pure)
    for each micro-batch: forward, loss / num_tokens, backward
    sum gradients over learners -> clip -> step            RLlib's grad_clip and learning-rate schedule apply

The gradient is *summed* because the loss already divides by the token count of the whole batch: any
number of learners, any sharding and any micro-batches give the gradient of one process.
Where this differs from RLlib's TorchLearner: no DDP wrapper (it would average, and hang on unequal
numbers of micro-batches); a non-finite gradient skips the step and is counted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.learner.torch.torch_learner import TorchLearner

from rllib_srl.batch import Episode, MicroBatch, episodes_of, micro_batch, micro_batches
from rllib_srl.engine.model_dir import load_tokenizer
from rllib_srl.losses import KL_LOSSES, clipped_policy_loss, importance_correction, k1
from rllib_srl.models import local_model
from rllib_srl.rl_module import load_causal_lm, token_logps
from rllib_srl.shard import TrainingShard
from rllib_srl.weights import WeightSender

logger = logging.getLogger(__name__)

SHARING_TOLERANCE = 1e-3  # largest |log-prob difference| of trie against padded in fp32, nats
OPTIMIZERS = ("adamw", "sgd")
TIMERS = ("layout_s", "forward_backward_s", "reduce_s", "optimizer_s")
STATS = (
    "loss",
    "policy_loss",
    "kl",
    "entropy",
    "clipped",
    "correction",
    "mismatch",
    "num_tokens",
    "num_computed_tokens",
)


class GRPOTorchLearner(WeightSender, TorchLearner):
    """Trains one `CausalLMModule`.

    Invariant: after `update` the weights of all learners are equal.
    """

    def build(self) -> None:
        """Build module and optimiser, load the reference if a KL term needs it, check prefix sharing."""
        super().build()
        self._micro_batches: list[dict[str, Any]] = []
        self._reference = self._load_reference() if self.config.kl_coeff else None
        self._can_share = bool(self.config.prefix_sharing) and self._sharing_is_exact()

    @property
    def model(self) -> torch.nn.Module:
        """The Hugging Face model in training."""
        return self.module[DEFAULT_MODULE_ID].model

    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        """Register AdamW or plain SGD over the trained parameters, with RLlib's learning-rate schedule."""
        params = [p for p in self.module[module_id].parameters() if p.requires_grad]
        if config.optimizer_name == "sgd":
            optimizer: torch.optim.Optimizer = torch.optim.SGD(params)
        else:
            optimizer = torch.optim.AdamW(
                params, betas=tuple(config.adam_betas), weight_decay=config.weight_decay, fused=True
            )
        self.register_optimizer(
            module_id=module_id, optimizer=optimizer, params=params, lr_or_lr_schedule=config.lr
        )

    # --- one update ---------------------------------------------------------------------------

    def _create_iterator_if_necessary(
        self, *, training_data: Any, num_epochs: int = 1, **kwargs: Any
    ) -> Iterable[TrainingShard]:
        shard: TrainingShard = training_data.batch
        self._seconds = dict.fromkeys(TIMERS, 0.0)
        with self._timed("layout_s"):
            episodes = episodes_of(shard.groups(), shard.advantages)
            passes = micro_batches(episodes, self.config.micro_batch_tokens, self._can_share)
            self._micro_batches = [self._tensors(one, shard.num_tokens) for one in passes]
        return [shard] * num_epochs

    def _update(self, batch: dict[str, Any], **kwargs: Any) -> tuple[Any, Any, Any]:
        for optimizer in self._optimizer_parameters:
            optimizer.zero_grad(set_to_none=True)
        stats = dict.fromkeys(STATS, 0.0)
        with self._timed("forward_backward_s"):
            self._accumulate_gradients(stats)
        with self._timed("reduce_s"):
            gradients = self._sum_over_learners({ref: p.grad for ref, p in self._params.items()}, stats)
        with self._timed("optimizer_s"):
            self.apply_gradients(self.postprocess_gradients(gradients))
        self._log_stats(stats | self._seconds)
        return {}, {DEFAULT_MODULE_ID: stats["loss"]}, {}

    def _accumulate_gradients(self, stats: dict[str, float]) -> None:
        for one in self._micro_batches:
            with self._autocast():
                fwd_out = self.module[DEFAULT_MODULE_ID](one)
            # The first epoch's own log-probs are those at the start of the update: no extra pass.
            one.setdefault("prox_logp", fwd_out["logp"].detach())
            loss = self.compute_loss_for_module(
                module_id=DEFAULT_MODULE_ID, config=self.config, batch=one, fwd_out=fwd_out
            )
            loss.backward()
            for name, value in one.pop("stats").items():
                stats[name] += float(value)

    def compute_loss_for_module(self, *, module_id: str, config: Any, batch: dict, fwd_out: dict) -> torch.Tensor:
        """Return this micro-batch's share of the loss: a sum over tokens, divided by the global count.

        Args:
            module_id: the module trained.
            config: the settings.
            batch: one micro-batch: `advantage`, `behaviour_logp`, `prox_logp`, `ref_logp` [N], `num_tokens`.
            fwd_out: `logp` and `entropy` [N].
        """
        logp_N, prox_logp_N = fwd_out["logp"], batch["prox_logp"]
        correction_N = torch.ones_like(prox_logp_N)
        if config.is_truncation is not None:
            correction_N = importance_correction(prox_logp_N, batch["behaviour_logp"], config.is_truncation)
        surrogate_N, is_clipped_N = clipped_policy_loss(
            logp_N, prox_logp_N, batch["advantage"], config.clip_low, config.clip_high
        )
        policy_loss = (correction_N * surrogate_N).sum() / batch["num_tokens"]
        loss = policy_loss
        kl_N = torch.zeros_like(prox_logp_N)
        if config.kl_coeff:
            kl_N = {**KL_LOSSES, "k1": k1}[config.kl_estimator](logp_N, batch["ref_logp"])
            if config.kl_estimator in KL_LOSSES:
                loss = loss + config.kl_coeff * kl_N.sum() / batch["num_tokens"]
        batch["stats"] = {
            "loss": loss.detach(),
            "policy_loss": policy_loss.detach(),
            "kl": kl_N.detach().sum() / batch["num_tokens"],
            "entropy": fwd_out["entropy"].sum() / batch["num_tokens"],
            "clipped": is_clipped_N.sum() / batch["num_tokens"],
            "correction": correction_N.sum() / batch["num_tokens"],
            "mismatch": (prox_logp_N - batch["behaviour_logp"]).abs().sum() / batch["num_tokens"],
            "num_tokens": len(prox_logp_N),
            "num_computed_tokens": batch["token_ids"].numel(),
        }
        return loss

    def apply_gradients(self, gradients_dict: dict) -> None:
        """Step the optimiser; a non-finite gradient skips the step on every learner, and is counted."""
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients_dict.values()]))
        is_finite = bool(torch.isfinite(norm))
        self._log("num_nonfinite_gradients", 0 if is_finite else 1)
        if not is_finite:
            return
        for ref, gradient in gradients_dict.items():
            self._params[ref].grad = gradient
        for optimizer in self._optimizer_parameters:
            optimizer.step()

    def make_room(self) -> None:
        """Move the optimiser's state to host memory and free the gradients, for an engine on the same card."""
        for optimizer in self._optimizer_parameters:
            optimizer.zero_grad(set_to_none=True)
        self._move_optimizer_state("cpu")
        self._micro_batches = []
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def take_room(self) -> None:
        """Undo `make_room`."""
        self._move_optimizer_state(self._device)

    def _move_optimizer_state(self, device: Any) -> None:
        for optimizer in self._optimizer_parameters:
            for state in optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, torch.Tensor) and value.dim():  # step counts stay where the optimiser put them
                        state[name] = value.to(device)

    def episode_kl(self, shard: TrainingShard) -> list[list[float]]:
        """Return for each group and episode the summed k1 of its tokens against the reference, nats.

        For the KL in the reward, which must be known before advantages are computed.
        """
        groups = shard.groups()
        episodes = episodes_of(groups, [np.zeros(group.size) for group in groups])
        sums = np.zeros(len(episodes))
        for part in micro_batches(episodes, self.config.micro_batch_tokens, self._can_share):
            batch = self._tensors(part, num_tokens=1)
            kl_N = batch["behaviour_logp"] - batch["ref_logp"]
            np.add.at(sums, part.episode_N, kl_N.float().cpu().numpy())
        bounds = np.cumsum([0] + [group.size for group in groups])
        return [sums[a:b].tolist() for a, b in pairwise(bounds)]

    # --- parts --------------------------------------------------------------------------------

    def score(
        self, sequences: list[list[int]], share_prefixes: bool = False, is_exact: bool = False
    ) -> list[np.ndarray]:
        """Return for each sequence the log-probs of its tokens 1..T-1 at temperature 1, float32 [T - 1].

        Args:
            sequences: token ids, each at least 2 long.
            share_prefixes: lay them out as a trie instead of padding.
            is_exact: compute in fp32 whatever the number format of training is.
        """
        episodes = [_scored(ids, index) for index, ids in enumerate(sequences)]
        one = self._tensors(micro_batch(episodes, share_prefixes), num_tokens=1, with_reference=False)
        with torch.no_grad(), nullcontext() if is_exact else self._autocast():
            logp_N = token_logps(self.model, {**one, "temperature": 1.0})["logp"].float().cpu().numpy()
        return np.split(logp_N, np.cumsum([len(ids) - 1 for ids in sequences])[:-1])

    def export(self, directory: str) -> None:
        """Write model and tokenizer as a Hugging Face directory."""
        self.model.save_pretrained(directory)
        load_tokenizer(local_model(self.module[DEFAULT_MODULE_ID].model_config["model"])).save_pretrained(directory)

    def set_state(self, state: dict[str, Any]) -> None:
        """Load a state whatever its age: RLlib would ignore weights with an older sequence number."""
        self._weights_seq_no = -1
        super().set_state(state)

    def _tensors(self, one: MicroBatch, num_tokens: int, with_reference: bool = True) -> dict[str, Any]:
        arrays = {
            "token_ids": one.layout.token_ids_RT,
            "position_ids": one.layout.position_ids_RT,
            "attention_mask": one.layout.attention_mask,
            "predictor": one.predictor_N,
            "target": one.target_N,
            "advantage": one.advantage_N,
            "behaviour_logp": one.behaviour_logp_N,
        }
        batch: dict[str, Any] = {name: torch.from_numpy(array).to(self._device) for name, array in arrays.items()}
        batch |= {"num_tokens": num_tokens, "temperature": self.config.temperature}
        if self._reference is not None and with_reference:
            with torch.no_grad(), self._autocast():
                batch["ref_logp"] = token_logps(self._reference, batch)["logp"]
        return batch

    def _autocast(self) -> AbstractContextManager:
        if self.config.compute_dtype == "bfloat16":
            return torch.autocast(self._device.type, dtype=torch.bfloat16)
        return nullcontext()

    def _load_reference(self) -> torch.nn.Module:
        # From the model's own files, so that a restored run is anchored where the first one was.
        name = self.module[DEFAULT_MODULE_ID].model_config["model"]
        return load_causal_lm(name).requires_grad_(False).to(self._device)

    def _sharing_is_exact(self) -> bool:
        """Compare trie and padded log-probs on the real weights; say so in log and metrics if they differ.

        Architectures whose attention depends on token indices (sliding windows) would silently attend
        to the wrong tokens in a trie.
        """
        ids = np.random.default_rng(0).integers(0, int(self.model.config.vocab_size), (4, 24))
        sequences = [np.concatenate([ids[0], ids[k][:12]]).tolist() for k in (1, 2, 3)]
        shared = self.score(sequences, share_prefixes=True, is_exact=True)
        padded = self.score(sequences, is_exact=True)
        gap = max(float(np.abs(a - b).max()) for a, b in zip(shared, padded, strict=True))
        has_window = "sliding_attention" in (getattr(self.model.config, "layer_types", None) or ())
        if gap <= SHARING_TOLERANCE and not has_window:
            return True
        reason = "it has sliding-window layers" if has_window else f"its log-probs differ by {gap:.3g} nats"
        logger.warning(
            "prefix sharing is off for %s: %s; training goes on with padding, slower and correct",
            type(self.model).__name__,
            reason,
        )
        return False

    def _sum_over_learners(self, gradients: dict, stats: dict[str, float]) -> dict:
        """Add up gradients and statistics; a learner without groups contributes zeros."""
        filled = {ref: torch.zeros_like(self._params[ref]) if g is None else g for ref, g in gradients.items()}
        if self.config.num_learners < 2:
            return filled
        values = torch.tensor(list(stats.values()), dtype=torch.float64, device=self._device)
        torch.distributed.all_reduce(values)
        stats.update(zip(stats, values.tolist(), strict=True))
        flat = torch.cat([g.flatten() for g in filled.values()])
        torch.distributed.all_reduce(flat)
        parts = flat.split([g.numel() for g in filled.values()])
        return {ref: part.view_as(filled[ref]) for ref, part in zip(filled, parts, strict=True)}

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # kernels run on after the call that started them
        self._seconds[name] += time.perf_counter() - start

    def _log_stats(self, stats: dict[str, float]) -> None:
        for name, value in stats.items():
            self._log(name, value)
        self._log("is_prefix_sharing", float(self._can_share))

    def _log(self, name: str, value: float) -> None:
        # Already summed over learners, so RLlib's mean over learners leaves it as it is.
        self.metrics.log_value((DEFAULT_MODULE_ID, name), value, reduce="mean", window=1)

    def _make_modules_ddp_if_necessary(self) -> None:
        """Wrap nothing: `_sum_over_learners` does the communication."""


def _scored(ids: list[int], index: int) -> Episode:
    token_ids_T = np.asarray(ids, np.int32)
    loss_mask_T = np.ones(len(ids), bool)
    loss_mask_T[0] = False
    return Episode(token_ids_T, loss_mask_T, np.zeros(len(ids), np.float32), 0.0, index)
