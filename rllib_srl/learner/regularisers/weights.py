"""Pull the trained weights towards earlier ones: L2 to the starting model, and online EWC.

    gradient of the whole batch, summed over learners  +  coeff * importance * (weight - anchor)  -> clip -> step

The term is added after the sum over learners, to each learner's own rows: learners, shards and micro-batches do not
change it. Trained weights only: with LoRA the adapters (docs/design/0004-learner.md).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rllib_srl.batch.layout import Episode, micro_batch
from rllib_srl.common.setting_model import is_integer, is_number
from rllib_srl.learner.gradients import summed
from rllib_srl.learner.regularisers.rule import AT_LEAST_1, COEFF, Named, Range, Regulariser, Training, bounded
from rllib_srl.learner.sharding import local, of_local
from rllib_srl.losses.regularisers import decayed, pull


def _copied(parameters: Named) -> dict[str, torch.Tensor]:
    """Return copies of the weights, of this learner's rows where they are sharded."""
    return {name: local(parameter).clone() for name, parameter in parameters.items()}


def _pulled(
    parameters: Named,
    gradients: Sequence[torch.Tensor],
    coeff: float,
    anchor: Mapping[str, torch.Tensor],
    importance: Mapping[str, torch.Tensor] | None,
) -> tuple[list[torch.Tensor], float]:
    """Return the gradients with those of the penalty added, and the penalty of this learner's rows."""
    result, total = [], 0.0
    for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
        weight = None if importance is None else importance[name]
        more, penalty = pull(local(parameter), anchor[name], weight)
        result.append(of_local(parameter, torch.add(local(gradient), more, alpha=coeff)))
        total += coeff * float(penalty)
    return result, total


@dataclass
class L2(Regulariser):
    """L2 to the weights of the starting model.

    Invariant: the anchor is in the model's files (with LoRA: the adapters' first values, which the seed fixes),
    also in a restored run, so that checkpoints need no copy.
    """

    num_copies = 1

    def start(self, training: Training) -> None:
        super().start(training)
        self._anchor = _copied(training.parameters)

    def pull(self, gradients: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], float]:
        """Add the gradients of coeff / 2 times the squared distance from the anchor."""
        return _pulled(self.training.parameters, gradients, self.coeff, self._anchor, None)


@dataclass
class EWC(Regulariser):
    """Online EWC: importance and anchor of the domains that ended.

    Invariant: both are None until the first stage with samples has ended.
    """

    coeff: float = bounded(100.0, COEFF)
    decay: float = bounded(1.0, Range(lambda x: is_number(x) and 0 <= x <= 1, "a number in [0, 1]"))
    episodes: int = bounded(64, AT_LEAST_1)  # episodes of the ended domain; whole groups, so there may be a few more

    needs_stages = True
    num_copies = 2

    @property
    def num_stage_episodes(self) -> int:
        """Return the number of episodes on which importance is measured."""
        return self.episodes

    def errors(self, name: str, config: Any) -> Iterator[str]:
        """Yield errors: it needs stages, whole weights and episodes of the last update."""
        yield from stage_errors(name, config, "gradients of single episodes")
        if is_integer(config.max_lag, 1):
            yield (
                f"{name} with max_lag = {config.max_lag}; expected max_lag = 0: it measures importance on episodes "
                "that are one update old"
            )

    def start(self, training: Training) -> None:
        super().start(training)
        self._importance: dict[str, torch.Tensor] | None = None
        self._anchor: dict[str, torch.Tensor] | None = None

    def pull(self, gradients: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], float]:
        """Add gradients as `L2.pull` does, weighted by importance; none before the end of the first stage."""
        if self._anchor is None:
            return list(gradients), 0.0
        return _pulled(self.training.parameters, gradients, self.coeff, self._anchor, self._importance)

    def end_stage(
        self, domains: Collection[str], episodes: Sequence[Episode], temperature: float, shares: bool
    ) -> int:
        """Add the importance of a domain and move the anchor to the present weights.

        The squares are of the gradient of log pi(y | x) of whole episodes that the policy wrote: with its own samples
        their mean estimates the diagonal of the Fisher information, not of the loss. An episode with a gradient that
        is not finite is left out; without any episode, importance and anchor do not change.
        """
        parameters, scorer = self.training.parameters, self.training.scorer
        squares = [torch.zeros_like(parameter) for parameter in parameters.values()]
        num = 0
        for episode in episodes:
            if not episode.loss_mask_T.any():
                continue
            batch = scorer.tensors(micro_batch([episode], shares), temperature)
            total = scorer.forward(batch)["logp"].sum()
            gradients = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
            if all(bool(torch.isfinite(g).all()) for g in gradients if g is not None):
                num += 1
                for square, gradient in zip(squares, gradients, strict=True):
                    if gradient is not None:
                        square.addcmul_(gradient, gradient)
        *squares, count = summed([*squares, squares[0].new_tensor([float(num)])], self.training.num_learners)
        if num := int(count):
            before = self._importance or {}
            named = zip(parameters, squares, strict=True)
            self._importance = {name: decayed(before.get(name), sums, num, self.decay) for name, sums in named}
            self._anchor = _copied(parameters)
        return num

    def get_state(self) -> dict[str, dict[str, np.ndarray]]:
        """Return importance and anchor by the names of weights, fp32; {} before the first end of a stage."""
        if self._importance is None or self._anchor is None:
            return {}
        both = {"importance": self._importance, "anchor": self._anchor}
        return {key: as_arrays(weights) for key, weights in both.items()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        device = self.training.device
        self._importance = as_tensors(state["importance"], device) if state else None
        self._anchor = as_tensors(state["anchor"], device) if state else None


def as_arrays(weights: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Return copies of tensors by name, in host memory."""
    return {name: tensor.detach().cpu().numpy().copy() for name, tensor in weights.items()}


def as_tensors(weights: Mapping[str, Any], device: torch.device) -> dict[str, torch.Tensor]:
    """Return copies of arrays by name, on a device; arrays of the object store are read-only."""
    return {name: torch.tensor(np.asarray(array), device=device) for name, array in weights.items()}


def stage_errors(name: str, config: Any, why: str) -> Iterator[str]:
    """Yield errors of a regulariser that acts from the end of the first stage on; with `fsdp` it lacks `why`."""
    if not isinstance(config.stream, list | tuple) or len(config.stream) < 2:
        shown = "None" if config.stream is None else "one without stages that end"
        yield (
            f"{name} with stream = {shown}; expected a list of at least two stages: it acts from the end of the first"
        )
    if config.fsdp:
        yield f"{name} with fsdp = True; expected fsdp = False, or regularisers.l2: it needs {why}"
