r"""Compare equations and inequalities, and read the intervals that inequalities, brackets and unions describe.

ends_of("2 < x <= 7")           [("2", "7", True, False)]
ends_of("x < 1 or x > 3")       [("", "1", True, True), ("3", "", True, True)]
right_side("x = 10 + 11 = 21")  "21"
assigned("f(x) = 2x")           "2x"
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from rllib_srl.envs.math.answer_text import bracketed, items_of, squeezed
from rllib_srl.envs.math.classes import BUILDER, special_of
from rllib_srl.envs.math.formula import Formula, levelled, read_formula
from rllib_srl.envs.math.identity import EQUAL, NUM_PLACES, values_at_places
from rllib_srl.envs.math.quantity import RELATIVE, near
from rllib_srl.envs.math.values import FormulaError

_VARIABLE = re.compile(r"(?<![\\A-Za-z_{])[a-zA-TV-Z](?![A-Za-z])")
Same = Callable[[str, str], bool]  # whether two answers mean the same
Ends = tuple[str, str, bool, bool]  # start, end ("" for infinity), and whether each is left out

RELATION = re.compile(r"<=|>=|!=|=<|(?<!\\)[=<>]|\\(?:le|ge|ne|lt|gt|in|equiv)(?![a-zA-Z])")
_SIGNS = {"<=": "<=", "=<": "<=", r"\le": "<=", ">=": ">=", r"\ge": ">=", r"\lt": "<", r"\gt": ">", r"\ne": "!=",
          "!=": "!=", r"\equiv": "="}  # fmt: skip
_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}
_NAMED = re.compile(r"(?:\\?[A-Za-z]+(?:_\{?\w+\}?)?)(?:\(\s*[A-Za-z](?:\s*,\s*[A-Za-z])*\s*\))?")
_COORDINATE = r"\s*\\?[A-Za-z]+(?:_\{?\w+\}?)?\s*"
TUPLE_NAME = re.compile(rf"(?:\\left)?\({_COORDINATE}(?:,{_COORDINATE})+(?:\\right)?\)\s*=\s*")


def right_side(text: str) -> str:
    r"""Return what stands behind the last equals sign: 21 of "x = 10 + 11 = 21"."""
    level = text
    parts = re.split(r"(?<![<>!\\=:])=(?!=)|\\approx|≈", level)
    return parts[-1].strip() if len(parts) > 1 else text


def left_side(text: str) -> str:
    """Return what stands in front of the first equals sign: 21 of "21 = x"."""
    left, sign, _ = text.partition("=")
    return left.strip() if sign and not left.endswith(("<", ">", "!")) else ""


def assigned(text: str) -> str | None:
    """Return the value of x = 5 and f(x) = 2x, None of another relation."""
    marks = [mark[0] for mark in RELATION.finditer(levelled(text))]
    left = text.partition("=")[0].strip()
    is_value = bool(marks) and set(marks) == {"="}
    return right_side(text) if is_value and (_NAMED.fullmatch(left) or TUPLE_NAME.fullmatch(f"{left} = ")) else None


def name_of(item: str) -> str:
    left, sign, _ = item.partition("=")
    return squeezed(left) if sign and _NAMED.fullmatch(left.strip()) else ""


def ends_of(text: str) -> list[Ends]:
    """Return the intervals of a text in one variable: of brackets, inequalities and unions of them; else nothing."""
    said = _builder_rule(text)
    said = re.sub(r"^\s*[A-Za-z]\s*(?:\\in(?![a-z])|∈)\s*", "", said)
    level = levelled(said).replace(r"\lt", "<").replace(r"\gt", ">")
    if special_of(said) == r"\mathbb{R}":
        return [("", "", True, True)]
    parts = re.split(r"\\cup|\bU\b|\\lor|\\vee", level) if re.search(r"\\cup|\bU\b|\\lor|\\vee", level) else [level]
    if len(parts) == 1 and RELATION.search(level):
        parts = items_of(level) if not re.search(r"\band\b|\\land|\\wedge", level) else [level]
    intervals: list[Ends] = []
    for part in parts:
        ends = _interval(part.strip()) or _chain(part.strip())
        if ends is None:
            return []
        intervals.append(ends)
    return intervals


def _builder_rule(text: str) -> str:
    match = BUILDER.fullmatch(text.strip())
    return match["rule"].strip() if match else text


def _interval(text: str) -> Ends | None:
    held = bracketed(text)
    if held is None or held.opened in "{⟨" or len(held.items) != 2:
        return None
    start, end = held.items
    is_below, is_above = re.fullmatch(r"-\s*\\infty\s*", start), re.fullmatch(r"\+?\s*\\infty\s*", end)
    if (is_below and held.opened == "[") or (is_above and held.closed == "]"):
        return None
    values = [_number_of(each) for each in (start, end)]
    if (values[0] is None and not is_below) or (values[1] is None and not is_above):
        return None
    if values[0] is not None and values[1] is not None and values[0] >= values[1]:
        return None
    return "" if is_below else start, "" if is_above else end, held.opened == "(", held.closed == ")"


def _chain(text: str) -> Ends | None:
    """Return the interval of 2 < x, x < 2 and 1 < x <= 2."""
    marks = [(mark.start(), mark.end(), _SIGNS.get(mark[0], mark[0])) for mark in RELATION.finditer(text)]
    if not 1 <= len(marks) <= 2 or any(sign not in ("<", ">", "<=", ">=") for *_, sign in marks):
        return None
    bounds = [0, *(at for start, end, _ in marks for at in (start, end)), len(text)]
    sides = [text[a:b].strip() for a, b in zip(bounds[::2], bounds[1::2])]
    signs = [sign for *_, sign in marks]
    if signs[0] in (">", ">="):
        sides, signs = sides[::-1], [_FLIPPED[sign] for sign in signs[::-1]]
    if any(sign not in ("<", "<=") for sign in signs):
        return None
    is_name = [bool(re.fullmatch(r"\\?[a-zA-Z]+(?:\([a-z]\))?", side)) and _number_of(side) is None for side in sides]
    if len(sides) == 3 and is_name == [False, True, False]:
        ends = sides[0], sides[2], signs[0] == "<", signs[1] == "<"
    elif len(sides) == 2 and is_name == [True, False]:
        ends = "", sides[1], True, signs[0] == "<"
    elif len(sides) == 2 and is_name == [False, True]:
        ends = sides[0], "", signs[0] == "<", True
    else:
        return None
    start = "" if re.fullmatch(r"-\s*\\infty\s*", ends[0]) else ends[0]
    end = "" if re.fullmatch(r"\+?\s*\\infty\s*", ends[1]) else ends[1]
    if any(side and _number_of(side) is None for side in (start, end)):
        return None
    return start, end, ends[2], ends[3]


def _number_of(text: str) -> float | None:
    try:
        value = read_formula(text).value()
    except (FormulaError, KeyError):
        return None
    try:
        return None if isinstance(value, complex) else float(value)
    except OverflowError:
        return None


def is_same_variable(one: str, other: str) -> bool:
    """Return whether two relations are about the same variable, or one names none."""
    names = [set(_VARIABLE.findall(_builder_rule(text))) for text in (one, other)]
    return not all(names) or names[0] == names[1]


def _start_of(ends: Ends) -> float:
    value = _number_of(ends[0]) if ends[0] else None
    return float("-inf") if value is None else value


def is_same_union(right: Sequence[Ends], said: Sequence[Ends], is_same: Same) -> bool:
    if len(right) != len(said):
        return False
    pairs = zip(*(sorted(ends, key=_start_of) for ends in (right, said)))
    return all(
        a[2:] == b[2:] and all(bool(x) == bool(y) and (not x or is_same(x, y)) for x, y in zip(a[:2], b[:2]))
        for a, b in pairs
    )


def is_same_relation(gold: str, answer: str, is_same: Same) -> bool:
    """Return whether two relations say the same: both sides differ by the same, up to a factor."""
    values = assigned(gold), assigned(answer)
    if values[0] is not None and values[1] is not None:
        names = [_spelling(text.partition("=")[0]) for text in (gold, answer)]
        if names[0] == names[1]:
            return is_same(values[0], values[1])
    of_gold, of_answer = _difference(gold), _difference(answer)
    if of_gold is None or of_answer is None:
        return False
    (right, sign), (said, other) = of_gold, of_answer
    try:
        pairs = values_at_places(right, said, 10.0)
    except FormulaError:
        return False
    if right.names != said.names:
        return False
    ratios = []
    for a, b in pairs:
        if a == 0 and b == 0:
            continue
        if a == 0 or b == 0:
            return False
        ratios.append(a / b if isinstance(a, Fraction) == isinstance(b, Fraction) else complex(a) / complex(b))
    tolerance = float(RELATIVE) if right.has_decimals or said.has_decimals else EQUAL
    if len(ratios) < NUM_PLACES // 2:
        return False
    if not all(near(ratios[0], ratio, tolerance) for ratio in ratios):
        return False
    if sign in ("=", "!="):
        return sign == other
    first = ratios[0]
    positive = (first.real if isinstance(first, complex) else first) > 0
    return sign == (other if positive else _FLIPPED[other])


def _spelling(name: str) -> str:
    return re.sub(r"[\s{}\\]", "", name)


def _difference(text: str) -> tuple[Formula, str] | None:
    level = levelled(text)
    matches = list(RELATION.finditer(level))
    if len(matches) != 1:
        return None
    sign = _SIGNS.get(matches[0][0], matches[0][0])
    if sign not in _FLIPPED:
        return None
    left, right = level[: matches[0].start()], level[matches[0].end() :]
    try:
        return read_formula(f"({left}) - ({right})"), sign
    except FormulaError:
        return None
