"""Sum gradients over learners; a learner without a gradient contributes zeros, so every all-reduce has all learners.

    reused micro-batches -> p.grad              -> norm(summed(...)): norm of the reused part of the gradient
    played micro-batches -> added to p.grad     -> summed(...): gradient of the whole batch

`summed` does not change p.grad, so the second sum covers both parts. The norm of the first part costs one more
all-reduce; no second copy of the gradient is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch


def gradients_of(parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Return the gradient of each parameter; a missing gradient is set to zeros."""
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    return gradients


def set_gradients(parameters: Iterable[torch.nn.Parameter], gradients: Iterable[torch.Tensor | None]) -> None:
    """Set the gradient of each parameter."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the global L2 norm of all gradients."""
    parts = [torch.linalg.vector_norm(gradient) for gradient in gradients]
    length: torch.Tensor = torch.linalg.vector_norm(torch.stack(parts))
    return length


def summed(gradients: Sequence[torch.Tensor], num_learners: int) -> list[torch.Tensor]:
    """Return the sum over learners of each tensor: new tensors, or the given ones with fewer than two learners."""
    if num_learners < 2:
        return list(gradients)
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    torch.distributed.all_reduce(flat)
    parts = flat.split([gradient.numel() for gradient in gradients])
    return [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]


@contextmanager
def aside(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Accumulate gradients from zero inside the context, and restore the earlier ones at its end."""
    before = _taken(parameters)
    yield
    set_gradients(before, before.values())


@contextmanager
def apart(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Accumulate gradients from zero inside the context, and add the earlier ones at its end, in place."""
    before = _taken(parameters)
    yield
    for parameter, gradient in before.items():
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def _taken(parameters: Iterable[torch.nn.Parameter]) -> dict[torch.nn.Parameter, torch.Tensor | None]:
    """Remove and return the gradient of each parameter."""
    before = {parameter: parameter.grad for parameter in parameters}
    for parameter in before:
        parameter.grad = None
    return before
