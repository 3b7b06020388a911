"""Verify a memory: the pages of its database, every stored group, and the invariants of a buffer opened on a copy.

Each error is one line. Damaged pages or groups end the verification, because later steps would repeat their errors.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from rllib_srl.replay.buffer import SRLReplayBuffer
from rllib_srl.replay.items import key_of
from rllib_srl.replay.reading import Reading, copied, reading
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.replay.store import DATABASE, StoreError


def faults_of(path: Path, trusts_rules: bool = False) -> list[str]:
    """Return one message for each error of a memory, live or closed.

    Args:
        path: of its database.
        trusts_rules: whether to import and call rules that its settings name by an import path.
    """
    try:
        with copied(path) as directory, closing(sqlite3.connect(directory / DATABASE)) as db:
            found = [" ".join(text.split()) for (text,) in db.execute("PRAGMA integrity_check(20)") if text != "ok"]
        if found:
            return [f"page: {text}" for text in found]
        with reading(path, trusts_rules) as one:
            if found := list(_faults_of_groups(one)):
                return found
            settings = one.settings
        with copied(path) as directory, closing(opened_buffer(directory, settings)) as buffer:
            buffer.check_valid()
    except (StoreError, ValueError, sqlite3.DatabaseError) as error:
        return [str(error)]
    return []


def _faults_of_groups(one: Reading) -> Iterator[str]:
    """Yield one message for each group that cannot be read, or does not match its item or its row."""
    keys = {int(slot): key_of(prompt) for slot, prompt in zip(one.stored.slots, one.stored.prompts, strict=True)}
    for seq, row in zip(one.stored.seqs.tolist(), one.stored.groups, strict=True):
        try:
            group = one.group(seq)
            group.check_valid()
        except (StoreError, ValueError) as error:
            yield str(error)
            continue
        if key_of(group.prompt) != keys.get(int(row["slot"])):
            yield f"group {seq} is of {group.prompt.env_id} [{group.prompt.prompt_id}], which is not its item"
        if (len(group.token_ids_N), group.size) != (row["num_tokens"], row["size"]):
            yield f"group {seq} has {len(group.token_ids_N)} tokens in {group.size} episodes; its row says otherwise"


def opened_buffer(directory: Path, settings: ReplaySettings) -> SRLReplayBuffer:
    """Open a buffer that neither draws nor grades, so that it needs no rules of the user and no tokenizer."""
    names = ("selection", "reuse_selection", "selection_config", "reuse_selection_config", "grade", "eviction")
    default, embedding = ReplaySettings(), settings.embedding_used  # of the rules as they were
    rules = {name: getattr(default, name) for name in names}
    rules |= {"embedding": embedding, "domains": "all", "admit": None}
    return SRLReplayBuffer(settings.model_copy(update=rules), directory=directory)
