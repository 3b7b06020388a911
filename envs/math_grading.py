"""Is a mathematical answer right? Numbers and letters are compared here, formulas by math-verify in killable processes.

    grade("1/2", "0.50")                         1.0      in process
    grade("2x + 3", "3+2x")                      1.0      in a worker
    grade("2x + 3", "3+2x+1")                    0.0
    grade("42", "")                              None     cannot be read
    final_answer("So \\\\boxed{7}.")             Stated("7", "boxed")

What is right:
- equal text, but for white space, case and the dollars, boxes and brackets of LaTeX around it;
- numbers of equal value; where one is a decimal, equal after rounding to 6 places, as math-verify does. "50%" is 50
  and also 0.5; thousands may be set apart by commas;
- a letter for a letter (multiple choice), however it is put: "B", "(B)", "B. Paris";
- otherwise what math-verify takes for equal: expressions, equations, intervals, sets, tuples, matrices.

Source: Kydlicek 2025, math-verify; the answer formats are those of GSM8K (Cobbe et al. 2021, arXiv 2110.14168) and MATH
(Hendrycks et al. 2021, arXiv 2103.03874).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from envs.math_pool import LateError, symbolic_pool

KINDS = ("auto", "number", "choice", "symbolic", "text")
MARKERS = ("boxed", "hashes", "phrase", "bare")  # how an answer can be told from the rest of a turn
MAX_ANSWER_CHARS = 1_000  # a longer answer is not read
DEADLINE_S = 2.0

_TAIL_CHARS = 20_000  # where an answer is looked for: the end of a turn
_NUM_PLACES = 6
_PHRASE = re.compile(r"answer\s*(?:is\b\s*[:=]?|[:=])", re.IGNORECASE)
_INTEGER = r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d{1,60})"
_DECIMAL = re.compile(rf"(?P<number>(?:{_INTEGER})?(?:\.\d{{0,60}})?(?:[eE][+-]?\d{{1,3}})?)(?P<percent>%?)", re.ASCII)
_FRACTION = re.compile(rf"(?P<over>{_INTEGER})/(?P<under>{_INTEGER})", re.ASCII)
_LATEX_FRACTION = re.compile(
    rf"(?P<sign>[+-]?)\\[dt]?frac\{{(?P<over>{_INTEGER})\}}\{{(?P<under>{_INTEGER})\}}", re.ASCII
)
_CHOICE = re.compile(r"\(?(?P<letter>[A-J])(?:$|[).:](?:\s.*)?$|\s*\))", re.DOTALL)
_AROUND = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"))
# Functions as programs write them: without its backslash LaTeX takes a name for a product of letters.
_FUNCTION = re.compile(r"(?<![\\\w])(?:a?(?:sin|cos|tan)|exp|ln|log)(?=\s*\()")
_COMMANDS = {"exp": "e^", "log": r"\ln", "asin": r"\arcsin", "acos": r"\arccos", "atan": r"\arctan"}
_NEEDLESS = re.compile(r"(?<!\w) | (?!\w)")
_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|boxed)\{(?P<inside>[^{}]*)\}")


@dataclass(frozen=True)
class Stated:
    """The final answer of a turn and how it was marked. Invariant: `marker` is one of `MARKERS`."""

    answer: str
    marker: str


def final_answer(turn: str, marker: str = "any") -> Stated:
    r"""Return the answer that a turn ends in.

    That is the last \boxed{...}, else what follows the last "####" or else the last "answer:" or "answer is", up to the
    end of the line, else the last line that is not empty. Only the last 20,000 characters are looked at.

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


def grade(gold: str, answer: str, kind: str = "auto", deadline_s: float = DEADLINE_S) -> float | None:
    """Return 1 for an answer that means the same as `gold`, 0 for another, None for one that cannot be read in time.

    Args:
        gold: the right answer
        answer: the policy's, of any length and content
        kind: "auto", or one of `KINDS` to allow one way of being right only
        deadline_s: seconds of symbolic work, more than 0

    Raises:
        PoolError: the symbolic workers fail for a reason that is not the answer.
    """
    if len(answer) > MAX_ANSWER_CHARS:
        return None
    right, said = plain(gold), plain(answer)
    if not said:
        return None
    if _squeezed(right) == _squeezed(said):
        return 1.0
    if kind == "text":
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
    r"""Return an answer without what only sets it: dollars, \text, \boxed, spacing, a final full stop."""
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
    """Return the values that a plain number may have: one, two for a percentage, none for what is no plain number."""
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
    """Return the letter, A to J, that answers a question of multiple choice, or None."""
    found = _CHOICE.match(answer.strip()[:200])
    if found:
        return found["letter"]
    only = answer.strip().upper()
    return only if len(only) == 1 and "A" <= only <= "J" else None


def _by_symbols(right: str, said: str, deadline_s: float) -> float | None:
    try:
        verdict = symbolic_pool().ask(_for_latex(right), _for_latex(said), deadline_s)
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


def _last_box(text: str) -> str | None:
    start = max(text.rfind(r"\boxed{"), text.rfind(r"\fbox{"))
    if start < 0:
        return None
    begin = depth = 0
    for at in range(start, len(text)):
        if text[at] == "{":
            begin, depth = (at + 1 if depth == 0 else begin), depth + 1
        elif text[at] == "}":
            depth -= 1
            if depth == 0:
                return text[begin:at].strip()
    return None


def _after_hashes(text: str) -> str | None:
    _, mark, after = text.rpartition("####")
    return _first_line(after) if mark else None


def _after_phrase(text: str) -> str | None:
    phrases = list(_PHRASE.finditer(text))
    return _first_line(text[phrases[-1].end() :]) if phrases else None


_FINDERS: dict[str, Callable[[str], str | None]] = {
    "boxed": _last_box,
    "hashes": _after_hashes,
    "phrase": _after_phrase,
}
