"""Gradients summed over learners: every one takes part in every sum, with zeros where it has nothing to add.

    reused micro-batches -> p.grad           -> norm(summed(...)): how much of the step comes from reuse
    played micro-batches -> p.grad, on top   -> summed(...): the gradient of the whole batch

A sum leaves each learner's own gradient as it is, so the second one holds both parts, and the norm of the
first costs one more sum and no more memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


def grads_of(parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Return the gradient of each parameter, making it zeros where no loss reached it."""
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    return gradients


def norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the L2 norm of all gradients taken as one vector."""
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]))


def summed(gradients: Sequence[torch.Tensor], num_learners: int) -> list[torch.Tensor]:
    """Return the sum over learners of each gradient: new tensors, or with fewer than two learners the same ones."""
    if num_learners < 2:
        return list(gradients)
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    torch.distributed.all_reduce(flat)
    parts = flat.split([gradient.numel() for gradient in gradients])
    return [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]
