"""Finds stored successes of given prompts, which are mixed into played groups (`batch/mixing.py`); read-only.

    keys of played prompts -> the newest older group of each that contains a success
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rllib_srl.types import Group

if TYPE_CHECKING:
    from rllib_srl.replay.buffer import SRLReplayBuffer


def stored_successes(buffer: SRLReplayBuffer, keys: Sequence[str], now: int) -> dict[str, Group]:
    """Return prompt key -> the newest group with a success whose age is in (0, `max_age`] iterations.

    The lookup is not a draw and does not count as a use: the success is trained on as part of a played group.

    Args:
        buffer: the buffer to search.
        keys: prompt keys; those without such a group are left out of the result.
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
