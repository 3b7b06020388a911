"""Exact arithmetic on a policy's text: parsed into a tree, checked node by node, never evaluated as code.

    evaluate("12 * 7 - 5")      -> Fraction(79)
    evaluate("9 ** 9 ** 9")     -> CalculatorError: too large
    shown(evaluate("1 / 4"))    -> "0.25"

Numbers, + - * / // % ** and brackets; no names. Decimals are exact: 0.1 + 0.2 is 0.3.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

from rllib_srl.envs.tools.calls import CallError

MAX_CHARS = 200
MAX_BITS = 1024  # of numerator and denominator: about 300 digits
_MAX_DIGITS = 10  # shown of a number that is not whole


class CalculatorError(CallError):
    """The text is not arithmetic, or its value is too large; the message contains the reason."""


def evaluate(expression: str) -> Fraction:
    """Return the exact value of an arithmetic expression.

    Args:
        expression: at most `MAX_CHARS` ASCII characters

    Raises:
        CalculatorError: the text is not arithmetic, divides by zero, or has a value beyond `MAX_BITS`.
    """
    expression = expression.strip()
    if not expression or len(expression) > MAX_CHARS or not expression.isascii():
        raise CalculatorError(f"expected 1 to {MAX_CHARS} plain characters")
    try:
        tree = ast.parse(expression, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise CalculatorError("expected numbers, + - * / // % ** and brackets") from None
    return _value(tree.body)


def calculator(expression: str) -> str:
    """Compute with numbers, + - * / // % ** and brackets.

    Args:
        expression: what to compute, such as 12 * 7 - 5
    """
    return shown(evaluate(expression))


def shown(value: Fraction) -> str:
    """Return a value as text: a whole number in full, any other as a decimal of at most 10 significant digits."""
    if value.denominator == 1:
        return str(value.numerator)
    try:
        return f"{float(value):.{_MAX_DIGITS}g}"
    except OverflowError:
        return str(round(value))


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        return _bounded(_number(node.value))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _SIGNS:
        return _SIGNS[type(node.op)] * _value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        left, right = _value(node.left), _value(node.right)
        try:
            return _bounded(_OPERATIONS[type(node.op)](left, right))
        except ZeroDivisionError:
            raise CalculatorError("division by zero") from None
    raise CalculatorError("expected numbers, + - * / // % ** and brackets")


def _number(value: int | float) -> Fraction:
    try:
        return Fraction(str(value))  # through text, so that 0.1 is a tenth
    except ValueError:  # infinity, as 1e999 is read
        raise CalculatorError("too large") from None


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise CalculatorError("too large")
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    # Check the size before computing the power: 9 ** 9 ** 9 would not finish.
    if exponent.denominator != 1:
        raise CalculatorError("expected a whole number as exponent")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if (bits - 1) * abs(exponent) > MAX_BITS:
        raise CalculatorError("too large")
    return base ** int(exponent)


_SIGNS: dict[type[ast.unaryop], int] = {ast.UAdd: 1, ast.USub: -1}
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
