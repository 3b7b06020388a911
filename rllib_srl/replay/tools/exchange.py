"""Export the groups of a memory to a file, and import groups from a file into a memory.

journal --export_journal--> FILE     secrets are redacted if on_secret = "mask"
FILE --import_into--> buffer          admitted by the same rules as a generated group; born now, log-probs as stored

The group of a new item counts as the item's first visit. The group of a known item is kept for reuse only, because it
is no test of the current policy.
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

from rllib_srl.replay.admission.secrets import Detector, redact, token_spans
from rllib_srl.replay.buffer import SRLReplayBuffer
from rllib_srl.replay.journal.reader import Reading
from rllib_srl.replay.store.records import ITEM
from rllib_srl.replay.tools.export import Exported, Row, export_groups, import_groups
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
    """Write all groups of a memory to a `.jsonl` or `.parquet` file; return their number.

    Args:
        reading: of the memory.
        path: of the file.
        decode: token ids -> text, for the column `text` and for detecting secrets; None without a tokenizer.
        with_text: whether to write the column `text`.

    Raises:
        ValueError: another suffix; or secrets must be redacted and `decode` is None.
    """
    detector = reading.detector
    if detector and decode is None:
        raise ValueError("on_secret = 'mask' and the tokenizer is not known; expected it, to redact what is exported")
    return export_groups(
        _rows(reading),
        path,
        item=EXPORTED_ITEM,
        text=None if decode is None or not with_text else partial(_text, decode),
        redact=partial(redacted, decode=decode, detector=detector) if detector and decode else None,
    )


def _rows(reading: Reading) -> Iterator[Exported]:
    at = {int(slot): n for n, slot in enumerate(reading.stored.slots)}
    for seq, row in zip(reading.stored.seqs.tolist(), reading.stored.groups, strict=True):
        item = reading.stored.items[[at[int(row["slot"])]]][COLUMNS][0]
        yield Exported(reading.group(seq), item)


def _text(decode: Decode, token_ids_T: np.ndarray) -> str:
    return decode(token_ids_T.tolist())


def redacted(row: Row, decode: Decode, detector: Detector) -> Row:
    """Return a row without secrets: texts show their kinds in brackets, tokens become id 0 outside the loss mask."""
    tokens, masks, logps = [], [], []
    for ids, mask, logp in zip(row["token_ids"], row["loss_mask"], row["behaviour_logp"], strict=True):
        is_secret_T = _secret_tokens(ids, decode, detector)
        tokens.append([0 if secret else token for token, secret in zip(ids, is_secret_T)])
        masks.append([written and not secret for written, secret in zip(mask, is_secret_T)])
        logps.append([0.0 if secret else value for value, secret in zip(logp, is_secret_T)])
    texts = {"text": [redact(text, detector) for text in row["text"]]} if "text" in row else {}
    extra = json.dumps(_redacted_value(json.loads(row["extra"]), detector))
    history = [redact(turn, detector) for turn in row["history"]]
    found = {"token_ids": tokens, "loss_mask": masks, "behaviour_logp": logps, "history": history, "extra": extra}
    return {**row, **found, **texts}


def _secret_tokens(ids: list[int], decode: Decode, detector: Detector) -> np.ndarray:
    is_secret_T = np.zeros(len(ids), bool)
    if not detector(decode(ids)):  # fast path: mostly there is no secret, and one decode suffices
        return is_secret_T
    text, starts_T, ends_T = token_spans(ids, decode)
    spans = detector(text)
    if not spans:  # the secret shows only in the text decoded as a whole, so its tokens are unknown: redact all
        return ~is_secret_T
    for span in spans:
        is_secret_T |= (starts_T < span.end) & (ends_T > span.start)
    return is_secret_T


def _redacted_value(value: Any, detector: Detector) -> Any:
    if isinstance(value, str):
        return redact(value, detector)
    if isinstance(value, list):
        return [_redacted_value(part, detector) for part in value]
    if isinstance(value, dict):
        return {name: _redacted_value(part, detector) for name, part in value.items()}
    return value


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
