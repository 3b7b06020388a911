"""Train on stored right answers during an update, and compare their gradient with that of the rest.

    begin       an update       lays out the held answers
    backward    each epoch      gradient of - scale * log q at each token of the held answers
    backward_of some updates    that of one domain's answers alone, to be compared

Scales are those of the whole batch (`losses/retention.py`), so gradients do not depend on how answers are split over
learners.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from rllib_srl.batch.layout import Episode, MicroBatch, episodes_of, micro_batches
from rllib_srl.batch.shard import TrainingShard, fetched
from rllib_srl.learner.gradients import aside
from rllib_srl.learner.scoring import Scorer
from rllib_srl.learner.sharding import is_spread, local

Sums = dict[str, list[float]]  # domain -> number of answers, their - log q and their Delta, nats


class Cosines(NamedTuple):
    """The cosines of compared gradients; a domain without a gradient is missing."""

    of_all: float
    by_domain: dict[str, float]


class HeldReport(NamedTuple):
    """An update's report on the answers that it held, before its step."""

    sums: Sums  # sums over this learner's answers
    cosines: Cosines | None  # over all learners; None unless the update compared gradients


class HeldAnswers:
    """One learner's side of retention."""

    def __init__(
        self,
        config: Any,
        scorer: Scorer,
        shares_prefixes: bool,
        empty_passes: Callable[[int], list[MicroBatch[torch.Tensor]]],
    ) -> None:
        """Set what forward passes need; `empty_passes` is that of the learner."""
        self._config, self._scorer = config, scorer
        self._shares, self._empty_passes = shares_prefixes, empty_passes
        self._sums: Sums = {}
        self._held: list[MicroBatch[torch.Tensor]] = []
        self._domain_B: list[str] = []
        self._compared: dict[str, list[MicroBatch[torch.Tensor]]] = {}  # in the first epoch
        self._cosines: Cosines | None = None

    def begin(self, shard: TrainingShard) -> bool:
        """Lay out the held answers; return whether any learner holds an answer in this update."""
        self._sums, self._held, self._compared, self._cosines = {}, [], {}, None
        if (part := shard.retention) is None:
            return False
        groups = fetched(part.held, shard.fetch_timeout_s)
        self._domain_B = [group.prompt.domain for group in groups]
        episodes = episodes_of(groups, [np.zeros(group.size) for group in groups], part.scales)
        self._held = self._passes(episodes)
        for domain in part.compared:
            of_domain = [episode for episode in episodes if self._domain_B[episode.index] == domain]
            self._compared[domain] = self._passes(of_domain, is_noted=True)
        return part.num_held_tokens > 0

    def _passes(self, episodes: Sequence[Episode], is_noted: bool = False) -> list[MicroBatch[torch.Tensor]]:
        cut = micro_batches(episodes, self._config.micro_batch_tokens, self._shares)
        batches = [self._scorer.tensors(arrays, self._config.temperature) for arrays in cut]
        for batch in batches:
            batch["is_noted"] = is_noted
        return batches

    def backward(self) -> None:
        """Add the gradient of the held answers to the parameters."""
        self._run(self._held)

    def backward_of(self, domain: str) -> None:
        """Add the gradient of the held answers of a domain that is compared to the parameters."""
        self._run(self._compared[domain])

    def _run(self, batches: Sequence[MicroBatch[torch.Tensor]]) -> None:
        empty = self._empty_passes(len(batches))
        for batch in batches:
            logp_N = self._scorer.forward(batch)["logp"]
            if not batch["is_noted"]:  # only the first pass of an update
                batch["is_noted"] = True
                self._note(batch, logp_N.detach())
            (-batch["scale"] * logp_N).sum().backward()
        for batch in empty:
            (0.0 * self._scorer.forward(batch)["logp"].sum()).backward()

    def _note(self, batch: MicroBatch[torch.Tensor], logp_N: torch.Tensor) -> None:
        values = torch.stack([-logp_N, batch["behaviour_logp"] - logp_N]).double().cpu().numpy()
        episodes = batch["episode"].cpu().numpy()
        for b in np.unique(episodes):
            nll, delta = values[:, episodes == b].sum(1)
            sums = self._sums.setdefault(self._domain_B[b], [0.0, 0.0, 0.0])
            self._sums[self._domain_B[b]] = [sums[0] + 1, sums[1] + float(nll), sums[2] + float(delta)]

    def compared(self) -> tuple[str, ...]:
        """Return the domains whose gradients this epoch compares."""
        return tuple(self._compared)

    def note(self, cosines: Cosines) -> None:
        """Keep the cosines for the report; later epochs do not compare."""
        self._cosines, self._compared = cosines, {}

    def report(self) -> HeldReport:
        """Return and clear, by domain, the number of held answers, the sums of - log q and of Delta; and the cosines.

        Delta_y = sum_t (log p - log q), p the policy that wrote the answer, as its engine recorded it: the answer is
        exp(-Delta) times as likely as when it was written. All are measured before the update's step.
        """
        report = HeldReport(self._sums, self._cosines)
        self._sums, self._cosines = {}, None
        return report


class Conflict:
    """Compares the gradient of held answers with that of everything else, on the last block of the model.

        cosine = <h, g> / (|h| |g|)      h: of all held answers, or of a domain; g: of the update without any

    Below 0 the two undo each other. A domain costs one more pass over its held answers, so only some updates are
    compared (`RetentionPart.compared`). Invariant: no call changes a gradient of the parameters.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        block: torch.nn.Module,
        summed: Callable[[], Sequence[torch.Tensor]],
    ) -> None:
        """Set what is compared: trained parameters of the block or, without any, all; `summed` is over learners."""
        self._parameters, self._summed = list(parameters), summed
        block_ids = {id(p) for p in block.parameters()}
        self._at = [i for i, p in enumerate(parameters) if id(p) in block_ids] or list(range(len(parameters)))
        self._held: list[torch.Tensor] = []

    def note(self, held: Sequence[torch.Tensor]) -> None:
        """Copy the gradient of all held answers, summed over learners."""
        self._held = [gradient.clone() for gradient in self._of_block(held)]

    def _of_block(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [gradients[i] for i in self._at]

    def cosines(
        self, gradients: Sequence[torch.Tensor], domains: Collection[str], backward: Callable[[str], None]
    ) -> Cosines:
        """Return the cosines after `note`; a collective.

        Args:
            gradients: of the whole update, held answers included, summed over learners.
            domains: of held answers, equal on all learners.
            backward: adds the gradient of a domain's held answers to the parameters.
        """
        others = [gradient - held for gradient, held in zip(self._of_block(gradients), self._held, strict=True)]
        by_domain = {}
        for domain in domains:
            with aside(self._parameters):
                backward(domain)
                by_domain[domain] = cosine(self._of_block(self._summed()), others)
        of_all, self._held = cosine(self._held, others), []
        return Cosines(of_all, {domain: value for domain, value in by_domain.items() if not math.isnan(value)})


def cosine(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    """Return the cosine of the angle between two lists of tensors, each taken as one vector; NaN where one is 0.

    A collective if the tensors are sharded.
    """
    pairs = [(local(a).flatten(), local(b).flatten()) for a, b in zip(one, other, strict=True)]
    rows = [torch.stack([a.dot(b), a.dot(a), b.dot(b)]).double() for a, b in pairs]
    sums_3 = torch.stack(rows).sum(0)
    if any(is_spread(a) for a in one):
        torch.distributed.all_reduce(sums_3)
    product, square, other_square = sums_3.tolist()
    return product / (square * other_square) ** 0.5 if square and other_square else float("nan")
