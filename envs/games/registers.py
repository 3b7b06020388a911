"""Read hidden registers, then answer a question about them.

    Question: Registers p, c, k. Larger of p and c?
    Action: get p
    p = 17
    Action: get c
    c = 40
    Action: answer 40                               reward 1; any other number 0

Four tasks: "read" (What is in c?), "larger" (Larger of p and c?), "smaller" (Smaller of p and c?), and "follow" (Follow
c: a register that holds the name of another, which holds the number). "larger" and "smaller" differ by one word and
have opposite answers after the same reads, so as domains of a stream they interfere with each other. A turn that is not
a valid action gets an error reply and counts as a turn.

The prompt id is the whole hidden state with the question, as in "p=17, c=40, k=93. larger p c".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import perm
from string import ascii_lowercase
from typing import Annotated

from rllib_srl.envs.math.compare import ordered_choice
from rllib_srl.envs.question import integer_in
from rllib_srl.envs.settings import OneOf, Within
from rllib_srl.envs.turns import Answer, TurnEnv, TurnSettings

TASKS = ("read", "larger", "smaller", "follow")
# Tasks about two registers -> what picks the answer.
_PAIRED: dict[str, Callable[[Iterable[int]], int]] = {"larger": max, "smaller": min}
_VALUES = range(10, 100)
_PROMPT_ID = re.compile(
    rf"([a-z]=(?:\d\d|[a-z])(?:, [a-z]=(?:\d\d|[a-z]))+)\. ({'|'.join(TASKS)})((?: [a-z]){{1,2}})", re.ASCII
)
_UNKNOWN = "Unknown. Say get and a register, or answer and a number."


@dataclass(frozen=True)
class RegistersSettings(TurnSettings):
    """Settings of `Registers`. Invariant: as in `TurnSettings`."""

    num_shots: int = 4
    num_turns: int = 4
    num_registers: Annotated[int, Within(2, 8)] = 3
    task: Annotated[str, OneOf(*TASKS)] = "read"

    def errors(self) -> list[str]:
        """Return one error message for each setting that does not fit the others."""
        least = 2 if self.task == "read" else 3  # of the shortest solution
        if self.num_turns >= least:
            return []
        return [f"num_turns = {self.num_turns}; expected at least {least} for task = {self.task!r}"]


class Registers(TurnEnv):
    """Questions about numbers that are only visible by reading registers.

    Invariant: names and numbers are distinct; a prompt never states a number of its registers.
    """

    domain = "registers"
    settings_class = RegistersSettings
    settings: RegistersSettings

    @property
    def num_questions(self) -> int:
        """Return the exact number of hidden states with their questions, without the shots."""
        return self._num_ids() - self.settings.num_shots

    @property
    def chance(self) -> float:
        """Return the accuracy of answering with one of the possible numbers, without reading."""
        return 1 / len(_VALUES)

    def _num_ids(self) -> int:
        num = self.settings.num_registers
        return perm(len(ascii_lowercase), num) * perm(len(_VALUES), num) * self._num_asked()

    def _num_asked(self) -> int:
        """Return the number of ways to ask for registers of one state."""
        return self.settings.num_registers if self.settings.task == "read" else perm(self.settings.num_registers, 2)

    def _prompt_id(self, number: int) -> str:
        num = self.settings.num_registers
        number, asked = divmod(number, self._num_asked())
        number, choice = divmod(number, perm(len(ascii_lowercase), num))
        names = ordered_choice(choice, ascii_lowercase, num)
        held = [str(value) for value in ordered_choice(number, _VALUES, num)]
        of = ordered_choice(asked, range(num), 1 if self.settings.task == "read" else 2)
        if self.settings.task == "follow":  # the first holds the name of the second
            held[of[0]] = names[of[1]]
            of = of[:1]
        listed = ", ".join(f"{name}={value}" for name, value in zip(names, held, strict=True))
        return f"{listed}. {self.settings.task} {' '.join(names[index] for index in of)}"

    def canonical(self, prompt_id: str) -> str:
        """Return the hidden state, whatever the question."""
        held, _, _ = self._read(prompt_id)
        return " ".join(sorted(f"{name}={value}" for name, value in held.items()))

    def gold_turns(self, prompt_id: str) -> list[str]:
        """Return the shortest solution: read the needed registers, then answer."""
        held, task, of = self._read(prompt_id)
        needed = [of[0], held[of[0]]] if task == "follow" else of
        return [*(f" get {name}\n" for name in needed), f" answer {_right(held, task, of)}\n"]

    def begin(self, prompt_id: str) -> str:
        """Name the registers, and state the question."""
        self._held, self._task, self._of = self._read(prompt_id)
        asked = {
            "read": f"What is in {self._of[0]}?",
            "larger": f"Larger of {' and '.join(self._of)}?",
            "smaller": f"Smaller of {' and '.join(self._of)}?",
            "follow": f"Follow {self._of[0]}.",
        }
        return f"Registers {', '.join(self._held)}. {asked[self._task]}"

    def answer(self, action: str) -> Answer:
        """Read a register, or grade the answer."""
        verb, _, argument = action.partition(" ")
        if verb == "get":
            name = argument.strip()
            if name in self._held:
                return Answer(f"{name} = {self._held[name]}")
            return Answer(f"No such register. There are {', '.join(self._held)}.")
        value = integer_in(argument.strip()) if verb == "answer" else None
        if value is None:
            return Answer(_UNKNOWN, is_read=False)
        return Answer(reward=float(value == _right(self._held, self._task, self._of)), is_over=True)

    def _read(self, prompt_id: str) -> tuple[dict[str, str], str, list[str]]:
        """Return what each register holds, the task, and the registers it names."""
        expected = f"prompt_id = {prompt_id!r}; expected registers and a task, as in 'p=17, c=40. larger p c'"
        match = _PROMPT_ID.fullmatch(prompt_id) if isinstance(prompt_id, str) else None
        if not match or not prompt_id.isascii():
            raise ValueError(expected)
        held = dict(pair.split("=") for pair in match[1].split(", "))
        task, of = match[2], match[3].split()
        numbers = {name: value for name, value in held.items() if value.isdigit()}
        letters = [name for name in held if name not in numbers]
        is_right = len(held) == match[1].count("=") and len(set(held.values())) == len(held) and set(of) <= set(held)
        is_right &= len(set(of)) == len(of) == (2 if task in _PAIRED else 1)
        is_right &= letters == (of if task == "follow" else [])
        if not is_right or (task == "follow" and held[of[0]] not in numbers):
            raise ValueError(expected)
        return held, task, of


def _right(held: dict[str, str], task: str, of: list[str]) -> int:
    if task in _PAIRED:
        return _PAIRED[task](int(held[name]) for name in of)
    return int(held[held[of[0]]] if task == "follow" else held[of[0]])
