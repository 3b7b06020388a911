"""Optimisers by name: torch's own, and bitsandbytes' whose state is 8-bit or paged to host memory, on GPUs only."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

import torch

TORCH = ("adamw", "sgd")
BITSANDBYTES = {"adamw_8bit": "AdamW8bit", "paged_adamw": "PagedAdamW", "paged_adamw_8bit": "PagedAdamW8bit"}
OPTIMIZERS = (*TORCH, *BITSANDBYTES)


def fault_of(name: str, num_gpus: float) -> str | None:
    """Return why an optimiser cannot run here, or None.

    Args:
        name: one of `OPTIMIZERS`.
        num_gpus: of each learner.
    """
    if name not in BITSANDBYTES:
        return None
    if not num_gpus:
        return f"optimizer_name = {name!r}; expected num_gpus_per_learner above 0: its kernels run on GPUs only"
    if find_spec("bitsandbytes") is None:
        return f"optimizer_name = {name!r}; expected the package bitsandbytes: pip install 'bitsandbytes>=0.50'"
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
