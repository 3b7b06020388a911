"""Take targets of right answers during an update, and hold stored answers at theirs.

    begin       an update       lays out held answers; scores right ones that are not trained on
    keep        a first pass    targets of right answers that are trained on, in host memory until `take`
    backward    each epoch      gradient of scale * KL_t at each token of the held answers
    backward_of some updates    that of one domain's answers alone, to be compared

Scales are those of the whole batch (`losses/retention.py`), so gradients do not depend on how answers are split over
learners.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from rllib_srl.batch.layout import Episode, MicroBatch, episodes_of, micro_batches
from rllib_srl.batch.parts import PartRef
from rllib_srl.batch.retention import RetentionPart, episodes_in
from rllib_srl.batch.shard import TrainingShard, fetched
from rllib_srl.learner.gradients import aside
from rllib_srl.learner.scoring import Scorer
from rllib_srl.learner.sharding import is_spread, local
from rllib_srl.losses.retention import make_target, tensors_of, token_kl
from rllib_srl.types import TARGET, Group, Target

Sums = dict[str, list[float]]  # domain -> number of answers, their KL and Delta, nats


class Cosines(NamedTuple):
    """The cosines of compared gradients; a domain without a gradient is missing."""

    of_all: float
    by_domain: dict[str, float]


class HeldReport(NamedTuple):
    """An update's report on the answers that it held, before its step."""

    sums: Sums  # sums over this learner's answers
    cosines: Cosines | None  # over all learners; None unless the update compared gradients


class StoredAnswers:
    """One learner's side of retention. Invariant: between two updates it holds only targets that were not taken yet."""

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
        self._top_k = int(config.replay_retain_top_k)
        self._of_B: dict[int, tuple[str, int]] = {}  # `Episode.index` -> group id and episode, of those that are taken
        self._targets: list[Target] = []
        self._sums: Sums = {}
        self._held: list[MicroBatch[torch.Tensor]] = []
        self._domain_B: list[str] = []
        self._compared: dict[str, list[MicroBatch[torch.Tensor]]] = {}  # in the first epoch
        self._cosines: Cosines | None = None

    def begin(
        self, shard: TrainingShard, groups: Sequence[Group], played: Sequence[MicroBatch[torch.Tensor]]
    ) -> bool:
        """Lay out the held answers, score those that are only scored, and ask for targets of the played ones.

        Return whether any learner holds an answer in this update.
        """
        self._targets, self._sums, self._held, self._compared, self._cosines = [], {}, [], {}, None
        if (part := shard.retention) is None:
            return False
        scored, held = (fetched(refs, shard.fetch_timeout_s) for refs in (part.scored, part.held))
        self._domain_B = [group.prompt.domain for group in held]
        targets = [group.extra[TARGET] for group in held]
        episodes = self._episodes(held, part.scales)
        self._held = self._held_passes(episodes, targets)
        for domain in part.compared:
            of_domain = [episode for episode in episodes if self._domain_B[episode.index] == domain]
            self._compared[domain] = self._held_passes(of_domain, targets)
        self._score(part.scored, scored)
        self._of_B = _taken(part, shard.group_refs, groups)
        for batch in played:
            self._ask(batch)
        return part.num_held_tokens > 0

    def _score(self, refs: Sequence[PartRef], groups: Sequence[Group]) -> None:
        """Take the targets of answers that are not trained on."""
        self._of_B = {b: (groups[b].group_id, ref.episodes[0]) for b, ref in enumerate(refs)}
        batches = self._passes(self._episodes(groups))
        empty = self._empty_passes(len(batches))
        with torch.no_grad():
            for batch in batches:
                self._ask(batch)
                self.keep(batch, self._scorer.forward(batch))
            for batch in empty:
                self._scorer.forward(batch)
        self._scorer.reshard()

    def _episodes(self, groups: Sequence[Group], scales: Sequence[float] | None = None) -> list[Episode]:
        return episodes_of(groups, [np.zeros(group.size) for group in groups], scales)

    def _passes(self, episodes: Sequence[Episode]) -> list[MicroBatch[torch.Tensor]]:
        cut = micro_batches(episodes, self._config.micro_batch_tokens, self._shares)
        return [self._scorer.tensors(arrays, self._config.temperature) for arrays in cut]

    def _held_passes(self, episodes: Sequence[Episode], targets: Sequence[Target]) -> list[MicroBatch[torch.Tensor]]:
        return [self._with_targets(batch, targets) for batch in self._passes(episodes)]

    def _with_targets(self, batch: MicroBatch[torch.Tensor], targets: Sequence[Target]) -> MicroBatch[torch.Tensor]:
        device, episode_N = batch["episode"].device, batch["episode"]
        batch["stored_tokens"] = torch.zeros((len(episode_N), self._top_k), dtype=torch.int64, device=device)
        batch["stored_top"] = torch.zeros((len(episode_N), self._top_k), device=device)
        batch["stored_sampled"] = torch.zeros(len(episode_N), device=device)
        for b in torch.unique(episode_N).tolist():
            at = torch.nonzero(episode_N == b)[:, 0]
            names = ("stored_tokens", "stored_top", "stored_sampled")
            for name, value in zip(names, tensors_of(targets[b], device), strict=True):
                batch[name][at] = value  # type: ignore[literal-required]
        return batch

    def _ask(self, batch: MicroBatch[torch.Tensor]) -> None:
        """Ask the first pass of a micro-batch for the likeliest tokens where targets are taken."""
        episode_N = batch["episode"]
        wanted = torch.tensor(sorted(self._of_B), dtype=episode_N.dtype, device=episode_N.device)
        at_M = torch.nonzero(torch.isin(episode_N, wanted))[:, 0]
        if len(at_M):
            batch["top_at"], batch["num_top"] = at_M, self._top_k

    def keep(self, batch: MicroBatch[torch.Tensor], fwd_out: Mapping[str, torch.Tensor]) -> None:
        """Keep the targets that the first pass of a played micro-batch was asked for."""
        if "top_at" not in batch:
            return
        stored = self.stored(batch, fwd_out)
        at_M = batch.pop("top_at")
        del batch["num_top"]
        episode_M = batch["episode"][at_M]
        for b in torch.unique(episode_M).tolist():
            at = episode_M == b
            self._targets.append(make_target(*self._of_B[b], *(values[at] for values in stored)))

    def stored(
        self, batch: MicroBatch[torch.Tensor], fwd_out: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return tokens [M, k], their log-probs [M, k] and those of the sampled tokens [M] at `batch["top_at"]`.

        They become targets; a subclass may hold answers at another policy than the one in training.
        """
        return fwd_out["top_tokens"], fwd_out["top_logp"], fwd_out["logp"].detach()[batch["top_at"]]

    def backward(self) -> None:
        """Add the gradient of the held answers to the parameters."""
        self._run(self._held)

    def backward_of(self, domain: str) -> None:
        """Add the gradient of the held answers of a domain that is compared to the parameters."""
        for batch in self._compared[domain]:
            batch["is_noted"] = True
        self._run(self._compared[domain])

    def _run(self, batches: Sequence[MicroBatch[torch.Tensor]]) -> None:
        empty = self._empty_passes(len(batches))
        for batch in batches:
            self._loss(batch, self._scorer.forward(batch)).backward()
        for batch in empty:
            (0.0 * self._scorer.forward(batch)["logp"].sum()).backward()

    def _loss(self, batch: MicroBatch[torch.Tensor], fwd_out: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return this micro-batch's part of the term; the first pass of an update also notes KL and Delta."""
        logp_N = fwd_out["logp"]
        logp_Nk = fwd_out["stored_logp"] if self._top_k else batch["stored_top"]
        kl_N = token_kl(batch["stored_top"], logp_Nk, batch["stored_sampled"], logp_N)
        if not batch.get("is_noted"):
            batch["is_noted"] = True
            self._note(batch["episode"], kl_N.detach(), batch["stored_sampled"] - logp_N.detach())
        return (batch["scale"] * self.token_loss(kl_N, logp_N, batch["stored_sampled"])).sum()

    def token_loss(self, kl_N: torch.Tensor, logp_N: torch.Tensor, stored_N: torch.Tensor) -> torch.Tensor:
        """Return the loss of each token of held answers, without its factor; a subclass may have another one.

        Args:
            kl_N: to the target.
            logp_N: log-prob of the sampled token under the policy in training.
            stored_N: log-prob of the sampled token in the target.
        """
        return kl_N

    def _note(self, episode_N: torch.Tensor, kl_N: torch.Tensor, gap_N: torch.Tensor) -> None:
        values = torch.stack([kl_N, gap_N]).double().cpu().numpy()
        episodes = episode_N.cpu().numpy()
        for b in np.unique(episodes):
            kl, gap = values[:, episodes == b].sum(1)
            sums = self._sums.setdefault(self._domain_B[b], [0.0, 0.0, 0.0])
            self._sums[self._domain_B[b]] = [sums[0] + 1, sums[1] + float(kl), sums[2] + float(gap)]

    def take(self) -> list[Target]:
        """Return and clear the targets of the last update."""
        targets, self._targets = self._targets, []
        return targets

    def compared(self) -> tuple[str, ...]:
        """Return the domains whose gradients this epoch compares."""
        return tuple(self._compared)

    def note(self, cosines: Cosines) -> None:
        """Keep the cosines for the report; later epochs do not compare."""
        self._cosines, self._compared = cosines, {}

    def report(self) -> HeldReport:
        """Return and clear, by domain, the number of held answers and the sums of KL_y and Delta_y; and the cosines.

        Delta_y = sum_t (log p - log q) at the sampled tokens: the policy's right answers are at least exp(-Delta) as
        likely as when they were stored. All are measured before the update's step.
        """
        report = HeldReport(self._sums, self._cosines)
        self._sums, self._cosines = {}, None
        return report


def _taken(part: RetentionPart, refs: Sequence[object], groups: Sequence[Group]) -> dict[int, tuple[str, int]]:
    """Return group id and number in the stored group of each episode whose target is taken, by `Episode.index`."""
    taken, index = {}, 0
    for ref, group in zip(refs, groups, strict=True):
        for number in episodes_in(ref, group.size):
            if (group.group_id, number) in part.taken:
                taken[index] = group.group_id, int(number)
            index += 1
    return taken


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
        self._held = [held[i].clone() for i in self._at]

    def cosines(
        self, gradients: Sequence[torch.Tensor], domains: Collection[str], backward: Callable[[str], None]
    ) -> Cosines:
        """Return the cosines after `note`; a collective.

        Args:
            gradients: of the whole update, held answers included, summed over learners.
            domains: of held answers, equal on all learners.
            backward: adds the gradient of a domain's held answers to the parameters.
        """
        others = [gradients[i] - held for i, held in zip(self._at, self._held, strict=True)]
        by_domain = {}
        for domain in domains:
            with aside(self._parameters):
                backward(domain)
                gradients_of_it = self._summed()
                by_domain[domain] = cosine([gradients_of_it[i] for i in self._at], others)
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
