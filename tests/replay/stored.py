"""Rows for the tests of what is stored, and processes that tests start: one holds a store, one dies while restoring.

python -m tests.replay.stored hold DIR               opens it, says so, waits to be killed
python -m tests.replay.stored restore SNAPSHOT DIR STEP
"""

import os
import signal
import sqlite3
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rllib_srl.replay.items import GROUP, ITEM
from rllib_srl.replay.payloads import compact_json, encode, prompt_fields
from rllib_srl.replay.store import Store
from rllib_srl.types import Group, Prompt
from tests.replay.groups import a_group


def assert_same(one: Group, other: Group) -> None:
    """Two groups are equal in every field, in values and in dtypes of arrays."""
    assert vars(one).keys() == vars(other).keys()
    for name, value in vars(one).items():
        theirs = getattr(other, name)
        if isinstance(value, np.ndarray):
            assert (value.dtype, value.shape) == (theirs.dtype, theirs.shape), name
            np.testing.assert_array_equal(value, theirs, err_msg=name)
        else:
            assert (value, type(value)) == (theirs, type(theirs)), name


def an_item(key: int, due: float = 0.0) -> np.void:
    """Return a row."""
    row = np.zeros((), ITEM)
    row["key"], row["due"], row["has_vector"] = key, due, 1
    return row[()]


def a_row(seq: int, slot: int = 0, uses: int = 0) -> np.void:
    """Return the row of a group."""
    row = np.zeros((), GROUP)
    row["seq"], row["slot"], row["uses"] = seq, slot, uses
    return row[()]


def commit(store: Store, index: int, **parts: Any) -> None:
    """Commit a new item, its vector and group, an answered request and two states; `parts` replace some."""
    values: dict[str, Any] = {
        "item": an_item(2**64 - 1 - index, index / 3),
        "payload": encode(a_group(index, index)),
        "answer": {"stored": [index, None, 0.1]},
        "generator": np.random.default_rng(index).bit_generator.state,
    }
    values |= parts
    with store.transaction():
        put_item(store, index, values["item"], prompt_at(index), np.full(3, index, np.float32))
        store.put("groups", [(index, a_row(index, index).tobytes(), f"g{index}")])
        store.put("payloads", [(index, values["payload"])])
        store.put_state({"generator": values["generator"], "items": {"next_group_seq": index + 1}})
        store.put_answer(f"{index}.add", values["answer"])


def put_item(store: Store, slot: int, row: np.void, prompt: Prompt, vector: np.ndarray) -> None:
    """Write an item, in a transaction."""
    store.put("items", [(slot, row.tobytes(), compact_json(prompt_fields(prompt)), vector.tobytes())])


def prompt_at(index: int) -> Prompt:
    """Return a prompt."""
    return Prompt("env", f"p{index}", "sums", ("a",))


def hold(directory: Path) -> None:
    """Open a store and keep it."""
    Store(directory)
    print("open", flush=True)
    time.sleep(600)


def restore(snapshot: Path, directory: Path, step: int) -> None:
    """Restore page by page, and die after so many pages, or before what follows them."""
    count = 0

    def may_die(*_: int) -> None:
        nonlocal count
        if count == step:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    class Dying(sqlite3.Connection):
        def backup(self, target: sqlite3.Connection, **_: Any) -> None:
            super().backup(target, pages=1, progress=may_die)

        def executemany(self, *arguments: Any) -> sqlite3.Cursor:
            may_die()
            return super().executemany(*arguments)

    sqlite3.connect = partial(sqlite3.connect, factory=Dying)
    Store(directory).restore(snapshot)


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "hold":
        hold(Path(arguments[0]))
    else:
        restore(Path(arguments[0]), Path(arguments[1]), int(arguments[2]))
