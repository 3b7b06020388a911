"""A maze with two doors under partial observation: a sign, out of sight of the doors, names the right door.

    Question: Maze: # wall, S sign, 1 and 2 doors. You stand on a hidden free cell. The sign names the right door.
    1 . . 2
    # . # #
    # S # #
    Free cells you see: n 0, e 1, s 0, w 1
    Move: w
    Free cells you see: n 0, e 1, s 1, w 1
    Move: s
    ...
    Move: s
    Free cells you see: n 1, e 0, s 0, w 0. The sign says 2.
    ...
    Move: e                                         the right door ends it with reward 1, the other with 0

The map is shown; the policy's position and the right door are hidden. An observation is the number of free cells in
each direction, at most `sight`; doors look like free cells, and everything outside the map is wall. A step into a wall
leaves the position unchanged and uses up the turn.

A policy needs memory for its possible positions and for the sign. The sign's cell has one exit, so a memoryless policy
leaves it in the same way whatever the sign says, and wins at most one of two episodes. `Grid.optimal_values` computes
this value and the value of the best policy with memory (a belief over positions and doors) exactly.

The prompt id is the map, row by row, with the hidden start and door: "1..2/#.##/#S## from 0,2 door 2" (row 0, column 2;
both from 0). From every cell the way by the sign to either door takes at most `num_turns` turns. The split depends on
the map only: no held-out map is used in training.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import perm
from typing import Annotated

from rllib_srl.envs.games.beliefs import Outcome, Policies, Pomdp, Solved
from rllib_srl.envs.math.compare import ordered_choice
from rllib_srl.envs.settings import Within
from rllib_srl.envs.turns import Answer, TurnSettings, TurnWorld

MOVES = {"n": (-1, 0), "e": (0, 1), "s": (1, 0), "w": (0, -1)}
DOORS = ("1", "2")
_PROMPT_ID = re.compile(r"([.#S12]+(?:/[.#S12]+)*) from (\d{1,2}),(\d{1,2}) door ([12])", re.ASCII)

Cell = tuple[int, int]  # row, column


@dataclass(frozen=True)
class GridSettings(TurnSettings):
    """Settings of `Grid`. Invariant: as in `TurnSettings`."""

    num_shots: int = 1
    num_turns: int = 10
    width: Annotated[int, Within(3, 8)] = 4  # cells
    height: Annotated[int, Within(2, 8)] = 3
    sight: Annotated[int, Within(0, 8)] = 1  # cells

    def faults(self) -> list[str]:
        """Return one error message for each setting that does not fit the others."""
        if self.num_turns >= self.width + self.height:
            return []
        return [f"num_turns = {self.num_turns}; expected at least width + height, {self.width + self.height}"]


class Maze:
    """A map with one sign and two doors.

    Invariant: `inside` is every free cell that is not a door, including the sign's.
    """

    def __init__(self, rows: list[str]):
        self.rows = rows
        cells = {(r, c): mark for r, row in enumerate(rows) for c, mark in enumerate(row)}
        self.free = frozenset(cell for cell, mark in cells.items() if mark != "#")
        at = {mark: cell for cell, mark in cells.items() if mark in "S12"}
        self.sign, self.doors = at["S"], {at[door]: door for door in DOORS}
        self.inside = self.free - self.doors.keys()
        self.to_sign = self._distances(self.sign)
        self.to_door = {door: self._distances(cell) for cell, door in self.doors.items()}

    def moved(self, cell: Cell, move: str) -> Cell:
        """Return the cell after a move: the same cell if a wall is in the way."""
        target = (cell[0] + MOVES[move][0], cell[1] + MOVES[move][1])
        return target if target in self.free else cell

    def seen(self, cell: Cell, sight: int) -> tuple[int, ...]:
        """Return the number of free cells in line to the north, east, south and west, at most `sight` each."""
        return tuple(self._open_cells(cell, move, sight) for move in MOVES)

    def starts(self) -> list[Cell]:
        """Return the possible start cells, all equally likely."""
        return sorted(self.inside - {self.sign})

    def told(self, cell: Cell, door: str, sight: int) -> str:
        """Return what a policy is told at a cell if `door` is the right one."""
        counts = zip(MOVES, self.seen(cell, sight), strict=True)
        told = "Free cells you see: " + ", ".join(f"{move} {count}" for move, count in counts)
        return f"{told}. The sign says {door}." if cell == self.sign else told

    def is_playable(self, num_turns: int) -> bool:
        """Return whether the sign has one exit, not to a door, and every way by the sign to a door fits the turns."""
        ways = [target for move in MOVES if (target := self.moved(self.sign, move)) != self.sign]
        is_connected = self.to_sign.keys() == self.inside
        if len(ways) != 1 or ways[0] in self.doors or not is_connected or len(self.inside) < 3:
            return False
        farthest = max((self.to_door[door].get(self.sign, num_turns) for door in DOORS), default=0)
        return max(self.to_sign.values()) + farthest <= num_turns

    def _open_cells(self, cell: Cell, move: str, sight: int) -> int:
        num = 0
        while num < sight and (target := self.moved(cell, move)) != cell:
            num, cell = num + 1, target
        return num

    def _distances(self, goal: Cell) -> dict[Cell, int]:
        """Return the number of turns to `goal` from each cell, on routes without a door."""
        distance, queue = {goal: 0}, deque([goal])
        while queue:
            cell = queue.popleft()
            for move in MOVES:
                if (target := self.moved(cell, move)) not in distance and target in self.inside:
                    distance[target] = distance[cell] + 1
                    queue.append(target)
        return distance


class Grid(TurnWorld, Solved):
    """Mazes to leave by the right door, from a hidden start.

    Invariant: start and right door are drawn uniformly and independently.
    """

    domain = "grid"
    settings_class = GridSettings
    settings: GridSettings
    cue = "Move:"

    def _num_ids(self) -> int:
        num_cells = self.settings.width * self.settings.height
        num_ids: int = 2 * perm(num_cells, 4) * 2 ** (num_cells - 4)
        return num_ids

    def _prompt_id(self, number: int) -> str | None:
        width, num_cells = self.settings.width, self.settings.width * self.settings.height
        number, door = divmod(number, 2)
        walls, choice = divmod(number, perm(num_cells, 4))
        sign, one, two, start = ordered_choice(choice, range(num_cells), 4)
        marks = {sign: "S", one: "1", two: "2", start: "."}
        for index, at in enumerate(at for at in range(num_cells) if at not in (sign, one, two, start)):
            marks[at] = "#" if walls >> index & 1 else "."
        if not _is_dead_end(sign, marks, width):  # most maps end here: cheaper than walking them
            return None
        rows = ["".join(marks[at] for at in range(first, first + width)) for first in range(0, num_cells, width)]
        if not Maze(rows).is_playable(self.settings.num_turns):
            return None
        return f"{'/'.join(rows)} from {start // width},{start % width} door {DOORS[door]}"

    def canonical(self, prompt_id: str) -> str:
        """Return the map."""
        return "/".join(self.read(prompt_id)[0].rows)

    def gold_turns(self, prompt_id: str) -> list[str]:
        """Return a shortest route by the sign, computed from the hidden start."""
        maze, cell, door = self.read(prompt_id)
        turns = []
        for distance in (maze.to_sign, maze.to_door[door]):
            while distance[cell]:
                ways = (move for move in MOVES if maze.moved(cell, move) in distance)
                move = min(ways, key=lambda move: distance[maze.moved(cell, move)])
                cell = maze.moved(cell, move)
                turns.append(f" {move}\n")
        return turns

    def begin(self, prompt_id: str) -> str:
        """Show the map and the observation at the start."""
        self._maze, self._cell, self._door = self.read(prompt_id)
        shown = "\n".join(" ".join(row) for row in self._maze.rows)
        return (
            "Maze: # wall, S sign, 1 and 2 doors. You stand on a hidden free cell. The sign names the right door.\n"
            f"{shown}\n{self._sight()}"
        )

    def answer(self, action: str) -> Answer:
        """Move."""
        if action not in MOVES:
            return Answer(f"Unknown. Say n, e, s or w.\n{self._sight()}", is_read=False)
        self._cell = self._maze.moved(self._cell, action)
        if self._cell in self._maze.doors:
            return Answer(reward=float(self._maze.doors[self._cell] == self._door), is_over=True)
        return Answer(self._sight())

    def solved(self, prompt_id: str) -> tuple[Policies, int]:
        """Return the best policies on a prompt's map, over all starts and doors, and the number of turns."""
        maze, _, _ = self.read(prompt_id)
        return _policies(tuple(maze.rows), self.settings.sight), self.settings.num_turns

    def read(self, prompt_id: str) -> tuple[Maze, Cell, str]:
        """Return the map, the start and the right door of a prompt.

        Raises:
            ValueError: it is not a prompt id, or cannot be played within `num_turns`.
        """
        found = _PROMPT_ID.fullmatch(prompt_id) if isinstance(prompt_id, str) and len(prompt_id) < 110 else None
        rows = found[1].split("/") if found else []
        if not found or len({*map(len, rows)}) > 1 or any(found[1].count(mark) != 1 for mark in "S12"):
            raise ValueError(
                f"prompt_id = {prompt_id!r}; expected a map with one S, 1 and 2, a start and a door, as in "
                "'1..2/#.##/#S## from 0,2 door 2'"
            )
        maze, start = Maze(rows), (int(found[2]), int(found[3]))
        if start not in maze.starts() or not maze.is_playable(self.settings.num_turns):
            raise ValueError(
                f"prompt_id = {prompt_id!r}; expected a start on a free cell, a sign whose only way out is not a door, "
                f"and ways by the sign to both doors of at most num_turns = {self.settings.num_turns} turns"
            )
        return maze, start, found[4]

    def _sight(self) -> str:
        return self._maze.told(self._cell, self._door, self.settings.sight)


class MazeTask(Pomdp):
    """A map whose start and right door are hidden. Invariant: the state is the position and the right door."""

    actions = tuple(MOVES)

    def __init__(self, maze: Maze, sight: int):
        self.maze, self.sight = maze, sight

    def starts(self) -> Iterable[tuple[int, tuple[Cell, str], str]]:
        """Return every start with either door, equally likely."""
        pairs = [(cell, door) for cell in self.maze.starts() for door in DOORS]
        return [(1, (cell, door), self.maze.told(cell, door, self.sight)) for cell, door in pairs]

    def outcomes(self, state: tuple[Cell, str], action: str) -> Iterable[Outcome]:
        """Return where a move leads, or the reward of the door behind it."""
        cell, door = self.maze.moved(state[0], action), state[1]
        if cell in self.maze.doors:
            return [Outcome(1, int(self.maze.doors[cell] == door), None, "")]
        return [Outcome(1, 0, (cell, door), self.maze.told(cell, door, self.sight))]


@lru_cache(maxsize=64)
def _policies(rows: tuple[str, ...], sight: int) -> Policies:
    return Policies(MazeTask(Maze(list(rows)), sight))


def _is_dead_end(at: int, marks: dict[int, str], width: int) -> bool:
    """Return whether a cell has exactly one free neighbour, and that is not a door."""
    row, column = divmod(at, width)
    beside = [(row + down) * width + column + right for down, right in MOVES.values() if 0 <= column + right < width]
    free = [marks[each] for each in beside if marks.get(each, "#") != "#"]
    return free == ["."]
