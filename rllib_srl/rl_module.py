"""A Hugging Face causal language model as an RLModule: tokens laid out in, log-probs of given tokens out.

Only the learner runs it: sampling is the engine's job, so the inference-only state is empty and
weights reach the engine through the verified transfer (`engine.sync`), never through RLlib's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from ray.rllib.core.rl_module.torch.torch_rl_module import TorchRLModule

from rllib_srl.head import Scale, token_scores
from rllib_srl.models import local_model
from rllib_srl.sharding import assign, is_sharded, whole
from rllib_srl.trie_attention import register

IN_SHARDS = "in learner_shards"  # a state's only entry, where the checkpoint's shards hold the weights


class CausalLMModule(TorchRLModule):
    """Holds the fp32 master weights of the policy.

    Invariant: `parameters()` names each tied weight once; those that are trained require a gradient.
    """

    gathered: dict[str, np.ndarray] | None = None  # whole weights, while `get_state` may be asked for them
    awaits_shards = False  # its weights are not those of the state it was given
    _layers: tuple[torch.nn.Module, ...] = ()  # that run again backwards

    def setup(self) -> None:
        """Load the model named by `model_config["model"]` in fp32."""
        self.model = load_causal_lm(self.model_config["model"])

    def train(self, mode: bool = True) -> CausalLMModule:
        """Keep dropout off, so that log-probs are those of the engine; gradients flow all the same."""
        super().train(False)
        for layer in self._layers:  # transformers runs a layer again only where this flag is up; what is in it stays
            layer.training = True
        return self

    def checkpoint_activations(self) -> None:
        """Keep only each decoder layer's input for the backward pass, and compute the rest of it again."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self._layers = tuple(one for one in self.model.modules() if isinstance(one, GradientCheckpointingLayer))
        self.train()

    def gather(self, keeps: bool) -> None:
        """Collect the weights of shards; every learner must join in.

        Args:
            keeps: this learner will be asked for its state.
        """
        found = {name: tensor.cpu() for name, tensor in whole(self.saved_parameters())}
        self.gathered = {name: tensor.float().numpy() for name, tensor in found.items()} if keeps else None

    def leave_to_shards(self) -> None:
        """Let `get_state` say that the weights lie in a checkpoint's shards, until the next update."""
        self.gathered = {IN_SHARDS: np.empty(0)}

    def saved_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield what is trained: the rest is read from the model's own files."""
        return ((name, one) for name, one in self.named_parameters() if one.requires_grad)

    def _forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, torch.Tensor]:
        return self._forward(batch, **kwargs)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, torch.Tensor]:
        if self.awaits_shards:
            raise RuntimeError("the weights lie in the checkpoint's learner_shards; restore it whole, through SRL")
        return token_logps(self.model, batch, batch.get("with_hidden", False))

    def get_state(self, components: Any = None, *, inference_only: bool = False, **kwargs: Any) -> dict[str, Any]:
        """Return the trained parameters, fp32 numpy arrays by name; nothing with `inference_only` (see the top)."""
        if inference_only:
            return {}
        if is_sharded(self.model):
            if self.gathered is None:
                raise RuntimeError("the weights are spread over learners; call gather on all of them first")
            return self.gathered
        return {name: parameter.detach().cpu().float().numpy() for name, parameter in self.saved_parameters()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Load what `get_state` returned; where the weights lie in shards, wait for `Fitted.load_shards`.

        Raises:
            ValueError: naming the parameters that are missing, unknown or of another shape.
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
            assign(parameter, torch.as_tensor(np.asarray(state[name])))


def load_causal_lm(name_or_path: str) -> torch.nn.Module:
    """Load a causal language model in fp32 with dropout off.

    Args:
        name_or_path: a Hugging Face id, a local directory or a packaged model (`models.local_model`).
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        local_model(name_or_path), dtype=torch.float32, attn_implementation=register()
    )
    return model.eval()


def token_logps(model: torch.nn.Module, batch: dict[str, Any], with_hidden: bool = False) -> dict[str, torch.Tensor]:
    """Compute the log-probs of the target tokens; the head runs only on rows that predict one.

    Args:
        model: a Hugging Face causal language model.
        batch: `token_ids` and `position_ids` [R, T], `trie` (R is 1) or `attention_mask` (int [R, T]), `predictor` and
            `target` [N], `temperature` (> 0).
        with_hidden: hand the hidden states through, for `episode_means`.

    Returns:
        `logp` and `entropy`, fp32 [N], nats, of softmax(logits / temperature), with gradients; with `with_hidden` also
        `hidden` [U, D], the last hidden states of the U distinct predictors, detached, and `row` [N], which
        of them predicts a token. Neither is a copy.
    """
    hidden_RTD = _body(model, batch)
    rows_U, row_N = torch.unique(batch["predictor"], return_inverse=True)
    hidden_UD = hidden_RTD.flatten(0, 1)[rows_U]
    head = model.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise ValueError(f"the head of {type(model).__name__} has a bias; expected one without")
    scale = Scale(float(batch["temperature"]), getattr(model.config, "final_logit_softcapping", None))
    logp_N, entropy_N = token_scores(hidden_UD, head.weight, row_N, batch["target"], scale)
    out = {"logp": logp_N, "entropy": entropy_N}
    return out | {"hidden": hidden_UD.detach(), "row": row_N} if with_hidden else out


def _body(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """Return the last hidden states [R, T, D]."""
    if batch.get("trie") is None:
        shape = {"attention_mask": batch["attention_mask"]}
    else:
        # Transformers passes a mask of four dimensions on as it is, where it would make one of [T, T].
        no_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=batch["token_ids"].device)
        shape = {"attention_mask": no_mask, "trie": batch["trie"]}
    token_ids, position_ids = batch["token_ids"], batch["position_ids"]
    return model.base_model(
        input_ids=token_ids, position_ids=position_ids, use_cache=False, **shape
    ).last_hidden_state


def episode_means(
    hidden_UD: torch.Tensor, row_N: torch.Tensor, episode_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the episodes in `episode_N`, ascending [B], and the mean of each one's hidden states, fp32 [B, D].

    Args:
        hidden_UD: hidden states of distinct rows.
        row_N: the row of each loss token.
        episode_N: the episode of each loss token.
    """
    episode_B, at_N, count_B = torch.unique(episode_N, return_inverse=True, return_counts=True)
    num_rows = len(hidden_UD)
    # A row of a trie serves many episodes: counting it in each needs no copy of its state.
    counts_BU = torch.bincount(at_N * num_rows + row_N, minlength=len(episode_B) * num_rows).view(-1, num_rows)
    return episode_B, counts_BU.float() @ hidden_UD.float() / count_B[:, None]
