"""Export the groups of a memory to a file, and import groups from a file into a memory.

journal --export_journal--> FILE
FILE --import_into--> buffer          admitted by the same rules as a generated group; born now, log-probs as stored

The group of a new item counts as the item's first visit. The group of a known item is kept for reuse only, because it
is no test of the current policy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from rllib_srl.replay.buffer import SRLReplayBuffer
from rllib_srl.replay.journal.reader import Reading
from rllib_srl.replay.store.records import ITEM
from rllib_srl.replay.tools.export import Exported, export_groups, import_groups
from rllib_srl.types import Group

Decode = Callable[[Sequence[int]], str]
COLUMNS = [name for name in ITEM.names or () if name != "spare"]
EXPORTED_ITEM = np.dtype([(name, ITEM[name]) for name in COLUMNS])
MARK = "~"  # separates an imported group's original id from its digest
GROUPS_A_COMMIT = 64


@dataclass(frozen=True)
class Taken:
    """The result of an import.

    Invariant: `num_read` = `num_stored` + the sum of `refused`; `faults` has one message per unreadable row.
    """

    num_read: int
    num_new_items: int
    num_stored: int
    refused: dict[str, int]  # by reason: "duplicate", and those of `admission.Reason`
    faults: list[str]


def export_journal(reading: Reading, path: Path, decode: Decode | None, with_text: bool = True) -> int:
    """Write all groups of a memory to a `.jsonl` file; return their number.

    Args:
        reading: of the memory.
        path: of the file.
        decode: token ids -> text, for the column `text`; None without a tokenizer.
        with_text: whether to write the column `text`.

    Raises:
        ValueError: another suffix.
    """
    return export_groups(
        _rows(reading),
        path,
        item=EXPORTED_ITEM,
        text=None if decode is None or not with_text else partial(_text, decode),
    )


def _rows(reading: Reading) -> Iterator[Exported]:
    at = {int(slot): n for n, slot in enumerate(reading.stored.slots)}
    for seq, row in zip(reading.stored.seqs.tolist(), reading.stored.groups, strict=True):
        item = reading.stored.items[[at[int(row["slot"])]]][COLUMNS][0]
        yield Exported(reading.group(seq), item)


def _text(decode: Decode, token_ids_T: np.ndarray) -> str:
    return decode(token_ids_T.tolist())


def import_into(buffer: SRLReplayBuffer, path: Path, now: int, on_fault: str = "refuse") -> Taken:
    """Import the groups of a file into a memory.

    It is written in several commits. An interrupted import can be repeated: groups stored before are refused
    as duplicates.

    Args:
        buffer: of the memory.
        path: of a file in the format of `export_groups`.
        now: the training iteration at which the groups are born.
        on_fault: "refuse" imports nothing from a file with invalid rows; "skip" leaves them out.

    Raises:
        ValueError: the file cannot be read, or has invalid rows that are not skipped; nothing was stored.
        JournalError: a commit failed; earlier commits stay.
    """
    imported = import_groups(path, on_fault)
    groups = [own(row.group) for row in imported.rows]
    counts: Counter[str] = Counter()
    num_new = 0
    for start in range(0, len(groups), GROUPS_A_COMMIT):
        visits = buffer.add(groups[start : start + GROUPS_A_COMMIT], now, is_played=False)
        counts.update(visit.refused for visit in visits)
        num_new += sum(visit.is_new for visit in visits)
    stored = counts.pop("", 0)
    return Taken(len(groups), num_new, stored, dict(counts), imported.faults)


def own(group: Group) -> Group:
    """Return a group with origin "fresh" and an id that no generated group has, equal for repeated imports."""
    digest = xxhash.xxh3_64_hexdigest(group.token_ids_N.tobytes() + group.behaviour_logp_N.tobytes())
    return replace(group, group_id=f"{group.group_id.split(MARK)[0]}{MARK}{digest}", origin="fresh")
