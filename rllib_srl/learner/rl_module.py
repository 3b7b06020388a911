"""Wrap a Hugging Face causal language model as an RLModule that returns log-probs of given tokens.

Only the learner runs it. The engine samples, so the inference-only state is empty, and weights reach the engine
through the verified transfer (`engine.sync`), never through RLlib's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ray.rllib.core.rl_module.torch.torch_rl_module import TorchRLModule

from rllib_srl.batch.layout import MicroBatch
from rllib_srl.engine.models import local_model
from rllib_srl.learner.fsdp.sequence_parallel import of_all, own_range, own_tokens
from rllib_srl.learner.fsdp.sharding import assign, is_sharded, is_spread, whole
from rllib_srl.learner.fsdp.tensor_parallel import split_token_scores
from rllib_srl.learner.head import Scale, token_scores, top_tokens
from rllib_srl.learner.trie_attention import register
from rllib_srl.storage.weight_file import WEIGHTS, read_weights, write_weights

IN_SHARDS = "in learner_shards"  # only key of a state whose weights are in the checkpoint's shards
IN_FILE = f"in {WEIGHTS}"  # only key of the state that RLlib pickles; the weights are in that file


class CausalLMModule(TorchRLModule):
    """Holds the fp32 master weights of the policy.

    Invariant: `parameters()` yields each tied weight once; exactly the trained ones require a gradient.
    """

    model: Any  # a Hugging Face causal language model
    gathered: dict[str, np.ndarray] | None = None  # whole weights for `get_state`, from `gather` to the next update
    awaits_shards = False  # True after a state without weights, until `load_shards`
    _layers: tuple[Any, ...] = ()  # decoder layers with activation checkpointing

    def setup(self) -> None:
        """Load the model named by `model_config["model"]` in fp32."""
        self.model = load_causal_lm(self.model_config["model"])

    def train(self, mode: bool = True) -> CausalLMModule:
        """Stay in eval mode: dropout off, so that log-probs match the engine's. Gradients are not affected."""
        super().train(False)
        for layer in self._layers:  # transformers checkpoints only layers with this flag; submodules keep False
            layer.training = True
        return self

    def checkpoint_activations(self, offload: bool = False) -> None:
        """Enable activation checkpointing: keep each decoder layer's input and recompute the rest in the backward.

        Args:
            offload: keep these inputs in host memory, page-locked with a GPU.
        """
        from transformers.modeling_layers import GradientCheckpointingLayer

        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self._layers = tuple(one for one in self.model.modules() if isinstance(one, GradientCheckpointingLayer))
        if offload:
            for layer in self._layers:
                layer._gradient_checkpointing_func = _saving_on_cpu(layer._gradient_checkpointing_func)
        self.train()

    def gather(self, keeps: bool) -> None:
        """Gather the sharded weights for `get_state`; a collective.

        Args:
            keeps: whether this learner keeps them, because `get_state` will be called on it.
        """
        found = {}
        for name, tensor in whole(self.saved_parameters()):
            if keeps:
                found[name] = tensor.cpu().float().numpy()
        self.gathered = found if keeps else None

    def leave_to_shards(self) -> None:
        """Make `get_state` return a marker for weights in the checkpoint's shards, until the next update."""
        self.gathered = {IN_SHARDS: np.empty(0)}

    def saved_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the trained parameters; the others are read from the model's own files."""
        return ((name, one) for name, one in self.named_parameters() if one.requires_grad)

    def _forward_train(self, batch: MicroBatch[torch.Tensor], **kwargs: Any) -> dict[str, torch.Tensor]:
        return self._forward(batch, **kwargs)

    def _forward(self, batch: MicroBatch[torch.Tensor], **kwargs: Any) -> dict[str, torch.Tensor]:
        if self.awaits_shards:
            raise RuntimeError("the weights lie in the checkpoint's learner_shards; restore it whole, through SRL")
        return token_logps(self.model, batch, batch.get("with_hidden", False))

    def get_state(self, components: Any = None, *, inference_only: bool = False, **kwargs: Any) -> dict[str, Any]:
        """Return the trained parameters by name, fp32 numpy arrays; {} with `inference_only` (see the module).

        Raises:
            RuntimeError: the weights are sharded and `gather` was not called.
        """
        if inference_only:
            return {}
        if is_sharded(self.model):
            if self.gathered is None:
                raise RuntimeError("the weights are spread over learners; call gather on all of them first")
            return self.gathered
        return {name: parameter.detach().cpu().float().numpy() for name, parameter in self.saved_parameters()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Load a state from `get_state`; if its weights are in shards, `TrainingState.load_shards` must follow.

        Raises:
            ValueError: parameters are missing, unknown or of another shape; the message names them.
        """
        if not state:
            return
        self.awaits_shards = IN_SHARDS in state
        if self.awaits_shards:
            return
        own = dict(self.saved_parameters())
        faults = [f"{name}: missing" for name in own if name not in state]
        faults += [f"{name}: unknown" for name in state if name not in own]
        faults += [
            f"{name}: shape {tuple(state[name].shape)}; expected {tuple(own[name].shape)}"
            for name in own
            if name in state and tuple(state[name].shape) != tuple(own[name].shape)
        ]
        if faults:
            raise ValueError(f"the state does not fit model {self.model_config['model']!r}: " + "; ".join(faults[:8]))
        for name, parameter in own.items():
            assign(parameter, torch.tensor(np.asarray(state[name])))  # a copy: arrays of the object store are read-only

    def save_to_path(self, path: Any = None, *, state: Any = None, **kwargs: Any) -> str:
        """Write RLlib's module files, with the weights as safetensors instead of a pickle."""
        weights = state or self.get_state()
        saved: str
        if IN_SHARDS in weights:
            saved = super().save_to_path(path, state=weights, **kwargs)
            return saved
        saved = super().save_to_path(path, state={IN_FILE: np.empty(0)}, **kwargs)
        write_weights(Path(saved) / WEIGHTS, weights)
        return saved

    def restore_from_path(self, path: Any, **kwargs: Any) -> None:
        """Load the files of `save_to_path`; a pickle is opened only if there is no safetensors file.

        Raises:
            CheckpointError: the file cannot be read.
            ValueError: the weights belong to another model.
        """
        file = Path(path) / WEIGHTS
        if file.is_file():
            self.set_state(read_weights(file))
        else:
            super().restore_from_path(path, **kwargs)


def _saving_on_cpu(checkpoint: Any) -> Callable[..., Any]:
    """Return a layer's checkpointing function that keeps the layer's inputs in host memory.

    torch saves the inputs of a non-reentrant checkpoint through the hooks outside of it; what the layer itself saves
    is computed again, and meets the checkpoint's own hooks.
    """

    def run(*args: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=args[-1].device.type == "cuda"):
            return checkpoint(*args)

    return run


def load_causal_lm(name_or_path: str) -> torch.nn.Module:
    """Load a causal language model in fp32 with dropout off.

    Args:
        name_or_path: a Hugging Face id, a local directory or a packaged model (`models.local_model`).
    """
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        local_model(name_or_path), dtype=torch.float32, attn_implementation=register()
    )
    return model.eval()


def autocast(device: torch.device, compute_dtype: str) -> AbstractContextManager[Any]:
    """Return the context of a forward pass in "float32" or "bfloat16"; the weights stay fp32."""
    if compute_dtype == "bfloat16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


def token_logps(
    model: Any, batch: MicroBatch[torch.Tensor], with_hidden: bool = False
) -> dict[str, torch.Tensor]:
    """Compute the log-probs of the target tokens; the head runs only on rows that predict a target.

    Args:
        model: a Hugging Face causal language model.
        batch: `token_ids`, `position_ids`, `trie` (R is 1) or `attention_mask`, `predictor`, `target`, `temperature`
            (> 0); `num_top` asks for the likeliest tokens where `top_at` [M] says, `stored_tokens` [N, k] for the
            log-probs of given ones.
        with_hidden: also return the hidden states, for the critic.

    Returns:
        `logp` and `entropy`, fp32 [N], nats, of softmax(logits / temperature), with gradients. With `with_hidden` also
        `hidden` [U, D], the detached last hidden states of the U distinct predictors, and `row` [N], the index in [0,
        U) of each token's predictor; neither is a copy. With `num_top` also `top_tokens` and `top_logp` [M, k], without
        gradient; with `stored_tokens` also `stored_logp` [N, k], with gradient.

    Raises:
        ValueError: the head has a bias.
    """
    hidden_RTD = _body(model, batch)
    predictor_N, target_N, mesh = batch["predictor"], batch["target"], batch.get("sequence")
    if mesh is not None:
        start, stop = own_range(batch["token_ids"].shape[1], mesh)
        is_own_N = (predictor_N >= start) & (predictor_N < stop)
        # One more token, which `of_all` leaves out: a learner without loss tokens takes part, too.
        predictor_N = torch.cat([predictor_N[is_own_N] - start, predictor_N.new_zeros(1)])
        target_N = torch.cat([target_N[is_own_N], target_N.new_zeros(1)])
    rows_U, row_N = torch.unique(predictor_N, return_inverse=True)
    hidden_UD = hidden_RTD.flatten(0, 1)[rows_U]
    head = model.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise ValueError(f"the head of {type(model).__name__} has a bias; expected one without")
    scale = Scale(float(batch["temperature"]), getattr(model.config, "final_logit_softcapping", None))
    weight_VD: Any = head.weight
    # Split by vocabulary with tensor parallelism; FSDP2 has gathered the rest.
    score: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    score = split_token_scores if is_spread(weight_VD) else token_scores
    out = {}
    if "stored_tokens" in batch:  # one pass of the head for all of them
        stored_Nk = batch["stored_tokens"]
        rows = torch.cat([row_N, row_N.repeat_interleave(stored_Nk.shape[1])])
        tokens = torch.cat([target_N, stored_Nk.flatten()])
        logp, entropy = score(hidden_UD, weight_VD, rows, tokens, scale)
        logp_N, entropy_N = logp[: len(row_N)], entropy[: len(row_N)]
        out["stored_logp"] = logp[len(row_N) :].view(stored_Nk.shape)
    else:
        logp_N, entropy_N = score(hidden_UD, weight_VD, row_N, target_N, scale)
    if "num_top" in batch:
        wanted_U, at_M = torch.unique(row_N[batch["top_at"]], return_inverse=True)
        tokens_Uk, logp_Uk = top_tokens(hidden_UD[wanted_U], weight_VD, batch["num_top"], scale)
        out |= {"top_tokens": tokens_Uk[at_M], "top_logp": logp_Uk[at_M]}
    if mesh is not None:
        logp_N, entropy_N = (of_all(one, is_own_N, mesh) for one in (logp_N, entropy_N))
    out |= {"logp": logp_N, "entropy": entropy_N}
    return out | {"hidden": hidden_UD.detach(), "row": row_N} if with_hidden else out


def _body(model: Any, batch: MicroBatch[torch.Tensor]) -> torch.Tensor:
    """Return the last hidden states [R, T, D]; with `sequence` those of this learner's tokens."""
    token_ids, position_ids = batch["token_ids"], batch["position_ids"]
    if batch.get("trie") is None:
        shape: dict[str, Any] = {"attention_mask": batch["attention_mask"]}
    else:
        # Transformers passes a 4-D mask through unchanged; without one it would build a [T, T] mask.
        no_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=batch["token_ids"].device)
        shape = {"attention_mask": no_mask, "trie": batch["trie"]}
        if (mesh := batch.get("sequence")) is not None:
            shape["sequence"] = mesh
            token_ids, position_ids = own_tokens(token_ids, mesh), own_tokens(position_ids, mesh)
    hidden_RTD: torch.Tensor = model.base_model(
        input_ids=token_ids, position_ids=position_ids, use_cache=False, **shape
    ).last_hidden_state
    return hidden_RTD
