"""The setting `regularisers`, and the interface through which a learner calls all its regularisers.

    {"ewc": {"coeff": 10.0, "decay": 0.9}, "l2": 0.1}      a number alone is the coefficient
    {"my_module:Mine": {"coeff": 0.1}}                     a class of another module, by its import path

A regulariser that is not named, or whose coefficient is 0, is not created: the run equals one without it, bit for bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from rllib_srl.batch.layout import Episode, MicroBatch
from rllib_srl.common.rules import Rules
from rllib_srl.learner.regularisers.distillation import Distillation
from rllib_srl.learner.regularisers.rule import Regulariser, Training
from rllib_srl.learner.regularisers.stage_policy import LwF
from rllib_srl.learner.regularisers.weights import EWC, L2
from rllib_srl.types import Group

OWN = {"l2": L2, "ewc": EWC, "lwf": LwF, "distill": Distillation}
REGULARISERS: Rules[type[Regulariser]] = Rules("regularisers", OWN)


def made(value: Any) -> dict[str, Regulariser]:
    """Return the regularisers of a valid value of the setting, by name; those of the package first."""
    regularisers = {name: REGULARISERS.named(name)(**_parameters(spec)) for name, spec in (value or {}).items()}
    order = [*REGULARISERS, *regularisers]
    return {name: regularisers[name] for name in sorted(regularisers, key=order.index) if regularisers[name].coeff}


def parameter_errors(value: Any) -> Iterator[str]:
    """Yield an error message for each name, parameter and value that `made` does not take."""
    if value is None:
        return
    if not isinstance(value, Mapping):
        listed = ", ".join(map(repr, sorted(REGULARISERS)))
        yield f"regularisers = {value!r}; expected a mapping from some of {listed} to their parameters, or None"
        return
    for name, spec in value.items():
        if error := REGULARISERS.error(name):
            yield f"regularisers.{name} = {spec!r}; {error}"
            continue
        kind: Any = REGULARISERS.named(name)
        if not isinstance(kind, type) or not issubclass(kind, Regulariser):
            yield f"regularisers.{name} = {spec!r}; expected a subclass of Regulariser (rllib_srl.learner.regularisers)"
            continue
        ranges = {field.name: field.metadata.get("range") for field in dataclasses.fields(kind) if field.init}
        for key, number in _parameters(spec).items():
            shown = f"regularisers.{name}.{key} = {number!r}"
            if key not in ranges:
                yield f"{shown}; expected some of {', '.join(ranges)}"
            elif (valid := ranges[key]) is not None and not valid.is_right(number):
                yield f"{shown}; expected {valid.expected}"


def size_errors(regularisers: Mapping[str, Regulariser], num_tokens: int) -> list[str]:
    """Return an error message for each parameter that the model's vocabulary rules out."""
    pairs = regularisers.items()
    return [line for name, r in pairs for line in r.errors_of_model(f"regularisers.{name}", num_tokens)]


def _parameters(spec: Any) -> dict[str, Any]:
    return dict(spec) if isinstance(spec, Mapping) else {"coeff": spec}


def _metric(name: str) -> str:
    return f"regularisers/{name.replace(':', '.').rpartition('.')[2]}"


def _overrides(regulariser: Regulariser, method: str) -> bool:
    return getattr(type(regulariser), method) is not getattr(Regulariser, method)


class Regularisers:
    """The regularisers of one learner, called as one; `Regulariser` explains each method."""

    def __init__(self, regularisers: Mapping[str, Regulariser], training: Training) -> None:
        """Start them with the weights of the model's files; call it before a checkpoint is loaded.

        Raises:
            ValueError: the model has fewer tokens than a parameter requires, or as in `Regulariser.start`.
        """
        self._all, self._training = dict(regularisers), training
        if errors := size_errors(self._all, training.policy.model.config.get_text_config().vocab_size):
            raise ValueError("; ".join(errors))
        for regulariser in self._all.values():
            regulariser.start(training)
        self._in_loss = {_metric(name): r for name, r in self._all.items() if _overrides(r, "loss")}
        self._pulls = {_metric(name): r for name, r in self._all.items() if _overrides(r, "pull")}
        # Names of sums over micro-batches and learners.
        self.sums = tuple(key for name in self._in_loss for key in (name, f"{name}_tokens"))

    def begin(self, groups: Sequence[Group], origins: Sequence[str]) -> None:
        for regulariser in self._all.values():
            regulariser.begin(groups, origins)

    def prepare(self, batch: MicroBatch[torch.Tensor], is_reused: bool) -> None:
        for regulariser in self._all.values():
            regulariser.prepare(batch, is_reused)

    @property
    def run_passes(self) -> bool:
        """Return whether `prepare` runs passes in which all learners of a sharded model take part."""
        return any(_overrides(regulariser, "idle") for regulariser in self._all.values())

    def idle(self, batch: MicroBatch[torch.Tensor]) -> None:
        for regulariser in self._all.values():
            regulariser.idle(batch)

    def loss(
        self, batch: MicroBatch[torch.Tensor], loss: torch.Tensor, fwd_out: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return the loss of a micro-batch with the terms of regularisers; their sums go to `batch["stats"]`."""
        for name, regulariser in self._in_loss.items():
            if (term := regulariser.loss(batch, fwd_out)) is not None:
                loss = loss + term.loss
                batch["stats"] |= {name: term.total, f"{name}_tokens": term.num_tokens}
        return loss

    def add_to(
        self, gradients: Sequence[torch.Tensor], sums: Mapping[str, float]
    ) -> tuple[list[torch.Tensor], dict[str, float]]:
        """Return the gradients, summed over learners as `sums` are, with the pulls added, and the metrics of both."""
        result, penalties = list(gradients), {}
        for name, regulariser in self._pulls.items():
            result, penalties[name] = regulariser.pull(result)
        if self._training.is_sharded and penalties:  # each learner has the penalty of its part
            totals = torch.tensor(list(penalties.values()), dtype=torch.float64, device=self._training.device)
            torch.distributed.all_reduce(totals)
            penalties = dict(zip(penalties, totals.tolist(), strict=True))
        means = {name: sums[name] for name in self.sums}
        for name in self._in_loss:
            means[name] /= max(1.0, means[f"{name}_tokens"])
        return result, penalties | means

    def end_stages(
        self, domains: Collection[str], episodes: Sequence[Episode], temperature: float, shares: bool
    ) -> int:
        return sum(regulariser.end_stage(domains, episodes, temperature, shares) for regulariser in self._all.values())

    def get_state(self) -> dict[str, Any]:
        """Return the states of those that keep one, by name; {} if none does."""
        return {name: r.get_state() for name, r in self._all.items() if _overrides(r, "get_state")}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Load what `get_state` returned; a regulariser that the state lacks is unchanged."""
        for name, regulariser in self._all.items():
            if name in state:
                regulariser.set_state(state[name])
