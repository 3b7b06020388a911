"""Adds the targets of stored answers, draws targets of answers to hold, and removes targets in excess.

A target is found by its place: the seq of its group, and the episode.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from rllib_srl.replay.items import Tables
from rllib_srl.replay.payloads import encode_target
from rllib_srl.replay.selection.rules import in_turns, occurrences
from rllib_srl.replay.store import Store
from rllib_srl.types import Target

Place = tuple[int, int]


def put_targets(tables: Tables, store: Store, targets: Sequence[Target], per_domain: int | None) -> tuple[int, int]:
    """Add the targets of stored groups, and remove those above `per_domain` of each domain, of the oldest groups.

    Returns:
        The numbers of added and of removed targets.
    """
    added: dict[Place, bytes] = {}
    for target in targets:
        if (at := tables.group_at(target.group_id)) is None:
            continue
        if not 0 <= target.episode < tables.groups["size"][at]:
            raise ValueError(f"target of group {target.group_id}: it has no episode {target.episode}")
        added[int(tables.groups["seq"][at]), target.episode] = encode_target(target)
    tables.targets |= {place: len(payload) for place, payload in added.items()}
    store.put("targets", [(*place, payload) for place, payload in added.items()])
    if per_domain is None:
        return len(added), 0
    places, _, domain_N = _located(tables)
    newest = np.argsort(-places[:, 0], kind="stable")
    surplus = newest[occurrences(domain_N[newest]) >= per_domain]
    return len(added), _remove(tables, store, [(seq, episode) for seq, episode in places[surplus].tolist()])


def drop_targets(tables: Tables, store: Store, env_ids: Collection[str]) -> int:
    """Remove the targets of all answers to prompts of some environments; return their number."""
    places, slot_N, _ = _located(tables)
    pairs = zip(places.tolist(), slot_N.tolist(), strict=True)
    return _remove(tables, store, [(seq, g) for (seq, g), slot in pairs if tables.prompt_of(slot).env_id in env_ids])


def _remove(tables: Tables, store: Store, places: Sequence[Place]) -> int:
    for place in places:
        del tables.targets[place]
    store.delete("targets", "seq = ? AND episode = ?", places)
    return len(places)


def draw_targets(
    tables: Tables,
    num: int,
    generator: np.random.Generator,
    without_slots: Sequence[int] = (),
    without_domains: Sequence[int] = (),
) -> list[Place]:
    """Draw the places of `num` distinct targets, fewer only if there are fewer.

    Every item comes once before any comes twice, and domains take turns; otherwise the draw is uniform. Items are left
    out by slot, domains by number.
    """
    places, slot_N, domain_N = _located(tables)
    is_able_N = ~np.isin(slot_N, without_slots) & ~np.isin(domain_N, without_domains)
    order_N = in_turns(domain_N[is_able_N], slot_N[is_able_N], generator)
    return [(seq, episode) for seq, episode in places[is_able_N][order_N[: max(0, num)]].tolist()]


def _located(tables: Tables) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the places of all targets in order, [N, 2], the slot of each one's item, and its domain."""
    places = np.array(sorted(tables.targets), np.int64).reshape(-1, 2)
    groups_N = tables.groups.slots()
    order_N = groups_N[np.argsort(tables.groups["seq"][groups_N])]
    at_N = order_N[np.searchsorted(tables.groups["seq"][order_N], places[:, 0].astype(np.uint64))]
    slot_N = tables.groups["slot"][at_N]
    return places, slot_N, tables.items["domain"][slot_N]
