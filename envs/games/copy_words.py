"""Repeat some words, forwards or backwards.

    Question: Copy these words: lamp, river, cloud, nest
    Answer: lamp, river, cloud, nest                reward 1; anything else 0; no word: unparsable

With `order="backwards"` the same prompt ids ask "Copy these words backwards: lamp, river, cloud, nest", and only "nest,
cloud, river, lamp" is right. As domains of a stream, the two orders interfere with each other.

Every word and the order count; case, commas and a final full stop are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import perm
from typing import Annotated

from rllib_srl.envs.math.compare import ordered_choice
from rllib_srl.envs.question import Question, QuestionEnv, QuestionSettings
from rllib_srl.envs.settings import OneOf, Within

_LISTED = """
    apple arrow basket bell bird boat book bottle bread bridge broom brush bucket button candle carpet chair cherry
    clock cloud coat coin corn cup desk door drum duck egg feather fence field fish flag flower forest fork frog
    garden gate glass glove grass hammer hat hill horse house island jar key kite ladder lake lamp leaf lemon letter
    map mirror moon mouse nail nest net onion paper pear pen piano pillow plate pond potato ring river road roof rope
    rose sand shell ship shoe sky snow soap spoon star stone street sun table tent tiger tower train tree wall wheel
    window wolf
"""
_WORDS = tuple(_LISTED.split())
_KNOWN = frozenset(_WORDS)
_MAX_CHARS = 1_000
_REQUESTS = {"forwards": "Copy these words", "backwards": "Copy these words backwards"}


@dataclass(frozen=True)
class CopyWordsSettings(QuestionSettings):
    """Settings of `CopyWords`. Invariant: as in `QuestionSettings`."""

    num_words: Annotated[int, Within(2, 8)] = 4  # words in a question, all different
    order: Annotated[str, OneOf(*_REQUESTS)] = "forwards"  # in which order the words are to be said
    graded: bool = False  # a wrong answer earns the share of words in the right position


class CopyWords(QuestionEnv):
    """Questions that are answered by repeating them, forwards or backwards.

    Invariant: a prompt id is the words in the order asked, as in "lamp, river, cloud".
    """

    domain = "copy_words"
    settings_class = CopyWordsSettings
    settings: CopyWordsSettings

    @property
    def num_questions(self) -> int:
        """Return the exact number of ordered choices of distinct words, without the shots."""
        return self._num_ids() - self.settings.num_shots

    def _num_ids(self) -> int:
        return perm(len(_WORDS), self.settings.num_words)

    def _prompt_id(self, number: int) -> str:
        return ", ".join(_WORDS[at] for at in ordered_choice(number, range(len(_WORDS)), self.settings.num_words))

    def question(self, prompt_id: str) -> Question:
        """Return the question of `prompt_id`."""
        right = self._right(prompt_id)
        return Question(
            text=f"{_REQUESTS[self.settings.order]}: {prompt_id}",
            answer=", ".join(right),
            wrong=", ".join(reversed(right)),
            canonical=" ".join(sorted(right)),  # a reordered question is in the same split
        )

    def grade(self, prompt_id: str, answer: str) -> float | None:
        """Return 1 for the words as asked, None for no word at all, else 0 or the share of words in their place."""
        if len(answer) > _MAX_CHARS:
            return None
        said, words = answer.casefold().removesuffix(".").replace(",", " ").split(), self._right(prompt_id)
        if not any(word.isalpha() and word.isascii() for word in said):
            return None
        if said == words or not self.settings.graded:
            return float(said == words)
        return sum(a == b for a, b in zip(said, words, strict=False)) / max(len(said), len(words))

    def _right(self, prompt_id: str) -> list[str]:
        """Return the words in the expected order."""
        words = self._words(prompt_id)
        return words[::-1] if self.settings.order == "backwards" else words

    def _words(self, prompt_id: str) -> list[str]:
        words = str(prompt_id).split(", ")
        if len(words) < 2 or len(set(words)) < len(words) or not set(words) <= _KNOWN:
            raise ValueError(f"prompt_id = {prompt_id!r}; expected distinct words as in 'lamp, river, cloud'")
        return words
