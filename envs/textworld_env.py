"""Text adventures that textworld generates: rooms, things and doors, seen from where you stand.

    TextWorld({"num_rooms": 3, "quest_length": 3})        prompt id "3.4.3 17"; the last number is the seed

    Please unlock the safe with the passkey.
    -= Spare Room =-
    You are in a spare room. ... There is an exit to the south.
    > go south
    -= Bedchamber =- ... You see a locked safe nearby. ... There is a passkey on the floor.
    > take passkey
    ...
    > unlock safe with passkey                      reward 1: won; lost or out of turns: the share of the score

A game is generated and compiled from its seed (one to two seconds the first time) and kept in `directory`, which
processes may share. The goal is stated by its last step only, unless `states_goal` is "steps". The walkthrough is
the gold play. The programs that compile and run games come with the package, for Linux.

Source: Côté et al. 2018, "TextWorld: a learning environment for text-based games", arXiv 1806.11532.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import threading
import uuid
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.turns import Answer, TurnSettings, TurnWorld

GOALS = ("last", "steps")
_PROMPT_ID = re.compile(r"(\d{1,2})\.(\d{1,2})\.(\d{1,2}) (\d{1,9})", re.ASCII)
_MAKING = threading.Lock()  # the generator of games keeps what it makes in globals
_STATUS = re.compile(r"\n*^>.*\Z", re.DOTALL | re.MULTILINE)  # the prompt and the status line behind it
_UNREAD = ("That's not a verb I recognise", "I only understood you as far as", "I beg your pardon")


@dataclass(frozen=True)
class TextWorldSettings(TurnSettings):
    """Settings of `TextWorld`. Invariant: as in `TurnSettings`."""

    num_shots: int = 0
    num_turns: int = 16
    num_rooms: int = 3
    num_objects: int = 4
    quest_length: int = 3  # steps of the shortest way to win
    states_goal: str = "last"  # "last": the last step; "steps": all of them
    pool_size: int = 4096  # seeds that games are made from
    directory: str = ""  # for compiled games; empty: one of this user in the directory for temporary files

    def faults(self) -> list[str]:
        """Return one line for each setting out of its range."""
        faults = super().faults()
        ranges = {"num_rooms": (1, 20), "num_objects": (1, 50), "quest_length": (1, 20), "pool_size": (2, 2**20)}
        faults += [
            f"{name} = {getattr(self, name)}; expected {least} to {most}"
            for name, (least, most) in ranges.items()
            if not least <= getattr(self, name) <= most
        ]
        if self.states_goal not in GOALS:
            faults.append(f"states_goal = {self.states_goal!r}; expected one of {', '.join(GOALS)}")
        if self.num_turns < self.quest_length:
            faults.append(f"num_turns = {self.num_turns}; expected at least quest_length = {self.quest_length}")
        return faults


class TextWorld(TurnWorld):
    """Generated text adventures.

    Invariant: a compiled game is a function of its prompt id and `states_goal`; a file that is there is whole.
    """

    domain = "textworld"
    settings_class = TextWorldSettings
    settings: TextWorldSettings
    opening = ""
    cue = ">"

    def __init__(self, env_config: Mapping[str, Any] | None = None):
        self._game: Any = None
        self._facts: Any = {}
        super().__init__(env_config)

    def _num_ids(self) -> int:
        return self.settings.pool_size

    def _prompt_id(self, number: int) -> str:
        settings = self.settings
        return f"{settings.num_rooms}.{settings.num_objects}.{settings.quest_length} {number}"

    def canonical(self, prompt_id: str) -> str:
        """Return the prompt id: no two seeds make the same game."""
        _sizes(prompt_id)
        return prompt_id

    def gold_turns(self, prompt_id: str) -> list[str]:
        """Return the walkthrough."""
        walkthrough = json.loads(self._compiled(prompt_id).with_suffix(".turns").read_text(encoding="utf-8"))
        return [f" {command}\n" for command in walkthrough]

    def begin(self, prompt_id: str) -> str:
        """Start a game, and state its goal and the first room."""
        path, textworld = self._compiled(prompt_id), _textworld()
        self.close()
        wanted = textworld.EnvInfos(
            feedback=True, description=True, objective=True, won=True, lost=True, score=True, max_score=True
        )
        self._game = textworld.start(str(path), wanted)
        self._facts = self._game.reset()
        return f"{self._facts.objective}\n{_shown(self._facts.description)}"

    def answer(self, action: str) -> Answer:
        """Carry out a command."""
        command = " ".join("".join(c if c.isprintable() and c.isascii() else " " for c in action).split())
        if not command:
            return Answer("Say a command.", is_read=False)
        self._facts, _, _ = self._game.step(command)
        said = _shown(self._facts.feedback)
        if self._facts.won:
            return Answer(reward=1.0, is_over=True)
        if self._facts.lost:
            return Answer(reward=self._share(), is_over=True, info={"lost": True})
        return Answer(said, is_read=not any(unread in said for unread in _UNREAD))

    def at_the_end(self) -> tuple[float, dict[str, Any]]:
        """Pay the share of the score."""
        return self._share(), {}

    def close(self) -> None:
        """End the game's interpreter."""
        if self._game is not None:
            self._game.close()
            self._game = None

    def _share(self) -> float:
        most = self._facts.max_score or 0
        return min(max((self._facts.score or 0) / most, 0.0), 1.0) if most else 0.0

    def _compiled(self, prompt_id: str) -> Path:
        """Return the compiled game, made if it is not there, and beside it its walkthrough."""
        sizes = _sizes(prompt_id)
        textworld = _textworld()
        version = getattr(textworld, "__version__", "0")
        place = Path(self.settings.directory or Path(tempfile.gettempdir()) / f"textworld-games-{os.getuid()}")
        place = place / f"{version}-{self.settings.states_goal}"
        path = place / f"{'-'.join(map(str, sizes))}.z8"
        if not path.exists():
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
            with _MAKING:
                self._compile(sizes, path)
        return path

    def _compile(self, sizes: tuple[int, ...], path: Path) -> None:
        from textworld.generator import compile_game, make_game

        options = _textworld().GameOptions()
        options.nb_rooms, options.nb_objects, options.quest_length, options.seeds = sizes
        options.grammar.only_last_action = self.settings.states_goal == "last"
        game = make_game(options)
        made = path.with_name(f"{uuid.uuid4().hex}.z8")
        options.path = str(made)
        compile_game(game, options)
        turns = made.with_suffix(".turns")
        turns.write_text(json.dumps(game.metadata["walkthrough"]), encoding="utf-8")
        # The game itself comes last: where it is, the files that go with it are.
        for suffix in (".turns", ".json", ".ni", ".z8"):
            if (part := made.with_suffix(suffix)).exists():
                os.replace(part, path.with_suffix(suffix))


def _sizes(prompt_id: str) -> tuple[int, ...]:
    """Return rooms, objects, quest length and seed."""
    found = _PROMPT_ID.fullmatch(prompt_id) if isinstance(prompt_id, str) else None
    sizes = tuple(map(int, found.groups())) if found else ()
    if not sizes or not all(1 <= size <= most for size, most in zip(sizes[:3], (20, 50, 20), strict=True)):
        raise ValueError(f"prompt_id = {prompt_id!r}; expected rooms, objects, quest length and seed, as in '3.4.3 17'")
    return sizes


def _shown(said: str) -> str:
    """Return what a game says without its prompt, its status line and empty lines."""
    lines = (line.rstrip() for line in _STATUS.sub("", said).splitlines())
    return "\n".join(line for line in lines if line)


def _textworld() -> Any:
    """Return the package.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import textworld
    except ImportError as error:
        raise ImportError(f"world 'textworld' needs textworld ({error}); pip install 'rllib_srl[envs]'") from error
    # Its interpreter says so of every generated game; textworld reads the score in another way.
    warnings.filterwarnings("ignore", message="Game .* is not fully supported")
    return textworld
