"""Verify a journal: its pages, payloads, groups, and the invariants of a buffer built from it.

    copy -> pages (SQLite's integrity check) -> payloads, decoded
         -> groups against their items and rows -> a buffer opened on the copy: check_valid

Every error is one line. Damaged pages end the verification, and so do damaged payloads, because later steps would
repeat their errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rllib_srl.replay.buffer import SRLReplayBuffer
from rllib_srl.replay.journal.codec import decode
from rllib_srl.replay.journal.file import JournalError, connect, explained
from rllib_srl.replay.journal.reader import Reading, copied, reading
from rllib_srl.replay.journal.schema import read_meta
from rllib_srl.replay.journal.transaction import JOURNAL
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.replay.store.records import GROUP, ITEM, key_of

if TYPE_CHECKING:
    from sqlite3 import Connection

MOST_PAGES = 20  # maximum number of page errors that SQLite reports


@dataclass(frozen=True)
class Verified:
    """The result of a verification. Invariant: the counts are valid if there are no faults."""

    path: Path
    faults: list[str]
    num_items: int = 0
    num_groups: int = 0
    position: int = 0


def verify(path: Path, trusts_rules: bool = False) -> Verified:
    """Verify a copy of a journal, live or closed; errors are returned as `faults`.

    Args:
        path: of the journal.
        trusts_rules: whether to import and call rules that its settings name by an import path.
    """
    try:
        with copied(path) as directory:
            faults = list(_faults_of_file(directory / JOURNAL, path))
        if faults:
            return Verified(path, faults)
        with reading(path, trusts_rules) as one:
            faults = list(_faults_of_groups(one))
            counts = (len(one.stored.items), len(one.stored.seqs), one.stored.position)
            settings = one.settings
        faults += _faults_of_buffer(path, settings)
    except (JournalError, ValueError) as error:
        return Verified(path, [str(error)])
    return Verified(path, faults, *counts)


def _faults_of_file(copy: Path, path: Path) -> Iterator[str]:
    """Yield one message for each damaged page, or else for each damaged payload."""
    with explained(path, "verifying it"), closing(connect(copy, is_durable=False)) as db:
        found = [text for (text,) in db.execute(f"PRAGMA integrity_check({MOST_PAGES})") if text != "ok"]
        if found:
            yield from (f"page: {' '.join(text.split())}" for text in found)
            return
        read_meta(db, path, ITEM, GROUP)
        yield from _faults_of_payloads(db)


def _faults_of_payloads(db: Connection) -> Iterator[str]:
    for seq, payload in db.execute("SELECT seq, CAST(payload AS BLOB) FROM payloads ORDER BY seq"):
        try:
            decode(payload, str(seq)).check_valid()
        except ValueError as error:
            yield str(error)


def _faults_of_groups(one: Reading) -> Iterator[str]:
    """Yield one message for each group without a payload or that does not match its item or its row."""
    keys = {int(slot): key_of(prompt) for slot, prompt in zip(one.stored.slots, one.stored.prompts, strict=True)}
    for seq, row in zip(one.stored.seqs.tolist(), one.stored.groups, strict=True):
        try:
            group = one.group(seq)
        except JournalError as error:
            yield str(error)
            continue
        if key_of(group.prompt) != keys.get(int(row["slot"])):
            yield f"group {seq} is of {group.prompt.env_id} [{group.prompt.prompt_id}], which is not its item"
        if (len(group.token_ids_N), group.size) != (row["num_tokens"], row["size"]):
            yield f"group {seq} has {len(group.token_ids_N)} tokens in {group.size} episodes; its row says otherwise"


def _faults_of_buffer(path: Path, settings: ReplaySettings) -> Iterator[str]:
    """Yield the error of `check_valid` of a buffer opened on a copy of the journal."""
    with copied(path) as directory, closing(opened_buffer(directory, settings)) as buffer:
        try:
            buffer.check_valid()
        except ValueError as error:
            yield str(error)


def opened_buffer(directory: Path, settings: ReplaySettings) -> SRLReplayBuffer:
    """Open a buffer on a copy, for inspection only.

    It does not draw or grade, so rules of selection, grading and eviction get their defaults, and no tokenizer is
    needed.
    """
    rules = {name: getattr(ReplaySettings, name) for name in ("selection", "reuse_selection", "grade", "eviction")}
    configs: dict[str, Any] = {"selection_config": {}, "reuse_selection_config": {}}
    embedding = settings.embedding_used  # of the rules as they were
    settings = replace(settings, **rules, **configs, embedding=embedding, domains="all", admit=None)
    return SRLReplayBuffer(settings, directory=directory)
