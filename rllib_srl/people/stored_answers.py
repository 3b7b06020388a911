"""Read the answers in the memory of a run, live or finished, from a copy of its database.

    with StoredAnswers.of_run(directory, decode) as answers:
        for answer in answers.newest_first(): ...

"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rllib_srl.people.rating import Answer
from rllib_srl.replay.admission import Decode, turns_of
from rllib_srl.replay.ratings import RatedGroups, fingerprint
from rllib_srl.replay.reading import Reading, reading
from rllib_srl.types import Group

WAITS = "waits for the next iteration of the run"
UNUSED = "unused: the answer is not in the memory"


class StoredAnswers:
    """The answers of one run at one moment. Invariant: the reading is an open copy; the run is not disturbed."""

    def __init__(self, reading: Reading, decode: Callable[[], Decode]) -> None:
        """Use an open reading; `decode` returns the function that turns token ids into text."""
        self._reading, self._make_decode = reading, decode
        self._rated = RatedGroups(**reading.state.get("rated", {}))

    @classmethod
    @contextmanager
    def of_run(cls, directory: Path, decode: Callable[[], Decode]) -> Iterator[Any]:
        """Yield the answers of a run; ValueError: it has no memory. A checkpoint and a database have no ratings."""
        check_run(directory)
        with reading(directory) as memory:
            yield cls(memory, decode)

    def newest_first(self) -> Iterator[Answer]:
        """Yield all answers of the run, those of the newest iteration first, each decoded when it is asked for."""
        for seq in self._seqs():
            group = self._reading.store.group(seq)
            yield from (self._answer(group, g) for g in range(group.size))

    def find(self, answer_id: str) -> Answer | None:
        group_id, _, episode = answer_id.rpartition("/")
        born = group_id.partition(".")[0]  # ids begin with the iteration, unless they come from a file
        born_N = self._rows["born"].tolist()
        born_of = dict(zip(self._rows["seq"].tolist(), map(str, born_N), strict=True))
        for seq in sorted(self._seqs(), key=lambda seq: born_of[seq] != born):
            group = self._reading.store.group(seq)
            if group.group_id == group_id and episode.isdecimal() and int(episode) < group.size:
                return self._answer(group, int(episode))
        return None

    def state_of(self, answer: Answer, seq: int) -> str:
        """Return in words what became of an answer's rating whose last change is `seq`."""
        rated = self._rated
        if rated.position < seq:
            return WAITS
        if answer.group_id in rated.unused:
            return UNUSED
        if str(answer.episode) in rated.applied.get(answer.group_id, {}):
            return "applied" if self._is_stored(answer) else "applied; its group has left the memory"
        return "taken back"

    @cached_property
    def _decode(self) -> Decode:
        return self._make_decode()

    @cached_property
    def _rows(self) -> np.ndarray:
        tables = self._reading.tables
        rows_N: np.ndarray = tables.groups[tables.groups.slots()]
        return rows_N

    def _seqs(self) -> list[int]:
        """Return the seq of every group of the run, the newest first."""
        rows_N = self._rows
        seqs: list[int] = rows_N["seq"][np.lexsort((rows_N["seq"], rows_N["born"]))[::-1]].tolist()
        return seqs

    def _answer(self, group: Group, g: int) -> Answer:
        listed = turns_of(group, g, self._decode)
        prompt = listed[0][-1] if listed and not listed[0][0] else ""
        turns = listed[1:] if prompt else listed
        text = "".join(text if is_policy else f"\n[environment] {text}\n" for is_policy, _, _, text in turns)
        return Answer(
            group.group_id,
            g,
            key=group.prompt.key,
            fingerprint=fingerprint(group, g),
            env_id=group.prompt.env_id,
            domain=group.prompt.domain,
            version=int(group.versions_G2[g].max()),
            prompt=prompt,
            answer=text,
        )

    def _is_stored(self, answer: Answer) -> bool:
        tables = self._reading.tables
        slot, at = tables.slot_of(int(answer.key, 16)), tables.group_at(answer.group_id)
        return slot is not None and at is not None and at in tables.groups_of(slot)


def check_run(directory: Path) -> None:
    """Check that a path is the directory of a run with a memory, no checkpoint or database; ValueError: it is not."""
    if not (directory / "replay/memory.db").is_file():
        reason = "holds no memory of a run" if directory.is_dir() else "is not a directory"
        raise ValueError(f"{directory} {reason}; expected the directory of a run, as srl train --out names it")
