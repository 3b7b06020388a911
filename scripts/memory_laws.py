"""What a memory holds, to compare two of them, and what holds of every memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from rllib_srl.replay.buffer import SRLReplayBuffer
from rllib_srl.replay.items import Tables
from rllib_srl.replay.store import Store

AT_LEAST_0 = (
    *("stability", "interval", "variance", "reps", "lapses", "visits", "num_success", "domain", "num_zero_variance"),
    *("history_count", "pass_rate", "diversity", "uses", "num_loss_tokens", "num_bytes", "abs_advantage"),
)


def content(tables: Tables) -> dict[str, Any]:
    """Return everything in a form that `==` compares; the slots of groups do not count."""
    slots, groups = tables.slots().tolist(), tables.groups.slots().tolist()
    seqs, (with_vector, vectors_KD) = tables.groups["seq"].tolist(), tables.vectors
    return {
        "items": {slot: (tables.items[slot].tobytes(), tables.prompt_of(slot)) for slot in slots},
        "found": [tables.slot_of(int(key)) for key in tables.items["key"][slots]],
        "vectors": {slot: vector.tobytes() for slot, vector in zip(with_vector.tolist(), vectors_KD, strict=True)},
        "groups": {seqs[at]: (tables.groups[at].tobytes(), tables.group_ids[at]) for at in groups},
        "groups of items": {slot: [seqs[at] for at in tables.groups_of(slot)] for slot in slots},
    }


def check_tables(tables: Tables, store: Store) -> None:
    """Check the laws of the rows, and that each group has its payload."""
    items_N, groups_N = tables.items.at(tables.slots()), tables.groups.at(tables.groups.slots())
    for rows_N, is_used_N, end in (
        (items_N, tables.items.is_used, tables.next_seq),
        (groups_N, tables.groups.is_used, tables.next_group_seq),
    ):
        columns = {name: rows_N[name] for name in rows_N.dtype.names or ()}
        assert all(np.isfinite(values_N).all() for values_N in columns.values())
        assert not any((columns[name] < 0).any() for name in AT_LEAST_0 if name in columns)
        assert len(np.unique(rows_N["seq"])) == len(rows_N) and (rows_N["seq"] < end).all()
        whole = tables.items if rows_N is items_N else tables.groups
        assert not whole[~is_used_N].view(np.uint8).any(), "a free row is not zero"
    assert (items_N["alpha"] > 0).all() and (items_N["beta"] > 0).all()
    assert (items_N["last_review"] <= items_N["due"]).all() and (items_N["domain"] < len(tables.domains)).all()
    seqs = set(groups_N["seq"].tolist())
    assert {seq for (seq,) in store._read("SELECT seq FROM payloads")} == seqs


def check_valid(buffer: SRLReplayBuffer) -> None:
    """Check that a buffer and its store hold the same, and the laws of its rows."""
    stored, written = buffer.store.read()
    assert content(buffer.tables) == content(stored)
    check_tables(stored, buffer.store)
    for name, value in buffer._state().items():  # new settings are written with the next commit
        assert not written or name == "settings" or written.get(name) == value, name
