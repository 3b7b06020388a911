"""Write a sentence that contains given words: a task for a rubric, graded by rules and without a model.

    Question: Write one sentence of 8 to 12 words with: lamp, river, cloud.
    Answer: The lamp and the river are below the cloud.         words 4, length 4, form 4: reward 1
    Answer: lamp river                                          words 3, length 1, form 1: reward 2/9

    words     every requested word, whole: 4; all but one 3, all but two 2, fewer 1
    length    inside the bounds 4; off by 1 or 2 words 3, by 3 to 5 words 2, by more 1
    form      one point each: begins with a capital, ends with a full stop, is one sentence, has no word but "the"
              three times; at least 1

The reward is the mean of (grade - 1) / 3. `grades` is a judge (judge.py), so rubric.py can use it as one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import perm
from typing import Annotated

from rllib_srl.envs.math.compare import ordered_choice
from rllib_srl.envs.people.judge import Criterion
from rllib_srl.envs.settings import Within
from rllib_srl.envs.turns import Answer, TurnEnv, TurnSettings

_LISTED = """
    apple basket bell bird boat book bottle bridge broom bucket button candle carpet chair cherry cloud coat corn desk
    drum duck fence field flower forest garden glass hammer horse island kettle ladder lamp leaf letter lion map mirror
    moon mouse paper pencil piano pillow pond potato ring river road rose ship shoe spoon star stone table tiger tower
    train tree wheel window
"""
_NOUNS = tuple(_LISTED.split())
CRITERIA = (
    Criterion("words", "contains every word asked for"),
    Criterion("length", "has as many words as asked for"),
    Criterion("form", "is one sentence: a capital first, a full stop last, no word three times"),
)
_ASKED = re.compile(r"Write one sentence of (\d+) to (\d+) words with: ([a-z]+(?:, [a-z]+)*)\.", re.ASCII)
_PROMPT_ID = re.compile(r"[a-z]+(, [a-z]+){1,5}", re.ASCII)
_SHORTER, _LONGER = 2, 2  # words fewer and more than the gold sentence has


@dataclass(frozen=True)
class SentencesSettings(TurnSettings):
    """Settings of `Sentences`. Invariant: as in `TurnSettings`."""

    num_turns: Annotated[int, Within(1, 1)] = 1
    num_words: Annotated[int, Within(2, 6)] = 3  # words a sentence must contain


class Sentences(TurnEnv):
    """Sentences to write. Invariant: a prompt id is the words in the requested order."""

    domain = "sentences"
    settings_class = SentencesSettings
    settings: SentencesSettings
    cue = "Answer:"
    pass_reward = 2 / 3  # a mean grade of 3, as in envs/people/rubric.py

    @property
    def num_questions(self) -> int:
        """Return the exact number of ordered choices of words, without the shots."""
        return self._num_ids() - self.settings.num_shots

    def _num_ids(self) -> int:
        return perm(len(_NOUNS), self.settings.num_words)

    def _prompt_id(self, number: int) -> str:
        return ", ".join(_NOUNS[index] for index in ordered_choice(number, range(len(_NOUNS)), self.settings.num_words))

    def canonical(self, prompt_id: str) -> str:
        """Return the words in a fixed order."""
        return " ".join(sorted(self._words(prompt_id)))

    def gold_turns(self, prompt_id: str) -> list[str]:
        """Return a sentence with full grades."""
        return [f" {_gold(self._words(prompt_id))}\n"]

    def begin(self, prompt_id: str) -> str:
        """State the words and the bounds."""
        words = self._words(prompt_id)
        num = len(_gold(words).split())
        self._task = f"Write one sentence of {num - _SHORTER} to {num + _LONGER} words with: {', '.join(words)}."
        return self._task

    def answer(self, action: str) -> Answer:
        """Grade the sentence."""
        if not action:
            return Answer(is_over=True, is_read=False, info={"stop_reason": "unparsable"})
        scores = grades(self._task, action, CRITERIA)
        reward = sum(grade - 1 for grade in scores.values()) / (3 * len(scores))
        return Answer(reward=reward, is_over=True, info={f"grade_{name}": grade for name, grade in scores.items()})

    def _words(self, prompt_id: str) -> list[str]:
        is_one = isinstance(prompt_id, str) and len(prompt_id) < 100 and _PROMPT_ID.fullmatch(prompt_id)
        words = prompt_id.split(", ") if is_one else []
        if not words or len(set(words)) < len(words) or not set(words) <= set(_NOUNS):
            raise ValueError(f"prompt_id = {prompt_id!r}; expected distinct known words, as in 'lamp, river, cloud'")
        return words


def grades(prompt: str, answer: str, criteria: Sequence[Criterion]) -> Mapping[str, int]:
    """Grade a sentence by rules: a judge of the last task in `prompt`.

    Raises:
        ValueError: the prompt contains no such task, or a criterion is not one of `CRITERIA`.
    """
    tasks = _ASKED.findall(prompt)
    unknown = [criterion.name for criterion in criteria if criterion.name not in _RULES]
    if not tasks or unknown:
        raise ValueError(f"criteria = {unknown}, {len(tasks)} tasks; expected some of {sorted(_RULES)}, and a task")
    least, most, listed = tasks[-1]
    said = re.findall(r"\w+", answer.lower())
    rules = {
        "words": lambda: _by_missing(len(set(listed.split(", ")) - set(said))),
        "length": lambda: _by_distance(max(int(least) - len(said), len(said) - int(most), 0)),
        "form": lambda: _by_form(answer, said),
    }
    return {criterion.name: rules[criterion.name]() for criterion in criteria}


_RULES = frozenset(criterion.name for criterion in CRITERIA)


def _gold(words: list[str]) -> str:
    head = " and the ".join(words)
    return f"The {head} are here."


def _by_missing(num: int) -> int:
    return max(4 - num, 1)


def _by_distance(num: int) -> int:
    return 4 if num == 0 else 3 if num <= 2 else 2 if num <= 5 else 1


def _by_form(answer: str, said: list[str]) -> int:
    holds = [
        answer[:1].isupper(),
        answer.endswith("."),
        len(re.findall(r"[.!?]", answer)) == 1,
        bool(said) and max(Counter(word for word in said if word != "the").values(), default=0) < 3,
    ]
    return max(sum(holds), 1)
