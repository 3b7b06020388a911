"""A Hugging Face causal language model as an RLModule: tokens laid out in, log-probs of given tokens out.

Only the learner runs it: sampling is the engine's job, so the inference-only state is empty and
weights reach the engine through the verified transfer (`engine.sync`), never through RLlib's own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from ray.rllib.core.rl_module.torch.torch_rl_module import TorchRLModule
from torch.utils.checkpoint import checkpoint

from rllib_srl.models import local_model

ROWS_PER_CHUNK = 512  # logits of one chunk: 512 x 50k fp32 is 100 MB


class CausalLMModule(TorchRLModule):
    """Holds the fp32 master weights of the policy.

    Invariant: `parameters()` are exactly the trained ones, each tied weight once.
    """

    def setup(self) -> None:
        """Load the model named by `model_config["model"]` in fp32."""
        self.model = load_causal_lm(self.model_config["model"])

    def train(self, mode: bool = True) -> CausalLMModule:
        """Keep dropout off, so that log-probs are those of the engine; gradients flow all the same."""
        return super().train(False)

    def _forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, torch.Tensor]:
        return self._forward(batch, **kwargs)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, torch.Tensor]:
        return token_logps(self.model, batch, batch.get("with_hidden", False))

    def get_state(self, components: Any = None, *, inference_only: bool = False, **kwargs: Any) -> dict[str, Any]:
        """Return fp32 numpy arrays by parameter name; nothing with `inference_only` (see the module docstring)."""
        if inference_only:
            return {}
        return {name: parameter.detach().cpu().float().numpy() for name, parameter in self.named_parameters()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Load what `get_state` returned.

        Raises:
            ValueError: naming the parameters that are missing, unknown or of another shape.
        """
        if not state:
            return
        own = dict(self.named_parameters())
        faults = [f"{name}: missing" for name in own if name not in state]
        faults += [f"{name}: unknown" for name in state if name not in own]
        faults += [
            f"{name}: shape {tuple(state[name].shape)}; expected {tuple(own[name].shape)}"
            for name in own
            if name in state and tuple(state[name].shape) != tuple(own[name].shape)
        ]
        if faults:
            raise ValueError(f"the state does not fit model {self.model_config['model']!r}: " + "; ".join(faults[:8]))
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(torch.as_tensor(np.asarray(state[name])))


def load_causal_lm(name_or_path: str) -> torch.nn.Module:
    """Load a causal language model in fp32 with dropout off.

    Args:
        name_or_path: a Hugging Face id, a local directory or a packaged model (`models.local_model`).
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        local_model(name_or_path), dtype=torch.float32, attn_implementation="sdpa"
    )
    return model.eval()


def token_logps(model: torch.nn.Module, batch: dict[str, Any], with_hidden: bool = False) -> dict[str, torch.Tensor]:
    """Compute the log-probs of the target tokens; the head runs only on rows that predict one.

    Args:
        model: a Hugging Face causal language model.
        batch: `token_ids` and `position_ids` [R, T], `attention_mask` (bool [1, 1, T, T] or int [R, T]),
            `predictor` and `target` [N], `temperature` (> 0).
        with_hidden: hand the hidden states through, for `episode_means`.

    Returns:
        `logp` and `entropy`, fp32 [N], nats, of softmax(logits / temperature); with `with_hidden` also
        `hidden` [U, D], the last hidden states of the U distinct predictors, detached, and `row` [N], which
        of them predicts a token. Neither is a copy.
    """
    hidden_RTD = model.base_model(
        input_ids=batch["token_ids"],
        position_ids=batch["position_ids"],
        attention_mask=batch["attention_mask"],
        use_cache=False,
    ).last_hidden_state
    rows_U, row_of_N = torch.unique(batch["predictor"], return_inverse=True)
    hidden_UD = hidden_RTD.flatten(0, 1)[rows_U]
    order = torch.argsort(row_of_N, stable=True)
    logps, entropies = [], []
    bounds = torch.searchsorted(row_of_N[order], torch.arange(0, len(rows_U) + ROWS_PER_CHUNK, ROWS_PER_CHUNK))
    for chunk, (start, stop) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        at, first = order[start:stop], chunk * ROWS_PER_CHUNK
        arguments = (
            model,
            hidden_UD[first : first + ROWS_PER_CHUNK],
            row_of_N[at] - first,
            batch["target"][at],
            batch["temperature"],
        )
        # Recomputing the head in the backward pass keeps at most one chunk of logits alive.
        one_chunk = len(rows_U) <= ROWS_PER_CHUNK
        logp, entropy = _head(*arguments) if one_chunk else checkpoint(_head, *arguments, use_reentrant=False)
        logps.append(logp)
        entropies.append(entropy)
    back = torch.argsort(order)
    out = {"logp": torch.cat(logps)[back], "entropy": torch.cat(entropies)[back]}
    return out | {"hidden": hidden_UD.detach(), "row": row_of_N} if with_hidden else out


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


def _head(
    model: torch.nn.Module, hidden_UD: torch.Tensor, row_N: torch.Tensor, target_N: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logits_UV = model.get_output_embeddings()(hidden_UD).float()
    cap = getattr(model.config, "final_logit_softcapping", None)
    if cap:
        logits_UV = torch.tanh(logits_UV / cap) * cap
    if temperature != 1.0:
        logits_UV = logits_UV / temperature
    logp_UV = torch.log_softmax(logits_UV, dim=-1)
    with torch.no_grad():
        entropy_U = -logp_UV.exp().mul_(logp_UV).sum(-1)
    return logp_UV[row_N, target_N], entropy_U[row_N]
