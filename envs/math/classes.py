r"""Classify a right answer: its class decides how a turn is read and how answers are compared.

    class_of("21")            "number"        class_of("x = 2 or x = 3")     "list"
    class_of("12 apples")     "number"        class_of(r"\{1, 2\}")          "set"
    class_of("52_8")          "base"          class_of("(1, 2)")             "bracket": a tuple or an interval
    class_of("B")             "choice"        class_of("2x + 3 = y")         "relation"
    class_of("no")            "yes or no"     class_of(r"\frac{\pi}{2}")     "expression"
    class_of("2:30 PM")       "time"          class_of("$xyz$")              "product"
    class_of("xyz")           "word"          class_of(r"\int_0^1 f")        "formula": math-verify reads it

docs/grading.md has the order, in which the first class that fits is taken.
"""

from __future__ import annotations

import re
from functools import lru_cache

from rllib_srl.envs.math.answer_text import bracketed, inner, is_delimited, items_of, plain
from rllib_srl.envs.math.formula import levelled, read_formula
from rllib_srl.envs.math.quantity import quantity_of
from rllib_srl.envs.math.size import is_absurd
from rllib_srl.envs.math.values import FormulaError

KINDS = ("auto", "number", "choice", "symbolic", "text")
CLASSES = (
    "choice", "yes or no", "time", "ratio", "base", "number", "word", "set", "bracket", "union", "list", "relation",
    "product", "expression", "formula",
)  # fmt: skip
TRUTHS = {"yes": True, "true": True, "no": False, "false": False}

CHOICE = re.compile(r"\(?(?P<letter>[A-J])(?:$|[).:](?:\s.*)?$|\s*\))", re.DOTALL)
_INITIAL = re.compile(r"[A-J][.:]\s")  # J. K. Rowling
TIME = re.compile(
    r"(?P<hour>\d{1,2}):(?P<minute>[0-5]\d)(?::(?P<second>[0-5]\d))?\s*(?P<half>[AaPp]\.?\s?[Mm]\b\.?)?"
    r"|(?P<hour2>\d{1,2})\s*(?P<half2>[AaPp]\.?\s?[Mm]\b\.?)|(?P<named>noon|midnight)",
    re.ASCII,
)
BASED = re.compile(
    r"(?P<digits>[0-9A-Za-z]{1,60})\s*(?:_\s*\{?\s*|\(?\s*base\s+)(?P<base>\d{1,2}|[a-z]+)\s*\}?\)?", re.ASCII
)
RATIO = re.compile(r"\d{1,20}(?:\s*:\s*\d{1,20})+", re.ASCII)
BUILDER = re.compile(
    r"(?:\\left\s*)?\\\{\s*[a-zA-Z]\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?::|\||\\mid|\\vert|\\colon)(?P<rule>.+)"
    r"(?:\\right\s*)?\\\}"
)
_DATE = re.compile(r"\d{1,4}([/.])\d{1,2}\1\d{1,4}", re.ASCII)
_RANGE = re.compile(r"\+?\d{1,20}(?:[-\u2013]\d{1,20}){1,9}", re.ASCII)  # also a score, a date, a telephone number
_LETTERS = re.compile(r"[A-Za-z]{2,}")
_RELATION = re.compile(
    r"(?<![\\])(?:[=<>≤≥≠∈]|\\(?:le|ge|leq|geq|lt|gt|ne|neq|leqslant|geqslant|in|equiv)(?![a-zA-Z]))"
)
_FORMAL = re.compile(r"[\\=^_{}+*<>|]")
_NAMES = frozenset((
    "sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "arcsin", "arccos", "arctan", "sinh", "cosh",
    "tanh", "exp", "ln", "log", "sqrt", "cbrt", "pi", "mod", "max", "min", "inf", "oo", "infinity", "theta",
    "alpha", "beta", "gamma", "lambda", "sigma", "omega", "abs", "floor", "ceil",
))  # fmt: skip


@lru_cache(maxsize=1024)  # an answer is classified twice for each grade, and again for each episode of its group
def class_of(gold: str, kind: str = "auto") -> str:
    """Return the class of a right answer, one of `CLASSES`.

    Args:
        gold: the right answer
        kind: "auto", or one of `KINDS`, which decides
    """
    classes = {"number": "number", "choice": "choice", "text": "word"}
    if kind in classes:
        return classes[kind]
    text = inner(gold)
    flat = plain(text)
    if kind == "auto":
        if CHOICE.fullmatch(flat):
            return "word" if _INITIAL.match(flat) else "choice"
        if flat.casefold() in TRUTHS:
            return "yes or no"
        if TIME.fullmatch(flat):
            return "time"
        is_range = _RANGE.fullmatch(flat) and not is_delimited(gold)  # $10-3$ is a difference
        if is_range or _DATE.fullmatch(flat) or '"' in text:  # program data is compared as it is written
            return "word"
        if RATIO.fullmatch(flat):
            return "ratio"
    if is_based(flat):
        return "base"
    if quantity_of(text, is_gold=True) is not None:
        return "number"
    shape = _shape(text)
    if shape:
        return shape
    if (measured := quantity_of(text, is_gold=True, takes_expressions=True)) is not None and measured.unit:
        return "expression"
    if is_delimited(gold) and _LETTERS.fullmatch(re.sub(r"\s", "", text)):
        return "product"
    if kind == "auto" and is_prose(text) and not _FORMAL.search(flat):
        return "word"
    try:
        read_formula(text)
    except FormulaError:
        return "formula" if _FORMAL.search(flat) or is_absurd(flat) or kind == "symbolic" else "word"
    return "expression"


def is_based(text: str) -> bool:
    """Return whether a text is a number with its base, as 52_8 is."""
    match = BASED.fullmatch(text)
    return match is not None and any(sign.isdigit() for sign in match["digits"]) and base_of(match["base"]) is not None


def base_of(name: str) -> int | None:
    """Return the base that digits or a word name, None for none from 2 to 36."""
    words = (
        "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
        "fourteen", "fifteen", "sixteen",
    )  # fmt: skip
    value = int(name) if name.isdigit() else words.index(name) + 2 if name in words else 0
    return value if 2 <= value <= 36 else None


def special_of(text: str) -> str:
    r"""Return \emptyset, \mathbb{R} or "": the sets that have their own sign."""
    said = re.sub(r"\s", "", levelled(text)).replace(r"\empty ", r"\emptyset")
    if said in (r"\emptyset", r"\{\}", "emptyset", r"\empty"):
        return r"\emptyset"
    words = " ".join(plain(text).casefold().split())
    if said in (r"\mathbb{R}", r"\mathbbR", r"\R", r"\mathbfR") or words in ("all real numbers", "all reals"):
        return r"\mathbb{R}"
    if words in ("empty set", "the empty set"):
        return r"\emptyset"
    return ""


def is_prose(text: str) -> bool:
    r"""Return whether a text has words in it, outside of \text{...}: letters in a row that name nothing."""
    text = re.sub(r"\\(?:begin|end)\s*\{[^{}]*\}", " ", text)
    said = re.sub(r"\\[a-zA-Z]+", " ", re.sub(r"\\(?:text|textbf|mathrm|mbox)\s*\{[^{}]*\}", " word ", text))
    runs = re.findall(r"[^\W\d_]{2,}", said)
    return any(run not in _NAMES and run.casefold() not in ("and", "or") for run in runs)


def _shape(text: str) -> str:
    """Return the class of an answer that has parts, "" for another."""
    if special_of(text):
        return "set"
    if BUILDER.fullmatch(text):
        return "relation"
    held = bracketed(text)
    if held is not None and (held.opened in "{[" or len(held.items) > 1):
        return "set" if held.opened == "{" else "bracket"
    level = levelled(text)
    items = items_of(text)
    if len(items) > 1 and all(_is_mathematical(item) for item in items):
        is_union = all(_INEQUALITY.search(levelled(item)) for item in items)
        return "union" if is_union else "list"
    if re.search(r"\\pm(?![a-z])", level) and not is_prose(text):
        return "list"
    if r"\cup" in level:
        return "union"
    if _RELATION.search(re.sub(r"_\s*\{[^{}]*\}", "", level)) and not is_prose(re.sub(r"\\text\{[^{}]*\}", "", text)):
        return "relation"
    return ""


_INEQUALITY = re.compile(r"[<>]|\\(?:le|ge)(?![a-zA-Z])")


def _is_mathematical(item: str) -> bool:
    """Return whether a part of a list is not a word."""
    if quantity_of(item) is not None or is_based(plain(item)) or special_of(item):
        return True
    if len(item) == 1 and item.isalpha():
        return True
    if is_prose(item):
        return False
    held = bracketed(item)
    if held is not None and all(_is_mathematical(each) for each in held.items):
        return True
    if _RELATION.search(levelled(item)):
        return True
    try:
        read_formula(item)
    except FormulaError:
        return bool(re.search(r"\\(?:pm|cup|infty)(?![a-z])", levelled(item)))
    return True
