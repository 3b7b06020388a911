"""Single-player games of textarena, offline: the seed is the prompt.

    TextArena({"game": "GuessTheNumber-v0"})       prompt id "GuessTheNumber-v0 17"

    You are Player 0. You are playing Guess The Number. ...
    Enter your guess.
    [9]
    The target number is higher.
    [14]                                            reward 1: guessed

`GAMES` lists the supported games: seeded, offline, the same in every process. An action is in square brackets, and
"]" ends a turn. The reward is the game's own, paid at its end and clipped to [0, 1].
A turn that makes the game itself fail (textarena reads numbers of any length) ends the episode as unparsable, with 0.

Games draw from Python's global random generator. Each instance here keeps a generator state of its own, installed for
the duration of a call under a process-wide lock, so that episodes disturb neither each other nor other code.

Source: Guertler et al. 2025, "TextArena", arXiv 2504.11442.
"""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rllib_srl.envs.optional import imported
from rllib_srl.envs.turns import Answer, TurnSettings, TurnWorld

GAMES = (
    "2048-v0", "2048-v0-easy", "2048-v0-3x3", "Bandit-v0", "Bandit-v0-hard", "Blackjack-v0", "Crosswords-v0",
    "FifteenPuzzle-v0", "FrozenLake-v0-random", "GuessTheNumber-v0", "GuessTheNumber-v0-hardcore", "LightsOut-v0",
    "Mastermind-v0", "Mastermind-v0-hard", "Mastermind-v0-extreme", "Secretary-v0", "Sudoku-v0-very-easy",
    "Sudoku-v0-easy",
)  # fmt: skip
_PROMPT_ID = re.compile(r"(\S+) (\d{1,9})", re.ASCII)
_GENERATOR = threading.Lock()  # over Python's global generator, while a game draws from it
_GOLD: dict[str, Callable[[Any], str]] = {  # games whose winning turn can be read from their state
    "GuessTheNumber": lambda state: f"[{state['game_number']}]",
    "Mastermind": lambda state: f"[{' '.join(map(str, state['secret_code']))}]",
}


@dataclass(frozen=True)
class TextArenaSettings(TurnSettings):
    """Settings of `TextArena`. Invariant: as in `TurnSettings`."""

    num_shots: int = 0
    num_turns: int = 64  # beside the game's own limit
    game: str = ""  # one of GAMES
    pool_size: int = 4096  # seeds that tasks are drawn from; seeds that set the same task count once

    def faults(self) -> list[str]:
        """Return one error message for each setting out of its range."""
        faults = super().faults()
        if self.game not in GAMES:
            faults.append(f"game = {self.game!r}; expected one of {', '.join(GAMES)}")
        elif self.num_shots and _family(self.game) not in _GOLD:
            faults.append(f"num_shots = {self.num_shots}; expected 0 for {self.game!r}, whose gold turns are unknown")
        if not 2 <= self.pool_size <= 2**20:
            faults.append(f"pool_size = {self.pool_size}; expected 2 to {2**20}")
        return faults


class TextArena(TurnWorld):
    """Single-player games.

    Invariant: a game's draws depend on its seed and turns only, and leave the global generator unchanged.
    """

    stop_strings = ("]",)
    settings_class = TextArenaSettings
    settings: TextArenaSettings
    opening = ""
    cue = ""

    def __init__(self, env_config: Mapping[str, Any] | None = None):
        self._game: Any = None
        self._state = random.Random(0).getstate()
        super().__init__(env_config)
        self.domain = self.settings.game

    def _num_ids(self) -> int:
        return self.settings.pool_size

    def _prompt_id(self, number: int) -> str:
        return f"{self.settings.game} {number}"

    def _shuffled(self, seed: str) -> Iterator[str]:
        seen = set()
        for prompt_id in super()._shuffled(seed):
            if (canonical := self.canonical(prompt_id)) not in seen:
                seen.add(canonical)
                yield prompt_id

    def canonical(self, prompt_id: str) -> str:
        """Return the hidden state of a new game."""
        game = self._started_game(prompt_id)[0]
        return f"{self.settings.game} {game.state.game_state!r}"

    def gold_turns(self, prompt_id: str) -> list[str]:
        """Return a turn that wins.

        Raises:
            ValueError: the gold turns of this game are unknown.
        """
        family = _family(self.settings.game)
        if family not in _GOLD:
            raise ValueError(f"game = {self.settings.game!r}; expected one of {', '.join(_GOLD)} for gold turns")
        return [_GOLD[family](self._started_game(prompt_id)[0].state.game_state)]

    def begin(self, prompt_id: str) -> str:
        """Start a game and return its opening text."""
        self._game, self._state = self._started_game(prompt_id)
        return self._said()

    def action_in(self, turn: str) -> str:
        """Return the whole turn: games parse the brackets themselves."""
        return turn

    def answer(self, action: str) -> Answer:
        """Make a move."""
        try:
            with self._drawing():
                is_over, _ = self._game.step(action)
        except Exception as error:  # third-party games fail on odd input with any exception
            return Answer(is_over=True, is_read=False, info=_unparsable(f"the game failed: {type(error).__name__}"))
        if not is_over:
            return Answer(self._said())
        rewards, info = self._game.close()
        is_invalid = bool(info[0].get("invalid_move"))
        reward = min(max(float((rewards or {}).get(0, 0.0)), 0.0), 1.0)
        reason = str(info[0].get("reason"))[:500]
        return Answer(reward=reward, is_over=True, info=_unparsable(reason) if is_invalid else {"reason": reason})

    def _started_game(self, prompt_id: str) -> tuple[Any, Any]:
        """Return a new game and the state of its generator."""
        found = _PROMPT_ID.fullmatch(prompt_id) if isinstance(prompt_id, str) else None
        if not found or found[1] != self.settings.game:
            raise ValueError(f"prompt_id = {prompt_id!r}; expected game and seed, as in '{self.settings.game} 17'")
        textarena = imported("textarena", "textarena")
        kept, seed = self._state, int(found[2])
        self._state = random.Random(seed).getstate()
        try:
            with self._drawing():
                game = textarena.make(f"{self.settings.game}-raw")
                game.reset(num_players=1, seed=seed)
            return game, self._state
        finally:
            self._state = kept

    def _said(self) -> str:
        """Return the game's output since the last turn, without the policy's own text."""
        _, messages = self._game.get_observation()
        said = "\n".join(str(message) for speaker, message, _ in messages if speaker != 0)
        return said.encode(errors="replace").decode()

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Install this instance's state in the global generator for the duration of a call, under a lock."""
        with _GENERATOR:
            kept = random.getstate()
            random.setstate(self._state)
            try:
                yield
            finally:
                self._state = random.getstate()
                random.setstate(kept)


def _family(game: str) -> str:
    return game.split("-v0")[0]


def _unparsable(reason: str) -> dict[str, Any]:
    return {"stop_reason": "unparsable", "reason": reason}
