"""The interface of a regulariser: a term that keeps the policy near what it has learned.

    start        once, with the weights of the model's files
    begin        the groups of the next update
    prepare      each micro-batch, once per update
    idle         where only other learners have a micro-batch, with `fsdp`
    loss         each pass                    a term of the loss
    pull         each optimiser step          changes the gradient of the batch, after the sum over learners
    end_stage    a domain's stage has ended

A subclass is a dataclass; its fields are the parameters that users give. It overrides the methods it needs. The
others do nothing, so a regulariser that is off costs nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from rllib_srl.batch.layout import Episode, MicroBatch
from rllib_srl.common.setting_model import is_integer, is_number
from rllib_srl.learner.reference import FrozenPolicy
from rllib_srl.learner.rl_module import CausalLMModule
from rllib_srl.learner.scoring import Scorer
from rllib_srl.types import Group

Named = Mapping[str, torch.nn.Parameter]  # the trained parameters by name


class Range(NamedTuple):
    """The valid values of a parameter, and their text in messages."""

    is_right: Callable[[Any], bool]
    expected: str


COEFF = Range(lambda x: is_number(x) and x >= 0, "a number of at least 0")
AT_LEAST_1 = Range(lambda x: is_integer(x, 1), "an integer of at least 1")


def bounded(default: Any, valid: Range) -> Any:
    """Return a field of a regulariser with the range that validation checks."""
    return dataclasses.field(default=default, metadata={"range": valid})


@dataclass(frozen=True)
class Training:
    """The learner to which a regulariser belongs."""

    policy: CausalLMModule
    parameters: Named
    scorer: Scorer
    device: torch.device
    num_learners: int  # whose gradients are summed
    is_sharded: bool  # FSDP2 shards the weights
    frozen: Callable[[str], FrozenPolicy]  # loads another policy, see `FrozenPolicies.load`


class Term(NamedTuple):
    """A term of the loss of a micro-batch."""

    loss: torch.Tensor  # times the coefficient, with gradient
    total: torch.Tensor  # sum of the unscaled values over its tokens, detached; the metric is their mean
    num_tokens: torch.Tensor


@dataclass
class Regulariser:
    """A regulariser that does nothing. Invariant: after `start` it is equal on all learners."""

    coeff: float = bounded(0.1, COEFF)

    needs_stages: ClassVar[bool] = False  # acts from the end of a stream's first stage on
    num_copies: ClassVar[int] = 0  # fp32 copies of the trained weights that a learner keeps for it
    trains_all: ClassVar[bool] = False  # also needs zero-variance groups in the batch

    @property
    def frozen_sources(self) -> Collection[str]:
        """Return which frozen policies it loads."""
        return ()

    @property
    def num_stage_episodes(self) -> int:
        """Return how many episodes of a domain `end_stage` reads."""
        return 0

    def errors(self, name: str, config: Any) -> Iterator[str]:
        """Yield conflicts of its parameters with other settings; `name` begins each message."""
        return iter(())

    def errors_of_model(self, name: str, num_tokens: int) -> Iterator[str]:
        """Yield conflicts of its parameters with a vocabulary of `num_tokens`."""
        return iter(())

    def start(self, training: Training) -> None:
        """Begin with the weights of the model's files, before a checkpoint is loaded."""
        self.training = training

    def begin(self, groups: Sequence[Group], origins: Sequence[str]) -> None:
        """Note the groups of the next update; episodes are numbered as `episodes_of` does."""

    def prepare(self, batch: MicroBatch[torch.Tensor], is_reused: bool) -> None:
        """Add the values that stay fixed during the update to a micro-batch."""

    def idle(self, batch: MicroBatch[torch.Tensor]) -> None:
        """Take part in the passes of `prepare` for a micro-batch that only other learners have."""

    def loss(self, batch: MicroBatch[torch.Tensor], fwd_out: Mapping[str, torch.Tensor]) -> Term | None:
        """Return the term of a micro-batch, None without one; `fwd_out` is of the policy, with gradient."""
        return None

    def pull(self, gradients: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], float]:
        """Return the gradients of the batch with those of the term added, and its value over this learner's rows."""
        return list(gradients), 0.0

    def end_stage(
        self, domains: Collection[str], episodes: Sequence[Episode], temperature: float, shares: bool
    ) -> int:
        """Record what the policy has learned by the end of a stage; a collective.

        Args:
            domains: those whose stage ended.
            episodes: this learner's part of up to `num_stage_episodes` episodes of these domains.
            temperature: temperature at which they were sampled.
            shares: whether micro-batches are tries.

        Returns:
            The number of episodes of all learners that were used.
        """
        return 0

    def get_state(self) -> dict[str, Any]:
        """Return the state for a checkpoint; {} if there is none."""
        return {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Load what `get_state` returned."""
