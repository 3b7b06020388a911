"""Whether a journal is whole: every page, every checksum, every group, and every invariant of the buffer it makes.

    copy -> pages (SQLite's own check) -> checksums, row by row -> groups -> a buffer opened on the copy: check_valid

Every fault is one line. What comes after a step that found faults would only repeat them, so it is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rllib_srl.replay.buffer import SRLReplayBuffer
from rllib_srl.replay.codec import decode
from rllib_srl.replay.journal import JournalError
from rllib_srl.replay.journal_file import connect, explained, read_meta, stored_dtypes
from rllib_srl.replay.journal_schema import checksum
from rllib_srl.replay.ledger import JOURNAL
from rllib_srl.replay.readings import Reading, copied, reading
from rllib_srl.replay.records import GROUP, ITEM, key_of
from rllib_srl.replay.settings import ReplaySettings

if TYPE_CHECKING:
    from sqlite3 import Connection

CHECKSUMS = {  # what is read of a table: its name for a row, a value, the value's checksum
    "log": (("commit", "position", "effects", "checksum"),),
    "items": (("item", "slot", "row", "checksum"), ("prompt of item", "slot", "prompt", "prompt_checksum")),
    "vectors": (("vector", "slot", "vector", "checksum"),),
    "groups": (("row of group", "seq", "row", "checksum"),),
    "orphans": (("orphan", "seq", "prompt", "checksum"),),
    "requests": (("answer", "name", "answer", "checksum"),),
    "state": (("state", "name", "value", "checksum"),),
}
MOST_PAGES = 20  # faults of pages that SQLite names


@dataclass(frozen=True)
class Verified:
    """What was found. Invariant: the counts are right if there are no faults."""

    path: Path
    faults: list[str]
    num_items: int = 0
    num_groups: int = 0
    num_reviews: int = 0
    position: int = 0


def verify(path: Path) -> Verified:
    """Check a copy of a journal, live or not."""
    try:
        with copied(path) as directory:
            faults = list(_faults_of_file(directory / JOURNAL, path))
        if faults:
            return Verified(path, faults)
        with reading(path) as one:
            faults = list(_faults_of_groups(one))
            counts = (len(one.stored.items), len(one.stored.seqs), len(one.reviews), one.stored.position)
            settings = one.settings
        faults += _faults_of_buffer(path, settings)
    except (JournalError, ValueError) as error:
        return Verified(path, [str(error)])
    return Verified(path, faults, *counts)


def _faults_of_file(copy: Path, path: Path) -> Iterator[str]:
    """Yield damaged pages, or else rows whose checksum does not agree."""
    with explained(path, "verifying it"), closing(connect(copy, is_durable=False)) as db:
        found = [text for (text,) in db.execute(f"PRAGMA integrity_check({MOST_PAGES})") if text != "ok"]
        if found:
            yield from (f"page: {' '.join(text.split())}" for text in found)
            return
        stored_dtypes(read_meta(db, path), path, ITEM, GROUP)
        for table, parts in CHECKSUMS.items():
            for what, name, value, stored in parts:
                for row, data, expected in db.execute(f"SELECT {name}, {value}, {stored} FROM {table}"):
                    if checksum(data) != expected:
                        yield f"{what} {row} is damaged: its checksum does not agree"
        yield from _faults_of_payloads(db)


def _faults_of_payloads(db: Connection) -> Iterator[str]:
    for seq, payload in db.execute("SELECT seq, CAST(payload AS BLOB) FROM payloads ORDER BY seq"):
        try:
            decode(payload, str(seq)).check_valid()
        except ValueError as error:
            yield str(error)


def _faults_of_groups(one: Reading) -> Iterator[str]:
    """Yield groups without a payload, and those that are not their item's or not what their row says."""
    keys = {int(slot): key_of(prompt) for slot, prompt in zip(one.stored.slots, one.stored.prompts, strict=True)}
    for seq, row in zip(one.stored.seqs.tolist(), one.stored.groups, strict=True):
        try:
            group = one.group(seq)
        except JournalError as error:
            yield str(error)
            continue
        if seq not in one.stored.orphans and key_of(group.prompt) != keys.get(int(row["slot"])):
            yield f"group {seq} is of {group.prompt.env_id} [{group.prompt.prompt_id}], which is not its item"
        if (len(group.token_ids_N), group.size) != (row["num_tokens"], row["size"]):
            yield f"group {seq} has {len(group.token_ids_N)} tokens in {group.size} episodes; its row says otherwise"


def _faults_of_buffer(path: Path, settings: ReplaySettings) -> Iterator[str]:
    """Yield what a buffer that is opened on the journal finds wrong with itself."""
    with copied(path) as directory, closing(opened_buffer(directory, settings)) as buffer:
        try:
            buffer.check_valid()
        except ValueError as error:
            yield str(error)


def opened_buffer(directory: Path, settings: ReplaySettings) -> SRLReplayBuffer:
    """Open a buffer on a copy, to look at: it draws nothing, so it needs no tokenizer, no GPU, no world's predicate."""
    settings = replace(settings, domains="all", index_device="cpu")
    return SRLReplayBuffer(settings, directory=directory, decode=lambda ids: "")
