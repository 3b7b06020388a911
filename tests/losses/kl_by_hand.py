"""The KL of a training batch from its definition: two Hugging Face models, episode by episode."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rllib_srl.types import Group

Weights = Mapping[str, torch.Tensor]


def captured(algo: Any, weights: Any) -> list[tuple[list[Group], dict[str, torch.Tensor]]]:
    """Return a list to which each update adds the groups it trains on, and what `weights()` gives before it."""
    seen, learn = [], algo._learn

    def watched(shards: Any) -> bool:
        seen.append(([group for shard in shards for group in shard.groups()], weights()))
        return learn(shards)

    algo._learn = watched
    return seen


def k3_mean(model_dir: Path, groups: Sequence[Group], policy: Weights, reference: Weights) -> float:
    """Return the mean of exp(-d) + d - 1, d = logp - ref_logp, over the tokens that the policy wrote."""
    logps = [logps_of(model_dir, groups, weights) for weights in (policy, reference)]
    d_N = logps[0] - logps[1]
    return float(np.mean(np.exp(-d_N) + d_N - 1))


@torch.no_grad()
def logps_of(model_dir: Path, groups: Sequence[Group], weights: Weights) -> np.ndarray:
    """Return the log-probs of all tokens the policy wrote, float64."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    own = dict(model.named_parameters())
    assert own.keys() == weights.keys()
    for name, tensor in weights.items():
        own[name].copy_(tensor)
    found = []
    for group in groups:
        for g in range(group.size):
            cut = slice(group.offsets[g], group.offsets[g + 1])
            ids, at = torch.tensor(group.token_ids_N[cut].astype(np.int64)), np.flatnonzero(group.loss_mask_N[cut])
            logits = model(ids[None]).logits[0].double().log_softmax(-1)
            found.append(logits[at - 1, ids[at]].numpy())
    return np.concatenate(found)
