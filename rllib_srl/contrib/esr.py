"""ESR, self-replay with stored logits: hold reused groups near the policy that first trained on them.

    regularisers={"contrib.esr": {"coeff": 0.1, "top_k": 16}}        with replay_reuse_fraction above 0

    keep      first pass of played groups    the k likeliest tokens and log-probs at each written token, in host memory
    prepare   reused groups                  what was stored for them
    loss      each pass of reused groups     KL to what was stored, over the k tokens and all others as one

An episode is found by its group's id and a digest of its tokens, never by its place: parts of groups number their
episodes anew. The newest groups are kept, whole ones. A reused episode without stored logits gets no term; the metric
`regularisers/esr_tokens` counts the tokens of the others. A single learner is needed: a group may be reused on another.

Difference from the paper, which stores the logits of a few actions: here they are of the k likeliest tokens.

Source: ESR, arXiv 2403.15049.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rllib_srl.batch.layout import MicroBatch
from rllib_srl.common.setting_checks import is_integer
from rllib_srl.learner.regularisers.rule import AT_LEAST_1, COEFF, Regulariser, Term, Training, bounded
from rllib_srl.losses.retention import top_kl
from rllib_srl.types import Group

Stored = tuple[np.ndarray, np.ndarray]  # at an episode's T loss tokens: token ids int32 [T, K], log-probs fp32 [T, K]


def key_of(group: Group, g: int) -> tuple[str, str]:
    """Return the id of the group of episode `g` and a digest of the episode, the same in each part of its group."""
    start, end = group.offsets[g], group.offsets[g + 1]
    parts = (group.token_ids_N[start:end], group.loss_mask_N[start:end], np.array(group.starts(g)))
    digest = hashlib.blake2b(digest_size=16)
    for part, dtype in zip(parts, (np.int32, np.uint8, np.int64), strict=True):
        digest.update(part.astype(dtype).tobytes())
    return group.group_id, digest.hexdigest()


@dataclass
class ESR(Regulariser):
    """Logits of the newest groups. Invariant: at most `episodes` episodes, unless one group alone has more."""

    coeff: float = bounded(0.1, COEFF)
    top_k: int = bounded(16, AT_LEAST_1)  # likeliest tokens whose log-probs are stored, at each written token
    episodes: int = bounded(4096, AT_LEAST_1)  # that are stored, the newest ones; whole groups

    def faults(self, name: str, config: Any) -> Iterator[str]:
        """Yield errors: it needs reuse, a whole head and one learner."""
        if not config.may_draw("reuse"):
            yield f"{name} with replay_reuse_fraction = 0; expected above 0: it acts on groups that are reused"
        if config.fsdp:
            yield f"{name} with fsdp = True; expected fsdp = False: it reads the whole head"
        if is_integer(config.num_learners, 2):
            yield (
                f"{name} with num_learners = {config.num_learners}; expected 0 or 1: a group may be reused on another "
                "learner than the one that has its logits"
            )

    def faults_of_model(self, name: str, num_layers: int | None, num_tokens: int | None) -> Iterator[str]:
        """Yield an error if the vocabulary is smaller than `top_k`."""
        if num_tokens is not None and self.top_k > num_tokens:
            yield f"{name}.top_k = {self.top_k}; expected at most {num_tokens}, the vocabulary of the model"

    def start(self, training: Training) -> None:
        """Begin without logits."""
        super().start(training)
        self._groups: dict[str, dict[str, Stored]] = {}  # by group id and digest, oldest group first
        self._key_B: list[tuple[str, str]] = []

    def begin(self, groups: Sequence[Group], origins: Sequence[str]) -> None:
        """Note the key of each episode."""
        self._key_B = [key_of(group, g) for group in groups for g in range(group.size)]

    def prepare(self, batch: MicroBatch[torch.Tensor], is_reused: bool) -> None:
        """Ask for the likeliest tokens of a played micro-batch; give a reused one what was stored for it."""
        if not is_reused:
            batch["num_top"] = self.top_k
            return
        episode_N = batch["episode"].cpu().numpy()
        tokens_NK = np.zeros((len(episode_N), self.top_k), np.int64)
        top_NK = np.zeros((len(episode_N), self.top_k), np.float32)
        is_stored_N = np.zeros(len(episode_N), bool)
        for (group_id, digest), at in self._episodes(episode_N):
            stored = self._groups.get(group_id, {}).get(digest)
            if stored is not None and len(stored[0]) == len(at):
                tokens_NK[at], top_NK[at] = stored
                is_stored_N[at] = True
        if is_stored_N.any():
            names = ("stored_tokens", "stored_top", "is_stored")
            for name, one in zip(names, (tokens_NK, top_NK, is_stored_N), strict=True):
                batch[name] = torch.from_numpy(one).to(batch["episode"].device)  # type: ignore[literal-required]

    def keep(self, batch: MicroBatch[torch.Tensor], fwd_out: Mapping[str, torch.Tensor]) -> None:
        """Store the likeliest tokens of a played micro-batch, from its first pass."""
        if "num_top" not in batch:
            return
        del batch["num_top"]
        tokens_NK = fwd_out["top_tokens"].to(torch.int32).cpu().numpy()
        top_NK = fwd_out["top_logp"].float().cpu().numpy()
        for (group_id, digest), at in self._episodes(batch["episode"].cpu().numpy()):
            self._groups.setdefault(group_id, {})[digest] = tokens_NK[at], top_NK[at]
        num = sum(map(len, self._groups.values()))
        while num > self.episodes and len(self._groups) > 1:
            num -= len(self._groups.pop(next(iter(self._groups))))

    def loss(self, batch: MicroBatch[torch.Tensor], fwd_out: Mapping[str, torch.Tensor]) -> Term | None:
        """Return coeff times the sum of scale * KL over the tokens of episodes with stored logits."""
        if "stored_tokens" not in batch:
            return None
        kl_N = torch.where(batch["is_stored"], top_kl(batch["stored_top"], fwd_out["stored_logp"]), 0.0)
        return Term(self.coeff * (batch["scale"] * kl_N).sum(), kl_N.detach().sum(), batch["is_stored"].sum())

    def get_state(self) -> dict[str, Any]:
        """Return what is stored, by group id and digest."""
        return {"groups": {group_id: dict(episodes) for group_id, episodes in self._groups.items()}}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Load what `get_state` returned."""
        self._groups = {group_id: dict(episodes) for group_id, episodes in state["groups"].items()}

    def _episodes(self, episode_N: np.ndarray) -> Iterator[tuple[tuple[str, str], np.ndarray]]:
        """Yield the key and the loss tokens of each episode of a micro-batch."""
        for episode in np.unique(episode_N):
            yield self._key_B[episode], np.flatnonzero(episode_N == episode)


esr = ESR
