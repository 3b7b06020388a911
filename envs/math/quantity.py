r"""Read a number with its percent sign and its unit, and compare it with another.

quantity_of("50%")                 value 50, a percentage
quantity_of(r"35\text{ cm}^2")     value 35, square centimetres
quantity_of("2.4 million")         value 2400000
quantity_of(r"\log 5")             value 0.69897: an expression, not a plain number
quantity_of("10 + 11")             None: a calculation has no result yet
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction

from rllib_srl.envs.math.answer_text import inner
from rllib_srl.envs.math.formula import read_formula
from rllib_srl.envs.math.number_words import spelled
from rllib_srl.envs.math.units import Unit, is_same_kind, split_unit, unit_of
from rllib_srl.envs.math.values import FormulaError, Value, size_of

RELATIVE = Fraction(1, 1_000_000)  # tolerance of a number that is written with a decimal point
_EXPRESSION = 1e-9  # of two expressions without one, computed in floats
_ZERO = Fraction(1, 10**12)  # of a gold 0.0, which has no relative tolerance
_NEAR_INTEGER = Fraction(1, 2_000_000)  # of a decimal beside an integer
_PERCENT = re.compile(r"\s*(?:\\?%|\bper\s?cent\b|\bpct\b|\bpercentage points?\b)$", re.IGNORECASE)
_FONTS = re.compile(r"\\(?:text|textrm|mathrm|mbox)\s*\{([^{}]*)\}")
_MAX_WORDS = 12


@dataclass(frozen=True)
class Quantity:
    """A number. Invariant: `step` is the worth of the last digit of a decimal, 0 for other numbers."""

    value: Value
    is_percent: bool = False
    unit: Unit | None = None
    has_decimals: bool = False
    step: Fraction = Fraction(0)
    is_plain: bool = True  # digits, a fraction, a mixed number, a power of ten, number words


def quantity_of(
    text: str, is_gold: bool = False, takes_expressions: bool = False, is_loose: bool = False
) -> Quantity | None:
    r"""Return the number that a whole text states, None for another text.

    Args:
        text: an answer, with delimiters or not
        is_gold: divisions without a rest ("42/2") count
        takes_expressions: numbers such as \sqrt{2} and 5! count too; calculations of plain numbers never do
        is_loose: one letter behind a space is a unit, as it always is in a gold
    """
    said = inner(text).strip()
    said = re.sub(r"^(?:\\approx|\\sim|≈|~|=|:)\s*", "", said)
    percent = _PERCENT.search(_FONTS.sub(r"\1", said)) if len(said) < 1_000 else None
    if percent:
        said = _FONTS.sub(r"\1", said)
        quantity = _number(said[: percent.start()].rstrip("\\ "), is_gold, takes_expressions)
        return None if quantity is None else replace(quantity, is_percent=True)
    quantity = _number(said, is_gold, takes_expressions)
    if quantity is not None:
        return quantity
    if is_gold and takes_expressions:  # in front of \text{...} a letter is a factor, as in 2\pi h
        font = _FONTS.search(said)
        body, tail = (said[: font.start()], said[font.start() :]) if font else (said, "")
        one, unit = split_unit(f"1 {tail}")
        unit = unit if one == "1" else None
    else:
        body, unit = split_unit(said, is_gold or is_loose)
    if unit is not None:
        quantity = _number(body, is_gold, takes_expressions)
        return None if quantity is None else replace(quantity, unit=unit)
    return None


def _number(said: str, is_gold: bool, takes_expressions: bool) -> Quantity | None:
    if said.startswith("[") and said.endswith("]"):  # a list of one
        return None
    if re.search("[A-Za-z]{3}", said):
        worded = _worded(_FONTS.sub(r" \1 ", said))
        if worded is not None:
            return worded
    try:
        formula = read_formula(said)
        if formula.names or formula.is_calculation or not (formula.is_plain or takes_expressions):
            return None
        value = formula.value()
    except FormulaError:
        return None
    is_divided = "/" in said or "frac" in said
    if formula.is_plain and is_divided and not is_gold and isinstance(value, Fraction) and value.denominator == 1:
        return None
    return Quantity(value, False, None, formula.has_decimals, formula.unit, formula.is_plain)


def _worded(said: str) -> Quantity | None:
    """Read a number in words, with a unit behind it or not."""
    said = re.sub(r"^([-\u2212]?)\s*\\?\$\s*", r"\1", said.strip())
    words = said.replace(r"\,", " ").replace("\\ ", " ").split()
    for count in range(min(len(words), _MAX_WORDS), 0, -1):
        value = spelled(" ".join(words[:count]))
        if value is not None:
            unit_text = " ".join(words[count:])
            unit = unit_of(unit_text) if unit_text else None
            return None if unit_text and unit is None else Quantity(value, unit=unit)
    return None


def is_same_quantity(gold: Quantity, answer: Quantity) -> bool:
    """Return whether an answer states the gold's number; a sign or unit that one of them lacks fits."""
    is_mixed = (gold.is_percent and answer.unit) or (answer.is_percent and gold.unit)
    if is_mixed or not is_same_kind(gold.unit, answer.unit):
        return False
    if gold.is_percent == answer.is_percent:
        if gold.unit and answer.unit and gold.unit.kinds == answer.unit.kinds and gold.unit.worth != answer.unit.worth:
            return is_close(_scaled(gold, gold.unit.worth), _scaled(answer, answer.unit.worth))
        return is_close(gold, answer)
    part = Fraction(1, 100)
    size = size_of(gold.value)
    if gold.is_percent:
        return is_close(_scaled(gold, part), answer) or (size > 1 and is_close(gold, answer))
    is_whole = isinstance(gold.value, Fraction) and gold.value.denominator == 1
    if size > 1 and is_close(gold, answer):
        return True
    return (size <= 1 or not is_whole) and is_close(gold, _scaled(answer, part))


def _scaled(quantity: Quantity, factor: Fraction) -> Quantity:
    value = quantity.value * factor if isinstance(quantity.value, Fraction) else quantity.value * float(factor)
    return replace(quantity, value=value, step=quantity.step * factor)


def is_close(gold: Quantity, answer: Quantity) -> bool:
    """Return whether two numbers are equal: exactly, or within a tolerance if one is rounded or irrational.

    A decimal is right within a relative 1e-6 of the gold, but two decimals may not differ in a digit that both have
    written (123456.78 and 123456.79), and beside an integer it may be off by 5e-7 at most.
    """
    right, said = gold.value, answer.value
    if not isinstance(right, Fraction) or not isinstance(said, Fraction):
        return near(right, said, float(RELATIVE) if gold.has_decimals or answer.has_decimals else _EXPRESSION)
    off = abs(right - said)
    if not off:
        return True
    if not right:
        return gold.has_decimals and off <= _ZERO
    if not gold.has_decimals and not answer.has_decimals:
        return False
    if not gold.has_decimals and right.denominator == 1:
        return off <= min(_NEAR_INTEGER, RELATIVE * abs(right))
    if not gold.has_decimals and _is_rounding(right, answer):
        return True
    is_fine = off <= RELATIVE or off < max(gold.step, answer.step)
    return is_fine and off <= RELATIVE * abs(right)


def _is_rounding(right: Fraction, answer: Quantity) -> bool:
    """Return whether a decimal is the right one, rounded to its six or more places, five of which count."""
    said, step = answer.value, answer.step
    if not isinstance(said, Fraction) or not 0 < step <= RELATIVE or abs(said) < 10_000 * step:
        return False
    return 2 * abs(right - said) <= step


def near(right: Value, said: Value, tolerance: float) -> bool:
    """Return whether two values agree within a relative tolerance."""
    try:
        a, b = complex(right), complex(said)
    except OverflowError:
        return False
    if right == 0 and said == 0:
        return True
    return abs(a - b) <= tolerance * abs(a) or (abs(a) < 1e-12 and abs(b) < 1e-12 and (right == 0 or said == 0))


def numbers_in(text: str) -> tuple[Fraction, ...]:
    """Return the possible values of a plain number: one, two for a percentage, none for other text."""
    quantity = quantity_of(text, is_gold=True)
    if quantity is None or quantity.unit is not None or not isinstance(quantity.value, Fraction):
        return ()
    return (quantity.value, quantity.value / 100) if quantity.is_percent else (quantity.value,)
