"""Shorten a round trip by local search: reverse a segment, see the new length, continue from there.

    Question: Shorten the round trip. Steps along the grid: A 0,0; B 4,4; C 4,0; D 0,4.
    A B C D: length 24, best 24.
    Move: reverse B C                               reverses the segment from B to C
    A C B D: length 16, best 16.                    the shortest there is: the episode ends, reward 1
    ...
    Move: stop                                      keeps the best trip so far

The reward is paid at the end: the share of the possible saving that the best trip achieves,

    reward = (length at the start - best length) / (length at the start - shortest),     in [0, 1]

where the shortest is exact (Held and Karp's dynamic programme over subsets) and distances are |dx| + |dy|, so that all
numbers are whole. The prompt id is the places in the order of the first trip: "0,0 4,4 4,0 0,4". The split depends on
the places without their order.

Source: Held and Karp 1962, J. SIAM 10, "A dynamic programming approach to sequencing problems"; Croes 1958, Operations
Research 6 (reversing a segment: the 2-opt move).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import perm
from string import ascii_uppercase
from typing import Any

from rllib_srl.envs.math.compare import ordered_choice
from rllib_srl.envs.turns import Answer, TurnSettings, TurnWorld

_PROMPT_ID = re.compile(r"\d{1,2},\d{1,2}( \d{1,2},\d{1,2})+", re.ASCII)
_MOST_PLACES = 9  # the exact optimum of more takes longer than a turn may

Place = tuple[int, int]


@dataclass(frozen=True)
class TourSettings(TurnSettings):
    """Settings of `Tour`. Invariant: as in `TurnSettings`."""

    num_shots: int = 1
    num_turns: int = 6
    num_places: int = 6
    side: int = 10  # places lie on a square grid of so many points a side

    def faults(self) -> list[str]:
        """Return one error message for each setting out of its range."""
        faults = super().faults()
        if not 4 <= self.num_places <= _MOST_PLACES:
            faults.append(f"num_places = {self.num_places}; expected 4 to {_MOST_PLACES}")
        if not 4 <= self.side <= 100:
            faults.append(f"side = {self.side}; expected 4 to 100")
        if self.num_turns < self.num_places - 2:
            faults.append(f"num_turns = {self.num_turns}; expected at least num_places - 2 = {self.num_places - 2}")
        return faults


class Tour(TurnWorld):
    """Round trips to shorten.

    Invariant: the first trip is longer than the shortest, and `num_places` - 2 moves reach the shortest.
    """

    domain = "tour"
    settings_class = TourSettings
    settings: TourSettings
    cue = "Move:"

    def _num_ids(self) -> int:
        return perm(self.settings.side**2, self.settings.num_places)

    def _prompt_id(self, number: int) -> str | None:
        chosen = ordered_choice(number, range(self.settings.side**2), self.settings.num_places)
        places = [divmod(index, self.settings.side) for index in chosen]
        if shortest(tuple(places))[0] == length(places, range(len(places))):
            return None
        return " ".join(f"{x},{y}" for x, y in places)

    def canonical(self, prompt_id: str) -> str:
        """Return the places in a fixed order."""
        return " ".join(f"{x},{y}" for x, y in sorted(self._read(prompt_id)))

    def gold_turns(self, prompt_id: str) -> list[str]:
        """Return moves to a shortest trip: each move brings the right place to the next position."""
        places = self._read(prompt_id)
        best, wanted = shortest(tuple(places))
        trip, turns = list(range(len(places))), []
        for at in range(1, len(trip)):
            if length(places, trip) == best:
                break
            if trip[at] != wanted[at]:
                turns.append(f" reverse {ascii_uppercase[trip[at]]} {ascii_uppercase[wanted[at]]}\n")
                trip = reversed_between(trip, trip[at], wanted[at])
        return turns

    def begin(self, prompt_id: str) -> str:
        """State the places and the first trip."""
        self._places = self._read(prompt_id)
        self._trip = list(range(len(self._places)))
        self._first = self._best = length(self._places, self._trip)
        self._shortest = shortest(tuple(self._places))[0]
        listed = "; ".join(f"{ascii_uppercase[i]} {x},{y}" for i, (x, y) in enumerate(self._places))
        return f"Shorten the round trip. Steps along the grid: {listed}.\n{self._shown()}"

    def answer(self, action: str) -> Answer:
        """Reverse a segment, or stop."""
        words = action.split()
        if words == ["stop"]:
            return self._ended()
        names = ascii_uppercase[: len(self._places)]
        is_move = len(words) == 3 and words[0] == "reverse" and all(len(w) == 1 and w in names for w in words[1:])
        if not is_move:
            unknown = f"Unknown. Say reverse and two of {' '.join(names)}, or stop.\n"
            return Answer(unknown + self._shown(), is_read=False)
        self._trip = reversed_between(self._trip, *(names.index(word) for word in words[1:]))
        self._best = min(self._best, length(self._places, self._trip))
        return self._ended() if self._best == self._shortest else Answer(self._shown())

    def at_the_end(self) -> tuple[float, dict[str, Any]]:
        """Return the reward of the best trip."""
        ended = self._ended()
        return ended.reward, ended.info

    def _ended(self) -> Answer:
        reward = (self._first - self._best) / (self._first - self._shortest)
        return Answer(reward=reward, is_over=True, info={"best_length": self._best, "shortest": self._shortest})

    def _shown(self) -> str:
        named = " ".join(ascii_uppercase[index] for index in self._trip)
        return f"{named}: length {length(self._places, self._trip)}, best {self._best}."

    def _read(self, prompt_id: str) -> list[Place]:
        """Return the places of a prompt."""
        is_one = isinstance(prompt_id, str) and len(prompt_id) < 100 and _PROMPT_ID.fullmatch(prompt_id)
        places = [(int(x), int(y)) for x, y in (place.split(",") for place in prompt_id.split())] if is_one else []
        num = len(places)
        is_task = 4 <= num <= min(_MOST_PLACES, self.settings.num_turns + 2) and len(set(places)) == num
        if not is_task or shortest(tuple(places))[0] == length(places, range(num)):
            raise ValueError(
                f"prompt_id = {prompt_id!r}; expected 4 to {min(_MOST_PLACES, self.settings.num_turns + 2)} places "
                "in an order that is not the shortest, as in '0,0 4,4 4,0 0,4'"
            )
        return places


def length(places: list[Place], trip: Any) -> int:
    """Return the length of a round trip: the sum of |dx| + |dy| over its legs, including the return to the start."""
    order = [places[index] for index in trip]
    return sum(_apart(one, other) for one, other in pairwise([*order, order[0]]))


def reversed_between(trip: list[int], one: int, other: int) -> list[int]:
    """Return the trip with the segment between two of its places, both included, reversed."""
    first, last = sorted((trip.index(one), trip.index(other)))
    return trip[:first] + trip[first : last + 1][::-1] + trip[last + 1 :]


@lru_cache(maxsize=4096)
def shortest(places: tuple[Place, ...]) -> tuple[int, tuple[int, ...]]:
    """Return the length of a shortest round trip from the first place, and one such trip.

    best[S, j] = min over i in S - {j} of best[S - {j}, i] + d(i, j): the shortest way from place 0 through S to j in S.

    Source: Held and Karp 1962, section 2.
    """
    num = len(places)
    apart = [[_apart(one, other) for other in places] for one in places]
    best: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
    best.update({(1 << j, j): (apart[0][j], (0, j)) for j in range(1, num)})
    for subset in range(2, 1 << num, 2):  # place 0 is in none
        members = [j for j in range(1, num) if subset >> j & 1]
        for j in members if len(members) > 1 else []:
            rest = subset & ~(1 << j)
            ways = ((best[rest, i][0] + apart[i][j], (*best[rest, i][1], j)) for i in members if i != j)
            best[subset, j] = min(ways)
    everything = (1 << num) - 2
    return min((best[everything, j][0] + apart[j][0], best[everything, j][1]) for j in range(1, num))


def _apart(one: Place, other: Place) -> int:
    return abs(one[0] - other[0]) + abs(one[1] - other[1])
