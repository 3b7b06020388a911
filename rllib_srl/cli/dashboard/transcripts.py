"""Find episodes in the transcripts of a run, which may be going on: an index of the lines, not their text.

    transcripts.jsonl --refresh--> one short row for each episode: where its line is, iteration, reward, ending
                      --search---> the newest episodes that fit; each line is read when it is looked at

A search that takes long stops, and says where to go on.
"""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from rllib_srl.cli.shared.tail import Tail

SEARCH_S = 1.0  # longest search for one page
ROWS_A_LOOK = 256  # rows between two looks at the clock
DAMAGES = (ValueError, KeyError, TypeError, AttributeError, OverflowError)


@dataclass(frozen=True)
class Wanted:
    """What an episode must fit. Invariant: `text` is lower case; "" and None stand for any."""

    text: str = ""
    iteration: Callable[[int], bool] | None = None
    reward: Callable[[float], bool] | None = None
    stop_reason: str = ""
    env_id: str = ""


@dataclass(frozen=True)
class Hits:
    """Episodes by row, the newest first. `before`: where to go on, None at the end of the file."""

    episodes: tuple[tuple[int, Mapping[str, Any]], ...]
    before: int | None
    is_cut: bool = False  # the time was over


class Transcripts:
    """The index of one file. Invariant: the columns are equally long; `_is_newest` is 0 for an episode played again."""

    def __init__(self, path: Path) -> None:
        """Prepare the index of a file, which may not exist; `refresh` reads it."""
        self._tail = Tail(path)
        self._clear()

    def _clear(self) -> None:
        self._offset, self._length, self._iteration = array("q"), array("q"), array("q")
        self._reward = array("d")
        self._stop, self._env, self._is_newest = array("i"), array("i"), array("b")
        self._row_of: dict[int, int] = {}  # hash of iteration, group and place in it -> row
        self._codes: dict[str, int] = {}
        self.num_damaged = 0

    def __len__(self) -> int:
        return len(self._row_of)

    @property
    def version(self) -> int:
        """Return a number that grows with the file."""
        return self._tail.position

    def refresh(self) -> None:
        """Read what was appended since."""
        if self._tail.has_restarted():
            self._clear()
        for offset, line in self._tail.new_lines():
            try:
                self._take(offset, len(line), json.loads(line))
            except DAMAGES:
                self.num_damaged += 1

    def _take(self, offset: int, length: int, episode: Mapping[str, Any]) -> None:
        iteration, reward = int(episode["iteration"]), float(episode["reward"])
        stop, env = str(episode["stop_reason"]), str(episode["env_id"])
        name = hash((iteration, str(episode["group_id"]), int(episode["index"])))
        if not all(isinstance(turn["text"], str) and isinstance(turn["role"], str) for turn in episode["turns"]):
            raise ValueError("a turn without a text")
        codes = [self._codes.setdefault(word, len(self._codes)) for word in (stop, env)]
        if (earlier := self._row_of.get(name)) is not None:
            self._is_newest[earlier] = 0
        self._row_of[name] = len(self._offset)
        places = (self._offset, self._length, self._iteration)
        columns: tuple[array[Any], ...] = (*places, self._reward, self._stop, self._env, self._is_newest)
        for column, value in zip(columns, (offset, length, iteration, reward, *codes, 1), strict=True):
            column.append(value)

    def choices(self) -> tuple[list[str], list[str]]:
        """Return the reasons of endings and the environments that occur."""
        names = list(self._codes)
        return sorted({names[code] for code in set(self._stop)}), sorted({names[code] for code in set(self._env)})

    def search(self, wanted: Wanted, before: int | None, most: int, seconds: float = SEARCH_S) -> Hits:
        """Return the newest episodes that fit.

        Args:
            wanted: what they must fit.
            before: go on below this row; None starts with the newest.
            most: number of episodes.
            seconds: after which the search stops.
        """
        deadline = time.monotonic() + seconds
        first = len(self._offset) if before is None else min(before, len(self._offset))
        found: list[tuple[int, Mapping[str, Any]]] = []
        if first <= 0:
            return Hits((), None)
        with self._tail.path.open("rb") as stream:
            for num, row in enumerate(range(first - 1, -1, -1), 1):
                if self._fits(row, wanted) and (episode := self._read(stream, row, wanted.text)) is not None:
                    found.append((row, episode))
                    if len(found) == most:
                        return Hits(tuple(found), row or None)
                if num % ROWS_A_LOOK == 0 and time.monotonic() > deadline:
                    return Hits(tuple(found), row or None, is_cut=row > 0)
        return Hits(tuple(found), None)

    def iteration_of(self, row: int) -> int:
        """Return the iteration of a row."""
        return self._iteration[row]

    def _fits(self, row: int, wanted: Wanted) -> bool:
        return bool(
            self._is_newest[row]
            and (wanted.iteration is None or wanted.iteration(self._iteration[row]))
            and (wanted.reward is None or wanted.reward(self._reward[row]))
            and (not wanted.stop_reason or self._codes.get(wanted.stop_reason) == self._stop[row])
            and (not wanted.env_id or self._codes.get(wanted.env_id) == self._env[row])
        )

    def _read(self, stream: BinaryIO, row: int, text: str) -> Mapping[str, Any] | None:
        """Return the episode of a row; None if it lacks the text, or its line was replaced meanwhile."""
        stream.seek(self._offset[row])
        line = stream.read(self._length[row])
        is_plain = text.isascii() and json.dumps(text) == f'"{text}"' and b"\\u" not in line
        if text and is_plain and text.encode() not in line.lower():
            return None  # without reading the JSON: most lines of a search end here
        try:
            episode: Mapping[str, Any] = json.loads(line)
        except ValueError:
            return None
        return episode if not text or any(text in part.lower() for part in _texts(episode)) else None


def _texts(episode: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts of an episode in which a search looks."""
    yield str(episode.get("prompt_id", ""))
    for turn in episode["turns"]:
        yield turn["text"]
