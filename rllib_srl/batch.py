"""Groups and advantages -> prefix tries, micro-batches and balanced parts: pure numpy.

Episodes of a group share their prompt, and groups share a few-shot text. A trie lays each shared
token out once; a branch attends to its own path only, so the result equals the padded computation:

    few-shot text ─┬─ prompt 1 ─┬─ answer a          tokens laid end to end, position = depth in the trie,
                   │            └─ answer b          attention_mask[i, j] = j is i or an ancestor of i
                   └─ prompt 2 ─── answer c

The unit of loss is one policy-written token of one episode (N of them): `predictor_N` is the row
whose logits predict it. Two episodes that wrote the same tokens share rows, never loss tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rllib_srl.types import Group


@dataclass(frozen=True)
class Episode:
    """What the loss needs of one episode: its stream, what the policy wrote, its advantage, and its tokens' weight.

    Invariant: the three arrays have the same length T, and `loss_mask_T[0]` is False.
    """

    token_ids_T: np.ndarray
    loss_mask_T: np.ndarray
    behaviour_logp_T: np.ndarray
    advantage: float
    index: int  # position in the shard
    scale: float = 1.0  # what the loss of each token is multiplied by


def episodes_of(
    groups: Sequence[Group], advantages: Sequence[np.ndarray], scales: Sequence[float] | None = None
) -> list[Episode]:
    """Cut groups into episodes with their advantages; `Episode.index` counts through all groups.

    Args:
        groups: whole groups.
        advantages: one array a group.
        scales: what the loss of each group's tokens is multiplied by; None: 1.

    Raises:
        ValueError: the number of groups and of advantage arrays, or of episodes and advantages of a group, differ.
    """
    if len(groups) != len(advantages):
        raise ValueError(f"{len(groups)} groups but {len(advantages)} advantage arrays")
    episodes: list[Episode] = []
    for group, advantage_G, scale in zip(groups, advantages, scales or [1.0] * len(groups), strict=True):
        if group.size != len(advantage_G):
            raise ValueError(f"group {group.group_id} has {group.size} episodes but {len(advantage_G)} advantages")
        for g, advantage in enumerate(advantage_G):
            cut = slice(group.offsets[g], group.offsets[g + 1])
            arrays = (group.token_ids_N[cut], group.loss_mask_N[cut], group.behaviour_logp_N[cut])
            episodes.append(Episode(*arrays, float(advantage), len(episodes), scale))
    return episodes


def bare_episode(token_ids: Sequence[int], index: int) -> Episode:
    """Return tokens as an episode that the policy wrote from the second token on, for scoring alone."""
    token_ids_T = np.asarray(token_ids, np.int32)
    return Episode(token_ids_T, np.arange(len(token_ids_T)) > 0, np.zeros(len(token_ids_T), np.float32), 0.0, index)


@dataclass(frozen=True)
class Layout:
    """Token streams laid out once, [R, T] rows of input, with one path of flat positions per stream.

    Invariant: `token_ids_RT.ravel()[paths[b]]` is stream b. With sharing R is 1 and
    `attention_mask` is bool [1, 1, T, T]; padded it is int64 [R, T].
    """

    token_ids_RT: np.ndarray
    position_ids_RT: np.ndarray
    attention_mask: np.ndarray
    paths: list[np.ndarray]

    @property
    def num_tokens(self) -> int:
        """Return how many tokens the model computes."""
        return self.token_ids_RT.size


def trie_layout(streams: Sequence[np.ndarray]) -> Layout:
    """Lay streams out as a prefix trie: each shared prefix once.

    Sorted streams share with their predecessor exactly what they share with any earlier one, so one
    pass suffices.
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
    token_ids_T, position_ids_T = np.zeros(size, np.int64), np.zeros(size, np.int64)
    mask_TT = np.zeros((size, size), bool)
    for b in order:
        path, fresh_T = paths[b], paths[b][shared[b] :]
        token_ids_T[fresh_T] = streams[b][shared[b] :]
        position_ids_T[fresh_T] = np.arange(shared[b], len(path))
        mask_TT[np.ix_(fresh_T, path[: shared[b]])] = True
        mask_TT[np.ix_(fresh_T, fresh_T)] = np.tri(len(fresh_T), dtype=bool)
    return Layout(token_ids_T[None], position_ids_T[None], mask_TT[None, None], paths)


def padded_layout(streams: Sequence[np.ndarray]) -> Layout:
    """Lay streams out one a row, padded on the right with token 0 that nothing attends to."""
    width = max(len(stream) for stream in streams)
    token_ids_RT = np.zeros((len(streams), width), np.int64)
    attention_mask = np.zeros((len(streams), width), np.int64)
    for b, stream in enumerate(streams):
        token_ids_RT[b, : len(stream)] = stream
        attention_mask[b, : len(stream)] = 1
    position_ids_RT = np.broadcast_to(np.arange(width), token_ids_RT.shape).copy()
    paths = [np.arange(b * width, b * width + len(stream)) for b, stream in enumerate(streams)]
    return Layout(token_ids_RT, position_ids_RT, attention_mask, paths)


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Return how many leading entries two arrays share."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward pass: a layout and its N loss tokens.

    Invariant: the six `_N` arrays have the same length; `predictor_N` indexes flattened rows.
    """

    layout: Layout
    predictor_N: np.ndarray
    target_N: np.ndarray
    advantage_N: np.ndarray
    scale_N: np.ndarray
    behaviour_logp_N: np.ndarray
    episode_N: np.ndarray  # `Episode.index` of each loss token


def micro_batch(episodes: Sequence[Episode], share_prefixes: bool) -> MicroBatch:
    """Lay out episodes and list their loss tokens, episode by episode, in order."""
    layout = (trie_layout if share_prefixes else padded_layout)([e.token_ids_T for e in episodes])
    written = [np.flatnonzero(e.loss_mask_T) for e in episodes]
    cut = list(zip(episodes, written, layout.paths, strict=True))
    return MicroBatch(
        layout=layout,
        predictor_N=np.concatenate([path[at - 1] for _, at, path in cut]),
        target_N=np.concatenate([e.token_ids_T[at] for e, at, _ in cut]).astype(np.int64),
        advantage_N=np.concatenate([np.full(len(at), e.advantage, np.float32) for e, at, _ in cut]),
        scale_N=np.concatenate([np.full(len(at), e.scale, np.float32) for e, at, _ in cut]),
        behaviour_logp_N=np.concatenate([e.behaviour_logp_T[at] for e, at, _ in cut]),
        episode_N=np.concatenate([np.full(len(at), e.index, np.int64) for e, at, _ in cut]),
    )


def micro_batches(episodes: Sequence[Episode], max_tokens: int, share_prefixes: bool) -> list[MicroBatch]:
    """Split episodes into passes of at most `max_tokens` computed tokens each, no episode over two of them.

    An episode longer than `max_tokens` gets a pass of its own: the budget bounds memory, it never
    drops or cuts an episode. Only one without a token to learn from is left out. Episodes are taken in
    lexical order, so those that share most sit together.
    """
    ordered = sorted((e for e in episodes if e.loss_mask_T.any()), key=lambda e: e.token_ids_T.tolist())
    parts: list[list[Episode]] = []
    cost = 0
    for episode in ordered:
        length = len(episode.token_ids_T)
        part = parts[-1] if parts else []
        if share_prefixes and part:
            new_cost = cost + length - common_prefix(part[-1].token_ids_T, episode.token_ids_T)
        else:
            new_cost = (len(part) + 1) * max([length, *(len(e.token_ids_T) for e in part)])
        if part and new_cost <= max_tokens:
            part.append(episode)
            cost = new_cost
        else:
            parts.append([episode])
            cost = length
    return [micro_batch(part, share_prefixes) for part in parts]


def balanced_shards(num_tokens_P: Sequence[int], num_shards: int) -> list[list[int]]:
    """Give each shard whole groups of about equal token counts: largest first, to the lightest shard.

    Args:
        num_tokens_P: the cost of each group.
        num_shards: at least 1; a shard may stay empty when groups are few.

    Returns:
        The indices of the groups of each shard, ascending.
    """
    lightest = [(0, shard) for shard in range(num_shards)]
    shards: list[list[int]] = [[] for _ in range(num_shards)]
    for index in sorted(range(len(num_tokens_P)), key=lambda i: (-num_tokens_P[i], i)):
        cost, shard = heapq.heappop(lightest)
        shards[shard].append(index)
        heapq.heappush(lightest, (cost + int(num_tokens_P[index]), shard))
    return [sorted(shard) for shard in shards]
