"""Groups of a buffer as a file that other programs read, and groups of a file taken into a buffer.

journal --export_journals--> FILE (secrets redacted where the memory masks them)
FILE --import_into--> buffer: judged like a played group; of a new item it is the first visit, of a known one it is
                      kept for reuse only, since nobody has tested today's policy; born now, its log-probs as stored
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from rllib_srl.replay.buffer import SRLReplayBuffer
from rllib_srl.replay.export import Exported, Row, export_groups, import_groups
from rllib_srl.replay.readings import Reading
from rllib_srl.replay.records import ITEM
from rllib_srl.replay.secrets import detect, redact, token_spans
from rllib_srl.types import Group

Decode = Callable[[Sequence[int]], str]
COLUMNS = [name for name in ITEM.names or () if name != "spare"]
EXPORTED_ITEM = np.dtype([(name, ITEM[name]) for name in COLUMNS])
MARK = "~"  # between the id that a group was exported with and what makes it this memory's own
GROUPS_A_COMMIT = 64


@dataclass(frozen=True)
class Taken:
    """What an import did. Invariant: `num_read` = `num_stored` + all of `refused`; `faults` are rows never read."""

    num_read: int
    num_new_items: int
    num_stored: int
    refused: dict[str, int]  # by reason: "duplicate", and those of `admission.Reason`
    faults: list[str]


def export_journals(readings: Sequence[Reading], path: Path, decode: Decode | None, with_text: bool = True) -> int:
    """Write all groups of all shards to a `.jsonl` or `.parquet` file; return how many.

    Args:
        readings: of the shards.
        path: of the file.
        decode: token ids -> text, for the column `text` and to find secrets; None where it is not known.
        with_text: whether the file gets that column.

    Raises:
        ValueError: another suffix; or secrets are to be redacted and there is no `decode`.
    """
    is_masking = any(reading.settings.on_secret == "mask" for reading in readings)
    if is_masking and decode is None:
        raise ValueError("on_secret = 'mask' and the tokenizer is not known; expected it, to redact what is exported")
    return export_groups(
        _rows(readings),
        path,
        item=EXPORTED_ITEM,
        text=None if decode is None or not with_text else partial(_text, decode),
        redact=partial(redacted, decode=decode) if is_masking and decode else None,
    )


def _rows(readings: Sequence[Reading]) -> Iterator[Exported]:
    for reading in readings:
        at = {int(slot): n for n, slot in enumerate(reading.stored.slots)}
        for seq, row in zip(reading.stored.seqs.tolist(), reading.stored.groups, strict=True):
            item = None if row["is_orphan"] else reading.stored.items[[at[int(row["slot"])]]][COLUMNS][0]
            yield Exported(reading.group(seq), item)


def _text(decode: Decode, token_ids_T: np.ndarray) -> str:
    return decode(token_ids_T.tolist())


def redacted(row: Row, decode: Decode) -> Row:
    """Return a row without secrets: kinds in brackets for texts; for tokens the id 0, which nothing trains on."""
    tokens, masks, logps = [], [], []
    for ids, mask, logp in zip(row["token_ids"], row["loss_mask"], row["behaviour_logp"], strict=True):
        is_secret_T = _secret_tokens(ids, decode)
        tokens.append([0 if secret else token for token, secret in zip(ids, is_secret_T)])
        masks.append([written and not secret for written, secret in zip(mask, is_secret_T)])
        logps.append([0.0 if secret else value for value, secret in zip(logp, is_secret_T)])
    texts = {"text": [redact(text) for text in row["text"]]} if "text" in row else {}
    extra = json.dumps(_redacted_value(json.loads(row["extra"])))
    history = [redact(turn) for turn in row["history"]]
    found = {"token_ids": tokens, "loss_mask": masks, "behaviour_logp": logps, "history": history, "extra": extra}
    return {**row, **found, **texts}


def _secret_tokens(ids: list[int], decode: Decode) -> np.ndarray:
    is_secret_T = np.zeros(len(ids), bool)
    if not detect(decode(ids)):  # the usual case, at the price of one decode
        return is_secret_T
    text, starts_T, ends_T = token_spans(ids, decode)
    spans = detect(text)
    if not spans:  # pieces hide what the whole shows: nothing of it is safe
        return ~is_secret_T
    for span in spans:
        is_secret_T |= (starts_T < span.end) & (ends_T > span.start)
    return is_secret_T


def _redacted_value(value: Any) -> Any:
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, list):
        return [_redacted_value(part) for part in value]
    if isinstance(value, dict):
        return {name: _redacted_value(part) for name, part in value.items()}
    return value


def import_into(buffers: Sequence[SRLReplayBuffer], path: Path, now: int, on_fault: str = "refuse") -> Taken:
    """Take the groups of a file into the shards of a memory.

    Shard by shard and commit by commit: what is interrupted can be done again, and finds duplicates.

    Args:
        buffers: all shards, in their order.
        path: of a file that `export_groups` wrote, or another program like it.
        now: the training iteration that the groups are born at.
        on_fault: "refuse" takes nothing from a file with broken rows, "skip" leaves these out.

    Raises:
        ValueError: the file cannot be read, or has broken rows and they are not skipped; nothing was stored.
        JournalError: a commit failed; what was committed before stays.
    """
    imported = import_groups(path, on_fault)
    groups = [own(row.group) for row in imported.rows]
    counts: Counter[str] = Counter()
    num_new = 0
    for index, buffer in enumerate(buffers):
        part = [group for group in groups if int(group.prompt.key, 16) % len(buffers) == index]
        for start in range(0, len(part), GROUPS_A_COMMIT):
            visits = buffer.add(part[start : start + GROUPS_A_COMMIT], now, is_played=False)
            counts.update(visit.refused for visit in visits)
            num_new += sum(visit.is_new for visit in visits)
    stored = counts.pop("", 0)
    return Taken(len(groups), num_new, stored, dict(counts), imported.faults)


def own(group: Group) -> Group:
    """Return a group under an id that no played group has, the same whenever the same group is imported."""
    digest = xxhash.xxh3_64_hexdigest(group.token_ids_N.tobytes() + group.behaviour_logp_N.tobytes())
    return replace(group, group_id=f"{group.group_id.split(MARK)[0]}{MARK}{digest}", origin="fresh")
