"""Remove items from a memory permanently: from the database of a run, and from the snapshots in its checkpoints.

A run that is resumed restores a snapshot, so items that were left there would come back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rllib_srl.replay.reading import database_in, reading
from rllib_srl.replay.store import DATABASE, SNAPSHOT, Store
from rllib_srl.storage.checkpoints import MANIFEST, checkpoints_in, seal, verify_own
from rllib_srl.storage.seal_key import make_key


def drop(directory: Path, names: Collection[str], **which: Any) -> dict[Path, int]:
    """Remove items with their groups, answers and targets; return their number in each database.

    Args:
        directory: directory of a run, with its checkpoints, of one checkpoint, or of a buffer.
        names: prompt ids, or prefixes of keys.
        which: further items, as in `SRLReplayBuffer.remove`.

    Raises:
        ValueError: a name matches no item, or several.
        StoreError: a run is using the memory, or there is none.
        CheckpointError: a checkpoint is damaged, or another user sealed it.
    """
    checkpoints = [directory] if (directory / MANIFEST).is_file() else checkpoints_in(directory)
    sealed = {path / "memory" / SNAPSHOT: (path, verify_own(path)) for path in checkpoints}
    paths = [path for path in sealed if path.is_file()]
    if directory not in checkpoints:
        paths.insert(0, database_in(directory))
        if paths[0].name != DATABASE:
            raise ValueError(f"{paths[0]} is part of a checkpoint; expected the directory of the checkpoint or its run")
    which["keys"] = {_key_of(name, paths) for name in names}
    removed = {}
    for path in paths:
        if path not in sealed:
            with closing(Store(path.parent)) as store:
                removed[path] = _remove(store, **which)
            continue
        with closing(Store(None)) as store:
            store.restore(path)
            removed[path] = _remove(store, **which)
            store.snapshot(path)
        seal(*sealed[path], make_key())
    return removed


def _remove(store: Store, **which: Any) -> int:
    tables, _ = store.read()
    with store.transaction():
        num = tables.remove(**which)
        store.write(tables)
    store.erase()
    return num


def _key_of(name: str, paths: Sequence[Path]) -> str:
    """Return the key of an item in the first of the databases that has it."""
    for path in paths:
        with reading(path) as one:
            try:
                return one.tables.prompt_of(one.find(name)).key
            except ValueError:
                if path == paths[-1]:
                    raise
    raise ValueError(f"{name!r}; expected a memory that holds it")
