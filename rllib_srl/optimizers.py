"""Optimisers by name: torch's own, and bitsandbytes' whose state is 8-bit, or paged between a GPU and the host.

    name                state of a parameter of n numbers        where
    adamw               8 n bytes                                CPU, GPU
    sgd                 none                                     CPU, GPU
    adamw_8bit          2 n bytes, and 4 for each 256 numbers    CPU, GPU    parameters below 4,096 numbers keep 8 n
    paged_adamw         8 n bytes, moved to the host if need be       GPU
    paged_adamw_8bit    as adamw_8bit, moved as above                 GPU

Source: Dettmers et al. 2022 (8-bit optimisers, block-wise quantisation), arXiv 2110.02861; Dettmers et al. 2023
(QLoRA, paged optimisers), arXiv 2305.14314 section 3.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

import torch

TORCH = ("adamw", "sgd")
PAGED = {"paged_adamw": "PagedAdamW", "paged_adamw_8bit": "PagedAdamW8bit"}
BITSANDBYTES = {"adamw_8bit": "AdamW8bit", **PAGED}
OPTIMIZERS = (*TORCH, *BITSANDBYTES)


def fault_of(name: str, num_gpus: float) -> str | None:
    """Return why an optimiser cannot run here, or None.

    Args:
        name: one of `OPTIMIZERS`.
        num_gpus: of each learner.
    """
    if name in PAGED and not num_gpus:
        return f"optimizer_name = {name!r}; expected num_gpus_per_learner above 0: on a CPU there is nothing to page"
    if name in BITSANDBYTES and find_spec("bitsandbytes") is None:
        return f"optimizer_name = {name!r}; expected the package bitsandbytes: pip install 'rllib_srl[optimizers]'"
    return None


def make_optimizer(
    name: str, parameters: Iterable[torch.nn.Parameter], betas: tuple[float, float], weight_decay: float
) -> torch.optim.Optimizer:
    """Return an optimiser; the learning rate is set by RLlib's schedule.

    Args:
        name: one of `OPTIMIZERS`.
        parameters: trained ones alone.
        betas: AdamW's moving-average rates.
        weight_decay: AdamW's.
    """
    if name == "sgd":
        return torch.optim.SGD(parameters)
    if name in BITSANDBYTES:
        import bitsandbytes

        return getattr(bitsandbytes.optim, BITSANDBYTES[name])(parameters, betas=betas, weight_decay=weight_decay)
    return torch.optim.AdamW(parameters, betas=betas, weight_decay=weight_decay, fused=True)
