"""Shared parts of the text environments: the text space, the transcript format, splits, and prompt orders.

    Question: Which is largest: 17, 40 or 93?      <- a shot: a question with its answer
    Answer: 93
                                                   <- a blank line ends a shot
    Question: Which is largest: 55, 21 or 34?
    Answer:                                        <- the prompt ends here, and the policy's turn begins

A base model continues such raw text far better than the same shots in a chat template, and its turn
ends by itself with the newline after the answer.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.error import ResetNeeded

SPLITS = ("train", "heldout")
HELDOUT_SHARE = 0.15
WRONG = "Wrong. Try again.\nAnswer:"

_MASK64 = (1 << 64) - 1


class TextSpace(gymnasium.spaces.Space[str]):
    """All unicode text of any length; gymnasium's own `Text` bounds both alphabet and length.

    Invariant: contains exactly the instances of `str`; any two text spaces are equal.
    """

    def __init__(self, seed: int | np.random.Generator | None = None):
        super().__init__(shape=None, dtype=None, seed=seed)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Return up to 16 random letters; meant for environment checkers, not for play."""
        letters = self.np_random.integers(ord("a"), ord("z") + 1, size=int(self.np_random.integers(17)))
        return "".join(chr(letter) for letter in letters)

    def contains(self, x: Any) -> bool:
        """Return whether `x` is text."""
        return isinstance(x, str)

    @property
    def is_np_flattenable(self) -> bool:
        """Return False: text has no fixed size."""
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TextSpace)

    def __hash__(self) -> int:
        return hash(TextSpace)

    def __repr__(self) -> str:
        return "TextSpace()"


def check_split(split: str) -> None:
    """Check the name of a split.

    Raises:
        ValueError: there is no such split.
    """
    if split not in SPLITS:
        raise ValueError(f"split = {split!r}; expected one of {', '.join(SPLITS)}")


def reset_options(options: Mapping[str, Any] | None) -> tuple[Any, Sequence[str]]:
    """Return the prompt id (None for any prompt) and the history from the options of a `reset`.

    Raises:
        ValueError: an unknown option, or a history without its prompt id.
    """
    remaining = dict(options or {})
    prompt_id, history = remaining.pop("prompt_id", None), remaining.pop("history", None) or ()
    if remaining:
        raise ValueError(f"reset option {sorted(remaining)[0]!r} is unknown; expected prompt_id and history")
    if history and prompt_id is None:
        raise ValueError("reset got a history without its prompt_id; expected both")
    return prompt_id, history


def check_step(action: Any, is_under_way: bool) -> None:
    """Check a turn before it is taken.

    Raises:
        ResetNeeded: no episode is under way.
        TypeError: the turn is not text.
    """
    if not is_under_way:
        raise ResetNeeded("step was called on an episode that has ended or not begun; call reset first")
    if not isinstance(action, str):
        raise TypeError(f"a turn is a {type(action).__name__}; expected text (str)")


def asked(question: str) -> str:
    """Return the prompt-side text of one question, up to where the policy's turn begins."""
    return f"Question: {question}\nAnswer:"


def shot(question: str, *answers: str) -> str:
    """Return a solved question; with several answers all but the last are shown as wrong."""
    return solved(asked(question), *answers)


def solved(request: str, *answers: str) -> str:
    """Return `request`, in the form of `asked` or another one, with its answers as in `shot`."""
    text = request
    for answer in answers[:-1]:
        text += f"{_gap(text)}{answer}\n{WRONG}"
    return f"{text}{_gap(text)}{answers[-1]}\n\n"


def _gap(text: str) -> str:
    return "" if text[-1:].isspace() else " "


def reply(turn: str, feedback: str) -> str:
    """Return the environment's reply to `turn`, on its own line even if the turn did not end its line."""
    return feedback if turn.endswith("\n") else "\n" + feedback


def replayed(step: Callable[[str], tuple[Any, ...]], history: Sequence[str], prompt_id: Any) -> str:
    """Take the turns of a history, and return the transcript from the first of them to the start of the next turn.

    Args:
        step: of an environment whose episode of `prompt_id` has just begun
        history: turns of the policy
        prompt_id: for the error message

    Raises:
        ValueError: the history ends the episode.
    """
    transcript = ""
    for turn in history:
        observation, _, terminated, truncated, _ = step(turn)
        if terminated or truncated:
            raise ValueError(
                f"the history of {len(history)} turns ends the episode of prompt {prompt_id!r}; "
                "expected one that leaves a turn to play"
            )
        transcript += turn + observation
    return transcript


def split_of(canonical: str) -> str:
    """Return the split of a question: "heldout" for a fixed, hash-chosen share of all texts, else "train".

    Args:
        canonical: the question in a form that is equal for questions whose answers reveal each other;
            case and white space are ignored
    """
    digest = hashlib.blake2b(" ".join(canonical.casefold().split()).encode(), digest_size=8).digest()
    return "heldout" if int.from_bytes(digest, "big") < HELDOUT_SHARE * 2**64 else "train"


def shuffled(size: int, seed: Any) -> Iterator[int]:
    """Yield 0 .. size - 1, each once, in an order drawn from `seed`, in constant memory.

    A Feistel network permutes the next power of four; numbers beyond `size` are skipped.

    Args:
        size: how many numbers, >= 0
        seed: anything whose `str` is the same in every process
    """
    half = max(1, ((max(size, 1) - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    generator = random.Random(str(seed))
    keys = [generator.getrandbits(64) for _ in range(6)]
    for number in range(1 << (2 * half)):
        left, right = number >> half, number & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right + key) & mask)
        permuted = left << half | right
        if permuted < size:
            yield permuted


def _mixed(value: int) -> int:
    """Return 64 bits that all depend on all bits of `value`. Source: Stafford, variant 13 (splitmix64)."""
    value &= _MASK64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK64
    return value ^ value >> 31
