"""Compute with rational numbers exactly, and with others in floats, within bounded sizes.

power(Fraction(2), Fraction(-3))     Fraction(1, 8)
root_of(Fraction(8), Fraction(3))    Fraction(2)
add(Fraction(1, 2), 1.5)             2.0
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable
from fractions import Fraction

_MAX_BITS = 60_000  # of an exact number

Value = Fraction | float | complex


class FormulaError(ValueError):
    """A text that is not a formula, or a formula without a value."""


def real_part(value: Value) -> float:
    if isinstance(value, complex):
        if abs(value.imag) > 1e-12 * max(1.0, abs(value.real)):
            raise FormulaError("not a real number")
        return value.real
    return float(value)


def _whole(value: Value) -> int:
    real = value if isinstance(value, Fraction) else real_part(value)
    if real != int(real):
        raise FormulaError("not an integer")
    return int(real)


def floor_of(value: Value) -> Value:
    return Fraction(math.floor(value if isinstance(value, Fraction) else real_part(value)))


def ceiling_of(value: Value) -> Value:
    return Fraction(math.ceil(value if isinstance(value, Fraction) else real_part(value)))


def size_of(value: Value) -> Fraction | float:
    """Return the absolute value."""
    return max(value, -value) if isinstance(value, Fraction | float) else abs(value)


def _trig(name: str) -> Callable[[Value], Value]:
    function: Callable[[complex], complex] = getattr(cmath, name)

    def computed(value: Value) -> Value:
        result = function(complex(value))
        return result.real if abs(result.imag) < 1e-15 * max(1.0, abs(result.real)) else result

    return computed


def _inverse(function: str) -> Callable[[Value], Value]:
    computed = _trig(function)
    return lambda value: 1 / computed(value)


def logarithm_of(value: Value, base: float) -> Value:
    if value == 0:
        raise FormulaError("logarithm of 0")
    if isinstance(value, Fraction) and value > 0:
        return (math.log(value.numerator) - math.log(value.denominator)) / math.log(base)
    result = cmath.log(complex(value)) / math.log(base)
    return result.real if result.imag == 0 else result


def root_of(value: Value, degree: Value) -> Value:
    if not isinstance(degree, Fraction) or degree.denominator != 1 or not 2 <= degree <= 1000:
        return power(value, 1 / degree)
    index = int(degree)
    if isinstance(value, Fraction):
        sign = -1 if value < 0 and index % 2 else 1
        over, under = _exact_root(sign * value.numerator, index), _exact_root(value.denominator, index)
        if over is not None and under is not None:
            return Fraction(sign * over, under)
        if value < 0 and index % 2:
            return -power(-value, Fraction(1, index))
    return power(value, Fraction(1, index))


def _exact_root(number: int, index: int) -> int | None:
    if number < 0:
        return None
    if index == 2:
        root = math.isqrt(number)
    elif number.bit_length() < 900:
        root = round(number ** (1 / index))
    else:
        return None
    return root if root**index == number else None


def power(base: Value, exponent: Value) -> Value:
    """Return base ** exponent, exactly if both are rational and the exponent is an integer of bounded size."""
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        if exponent.denominator == 1:
            bits = max(base.numerator.bit_length(), base.denominator.bit_length())
            if abs(exponent) * bits > _MAX_BITS:
                raise FormulaError("too large")
            return base ** int(exponent)
        if base >= 0 and exponent.denominator <= 12:
            root = (
                _exact_root(base.numerator, exponent.denominator),
                _exact_root(base.denominator, exponent.denominator),
            )
            if root[0] is not None and root[1] is not None:
                return power(Fraction(root[0], root[1]), Fraction(exponent.numerator))
        if base > 0:
            return math.exp(float(exponent) * (math.log(base.numerator) - math.log(base.denominator)))
    if base == 0:
        if real_part(exponent) > 0:
            return Fraction(0)
        raise FormulaError("0 to a power that is not positive")
    result = complex(base) ** complex(exponent)
    return result.real if abs(result.imag) < 1e-15 * abs(result.real) else result


def _bounded(value: Value) -> Value:
    if isinstance(value, Fraction) and value.numerator.bit_length() + value.denominator.bit_length() > 4 * _MAX_BITS:
        raise FormulaError("too large")
    return value


def _mixed_kinds(a: Value, b: Value) -> tuple[Value, Value]:
    """Return both numbers as ones that Python adds: a fraction beside a float becomes one."""
    if isinstance(a, Fraction) and not isinstance(b, Fraction):
        return float(a), b
    if isinstance(b, Fraction) and not isinstance(a, Fraction):
        return a, float(b)
    return a, b


def add(a: Value, b: Value) -> Value:
    a, b = _mixed_kinds(a, b)
    return _bounded(a + b)


def multiply(a: Value, b: Value) -> Value:
    a, b = _mixed_kinds(a, b)
    return _bounded(a * b)


def divide(a: Value, b: Value) -> Value:
    a, b = _mixed_kinds(a, b)
    return _bounded(a / b)


def logarithm_to(value: Value, base: Value) -> Value:
    return logarithm_of(value, real_part(base))


def subtract(a: Value, b: Value) -> Value:
    return add(a, -b)


def factorial_of(value: Value) -> Value:
    number = _whole(value)
    if not 0 <= number <= 3000:
        raise FormulaError("a factorial out of range")
    return Fraction(math.factorial(number))


def binomial_of(over: Value, under: Value) -> Value:
    n, k = _whole(over), _whole(under)
    if not 0 <= k <= n or min(k, n - k) > 3000 or n > 10**9:
        raise FormulaError("a binomial out of range")
    return Fraction(math.comb(n, k))


FUNCTIONS: dict[str, Callable[[Value], Value]] = {
    **{name: _trig(name) for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh", "exp")},
    **{name: _trig(to) for to, names in {
        "asin": ("arcsin", "asin"), "acos": ("arccos", "acos"), "atan": ("arctan", "atan")}.items() for name in names},
    **{name: _inverse(of) for name, of in {"sec": "cos", "csc": "sin", "cot": "tan"}.items()},
    "ln": lambda value: logarithm_of(value, math.e),
    "abs": size_of, "floor": floor_of, "ceil": ceiling_of,
}  # fmt: skip
