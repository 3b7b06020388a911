r"""Extract the final answers of a turn and grade them: the single grading order of questions with a known answer.

The class of the right answer decides how the turn is read; docs/grading.md has every rule.

    1  thoughts are left out
    2  \boxed{...}, <answer>...</answer>, "#### ..."     all of them
    3  "answer is ...", "answer: ..."                    behind the last of 2, or anywhere if there is none of 2
    4  else the last number (numbers), the last formula of the last line (formulas, lists), the last line (words), the
       one letter of the last line (choices), the line that begins with yes or no, the one time of the last line

A turn is right if every final answer that it states is right, so two different ones are wrong, unless the right answer
is a list and each states one of its parts. A rejected answer ("not 21", "21 is wrong") does not count, nor does a
question, a copy of the question, or an unevaluated calculation.

    read("10 + 11 equals 21.", "number")     Reading(("21",), "bare")
    read("21 or 22", "number")               Reading(("21", "22"), "bare")
    read("It is not 21", "number")           Reading((), "bare", is_rejected=True)
    graded("21", "10 + 11 equals 21.")       Verdict(1.0, Reading(("21",), "bare"))
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rllib_srl.envs.math.answer_text import inner, items_of, plain, squeezed
from rllib_srl.envs.math.classes import TIME, class_of, is_based, is_prose
from rllib_srl.envs.math.formula import levelled
from rllib_srl.envs.math.grading import DEADLINE_S, choice_in, grade, words_of
from rllib_srl.envs.math.marks import TAIL_CHARS, last_line, marked_answers, without_thoughts
from rllib_srl.envs.math.number_reading import numbers_of, rejects
from rllib_srl.envs.math.quantity import quantity_of
from rllib_srl.envs.math.units import unit_of

MAX_ANSWERS = 4  # most final answers of one turn; a turn with more counts as one without an answer
_MAX_PARTS = 32  # most of a list
_CLOCK = re.compile(r"\d:\d\d")
_MAX_NUMBERS = 100  # most of a list of numbers in prose, the last ones
_MAX_LINE = 2_000  # characters of a line that is read as a formula or as words
_MAX_QUESTION_WORDS = 400  # longest question whose copy is searched for
_LISTS = ("list", "set", "union")
_REASON = re.compile(
    r",?\s*\b(?:because|since|as|which(?! is (?:wrong|incorrect)\b)|where|whereas|while|although|even though"
    r"|due to|given that|for)\b",
    re.IGNORECASE,
)
_BECAUSE = re.compile(r"(?<=\S),?\s+(?:because|since)\b", re.IGNORECASE)  # what else begins a reason may be in a title
_SENTENCE_END = re.compile(r"(?<=[^\s.])[.!](?=\s|$)|(?<=[^\s.])\.(?=\s|$)|\n")
_CLAUSE_END = re.compile(r"(?<=[^\s.])[.!;](?=\s|$)|\n")
_SEGMENT = re.compile(r"\$\$?([^$]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_SAYS = re.compile(
    r"\b(?:is|are|equals?|gives?|get|becomes?|be|yields?|satisfy|obtain|have|find)\b|(?<!\d):|:(?!\d)", re.IGNORECASE
)
_OR = re.compile(r"\s*(?:,|;|/|&|\bor\b|\band\b)*\s*(?:,|;|/|&|\bor\b|\band\b)\s*(?:maybe|perhaps)?\s*", re.IGNORECASE)
_LETTER = re.compile(  # "A" in front of another word is an article, but not in front of a verb or a preposition
    r"(?<![\w'’])(?!I['’ ][a-z]|A (?!(?:or|and|is|was|because|since|as|would|can|cannot|could|does|must|seems|looks"
    r"|fits|works|which|but|not|fails|holds|matches|satisfies|makes|with|over|after|by|despite|rather|instead|here|again"
    r"|then)\b"
    r"|[a-z]+ly\s*(?:[.,;!]|$))[a-z])\(?(?P<letter>[A-J])\)?(?![\w'’])",
    re.MULTILINE,
)
_NAMED_LETTER = re.compile(
    r"(?:\b(?:is|are|be|choose|choice|option|pick|select|say|says|so|thus|hence|therefore|actually|it['’]s)\b|[:=])"
    r"[\s*(]*(?:(?:option|choice|letter|the|answer)\s+)*[\s*(]*\(?(?P<letter>[A-J])\)?(?![\w'’])",
    re.IGNORECASE,
)
_LETTER_REJECTED = re.compile(
    r"\b(?:not|cannot|can['’]t|couldn['’]t|never|nor|neither|isn['’]t|than|unlike|instead of|over|despite|without"
    r"|eliminat(?:e[sd]?|ing)|exclud(?:e[sd]?|ing)|rul(?:e[sd]?|ing) out|reject(?:s|ed|ing)?|against)"
    r"(?:\s+(?:be|option|choice|letter|answer|the))*[\s*(]*$",
    re.IGNORECASE,
)
_REJECTED_LETTER = re.compile(
    r"[)\s*]*(?:(?:is|was|are|seems|looks|(?:would|must|could)\s+be)\s+(?:too|not|wrong|incorrect|false|impossible|ruled|out)\b|isn['’]t"
    r"|(?:can|could|does|do|did|would|will)(?:not|n['’]t|\s+not)\b|fails?\b|cannot\b)",
    re.IGNORECASE,
)
_TRUTH = re.compile(
    r"(?:^|(?<=[.!?:;,])\s*|(?:\b(?:is|so|thus|hence|therefore|answer|say|clearly|definitely|certainly|absolutely)"
    r"|\b(?:it|that)['’]s)[,:]?\s+)[\"'*(]*(?P<word>yes|no|true|false)\b"
    r"(?P<after>[\"'*)]*\s*(?:$|[.,;:!\n]|[-–—]|because\b|since\b|as\b|it\b|they\b"
    r"|he\b|she\b|we\b|you\b|this\b|that\b|there\b))",
    re.IGNORECASE,
)
_DENIED = re.compile(r"(?:\bisn['’]t|\bnot)\s+true\b(?=[\"'*)]*\s*(?:$|[.,;:!]|because\b|since\b))", re.IGNORECASE)
_DOUBTS = re.compile(r"\b(?:opposite|converse|contrary|reverse|doubt\w*|den(?:y|ies))\b", re.IGNORECASE)
_TRUTH_WORD = re.compile(r"\b(yes|no|true|false)\b", re.IGNORECASE)
_TRUE = ("yes", "true")
_TIMES = re.compile(rf"(?<![\w:])(?:{TIME.pattern})(?![\w:])", re.ASCII)


@dataclass(frozen=True)
class Reading:
    """The final answers of a turn.

    Invariant: `answers` are distinct; `is_rejected` only if `answers` is empty.
    """

    answers: tuple[str, ...]
    marker: str  # of `rllib_srl.envs.math.marks.MARKERS`: how the first of them was marked
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
        marker: of `rllib_srl.envs.math.marks.MARKERS`; answers with this marker are looked for first
        kind: as in `rllib_srl.envs.math.grading.grade`
        deadline_s: seconds of symbolic work for each comparison, more than 0
        question: the question's text; a copy of it in the turn is ignored

    Raises:
        PoolError: the symbolic workers fail for a reason other than the answer.
    """
    stated = _verbatim(gold, turn, marker)
    if stated is not None:
        return stated
    name = class_of(gold, kind)
    reading = read(turn, name, marker, question)
    if name == "word":
        # A marked answer may be followed by further sentences or a reason; what is in front of them is the answer then.
        grades = [
            max(grade(gold, each, kind) or 0.0, grade(gold, _BECAUSE.split(_clause(each))[0], kind) or 0.0)
            for each in reading.answers
        ]
        return Verdict(min(grades) if grades else _nothing(reading), reading)
    if name in (*_LISTS, "bracket") and len(reading.answers) > 1:  # \boxed{3}, \boxed{5}, or $x=1$ and $y=2$
        joined = _joined(reading)
        if joined is not None and grade(gold, joined, kind, deadline_s) == 1.0:
            return Verdict(1.0, reading)
    worst: float | None = 1.0 if 0 < len(reading.answers) <= MAX_ANSWERS else _nothing(reading)
    for answer in reading.answers[:MAX_ANSWERS] if worst else ():
        worst = grade(gold, answer, kind, deadline_s)
        if not worst:
            break
    return Verdict(worst, reading)


def read(turn: str, name: str, marker: str = "any", question: str = "") -> Reading:
    """Return the final answers of a turn. Only the last 20,000 characters behind its thoughts are read.

    Args:
        turn: the policy's
        name: the class of the right answer, of `rllib_srl.envs.math.classes.CLASSES`
        marker: as in `graded`
        question: as in `graded`
    """
    text = _without(without_thoughts(turn)[-TAIL_CHARS:], question)
    marks = marked_answers(text, marker)
    first = marks[0].marker if marks else "bare"
    answers: list[str] = []
    is_rejected = False
    for stated in marks:
        reading = _stated(stated.answer, name, stated.marker)
        is_rejected |= stated.is_rejected or reading.is_rejected
        answers += () if stated.is_rejected else reading.answers
    if not marks or (not answers and not is_rejected and first == "phrase"):
        reading, first = _stated(text, name, "bare"), "bare"
        answers, is_rejected = list(reading.answers), reading.is_rejected
    distinct = tuple(dict.fromkeys(answers))
    return Reading(distinct, first, is_rejected and not distinct)


def _verbatim(gold: str, turn: str, marker: str) -> Verdict | None:
    """Return the verdict on a turn whose marked answers, or whose whole text, are the right answer as it is written."""
    text = without_thoughts(turn)[-TAIL_CHARS:]
    marks = marked_answers(text, marker)
    right = squeezed(plain(gold))
    answers = [each.answer for each in marks if not each.is_rejected] if marks else [text.strip()]
    if not right or not answers or len(answers) < len(marks) or any(squeezed(plain(each)) != right for each in answers):
        return None
    return Verdict(1.0, Reading((answers[0],), marks[0].marker if marks else "bare"))


def _nothing(reading: Reading) -> float | None:
    return 0.0 if reading.is_rejected or reading.answers else None


def _joined(reading: Reading) -> str | None:
    """Return the answers as one list, if each is one part."""
    parts = [inner(answer) for answer in reading.answers]
    is_parted = len(parts) <= _MAX_PARTS and all(len(items_of(part)) == 1 for part in parts)
    return ", ".join(parts) if is_parted else None


def _stated(text: str, name: str, marker: str) -> Reading:
    if name in ("number", "base"):
        return _number(text, marker, name)
    if name == "yes or no":
        return _truth(text, marker)
    if marker == "bare":
        text = last_line(text)
    readers = {"word": _whole, "choice": _choice, "time": _time}
    if name in readers:
        return readers[name](text, marker)
    return _formula(text, marker, is_list=name in _LISTS)


def _number(text: str, marker: str, name: str) -> Reading:
    """Return the number that a whole answer states, else the last one in it, with those listed with it."""
    if marker == "phrase":
        text = _REASON.split(_clause(text), maxsplit=1)[0]
    lines = [line for line in text.splitlines() if line.strip()]
    if marker != "bare" or len(lines) == 1:
        whole = _whole_number(text.strip(), name, marker)
        if whole is not None:
            return whole
    if marker not in ("bare", "phrase") and (len(lines) > 1 or _CLOCK.search(text)):
        lines = [line for line in lines if not re.fullmatch(r"[\W\d_]+", line)] if not _CLOCK.search(text) else []
        if not lines:  # a table, or a number with a time behind it
            return Reading((text.strip(),) if text.strip() else (), marker)
    is_table = marker not in ("bare", "phrase") and len(lines) > 1  # then every number of it is a final one
    is_rejected, last = False, None
    answers: list[str] = []
    for number in numbers_of(text):
        if number.is_rejected:
            is_rejected = True
            continue
        if last is not None and not (number.is_joined_to(last) or is_table):
            break
        if len(answers) == _MAX_NUMBERS:
            break
        last = number
        answers.append(number.text + _unit_behind(number.within[number.end : number.end + 60]))
    if answers:
        return Reading(tuple(dict.fromkeys(reversed(answers))), marker)
    if not is_rejected and lines and (numeral := _worded(lines[-1])):
        return Reading((numeral,), marker)
    if not is_rejected and lines and _FORMULA.search(text):
        found_formula = _formula(lines[-1].strip(), marker)
        return Reading(found_formula.answers, marker, found_formula.is_rejected)
    return Reading((), marker, is_rejected)


_FORMULA = re.compile(r"\\[a-zA-Z]|\b(?:sin|cos|tan|exp|ln|log|sqrt)\b|[√!|π]")
_UNIT_BEHIND = re.compile(r"\s*(?P<unit>[A-Za-z°€£][^,;:!?()\n=]{0,50})")


def _unit_behind(text: str) -> str:
    match = _UNIT_BEHIND.match(re.split(r"\.(?:\s|$)|\b(?:and|or|because|since|but)\b", text, maxsplit=1)[0])
    unit = match["unit"].strip() if match else ""
    return f" {unit}" if unit and len(unit.split()) <= 4 and unit_of(unit) is not None else ""


def _whole_number(text: str, name: str, marker: str) -> Reading | None:
    """Return the answers of a text that is a number, a formula, or several of them, without a sentence around it."""
    said = inner(text)
    if not said or len(said) > _MAX_LINE or said.endswith("?") or rejects(said):
        return None
    if name == "base" and (sides := [side.strip() for side in said.split("=") if is_based(plain(side))]):
        return Reading(tuple(dict.fromkeys(sides)), marker)
    if quantity_of(said) is not None and (marker != "bare" or not re.fullmatch(r"[^\d]*\d+!", said)):
        return Reading((said,), marker)
    level = re.sub(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}", r" \1 ", said)
    if marker == "boxed" and _OTHER_COMMAND.search(said):
        return Reading(tuple(dict.fromkeys(items_of(said))), marker)
    is_sentence = marker in ("bare", "phrase")
    based = [each[0] for each in _BASED.finditer(last_line(text))] if is_sentence or is_prose(level) else []
    if name == "base" and based:
        return Reading(tuple(dict.fromkeys(based)), marker)
    if is_prose(level) or (is_sentence and not _IS_FORMULA.search(levelled(said))):
        return None
    parts = items_of(said)
    if is_sentence and any(re.fullmatch(r"[\d\s+*/.^()x×÷=-]+", part) for part in parts):
        return None
    return Reading(tuple(dict.fromkeys(parts)), marker)


# A box with another command than these is a formula as a whole: no number is taken out of it.
_OTHER_COMMAND = re.compile(
    r"\\(?!(?:text|textbf|textrm|mathrm|mathbf|mbox|[dt]?frac|times|cdot|left|right|approx|q?quad|circ|boxed|div|pm"
    r"|displaystyle|to|rightarrow|Rightarrow|implies|therefore)(?![a-zA-Z]))[a-zA-Z]+"
)
_BASED = re.compile(  # no operand of a calculation
    r"(?<![\w\\+*/^\u2212-])(?<![+*/^\u2212-]\s)(?:[0-9A-Za-z]*\d[0-9A-Za-z]*|[A-F]+)\s*_\s*"
    r"(?:\{[^{}]*\}|[0-9A-Za-z]+\b)(?!\s*[+*/^\u2212-]\s*\w)",
    re.ASCII,
)
_IS_FORMULA = re.compile(
    r"\\(?!approx|times|cdot|div|pm)[a-zA-Z]|[_^!|]|\b(?:sin|cos|tan|exp|ln|log|sqrt)\b|\d\.\(|\d\.\.\."
)


def _worded(line: str) -> str:
    """Return the number words at the end of a sentence: twelve of "There are twelve apples"."""
    said = _SAYS.split(_clause(line[-300:]))[-1].strip(" *_\"'")
    said = re.sub(r"^(?:about|exactly|only|just|approximately|roughly)\s+", "", said, flags=re.IGNORECASE)
    return said if quantity_of(said) is not None and not rejects(line) and not line.rstrip().endswith("?") else ""


def _formula(text: str, marker: str, is_list: bool = False) -> Reading:
    """Return the last formula of a line, with those listed with it; a list as one answer."""
    text = text[-_MAX_LINE:]
    if rejects(text):
        return Reading((), marker, True)
    if text.rstrip().endswith("?"):
        return Reading((), marker)
    if marker == "phrase":
        text = _REASON.split(_sentence(text) if is_list else _clause(text), maxsplit=1)[0]
    segments = list(_SEGMENT.finditer(text))
    outside = _SEGMENT.sub(" ", text)
    if segments and (is_prose(outside) or len(segments) > 1):
        last = segments.pop()
        answers = [last[0]]
        while segments and _OR.fullmatch(text, segments[-1].end(), last.start()):
            last = segments.pop()
            answers.insert(0, last[0])
        if is_list and len(answers) > 1:
            answers = [", ".join(inner(each) for each in answers)]
        return Reading(tuple(dict.fromkeys(answers)), marker)
    bare = inner(text)
    if is_prose(_unfonted(bare)):
        said = list(_SAYS.finditer(bare))
        bare = bare[said[-1].end() :].strip() if said else bare
    if is_list:
        return Reading((bare,) if bare else (), marker)
    answers = [each.strip() for each in re.split(r"\bor\b", bare, flags=re.IGNORECASE) if each.strip()]
    if any(re.search(r"[<>]|\\[lg]e", each) for each in answers) and len(answers) > 1:
        answers = [bare]
    return Reading(tuple(dict.fromkeys(answers)), marker)


def _unfonted(text: str) -> str:
    return re.sub(r"\\(?:text|textbf|mathrm|mbox)\s*\{[^{}]*\}", " ", text)


def _whole(text: str, marker: str) -> Reading:
    return Reading((text.strip(),) if words_of(text) else (), marker)


def _time(text: str, marker: str) -> Reading:
    """Return the times of day of a line."""
    said = plain(text[-_MAX_LINE:])
    if rejects(said):
        return Reading((), marker, True)
    times = [each[0].strip() for each in _TIMES.finditer(said)]
    return Reading(tuple(dict.fromkeys(times or ([said] if marker != "bare" and said else []))), marker)


def _truth(text: str, marker: str) -> Reading:
    """Return the yes or no that a line begins with or says; both if the text says both."""
    said = plain(text[-_MAX_LINE:]) if marker != "bare" else text[-_MAX_LINE:]
    words: list[str] = []
    is_rejected = False
    for line in said.splitlines():
        line = _DENIED.sub("is false", plain(line))
        if line.rstrip().endswith("?") or (
            len(set(map(str.casefold, _TRUTH_WORD.findall(line[:60])))) > 1
            and re.search(
                r"\b(?:yes|no|true|false)\b[\s,/]*(?:and|or|/)[\s,]*\b(?:yes|no|true|false)\b", line, re.IGNORECASE
            )
        ):
            words += [word.casefold() for word in _TRUTH_WORD.findall(line)] if not line.rstrip().endswith("?") else []
            continue
        for said_so in _TRUTH.finditer(line):
            before = line[: said_so.start("word")]
            if (rejects(before) or _DOUBTS.search(before)) and not words:
                is_rejected = True
                continue
            words.append(said_so["word"].casefold())
    kinds = {word in _TRUE: word for word in words}
    if not kinds and not is_rejected and (line := plain(last_line(text))):
        return Reading((line,), marker)
    return Reading(tuple(kinds.values()), marker, is_rejected and not kinds)


def _choice(text: str, marker: str) -> Reading:
    """Return the letter that a line names, or all letters if it names several."""
    said = plain(text.strip(" \t*"))[:1000]
    whole = choice_in(said)
    if whole is not None and len(said) <= 3:
        return Reading((whole,), marker)
    body = (
        _REASON.split(said, maxsplit=1)[0] if not re.match(r"(?:because|since|as|for)\b", said, re.IGNORECASE) else said
    )
    letters, num_rejected = [], 0
    for match in _LETTER.finditer(body):
        if _LETTER_REJECTED.search(body, max(0, match.start() - 60), match.start()) or _REJECTED_LETTER.match(
            body, match.end()
        ):
            num_rejected += 1
        else:
            letters.append(match)
    if not letters:
        return Reading((), marker, num_rejected > 0)
    distinct = tuple(dict.fromkeys(match["letter"] for match in letters))
    if rejects(body[: letters[0].start()]) and not num_rejected:
        return Reading((), marker, True)
    if len(distinct) == 1 or whole is None:
        return Reading(distinct, marker)
    # The text of a choice may itself name letters: "B. Between A and C".
    another = _alternative(body, letters)
    return Reading((whole,) if another in (None, whole) else (whole, another), marker)


def _alternative(said: str, letters: Sequence[re.Match[str]]) -> str | None:
    """Return the letter that stands beside the first one, as in "A or B", or that is named behind it."""
    if re.fullmatch(r"[).\s]*" + _OR.pattern, said[letters[0].end() : letters[1].start()], re.IGNORECASE):
        return letters[1]["letter"]
    named = _NAMED_LETTER.search(said, letters[0].end())
    return named["letter"] if named and named["letter"].isupper() else None


def _sentence(text: str) -> str:
    return _SENTENCE_END.split(text.strip(), maxsplit=1)[0]


def _clause(text: str) -> str:
    return _CLAUSE_END.split(text.strip(), maxsplit=1)[0]


def _without(turn: str, question: str) -> str:
    words = question.split()
    if not 3 <= len(words) <= _MAX_QUESTION_WORDS:  # two words may well be part of an answer
        return turn
    return re.sub(r"\s+".join(map(re.escape, words)), " ", turn)


def shown(answers: Sequence[str]) -> str:
    """Return answers as one readable line, "" for none."""
    return " | ".join(" ".join(answer.split()) for answer in answers)
