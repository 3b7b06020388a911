"""Take targets of right answers during an update, and hold stored answers at theirs.

    begin       an update       lays out held answers; scores right ones that are not trained on
    keep        a first pass    targets of right answers that are trained on, in host memory until `take`
    backward    each epoch      gradient of scale * KL_t at each token of the held answers

Scales are those of the whole batch (`losses/retention.py`), so gradients do not depend on how answers are split over
learners.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rllib_srl.batch.layout import Episode, MicroBatch, episodes_of, micro_batches, turns_of
from rllib_srl.batch.parts import PartRef
from rllib_srl.batch.retention import RetentionPart, episodes_in
from rllib_srl.batch.shard import TrainingShard, fetched
from rllib_srl.learner.scoring import Scorer
from rllib_srl.losses.retention import make_target, tensors_of, token_kl
from rllib_srl.types import TARGET, Group, Target

Sums = dict[str, list[float]]  # domain -> number of answers, their KL and Delta, nats


class StoredAnswers:
    """One learner's side of retention. Invariant: between two updates it holds targets that were not taken yet only."""

    def __init__(
        self,
        config: Any,
        scorer: Scorer,
        shares_prefixes: bool,
        empty_passes: Callable[[int], list[MicroBatch[torch.Tensor]]],
    ) -> None:
        """Set what passes need.

        Args:
            config: an `SRLConfig`.
            scorer: forward passes of the policy.
            shares_prefixes: whether micro-batches are tries.
            empty_passes: returns those that this learner must add to so many, so that all learners run equally many.
        """
        self._config, self._scorer = config, scorer
        self._shares, self._empty_passes = shares_prefixes, empty_passes
        self._top_k = int(config.flat().replay_retain_top_k)
        self._of_B: dict[int, tuple[str, int]] = {}  # `Episode.index` -> group id and episode, of those that are taken
        self._targets: list[Target] = []
        self._sums: Sums = {}
        self._held: list[MicroBatch[torch.Tensor]] = []
        self._domain_B: list[str] = []

    def begin(
        self, shard: TrainingShard, groups: Sequence[Group], played: Sequence[MicroBatch[torch.Tensor]]
    ) -> bool:
        """Lay out the held answers, score those that are only scored, and ask for targets of the played ones.

        Args:
            shard: of the update.
            groups: its groups; episodes are numbered as `episodes_of` does.
            played: their micro-batches.

        Returns:
            Whether any learner holds an answer in this update.
        """
        self._targets, self._sums, self._held = [], {}, []
        if (part := shard.retention) is None:
            return False
        scored, held = (fetched(refs, shard.fetch_timeout_s) for refs in (part.scored, part.held))
        self._domain_B = [group.prompt.domain for group in held]
        targets = [group.extra[TARGET] for group in held]
        self._held = [self._with_targets(one, targets) for one in self._passes(self._episodes(held, part.scales))]
        self._score(part.scored, scored)
        self._of_B = _taken(part, shard.group_refs, groups)
        for one in played:
            self._ask(one)
        return part.num_held_tokens > 0

    def _score(self, refs: Sequence[PartRef], groups: Sequence[Group]) -> None:
        """Take the targets of answers that are not trained on."""
        self._of_B = {b: (groups[b].group_id, ref.episodes[0]) for b, ref in enumerate(refs)}
        batches = self._passes(self._episodes(groups))
        empty = self._empty_passes(len(batches))
        with torch.no_grad():
            for one in batches:
                self._ask(one)
                self.keep(one, self._scorer.forward(one))
            for one in empty:
                self._scorer.forward(one)
        self._scorer.reshard()

    def _episodes(self, groups: Sequence[Group], scales: Sequence[float] | None = None) -> list[Episode]:
        episodes = episodes_of(groups, [np.zeros(group.size) for group in groups], scales)
        return [turns_of(one, self._config.turn_mask) for one in episodes]

    def _passes(self, episodes: Sequence[Episode]) -> list[MicroBatch[torch.Tensor]]:
        cut = micro_batches(episodes, self._config.micro_batch_tokens, self._shares)
        return [self._scorer.tensors(one, self._config.temperature) for one in cut]

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
        at_M = batch.pop("top_at")
        del batch["num_top"]
        episode_M, logp_M = batch["episode"][at_M], fwd_out["logp"].detach()[at_M]
        for b in torch.unique(episode_M).tolist():
            at = episode_M == b
            likeliest = fwd_out["top_tokens"][at], fwd_out["top_logp"][at]
            self._targets.append(make_target(*self._of_B[b], *likeliest, logp_M[at]))

    def backward(self) -> None:
        """Add the gradient of the held answers to the parameters."""
        empty = self._empty_passes(len(self._held))
        for one in self._held:
            self._loss(one, self._scorer.forward(one)).backward()
        for one in empty:
            (0.0 * self._scorer.forward(one)["logp"].sum()).backward()

    def _loss(self, batch: MicroBatch[torch.Tensor], fwd_out: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return this micro-batch's part of the term; the first pass of an update also notes KL and Delta."""
        logp_N = fwd_out["logp"]
        logp_Nk = fwd_out["stored_logp"] if self._top_k else batch["stored_top"]
        kl_N = token_kl(batch["stored_top"], logp_Nk, batch["stored_sampled"], logp_N)
        if not batch.get("is_noted"):
            batch["is_noted"] = True
            self._note(batch["episode"], kl_N.detach(), batch["stored_sampled"] - logp_N.detach())
        return (batch["scale"] * kl_N).sum()

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

    def report(self) -> Sums:
        """Return and clear, by domain of the held answers, their number and the sums of KL_y and Delta_y.

        Delta_y = sum_t (log p - log q) at the sampled tokens: the policy's right answers are at least exp(-Delta) as
        likely as when they were stored. Both are measured before the update's step.
        """
        sums, self._sums = self._sums, {}
        return sums


def _taken(part: RetentionPart, refs: Sequence[object], groups: Sequence[Group]) -> dict[int, tuple[str, int]]:
    """Return group id and number in the stored group of each episode whose target is taken, by `Episode.index`."""
    found, index = {}, 0
    for ref, group in zip(refs, groups, strict=True):
        for number in episodes_in(ref, group.size):
            if (group.group_id, number) in part.taken:
                found[index] = group.group_id, int(number)
            index += 1
    return found
