"""Stored successes of given prompts, for the rescue of played groups (`compose`): a reading that changes nothing.

    keys of played prompts -> the newest older group of each that holds a success
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rllib_srl.types import Group

if TYPE_CHECKING:
    from rllib_srl.replay.buffer import SRLReplayBuffer


def stored_successes(buffer: SRLReplayBuffer, keys: Sequence[str], now: int) -> dict[str, Group]:
    """Return by prompt key the newest group that holds a success, if it is older than `now` and within `max_age`.

    It is neither counted as a use nor drawn: what it teaches, it teaches inside the group of today.

    Args:
        buffer: where they are stored.
        keys: of prompts; those without such a group are left out.
        now: the training iteration.
    """
    store, rows = buffer.store, buffer.store.groups
    found: dict[str, Group] = {}
    for key in keys:
        slot = store.slot_of(int(key, 16))
        for group in reversed(store.groups_of(slot)) if slot is not None else ():
            age = now - int(rows["born"][group])
            if rows["num_success"][group] > 0 and 0 < age <= buffer.settings.max_age:
                found[key] = replace(buffer.ledger.payloads.get(int(rows["seq"][group])), origin="reuse")
                break
    return found
