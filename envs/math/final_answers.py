r"""Extract the final answers of a turn and grade them: the single grading order of questions with a known answer.

The sort of the right answer decides how the turn is read; docs/grading.md has every rule.

    1  \boxed{...}, <answer>...</answer>, "#### ..."     all of them
    2  "answer is ...", "answer: ..."                    behind the last of 1, or anywhere if there is none of 1
    3  else the last number (numbers), the last formula of the last line (expressions), the last line (words),
       the one letter of the last line (choices)

A turn is right if every final answer that it states is right, so two different ones are wrong. A rejected answer ("not
21", "21 is wrong") does not count, nor does a question, a copy of the question, or an unevaluated calculation.

    read("10 + 11 equals 21.", "number")     Reading(("21",), "bare")
    read("21 or 22", "number")               Reading(("21", "22"), "bare")
    read("It is not 21", "number")           Reading((), "bare", is_rejected=True)
    graded("21", "10 + 11 equals 21.")       Verdict(1.0, Reading(("21",), "bare"))
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rllib_srl.envs.math.grading import DEADLINE_S, choice_in, grade, marked_answers, plain, sort_of, with_unit
from rllib_srl.envs.math.number_reading import numbers_of, rejects

MAX_ANSWERS = 4  # most final answers of one turn; a turn with more counts as one without an answer
_TAIL_CHARS = 20_000  # length of the end of a turn that is searched for an answer
_MAX_QUESTION_WORDS = 400  # longest question whose copy is searched for
_REASON = re.compile(r"\b(?:because|since|as|which|where)\b", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<=[^\s.])[.!;](?=\s|$)|\n")
_SEGMENT = re.compile(r"\$\$?([^$]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_SAYS = re.compile(r"\b(?:is|are|equals?|gives?|get|becomes?|be|yields?)\b|:", re.IGNORECASE)
_OR = re.compile(r"\s*(?:,|;|/|&|\bor\b|\band\b)\s*(?:maybe|perhaps)?\s*", re.IGNORECASE)
_PROSE = re.compile(r"(?<![\\A-Za-z])(?!(?:sin|cos|tan|exp|ln|log|sqrt|pi|mod|max|min|frac)\b)[^\W\d_]{2,}")
_LETTER = re.compile(r"(?<![\w'’])(?!I['’ ][a-z]|A (?!or\b|and\b)[a-z])\(?(?P<letter>[A-J])\)?(?![\w'’])")
_FORMULA = re.compile(r"\\[a-zA-Z]|\b(?:sin|cos|tan|exp|ln|log)\s*\(")
_CALCULATION = re.compile(r"(?:\\[dt]?frac|\\times|\\cdot|\\div|\\left|\\right|[\d\s+*/^().,{}×·÷−-])+", re.ASCII)
_AROUND_WORDS = " \t\r\n\"'`*_“”‘’.,;:!"


@dataclass(frozen=True)
class Reading:
    """The final answers of a turn.

    Invariant: `answers` are distinct; `is_rejected` only if `answers` is empty.
    """

    answers: tuple[str, ...]
    marker: str  # of `rllib_srl.envs.math.grading.MARKERS`: how the first of them was marked
    is_rejected: bool = False  # the turn states an answer and rejects it


@dataclass(frozen=True)
class Verdict:
    """The grade of a turn: 1 for right, 0 for wrong, None if no answer can be read; and the answers that were read."""

    grade: float | None
    reading: Reading


def graded(
    gold: str,
    turn: str,
    marker: str = "any",
    kind: str = "auto",
    deadline_s: float = DEADLINE_S,
    question: str = "",
) -> Verdict:
    """Grade a turn by its final answers.

    Args:
        gold: the right answer
        turn: the policy's, of any length and content
        marker: of `MARKERS`; answers with this marker are looked for first
        kind: as in `rllib_srl.envs.math.grading.grade`
        deadline_s: seconds of symbolic work for each comparison, more than 0
        question: the question's text; a copy of it in the turn is ignored

    Raises:
        PoolError: the symbolic workers fail for a reason other than the answer.
    """
    sort = sort_of(gold, kind)
    reading = read(turn, sort, marker, question)
    if sort == "words":
        right = _words(gold)
        # A marked answer may be followed by further sentences; the first of them is the answer then.
        grades = [float(right in (_words(each), _words(_sentence(each)))) for each in reading.answers]
        return Verdict(min(grades) if grades else _nothing(reading), reading)
    wanted = with_unit(gold)[0] if sort == "number" else gold
    worst: float | None = 1.0 if 0 < len(reading.answers) <= MAX_ANSWERS else _nothing(reading)
    for answer in reading.answers[:MAX_ANSWERS] if worst else ():
        worst = grade(wanted, answer, kind, deadline_s)
        if not worst:
            break
    return Verdict(worst, reading)


def read(turn: str, sort: str, marker: str = "any", question: str = "") -> Reading:
    """Return the final answers of a turn. Only the last 20,000 characters are read.

    Args:
        turn: the policy's
        sort: "number", "expression", "words" or "choice": the sort of the right answer
        marker: as in `graded`
        question: as in `graded`
    """
    text = _without(turn[-_TAIL_CHARS:], question)
    found = marked_answers(text, marker)
    name = found[0].marker if found else "bare"
    answers: list[str] = []
    is_rejected = False
    for stated in found:
        one = _stated(stated.answer, sort, stated.marker)
        is_rejected |= stated.is_rejected or one.is_rejected
        answers += () if stated.is_rejected else one.answers
    if not found or (not answers and not is_rejected and name == "phrase"):
        one, name = _stated(text, sort, "bare"), "bare"
        answers, is_rejected = list(one.answers), one.is_rejected
    distinct = tuple(dict.fromkeys(answers))
    return Reading(distinct, name, is_rejected and not distinct)


def _nothing(reading: Reading) -> float | None:
    return 0.0 if reading.is_rejected or reading.answers else None


def _stated(text: str, sort: str, marker: str) -> Reading:
    if sort == "number":
        return _number(text, marker)
    if marker == "bare":
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        text = lines[-1] if lines else ""
    readers = {"expression": _expression, "words": _whole, "choice": _choice}
    return readers[sort](text, marker)


def _number(text: str, marker: str) -> Reading:
    """Return the last number, with those listed with it or alternative to it; else a formula without words."""
    if marker == "phrase":
        text = _REASON.split(_sentence(text), maxsplit=1)[0]
    is_rejected, last, answers = False, None, []
    for number in numbers_of(text):
        if number.is_rejected:
            is_rejected = True
            continue
        if last is not None and not (number.is_joined_to(last)):
            break
        last = number
        answers.append(number.text)
    if answers:
        return Reading(tuple(dict.fromkeys(reversed(answers))), marker)
    if not is_rejected and _FORMULA.search(text):
        found = _expression(text.strip().splitlines()[-1], marker) if text.strip() else Reading((), marker)
        return Reading(tuple(each for each in found.answers if not _is_calculation(each)), marker, found.is_rejected)
    return Reading((), marker, is_rejected)


def _is_calculation(text: str) -> bool:
    return _CALCULATION.fullmatch(plain(text)) is not None


def _expression(text: str, marker: str) -> Reading:
    """Return the last formula of a line, with those listed with it."""
    if rejects(text):
        return Reading((), marker, True)
    if text.rstrip().endswith("?"):
        return Reading((), marker)
    if marker == "phrase":
        text = _REASON.split(_sentence(text), maxsplit=1)[0]
    segments = list(_SEGMENT.finditer(text))
    outside = _SEGMENT.sub(" ", text)
    if segments and _PROSE.search(outside):
        last = segments.pop()
        answers = [last[0]]
        while segments and _OR.fullmatch(text, segments[-1].end(), last.start()):
            last = segments.pop()
            answers.insert(0, last[0])
        return Reading(tuple(dict.fromkeys(answers)), marker)
    bare = plain(text)
    if _PROSE.search(bare):
        said = list(_SAYS.finditer(bare))
        bare = bare[said[-1].end() :].strip() if said else bare
    answers = [each.strip() for each in re.split(r"\bor\b", bare, flags=re.IGNORECASE) if each.strip()]
    return Reading(tuple(dict.fromkeys(answers)), marker)


def _whole(text: str, marker: str) -> Reading:
    return Reading((text.strip(),) if _words(text) else (), marker)


def _choice(text: str, marker: str) -> Reading:
    """Return the letter that a line names, or all letters if it names several."""
    said = plain(text.strip(" \t*"))
    first = choice_in(said)
    letters = [found["letter"] for found in _LETTER.finditer(said[:1000])]
    if rejects(said[:200]) and letters:
        return Reading((), marker, True)
    if first is not None:
        another = _alternative(said)
        return Reading((first,) if another in (None, first) else (first, another), marker)
    return Reading(tuple(dict.fromkeys(letters)), marker)


def _alternative(said: str) -> str | None:
    """Return the letter that stands beside the first one, as in "A or B" and "A, B"."""
    letters = list(_LETTER.finditer(said[:1000]))
    if len(letters) < 2 or not re.fullmatch(r"[).\s]*" + _OR.pattern, said[letters[0].end() : letters[1].start()]):
        return None
    return letters[1]["letter"]


def _sentence(text: str) -> str:
    return _SENTENCE_END.split(text.strip(), maxsplit=1)[0]


def _words(text: str) -> str:
    return " ".join(plain(text).strip(_AROUND_WORDS).casefold().split())


def _without(turn: str, question: str) -> str:
    words = question.split()
    if not 3 <= len(words) <= _MAX_QUESTION_WORDS:  # two words may well be part of an answer
        return turn
    return re.sub(r"\s+".join(map(re.escape, words)), " ", turn)


def shown(answers: Sequence[str]) -> str:
    """Return answers as one readable line, "" for none."""
    return " | ".join(" ".join(answer.split()) for answer in answers)
