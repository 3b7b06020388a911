"""Decide whether two formulas are the same function of their names: their values agree at several places.

    is_identical(read_formula("(x-1)(x+1)"), read_formula("x^2 - 1"))      True

The places are fractions, the same ones for all time, so that rational functions are compared exactly. Other functions
are compared in floats. Two different formulas agree at all places only if somebody made them to.
"""

from __future__ import annotations

import random
from fractions import Fraction

from rllib_srl.envs.math.formula import Formula, Place, value_at
from rllib_srl.envs.math.quantity import RELATIVE, near
from rllib_srl.envs.math.values import FormulaError, Value

NUM_PLACES = 6  # where two formulas are compared
_LOG_BASES = (10.0, 2.718281828459045)  # of "log", which means both
EQUAL = 1e-9


def is_identical(a: Formula, b: Formula) -> bool:
    """Return whether two formulas have the same values wherever both have one.

    Raises:
        FormulaError: they have values at too few places.
    """
    error = None
    for base in _LOG_BASES:
        try:
            pairs = values_at_places(a, b, base)
        except FormulaError as raised:
            error = raised
            continue
        tolerance = float(RELATIVE) if a.has_decimals or b.has_decimals else EQUAL
        if all(_is_equal(x, y, tolerance) for x, y in pairs):
            return True
        error = None
    if error is not None:
        raise error
    return False


def _is_equal(a: Value, b: Value, tolerance: float) -> bool:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b or (tolerance > EQUAL and abs(a - b) <= RELATIVE * abs(a))
    return near(a, b, tolerance)


def values_at_places(a: Formula, b: Formula, log_base: float) -> list[tuple[Value, Value]]:
    """Return the values of two formulas at the same places: positive ones first, then of both signs."""
    names = sorted(a.names | b.names)
    draw = random.Random(17)
    pairs = []
    for number in range(3 * NUM_PLACES):
        signs = (1,) if number < NUM_PLACES // 2 else (1, -1)
        values = {
            name: Fraction(draw.choice(signs) * draw.randint(113, 997), draw.choice((211, 223, 227, 229)))
            for name in names
        }
        place = Place(values, log_base)
        values_of = []
        for formula in (a, b):
            try:
                values_of.append(value_at(formula, place))
            except FormulaError:
                break
        if len(values_of) == 2:
            pairs.append((values_of[0], values_of[1]))
        if not names or len(pairs) == NUM_PLACES:
            break
    if len(pairs) < (min(3, NUM_PLACES) if names else 1):
        raise FormulaError("no common values")
    return pairs
