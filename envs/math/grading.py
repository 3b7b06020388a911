"""Compare a mathematical answer with the right one: numbers and letters in process, formulas by math-verify in workers.

    grade("1/2", "0.50")                         1.0      in process
    grade("2x + 3", "3+2x")                      1.0      in a worker
    grade("2x + 3", "3+2x+1")                    0.0
    grade("42", "")                              None     cannot be read
    final_answer("So \\\\boxed{7}.")             Stated("7", "boxed")

An answer is right if it is
- equal text, except for white space, case and LaTeX's dollars, boxes and brackets around it;
- a number of equal value; if one is a decimal, equal after rounding to 6 places, as in math-verify. "50%" is 50
  and also 0.5; commas may separate thousands;
- the same letter (multiple choice), in any form: "B", "(B)", "B. Paris";
- the same words, for an answer in words: math-verify reads a word as a product of letters, so "stop" equals "post";
- otherwise equal according to math-verify: expressions, equations, intervals, sets, tuples, matrices.

An absurdly large answer, such as 10000000! or 9^{9^9}, is not computed (envs/math/size.py), unless the gold is one too.
`grade` compares one answer with another; envs/math/final_answers.py extracts the answer from a turn.

Source: Kydlicek 2025, math-verify; the answer formats are those of GSM8K (Cobbe et al. 2021, arXiv 2110.14168) and MATH
(Hendrycks et al. 2021, arXiv 2103.03874).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from rllib_srl.envs.math.pool import LateError, symbolic_pool
from rllib_srl.envs.math.size import is_absurd

KINDS = ("auto", "number", "choice", "symbolic", "text")
SORTS = ("number", "expression", "words", "choice")  # sorts of right answers
MARKERS = ("boxed", "tags", "hashes", "phrase", "bare")  # ways to mark the final answer of a turn
NOT = (  # words that reject what follows them
    r"(?:\b(?:not|never|neither|nor|cannot|isnt|except)\b|n['’]t\b"
    r"|\b(?:instead\s+of|(?:rather|other)\s+than|(?:anything|all)\s+but)\b)"
)
MAX_ANSWER_CHARS = 1_000  # a longer answer is not read
DEADLINE_S = 2.0

_TAIL_CHARS = 20_000  # length of the end of a turn that is searched for an answer
_NUM_PLACES = 6
_MAX_UNIT_CHARS = 100  # of a number with its unit
_MAX_MARKS = 16  # most marks of each kind that are read, the last ones
_REJECTED = re.compile(rf"(?:{NOT}|\b(?:wrong|incorrect)\b)(?:\s+[\w'’]+){{0,3}}[\s*$(:]*$", re.IGNORECASE)
_BRACE = re.compile(r"\\[{}]|\\(?:boxed|fbox)\{|[{}]")
_TAGS = re.compile(r"<answer>(?P<inside>(?:(?!<answer>).)*?)</answer>", re.IGNORECASE | re.DOTALL)
_UNIT = re.compile(r"(?P<number>\S*\d\S*?)\s*(?P<unit>[^\W\d_]{2,}|°[CF]?)")
_NAMES = frozenset(
    ("sin", "cos", "tan", "asin", "acos", "atan", "exp", "ln", "log", "sqrt", "pi", "mod", "max", "min", "inf", "oo")
)
_FORMAL = re.compile(r"[\\=^_{}+*<>|]")
_DATE = re.compile(r"\d{1,4}([-/.])\d{1,2}\1\d{1,4}|\d{1,2}:\d{2}(?::\d{2})?", re.ASCII)
_PHRASE = re.compile(r"answer\s*(?:is\b\s*[:=]?|[:=])", re.IGNORECASE)
_INTEGER = r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d{1,60})"
_DECIMAL = re.compile(rf"(?P<number>(?:{_INTEGER})?(?:\.\d{{0,60}})?(?:[eE][+-]?\d{{1,3}})?)(?P<percent>%?)", re.ASCII)
_FRACTION = re.compile(rf"(?P<over>{_INTEGER})/(?P<under>{_INTEGER})", re.ASCII)
_LATEX_FRACTION = re.compile(
    rf"(?P<sign>[+-]?)\\[dt]?frac\{{(?P<over>{_INTEGER})\}}\{{(?P<under>{_INTEGER})\}}", re.ASCII
)
_CHOICE = re.compile(r"\(?(?P<letter>[A-J])(?:$|[).:](?:\s.*)?$|\s*\))", re.DOTALL)
_AROUND = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"))
# Function names as in program code: without a backslash LaTeX reads a name as a product of letters.
_FUNCTION = re.compile(r"(?<![\\\w])(?:a?(?:sin|cos|tan)|exp|ln|log)(?=\s*\()")
_COMMANDS = {"exp": "e^", "log": r"\ln", "asin": r"\arcsin", "acos": r"\arccos", "atan": r"\arctan"}
_NEEDLESS = re.compile(r"(?<!\w) | (?!\w)")
_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|boxed)\{(?P<inside>[^{}]*)\}")


@dataclass(frozen=True)
class Stated:
    """The final answer of a turn and how it was marked. Invariant: `marker` is one of `MARKERS`."""

    answer: str
    marker: str
    is_rejected: bool = False  # the words in front of the mark reject the answer


def final_answer(turn: str, marker: str = "any") -> Stated:
    r"""Return the final answer of a turn.

    It is the last \boxed{...}, else the last <answer>...</answer>, else the text after the last "####", else the text
    after the last "answer:" or "answer is" on its line, else the last line that is not empty. Only the last 20,000
    characters are read.

    Args:
        turn: the policy's
        marker: of `MARKERS`; looked for before the others
    """
    tail = turn[-_TAIL_CHARS:]
    for name in dict.fromkeys((marker, *_FINDERS)):
        found = _FINDERS[name](tail) if name in _FINDERS else None
        if found is not None:
            return Stated(found, name)
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    return Stated(lines[-1] if lines else "", "bare")


def marked_answers(text: str, marker: str = "any") -> list[Stated]:
    r"""Return the answers that a text marks as final, in order, those marked by `marker` first.

    These are all \boxed{...} and <answer>...</answer>, the last "####" and earlier ones that hold only a number, and
    the text after "answer is" and "answer:", behind the last of the others if there are any.

    Args:
        text: the end of a turn
        marker: of `MARKERS`, or "any"
    """
    tags = list(_TAGS.finditer(text))[-_MAX_MARKS:]
    places = [(start, end, Stated(held, "boxed")) for start, end, held in _boxes(text)[-_MAX_MARKS:]]
    places += [(found.start(), found.end(), Stated(found["inside"].strip(), "tags")) for found in tags]
    places += _hash_lines(text)
    last = max((end for _, end, _ in places), default=0)
    spans = [found.span() for found in _PHRASE.finditer(text)][-_MAX_MARKS:]
    ends = [*(start for start, _ in spans[1:]), len(text)]
    places += [
        (start, end, Stated(_first_line(text[end:until]), "phrase"))
        for (start, end), until in zip(spans, ends, strict=False)
        if start >= last or marker == "phrase"
    ]
    places.sort(key=lambda place: (place[2].marker != marker, place[0]))
    return [
        Stated(stated.answer, stated.marker, bool(_REJECTED.search(text, max(0, start - 60), start)))
        for start, _, stated in places
    ]


def sort_of(gold: str, kind: str = "auto") -> str:
    """Return the sort of a right answer, one of `SORTS`.

    Args:
        gold: the right answer
        kind: "auto", or one of `KINDS`, which decides
    """
    given = {"number": "number", "choice": "choice", "symbolic": "expression", "text": "words"}
    if kind in given:
        return given[kind]
    right = plain(gold)
    if _CHOICE.fullmatch(right):
        return "choice"
    if numbers_in(with_unit(gold)[0]):
        return "number"
    if _DATE.fullmatch(right):
        return "words"
    names = set(re.findall(r"[^\W\d_]{2,}", right)) - _NAMES
    is_prose = any(not name.isascii() or re.search("[aeiou]", name, re.IGNORECASE) for name in names)
    return "words" if is_prose and not _FORMAL.search(right) else "expression"


def with_unit(gold: str) -> tuple[str, str]:
    """Return number and unit of a right answer such as "5 apples"; the answer and "" for one without a unit."""
    right = plain(gold)
    found = _UNIT.fullmatch(right) if len(right) <= _MAX_UNIT_CHARS else None
    return (found["number"], found["unit"]) if found and numbers_in(found["number"]) else (right, "")


def grade(gold: str, answer: str, kind: str = "auto", deadline_s: float = DEADLINE_S) -> float | None:
    """Return 1 for an answer that means the same as `gold`, 0 for another, None for one that cannot be read in time.

    Args:
        gold: the right answer
        answer: the policy's, of any length and content
        kind: "auto", or one of `KINDS` to allow only one kind of comparison
        deadline_s: seconds of symbolic work, more than 0

    Raises:
        PoolError: the symbolic workers fail for a reason other than the answer.
    """
    if len(answer) > MAX_ANSWER_CHARS:
        return None
    right, said = plain(gold), plain(answer)
    if not said:
        return None
    if _squeezed(right) == _squeezed(said):
        return 1.0
    if kind == "text" or (kind == "auto" and sort_of(gold) == "words"):
        return 0.0
    if kind == "choice" or (kind == "auto" and _CHOICE.fullmatch(right)):
        letter = choice_in(said)
        return None if letter is None else float(letter == choice_in(right))
    if kind != "symbolic":
        numbers, wanted = numbers_in(said), numbers_in(right)
        if numbers and wanted:
            return float(any(_is_close(a, b) for a in wanted for b in numbers))
        if kind == "number":
            return None if not numbers else 0.0
    return _by_symbols(right, said, deadline_s)


def plain(answer: str) -> str:
    r"""Return an answer without its markup: dollars, \text, \boxed, spacing, a final full stop."""
    text = answer.strip().removesuffix(".").strip()
    for left, right in _AROUND:
        if len(text) > len(left + right) and text.startswith(left) and text.endswith(right):
            text = text[len(left) : -len(right)].strip()
    for command in (r"\!", r"\,", r"\;", r"\:", r"\left", r"\right", r"\displaystyle"):
        text = re.sub(re.escape(command) + ("(?![a-zA-Z])" if command[1].isalpha() else ""), "", text)
    text = _WRAPPED.sub(lambda found: found["inside"], text)
    text = text.replace("\\ ", " ").replace(r"\$", "").replace(r"\%", "%").replace("\u2212", "-").removeprefix("$")
    return text.strip().removesuffix(".").strip()


def numbers_in(text: str) -> tuple[Fraction, ...]:
    """Return the possible values of a plain number: one, two for a percentage, none for other text."""
    squeezed = _squeezed(text)
    for pattern in (_FRACTION, _LATEX_FRACTION):
        found = pattern.fullmatch(squeezed)
        if found:
            under = _integer(found["under"])
            sign = -1 if found.groupdict().get("sign") == "-" else 1
            return (sign * Fraction(_integer(found["over"]), under),) if under else ()
    found = _DECIMAL.fullmatch(squeezed)
    if not found or not any(letter.isdigit() for letter in found["number"].lower().partition("e")[0]):
        return ()
    value = Fraction(found["number"].replace(",", "").removesuffix("."))
    return (value, value / 100) if found["percent"] else (value,)


def choice_in(answer: str) -> str | None:
    """Return the letter, A to J, that answers a multiple-choice question, or None."""
    found = _CHOICE.match(answer.strip()[:200])
    if found:
        return found["letter"]
    only = answer.strip().upper()
    return only if len(only) == 1 and "A" <= only <= "J" else None


def _by_symbols(right: str, said: str, deadline_s: float) -> float | None:
    right, said = _for_latex(right), _for_latex(said)
    if is_absurd(said) and not is_absurd(right):
        return None
    try:
        verdict = symbolic_pool().ask(right, said, deadline_s)
    except LateError:
        return None
    return None if verdict is None else float(verdict)


def _for_latex(text: str) -> str:
    named = _FUNCTION.sub(lambda found: _COMMANDS.get(found[0], "\\" + found[0]), text)
    return " ".join(named.replace("**", "^").replace("$", " ").split())


def _is_close(a: Fraction, b: Fraction) -> bool:
    if a == b:
        return True
    return (a.denominator != 1 or b.denominator != 1) and round(a, _NUM_PLACES) == round(b, _NUM_PLACES)


def _integer(digits: str) -> int:
    return int(digits.replace(",", ""))


def _squeezed(text: str) -> str:
    # White space between two words or two numbers stays: "7 8" is not 78.
    return _NEEDLESS.sub("", " ".join(text.split())).casefold()


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0].strip() if lines else ""


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """Return (start, end, content) of the closed boxes, outermost ones only."""
    opened: list[tuple[int, int, bool]] = []
    closed = []
    for found in _BRACE.finditer(text):
        if found[0].endswith("{") and found[0] != r"\{":
            opened.append((found.start(), found.end(), len(found[0]) > 1))
        elif found[0] == "}" and opened:
            start, begin, is_box = opened.pop()
            if is_box:
                closed.append((start, found.end(), text[begin : found.start()].strip()))
    outermost: list[tuple[int, int, str]] = []
    for box in sorted(closed):
        if not outermost or box[0] >= outermost[-1][1]:
            outermost.append(box)
    return outermost


def _last_box(text: str) -> str | None:
    boxes = _boxes(text)
    return boxes[-1][2] if boxes else None


def _last_tags(text: str) -> str | None:
    found = [each["inside"].strip() for each in _TAGS.finditer(text)]
    return found[-1] if found else None


def _hash_lines(text: str) -> list[tuple[int, int, Stated]]:
    """Return the last "####" and earlier ones that hold only a number; others are headings."""
    found = [(each.start(), each.end(), each[1].strip()) for each in re.finditer(r"####([^\n]*)", text)]
    found = found[-_MAX_MARKS:]
    kept = [(start, end, Stated(line, "hashes")) for start, end, line in found[:-1] if numbers_in(plain(line))]
    if found:
        kept.append((found[-1][0], found[-1][1], Stated(_after_hashes(text) or "", "hashes")))
    return kept


def _after_hashes(text: str) -> str | None:
    _, mark, after = text.rpartition("####")
    return _first_line(after) if mark else None


def _after_phrase(text: str) -> str | None:
    phrases = list(_PHRASE.finditer(text))
    return _first_line(text[phrases[-1].end() :]) if phrases else None


_FINDERS: dict[str, Callable[[str], str | None]] = {
    "boxed": _last_box,
    "tags": _last_tags,
    "hashes": _after_hashes,
    "phrase": _after_phrase,
}
