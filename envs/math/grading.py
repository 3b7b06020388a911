r"""Compare an answer with the right one, by the class of the right one.

    grade("1/2", "0.50")                         1.0
    grade("2x + 3", "3+2x")                      1.0
    grade("2, 3", "x = 3 or x = 2")              1.0
    grade("[2, 7)", "2 <= x < 7")                1.0
    grade("2x + 3", "3+2x+1")                    0.0
    grade("42", "")                              None     cannot be read

docs/grading.md has the rules. Numbers, words, lists and formulas that envs/math/formula.py reads are compared in this
process, in bounded time; matrices aside, everything else (integrals, sums, limits) by math-verify in killable workers,
and only if the right answer is of that sort. An absurdly large answer, such as 10000000! or 9^{9^9}, is not computed
(envs/math/size.py), unless the right answer is one too.

`grade` compares one answer with another; envs/math/final_answers.py extracts the answer from a turn.

Source: Kydlicek 2025, math-verify; the answer formats are those of GSM8K (Cobbe et al. 2021, arXiv 2110.14168) and MATH
(Hendrycks et al. 2021, arXiv 2103.03874).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from fractions import Fraction

from rllib_srl.envs.math.answer_text import bracketed, inner, items_of, plain, squeezed
from rllib_srl.envs.math.classes import BASED, CHOICE, RATIO, TIME, TRUTHS, base_of, class_of, special_of
from rllib_srl.envs.math.formula import levelled, read_formula
from rllib_srl.envs.math.identity import is_identical
from rllib_srl.envs.math.pool import LateError, symbolic_pool
from rllib_srl.envs.math.quantity import is_same_quantity, quantity_of
from rllib_srl.envs.math.relations import (
    RELATION,
    TUPLE_NAME,
    assigned,
    ends_of,
    is_same_relation,
    is_same_union,
    is_same_variable,
    left_side,
    name_of,
    right_side,
)
from rllib_srl.envs.math.size import is_absurd
from rllib_srl.envs.math.values import FormulaError

MAX_ANSWER_CHARS = 1_000  # a longer answer is not read
DEADLINE_S = 2.0

_MAX_ITEMS = 32
_BASED_WORDS = ("choice", "yes or no", "time", "ratio", "base", "word")
_GROUPED = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])", re.ASCII)  # 65,536
_PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![a-z])")
_MATRIX = re.compile(r"\\begin\{(?P<kind>[pbBvV]?)matrix\}(?P<inside>.*)\\end\{(?P=kind)matrix\}", re.DOTALL)
_ARRAY = re.compile(  # a matrix in brackets of its own
    r"\\left\s*[(\[]\s*\\begin\{(?P<name>array|matrix)\}(?:\{[^{}]*\})?(?P<inside>.*)"
    r"\\end\{(?P=name)\}\s*\\right\s*[)\]]",
    re.DOTALL,
)
_FUNCTION = re.compile(r"(?<![\\\w])(?:a?(?:sin|cos|tan)|exp|ln|log)(?=\s*\()")
_COMMANDS = {"exp": "e^", "log": r"\ln", "asin": r"\arcsin", "acos": r"\arccos", "atan": r"\arctan"}


def grade(gold: str, answer: str, kind: str = "auto", deadline_s: float = DEADLINE_S) -> float | None:
    """Return 1 for an answer that means the same as `gold`, 0 for another, None for one that cannot be read in time.

    Args:
        gold: the right answer
        answer: the policy's, of any length and content
        kind: "auto", or one of `rllib_srl.envs.math.classes.KINDS` to allow only one kind of comparison
        deadline_s: seconds of symbolic work, more than 0

    Raises:
        PoolError: the symbolic workers fail for a reason other than the answer.
    """
    if len(answer) > MAX_ANSWER_CHARS or not plain(answer):
        return None
    name = class_of(gold, kind)
    right, said = squeezed(plain(gold)), squeezed(plain(answer))
    if right == said or (name in _BASED_WORDS and right.casefold() == said.casefold()):
        return 1.0
    if name == "formula":
        return _by_symbols(gold, answer, deadline_s)
    return _COMPARED[name](inner(gold), inner(answer), name)


def choice_in(answer: str) -> str | None:
    """Return the letter, A to J, that answers a multiple-choice question, or None."""
    match = CHOICE.match(answer.strip()[:200])
    if match:
        return match["letter"]
    only = answer.strip().strip("().").upper()
    return only if len(only) == 1 and "A" <= only <= "J" else None


def time_in(text: str) -> int | None:
    """Return the seconds since midnight of a time of day, None for another text; 12 hours later if it ends in PM."""
    match = TIME.fullmatch(plain(text))
    if not match:
        return None
    if match["named"]:
        return 43_200 if match["named"] == "noon" else 0
    hour, half = int(match["hour"] or match["hour2"]), (match["half"] or match["half2"] or "").casefold()
    if hour > (12 if half else 24) or (half and not hour):
        return None
    if half:
        hour = hour % 12 + (12 if half.startswith("p") else 0)
    return 3600 * hour + 60 * int(match["minute"] or 0) + int(match["second"] or 0)


def _by_choice(gold: str, answer: str, _: str) -> float | None:
    letter = choice_in(plain(answer))
    return None if letter is None else float(letter == choice_in(plain(gold)))


def _by_truth(gold: str, answer: str, _: str) -> float | None:
    said = TRUTHS.get(plain(answer).casefold().strip(" .!"))
    return float(said == TRUTHS[plain(gold).casefold()])


def _by_time(gold: str, answer: str, _: str) -> float | None:
    said = time_in(answer)
    return None if said is None else float(said == time_in(gold))


def _by_ratio(gold: str, answer: str, _: str) -> float | None:
    said = re.sub(r"\s+to\s+", ":", plain(answer))
    right = [int(part) for part in plain(gold).split(":")]
    if not RATIO.fullmatch(said):
        number = quantity_of(said, is_gold=True)
        if number is None or len(right) != 2 or not right[1] or number.unit or number.is_percent:
            return None if number is None else 0.0
        return float(number.value == Fraction(right[0], right[1]))
    parts = [int(part) for part in said.split(":")]
    if len(parts) != len(right):
        return 0.0
    return float(all(a * right[0] == b * parts[0] for a, b in zip(parts, right)) and any(parts) == any(right))


def _by_base(gold: str, answer: str, _: str) -> float | None:
    return float(_digits_in(answer) == _digits_in(gold)) if _digits_in(answer) else 0.0


def _digits_in(text: str) -> tuple[str, int] | None:
    match = BASED.fullmatch(plain(text).replace(" _", "_"))
    base = base_of(match["base"]) if match else None
    return (match["digits"].casefold().lstrip("0"), base) if match and base else None


def _by_number(gold: str, answer: str, _: str) -> float | None:
    right = quantity_of(gold, is_gold=True)
    if right is None:
        return 0.0
    said = answer
    based = _digits_in(said)
    if based is not None and based[1] != 10:
        return 0.0
    if based is not None:
        said = based[0]
    for part in (right_side(said), left_side(said)):
        number = quantity_of(part, takes_expressions=True, is_loose=True) if part else None
        if number is not None:
            return float(is_same_quantity(right, number))
    level = levelled(said)
    held = bracketed(said)
    has_parts = held is not None and (held.opened == "{" or len(held.items) > 1)
    is_other = has_parts or len(items_of(said)) > 1 or bool(special_of(said)) or bool(_PLUS_MINUS.search(level))
    return 0.0 if is_other or re.fullmatch(r"[\d\s.,]+", said, re.ASCII) else None


def _by_words(gold: str, answer: str, _: str) -> float | None:
    right, said = words_of(gold), words_of(answer)
    if right == said:
        return 1.0
    wanted = items_of(right)
    is_list = len(wanted) > 1 and re.search(r"\b(?:and|or)\b", right) and all(len(each.split()) <= 3 for each in wanted)
    return float(bool(is_list) and sorted(wanted) == sorted(items_of(said)))


def words_of(text: str) -> str:
    """Return the words of an answer without case, and without what stands around them."""
    said = unicodedata.normalize("NFC", plain(text).replace("’", "'")).strip(" \t\r\n\"'`*_“”‘.,;:!").casefold()
    return " ".join(re.sub(r"(?<=\d)\s*[-\u2013]\s*(?=\d)", "-", said).split())


def _by_product(gold: str, answer: str, _: str) -> float | None:
    try:
        right, said = (read_formula(_unwrapped(text), is_product=True) for text in (gold, answer))
        return float(is_identical(right, said))
    except FormulaError:
        return None


def _unwrapped(text: str) -> str:
    return right_side(re.sub(r"\\(?:text|mathrm)\s*\{([^{}]*)\}", r"\1", text))


def _by_formula(gold: str, answer: str, _: str) -> float | None:
    """Compare two formulas by their values, at several places if they have names."""
    answer = _GROUPED.sub(lambda digits: digits[0].replace(",", ""), answer)
    if len(items_of(answer)) > 1 or (bracketed(answer) is not None and len(bracketed(answer).items) != 1):  # type: ignore[union-attr]
        return 0.0
    try:
        number = quantity_of(right_side(answer), takes_expressions=True)
        wanted = quantity_of(gold, is_gold=True, takes_expressions=True)
        if number is not None and wanted is not None:
            return float(is_same_quantity(wanted, number))
        if number is not None and (number.is_percent or number.unit):
            return 0.0
        right, said = read_formula(gold), read_formula(right_side(answer))
    except FormulaError:
        return 0.0 if re.search(r"\\pm(?![a-z])|[<>]", levelled(answer)) else None
    try:
        return float(is_identical(right, said))
    except FormulaError:
        return 0.0


def _by_items(gold: str, answer: str, name: str) -> float | None:
    """Compare lists and sets: the same items in any order, a set without repetitions."""
    answer = re.sub(r"^\{([^{}]*)\}$", r"\\{\1\\}", answer.strip())  # {1, 2} is \{1, 2\}
    if special_of(gold) or special_of(answer):
        return _by_special(gold, answer)
    held = bracketed(answer)
    wanted = _items(gold)
    if held is not None and held.opened != "{" and len(held.items) == 2 and not _is_list_of_brackets(gold):
        return 0.0  # a point or an interval
    said = _items(answer)
    if not said:
        return None
    is_set = name == "set"
    if held is not None and held.opened != "{" and len(held.items) > 1 and not _is_list_of_brackets(gold):
        if is_set:
            return 0.0
        return _in_order(wanted, said)
    names = {name_of(item) for item in wanted}
    if len(names - {""}) > 1:
        if not all(name_of(item) for item in said):
            return 0.0
    else:
        wanted, said = ([right_side(item) for item in items] for items in (wanted, said))
    if is_set:
        wanted, said = _distinct(wanted), _distinct(said)
    if len(wanted) != len(said) or len(wanted) > _MAX_ITEMS:
        return 0.0
    left = list(said)
    for item in wanted:
        match = next((other for other in left if _same_item(item, other)), None)
        if match is None:
            return 0.0
        left.remove(match)
    return 1.0


def _is_list_of_brackets(gold: str) -> bool:
    held = bracketed(gold)
    items = held.items if held is not None and held.opened == "{" else items_of(gold)
    return bool(items) and all((inside := bracketed(item)) is not None and len(inside.items) > 1 for item in items)


def _in_order(wanted: Sequence[str], said: Sequence[str]) -> float:
    if len(wanted) != len(said):
        return 0.0
    return float(all(_same_item(a, b) for a, b in zip(wanted, said)))


def _same_item(gold: str, answer: str) -> bool:
    return squeezed(plain(gold)) == squeezed(plain(answer)) or _graded_item(gold, answer) == 1.0


def _graded_item(gold: str, answer: str) -> float | None:
    name = class_of(gold, "symbolic")
    if name == "formula" or (name == "list" and len(items_of(gold)) > 1):
        return 0.0
    if len(gold) == 1 and gold.isupper():
        return float(plain(gold) == plain(answer))
    return _COMPARED[name](inner(gold), inner(answer), name)


def _items(text: str) -> list[str]:
    """Return the items of a list or set, with both values of a plus-minus sign."""
    text = re.sub(r"^\s*[A-Za-z]\s*(?:\\in(?![a-z])|∈)\s*", "", text)
    held = bracketed(text)
    if held is not None and (held.opened == "{" or len(held.items) > 1):
        parts = list(held.items)
    else:
        parts = items_of(text)
        names = [name_of(part) for part in parts]
        if names and not names[0] and "=" in parts[0]:
            parts = [right_side(parts[0]), *parts[1:]] if special_of(right_side(parts[0])) else parts
    items = []
    for part in parts:
        level = levelled(part)
        if re.search(r"\\pm(?![a-z])|\\mp(?![a-z])", level):
            items += [
                re.sub(r"\\mp(?![a-z])", below, re.sub(r"\\pm(?![a-z])", above, level)) for above, below in ("+-", "-+")
            ]
        else:
            inside = bracketed(part.partition("=")[2].strip())
            items += inside.items if inside is not None and inside.opened == "{" else [part]
    return items


def _distinct(items: Sequence[str]) -> list[str]:
    kept: list[str] = []
    for item in items:
        if not any(_same_item(other, item) for other in kept):
            kept.append(item)
    return kept


def _by_special(gold: str, answer: str) -> float | None:
    right, said = (_whole_line(text) for text in (gold, answer))
    if right and said:
        return float(right == said)
    return 0.0


def _whole_line(text: str) -> str:
    special = special_of(right_side(text))
    ends = ends_of(text)
    return r"\mathbb{R}" if ends == [("", "", True, True)] else special


def _by_bracket(gold: str, answer: str, _: str) -> float | None:
    """Compare a tuple or an interval: the same brackets, the same items in their order."""
    right = bracketed(gold)
    assert right is not None
    said = bracketed(TUPLE_NAME.sub("", re.sub(r"^\s*[A-Za-z]\s*(?:\\in(?![a-z])|=|∈)\s*", "", answer)))
    if said is None:
        return _by_bare_items(gold, answer)
    if (said.opened, said.closed) != (right.opened, right.closed):
        return 0.0
    return _in_order(right.items, said.items)


def _by_bare_items(gold: str, answer: str) -> float | None:
    """Compare a tuple with x = 1, y = 2, a sequence with its items, an interval with inequalities."""
    right = bracketed(gold)
    assert right is not None
    ends = ends_of(gold)
    if ends and RELATION.search(levelled(answer)) and (said := ends_of(answer)):
        return float(is_same_union(ends, said, _same_item))
    if special_of(answer):
        return _by_special(gold, answer)
    items = items_of(answer)
    names = [name_of(item) for item in items]
    if len(items) > 1 and all(names) and names == sorted(set(names)) and right.opened == "(":
        return _in_order(right.items, [right_side(item) for item in items])
    if len(items) > 2 and len(right.items) > 2:
        return _in_order(right.items, items)
    return 0.0 if items else None


def _by_union(gold: str, answer: str, _: str) -> float | None:
    right, said = ends_of(gold), ends_of(answer)
    if not right:
        return float(is_same_relation(gold, answer, _same_item))
    if not said:
        return 0.0
    return float(is_same_variable(gold, answer) and is_same_union(right, said, _same_item))


def _by_relation(gold: str, answer: str, _: str) -> float | None:
    """Compare equations and inequalities."""
    right = ends_of(gold)
    if right:
        said = ends_of(answer)
        return float(is_same_variable(gold, answer) and is_same_union(right, said, _same_item)) if said else 0.0
    if not RELATION.search(levelled(answer)):
        value = assigned(gold)
        if value is None:
            return 0.0
        return _graded_item(value, answer)
    return float(is_same_relation(gold, answer, _same_item))


def _by_symbols(gold: str, answer: str, deadline_s: float) -> float | None:
    """Compare matrices by their entries, other formulas by math-verify."""
    wanted, found = (_matrix_of(inner(text)) for text in (gold, answer))
    if wanted is not None and found is not None:
        same = wanted[0] == found[0] and [len(row) for row in wanted[1]] == [len(row) for row in found[1]]
        return float(same and all(_in_order(a, b) for a, b in zip(wanted[1], found[1])))
    right, said = _for_latex(plain(gold)), _for_latex(plain(answer))
    if is_absurd(said) and not is_absurd(right):
        return None
    try:
        verdict = symbolic_pool().ask(right, said, deadline_s)
    except LateError:
        return None
    return None if verdict is None else float(verdict)


def _matrix_of(text: str) -> tuple[str, list[list[str]]] | None:
    """Return the bars of a matrix, "v" or "V" of a determinant or norm and "" of brackets, and its rows."""
    match = _MATRIX.fullmatch(_ARRAY.sub(r"\\begin{matrix}\g<inside>\\end{matrix}", right_side(text)))
    if not match:
        return None
    rows = re.split(r"\\\\(?:\[[^\]]*\])?", match["inside"])
    return match["kind"].strip("pbB"), [[cell.strip() for cell in row.split("&")] for row in rows if row.strip()]


def _for_latex(text: str) -> str:
    named = _FUNCTION.sub(lambda match: _COMMANDS.get(match[0], "\\" + match[0]), text)
    return " ".join(named.replace("**", "^").replace("$", " ").split())


_COMPARED: dict[str, Callable[[str, str, str], float | None]] = {
    "choice": _by_choice,
    "yes or no": _by_truth,
    "time": _by_time,
    "ratio": _by_ratio,
    "base": _by_base,
    "number": _by_number,
    "word": _by_words,
    "set": _by_items,
    "bracket": _by_bracket,
    "union": _by_union,
    "list": _by_items,
    "relation": _by_relation,
    "product": _by_product,
    "expression": _by_formula,
}
