"""Lay out groups and advantages as prefix tries, split them into micro-batches and balance shards: pure NumPy.

Episodes of a group share their prompt, and groups share a few-shot text. A trie holds each shared token once. A branch
attends to its own path only, so the result equals the padded computation:

    few-shot text ─┬─ prompt 1 ─┬─ answer a          tokens laid end to end, position = depth in the trie,
                   │            └─ answer b          a token attends to itself and its ancestors (`trie.py`)
                   └─ prompt 2 ─── answer c

Streams that share nothing are separate tries in the same row, packed up to a token budget. An episode of several
conversations has several streams; its loss tokens, statistics and advantage remain those of one episode.

The unit of loss is one policy-written token of one episode (N in total); `predictor` is the row whose logits predict
it. Two episodes that wrote the same tokens share rows, but each has its own loss tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, NotRequired, TypedDict, TypeVar

import numpy as np

from rllib_srl.batch.trie import Trie
from rllib_srl.types import Group

Array = TypeVar("Array")  # np.ndarray or torch.Tensor

@dataclass(frozen=True)
class Episode:
    """One episode as the loss needs it: token stream, loss mask, behaviour log-probs, advantage and loss weight.

    Invariant: the three arrays have the same length T, and `loss_mask_T[0]` is False.
    """

    token_ids_T: np.ndarray
    loss_mask_T: np.ndarray
    behaviour_logp_T: np.ndarray
    advantage: float
    index: int  # position in the shard
    scale: float = 1.0  # factor of the loss of each token
    starts: tuple[int, ...] = (0,)  # where its conversations begin; see `Group.starts`

    def streams(self) -> list[np.ndarray]:
        """Return the tokens of each conversation."""
        if len(self.starts) == 1:
            return [self.token_ids_T]
        return np.split(self.token_ids_T, self.starts[1:])

    def order_key(self) -> np.ndarray:
        """Return the tokens with -1 between conversations: what two episodes share of this they share in a trie."""
        if len(self.starts) == 1:
            return self.token_ids_T
        return np.insert(self.token_ids_T, self.starts[1:], -1)


def episodes_of(
    groups: Sequence[Group], advantages: Sequence[np.ndarray], scales: Sequence[float | np.ndarray] | None = None
) -> list[Episode]:
    """Split groups into episodes with their advantages; `Episode.index` counts through all groups.

    Args:
        groups: whole groups.
        advantages: one array [G] per group.
        scales: factor of the token loss for each group, either one number or one per episode [G]; None: 1.
    """
    episodes: list[Episode] = []
    for group, advantage_G, scale in zip(groups, advantages, scales or [1.0] * len(groups), strict=True):
        for g, (advantage, weight) in enumerate(zip(advantage_G, np.broadcast_to(scale, group.size), strict=True)):
            cut = slice(group.offsets[g], group.offsets[g + 1])
            arrays = (group.token_ids_N[cut], group.loss_mask_N[cut], group.behaviour_logp_N[cut])
            episodes.append(Episode(*arrays, float(advantage), len(episodes), float(weight), group.starts(g)))
    return episodes


def bare_episode(token_ids: Sequence[int], index: int) -> Episode:
    """Return tokens as an episode with a loss mask from the second token on, for scoring only."""
    token_ids_T = np.asarray(token_ids, np.int32)
    return Episode(token_ids_T, np.arange(len(token_ids_T)) > 0, np.zeros(len(token_ids_T), np.float32), 0.0, index)


@dataclass(frozen=True)
class Layout:
    """Token streams laid out as input [R, T], with one path of flat positions per stream.

    Invariant: `token_ids_RT.ravel()[paths[b]]` is stream b. With shared prefixes R is 1 and `trie` is set; with padding
    `attention_mask`, int64 [R, T], is set.
    """

    token_ids_RT: np.ndarray
    position_ids_RT: np.ndarray
    paths: list[np.ndarray]
    trie: Trie | None = None
    attention_mask: np.ndarray | None = None


def trie_layout(streams: Sequence[np.ndarray]) -> Layout:
    """Lay out streams as a prefix trie, each shared prefix once.

    In sorted order a stream shares its longest prefix with its predecessor, so one pass suffices.
    """
    paths: list[np.ndarray] = [np.empty(0, np.int64)] * len(streams)
    shared = np.zeros(len(streams), np.int64)
    previous_ids, previous_path, size = np.empty(0, np.int32), np.empty(0, np.int64), 0
    order = sorted(range(len(streams)), key=lambda b: streams[b].tolist())
    for b in order:
        shared[b] = common_prefix(previous_ids, streams[b])
        fresh = len(streams[b]) - shared[b]
        path = np.concatenate([previous_path[: shared[b]], np.arange(size, size + fresh)])
        paths[b], previous_ids, previous_path = path, streams[b], path
        size += fresh
    token_ids_T, depth_T = np.zeros(size, np.int64), np.zeros(size, np.int64)
    for b in order:
        fresh_T = paths[b][shared[b] :]
        token_ids_T[fresh_T] = streams[b][shared[b] :]
        depth_T[fresh_T] = np.arange(shared[b], len(paths[b]))
    return Layout(token_ids_T[None], depth_T[None], paths, trie=Trie.of(depth_T))


def padded_layout(streams: Sequence[np.ndarray]) -> Layout:
    """Lay out one stream per row, padded on the right with token 0, which is masked."""
    width = max(len(stream) for stream in streams)
    token_ids_RT = np.zeros((len(streams), width), np.int64)
    attention_mask = np.zeros((len(streams), width), np.int64)
    for b, stream in enumerate(streams):
        token_ids_RT[b, : len(stream)] = stream
        attention_mask[b, : len(stream)] = 1
    position_ids_RT = np.broadcast_to(np.arange(width), token_ids_RT.shape).copy()
    paths = [np.arange(b * width, b * width + len(stream)) for b, stream in enumerate(streams)]
    return Layout(token_ids_RT, position_ids_RT, paths, attention_mask=attention_mask)


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the common prefix of two arrays."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


class MicroBatch(TypedDict, Generic[Array]):
    """One forward and backward pass: token streams laid out, and their N loss tokens.

    Arrays are numpy from `micro_batch`, and tensors on the learner's device from `Scorer.tensors` on. It is a
    dictionary because RLlib's learners and modules pass batches as dictionaries.

    Invariant: the arrays [N] have the same length; `predictor` indexes flattened rows.
    """

    token_ids: Array  # [R, T]
    position_ids: Array  # [R, T]
    attention_mask: NotRequired[Array]  # [R, T], with padding only
    trie: Trie | None
    predictor: Array  # [N]
    target: Array  # [N]
    advantage: Array  # [N]
    scale: Array  # [N]
    behaviour_logp: Array  # [N], nats
    episode: Array  # [N], `Episode.index` of each loss token
    # Set by the learner:
    temperature: NotRequired[float]
    is_reused: NotRequired[bool]
    ref_logp: NotRequired[Array]  # [N], nats; with a KL term
    is_old: NotRequired[Array]  # bool [N], where the KL to the last stage's policy acts; with `stage_logp`
    stage_logp: NotRequired[Array]  # [N], nats; under the policy at the end of the last stage
    has_teacher: NotRequired[Array]  # bool [N], whether the KL to a teacher acts; with `teacher_logp`
    teacher_logp: NotRequired[Array]  # [N], nats
    num_top: NotRequired[int]  # number of likeliest tokens that a teacher's forward pass returns
    given_tokens: NotRequired[Array]  # int64 [N, k], a teacher's likeliest tokens; with `teacher_top`
    teacher_top: NotRequired[Array]  # [N, k], nats, their log-probs under the teacher
    is_noted: NotRequired[bool]  # whether the loss of these held answers was reported
    prox_logp: NotRequired[Array]  # [N], nats; from the first pass on, as is `is_kept`
    is_kept: NotRequired[Array]  # bool [N]; of reused episodes
    stats: NotRequired[dict[str, Any]]  # sums for the metrics, between loss and backward pass


def micro_batch(episodes: Sequence[Episode], share_prefixes: bool) -> MicroBatch[np.ndarray]:
    """Lay out episodes and collect their loss tokens, in order of episodes and positions."""
    streams = [stream for e in episodes for stream in e.streams()]
    layout = (trie_layout if share_prefixes else padded_layout)(streams)
    remaining = iter(layout.paths)
    # The token before a loss token is of the same conversation, because a conversation does not begin with one.
    paths = [np.concatenate([next(remaining) for _ in e.starts]) for e in episodes]
    written = [np.flatnonzero(e.loss_mask_T) for e in episodes]
    cut = list(zip(episodes, written, paths, strict=True))
    batch = MicroBatch(
        token_ids=layout.token_ids_RT,
        position_ids=layout.position_ids_RT,
        trie=layout.trie,
        predictor=np.concatenate([path[at - 1] for _, at, path in cut]),
        target=np.concatenate([e.token_ids_T[at] for e, at, _ in cut]).astype(np.int64),
        advantage=np.concatenate([np.full(len(at), e.advantage, np.float32) for e, at, _ in cut]),
        scale=np.concatenate([np.full(len(at), e.scale, np.float32) for e, at, _ in cut]),
        behaviour_logp=np.concatenate([e.behaviour_logp_T[at] for e, at, _ in cut]),
        episode=np.concatenate([np.full(len(at), e.index, np.int64) for e, at, _ in cut]),
    )
    if layout.attention_mask is not None:
        batch["attention_mask"] = layout.attention_mask
    return batch


def micro_batches(
    episodes: Sequence[Episode], max_tokens: int, share_prefixes: bool
) -> list[MicroBatch[np.ndarray]]:
    """Split episodes into passes of at most `max_tokens` computed tokens each; an episode is never split.

    An episode longer than `max_tokens` gets its own pass: the budget bounds memory, it never drops or truncates an
    episode. Only episodes without loss tokens are left out. Episodes are sorted by their tokens, so that those with
    long common prefixes are neighbours.
    """
    ordered = sorted((e for e in episodes if e.loss_mask_T.any()), key=lambda e: e.order_key().tolist())
    if not ordered:
        return []
    if share_prefixes:
        cuts = _trie_cuts([e.order_key() for e in ordered], max_tokens)
    else:
        cuts = _padded_cuts([[len(stream) for stream in e.streams()] for e in ordered], max_tokens)
    return [micro_batch(ordered[start:stop], share_prefixes) for start, stop in pairwise(cuts)]


def _trie_cuts(streams: Sequence[np.ndarray], max_tokens: int) -> list[int]:
    """Return the cuts of sorted streams that minimise tokens computed twice, then the number of parts.

    A cut before stream b costs the tokens that b shares with stream b - 1. `best_B[b]` is the least cost of streams 0
    to b - 1; tokens and parts are encoded as one number, tokens first.
    """
    num, part = len(streams), 1
    lengths_B = np.array([len(stream) for stream in streams])
    shared_B = np.array([0, *(common_prefix(a, b) for a, b in pairwise(streams))])
    until_B = np.concatenate([[0], np.cumsum(lengths_B - shared_B)])  # tokens of streams 0 to b - 1 in one trie
    best_B, start_B = np.zeros(num + 1, np.int64), np.zeros(num + 1, np.int64)
    for stop in range(1, num + 1):
        first = int(np.searchsorted(until_B[:stop] - shared_B[:stop], until_B[stop] - max_tokens))
        # The left side is sorted, because a stream is at least as long as the prefix its neighbours share with it.
        first = min(first, stop - 1)
        cost = best_B[first:stop] + shared_B[first:stop] * (num + 1) + part
        at = int(np.argmin(cost))
        best_B[stop], start_B[stop] = cost[at], first + at
    cuts = [num]
    while cuts[-1]:
        cuts.append(int(start_B[cuts[-1]]))
    return cuts[::-1]


def _padded_cuts(lengths_B: Sequence[Sequence[int]], max_tokens: int) -> list[int]:
    """Return the cuts, given the lengths of each episode's streams; a padded part has at most `max_tokens`."""
    cuts, width, rows = [0], 0, 0
    for b, lengths in enumerate(lengths_B):
        width, rows = max(width, *lengths), rows + len(lengths)
        if b > cuts[-1] and rows * width > max_tokens:
            cuts.append(b)
            width, rows = max(lengths), len(lengths)
    return [*cuts, len(lengths_B)]


def balanced_shards(num_tokens_P: Sequence[int], num_shards: int) -> list[list[int]]:
    """Distribute whole groups over shards with about equal token counts: largest group first, to the lightest shard.

    Args:
        num_tokens_P: token count of each group.
        num_shards: at least 1; a shard may stay empty if there are few groups.

    Returns:
        Indices of the groups of each shard, ascending.
    """
    lightest = [(0, shard) for shard in range(num_shards)]
    shards: list[list[int]] = [[] for _ in range(num_shards)]
    for index in sorted(range(len(num_tokens_P)), key=lambda i: (-num_tokens_P[i], i)):
        cost, shard = heapq.heappop(lightest)
        shards[shard].append(index)
        heapq.heappush(lightest, (cost + int(num_tokens_P[index]), shard))
    return [sorted(shard) for shard in shards]
