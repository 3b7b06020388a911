"""Read the answers in the memory of a run, live or finished, from a copy of its database.

    with StoredAnswers.of_run(directory, decode) as answers:
        for answer in answers.newest_first(): ...

"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from rllib_srl.people.rating import Answer
from rllib_srl.replay.ratings import RatedGroups, fingerprint
from rllib_srl.replay.reading import Reading, reading
from rllib_srl.replay.tools.describe import Decode, turns
from rllib_srl.types import Group

WAITS = "waits for the next iteration of the run"
UNUSED = "unused: the answer is not in the memory"


class NotARun(ValueError):
    """A path is not the directory of a run with a memory."""


class StoredAnswers:
    """The answers of one run as of one moment. Invariant: the reading is an open copy; the run is not disturbed."""

    def __init__(self, reading: Reading, decode: Callable[[], Decode]) -> None:
        """Use an open reading; `decode` returns the function that turns token ids into text."""
        self._reading, self._make_decode = reading, decode
        self._decode: Decode | None = None
        self._rated = RatedGroups(**reading.stored.state.get("rated", {}))

    @classmethod
    @contextmanager
    def of_run(cls, directory: Path, decode: Callable[[], Decode]) -> Iterator[Any]:
        """Yield the answers of a run.

        Raises:
            NotARun: the directory has no memory of a run; a checkpoint and a database have no ratings of their own.
            StoreError: the memory cannot be read.
        """
        check_run(directory)
        with reading(directory) as found:
            yield cls(found, decode)

    def newest_first(self) -> Iterator[Answer]:
        """Yield all answers of the run, those of the newest iteration first, each decoded when it is asked for."""
        for at in self._groups():
            yield from self._answers(at)

    def find(self, answer_id: str) -> Answer | None:
        """Return the answer with an id, None if it is not in the memory."""
        group_id, _, episode = answer_id.rpartition("/")
        born = group_id.partition(".")[0]  # ids begin with the iteration, unless they come from a file
        born_N = self._reading.stored.groups["born"]
        for at in sorted(self._groups(), key=lambda at: str(born_N[at]) != born):
            group = self._group(at)
            if group.group_id == group_id and episode.isdecimal() and int(episode) < group.size:
                return self._answer(group, int(episode))
        return None

    def state_of(self, answer: Answer, seq: int) -> str:
        """Return what has become of the rating of an answer whose last change is `seq`, in words."""
        rated = self._rated
        if rated.position < seq:
            return WAITS
        if answer.group_id in rated.unused:
            return UNUSED
        if str(answer.episode) in rated.applied.get(answer.group_id, {}):
            return "applied" if self._is_stored(answer) else "applied; its group has left the memory"
        return "taken back"

    # --- parts -----------------------------------------------------------------------------------

    def _groups(self) -> list[int]:
        """Return the position of every group of the run, the newest first."""
        stored = self._reading.stored
        positions: list[int] = np.lexsort((stored.seqs, stored.groups["born"]))[::-1].tolist()
        return positions

    def _group(self, at: int) -> Group:
        return self._reading.group(int(self._reading.stored.seqs[at]))

    def _answers(self, at: int) -> Iterator[Answer]:
        group = self._group(at)
        for g in range(group.size):
            yield self._answer(group, g)

    def _answer(self, group: Group, g: int) -> Answer:
        if self._decode is None:
            self._decode = self._make_decode()
        listed = turns(group, g, self._decode)
        prompt = listed[0][1] if listed and listed[0][0] == "environment" else ""
        rest = listed[1:] if prompt else listed
        text = "".join(text if role == "policy" else f"\n[environment] {text}\n" for role, text in rest)
        about: Mapping[str, str] = {"key": group.prompt.key, "env_id": group.prompt.env_id}
        return Answer(
            group.group_id,
            g,
            fingerprint=fingerprint(group, g),
            domain=group.prompt.domain,
            version=int(group.versions_G2[g].max()),
            prompt=prompt,
            answer=text,
            **about,
        )

    def _is_stored(self, answer: Answer) -> bool:
        reading = self._reading
        keys_N = reading.stored.items["key"]
        at = np.flatnonzero(keys_N == np.uint64(int(answer.key, 16)))
        if not len(at):
            return False
        groups = reading.groups_at(int(reading.stored.slots[at[0]])).tolist()
        return any(reading.group(int(reading.stored.seqs[one])).group_id == answer.group_id for one in groups)


def check_run(directory: Path) -> None:
    """Check that a path is the directory of a run with a memory.

    Raises:
        NotARun: it is not.
    """
    if not (directory / "replay/memory.db").is_file():
        reason = "holds no memory of a run" if directory.is_dir() else "is not a directory"
        raise NotARun(f"{directory} {reason}; expected the directory of a run, as srl train --out names it")
