"""Export the groups of a memory to a JSONL file for other programs, one row per group.

    group_id  env_id  prompt_id  domain  history  step    origin  num_dropped  stop_reasons  extra (text of JSON)
    token_ids  loss_mask  behaviour_logp                  one list per episode
    rewards  versions  text (with a tokenizer)            one entry per episode
    item                                                  the item's record by column

A non-finite float of an item is the text "nan", "inf" or "-inf". The file is written atomically.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rllib_srl.replay.items import ITEM
from rllib_srl.replay.reading import Reading
from rllib_srl.types import Group

COLUMNS = [name for name in ITEM.names or () if name != "spare"]


def export_memory(reading: Reading, path: Path, decode: Callable[[Sequence[int]], str] | None) -> int:
    """Write all groups of a memory to `path`; return their number.

    Args:
        reading: of the memory.
        path: of the file, which is replaced at the end; its name ends in ".jsonl".
        decode: token ids -> text, for the column `text`; None leaves it out.

    Raises:
        ValueError: another suffix.
    """
    if path.suffix != ".jsonl":
        raise ValueError(f"{path}; expected a name that ends in .jsonl")
    stored = reading.stored
    item_of = dict(zip(stored.slots.tolist(), stored.items, strict=True))
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".new")
    try:
        with scratch.open("w", encoding="ascii") as stream:
            for seq, slot in zip(stored.seqs.tolist(), stored.groups["slot"].tolist(), strict=True):
                item = {name: item_of[slot][name].item() for name in COLUMNS}
                row = row_of(reading.group(seq), item, decode)
                stream.write(json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
    return len(stored.seqs)


def row_of(group: Group, item: Mapping[str, Any], decode: Callable[[Sequence[int]], str] | None) -> dict[str, Any]:
    """Return the row of a group and its item, in JSON types."""

    def by_episode(array_N: np.ndarray) -> list[list[Any]]:
        return [array_N[start:end].tolist() for start, end in zip(group.offsets[:-1], group.offsets[1:], strict=True)]

    token_ids = by_episode(group.token_ids_N)
    return {
        "group_id": group.group_id,
        **vars(group.prompt),
        "origin": group.origin,
        "num_dropped": int(group.num_dropped),
        "stop_reasons": [reason.value for reason in group.stop_reasons],
        "extra": json.dumps(group.extra),
        "token_ids": token_ids,
        "loss_mask": by_episode(group.loss_mask_N),
        "behaviour_logp": by_episode(group.behaviour_logp_N),
        "rewards": group.rewards_G.tolist(),
        "versions": group.versions_G2.tolist(),
        **({} if decode is None else {"text": [decode(ids) for ids in token_ids]}),
        "item": {name: value if math.isfinite(value) else str(value) for name, value in item.items()},
    }
