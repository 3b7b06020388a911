"""Questions about whole numbers that a one- or two-line program answers and that are too long for mental arithmetic.

    power_mod 37 20 101  ->  "What is the remainder when 37 to the power of 20 is divided by 101?"

A prompt id is the template's name and its numbers. Every template occurs equally often.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class NumberTemplate:
    """One kind of question. Invariant: distinct numbers make distinct texts, and `code` prints what `solve` returns."""

    ranges: tuple[range, ...]
    text: str
    code: str
    solve: Callable[..., int]


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def _steps_to_one(number: int) -> int:
    steps = 0
    while number != 1:
        number, steps = (3 * number + 1 if number % 2 else number // 2), steps + 1
    return steps


def _grown(cells: int, percent: int, hours: int) -> int:
    for _ in range(hours):
        cells += cells * percent // 100
    return cells


TEMPLATES = {
    "power_mod": NumberTemplate(
        (range(2, 100), range(11, 100), range(11, 1000)),
        "What is the remainder when {0} to the power of {1} is divided by {2}?",
        "print(pow({0}, {1}, {2}))",
        pow,
    ),
    "digit_sum": NumberTemplate(
        (range(2, 100), range(10, 62)),
        "What is the sum of the decimal digits of {0} to the power of {1}?",
        "print(sum(int(digit) for digit in str({0} ** {1})))",
        lambda a, b: sum(map(int, str(a**b))),
    ),
    "primes": NumberTemplate(
        (range(10, 200), range(300, 500)),
        "What is the sum of the prime numbers from {0} to {1}?",
        "print(sum(n for n in range({0}, {1} + 1) if all(n % d for d in range(2, n))))",
        lambda a, b: sum(number for number in range(a, b + 1) if _is_prime(number)),
    ),
    "divisible": NumberTemplate(
        (range(100, 1000), range(3, 10), range(11, 20)),
        "How many whole numbers from 1 to {0} are divisible by {1} or by {2}?",
        "print(sum(n % {1} == 0 or n % {2} == 0 for n in range(1, {0} + 1)))",
        lambda n, p, q: n // p + n // q - n // math.lcm(p, q),
    ),
    "collatz": NumberTemplate(
        (range(7, 6000),),
        "Start with {0}. Halve an even number; take three times an odd number plus 1. How many steps lead to 1?",
        "n, steps = {0}, 0\nwhile n != 1:\n    n = 3 * n + 1 if n % 2 else n // 2\n    steps += 1\nprint(steps)",
        _steps_to_one,
    ),
    "divisor_sum": NumberTemplate(
        (range(1000, 7000),),
        "What is the sum of the greatest common divisors of {0} and each of the whole numbers from 1 to {0}?",
        "from math import gcd\nprint(sum(gcd({0}, k) for k in range(1, {0} + 1)))",
        lambda n: sum(math.gcd(n, k) for k in range(1, n + 1)),
    ),
    "growth": NumberTemplate(
        (range(100, 1000), range(5, 40), range(5, 20)),
        "A colony has {0} cells. Every hour {1} percent of its cells, rounded down to whole cells, are added. "
        "How many cells are there after {2} hours?",
        "cells = {0}\nfor hour in range({2}):\n    cells += cells * {1} // 100\nprint(cells)",
        _grown,
    ),
}
NAMES = tuple(TEMPLATES)
QUESTIONS_PER_TEMPLATE = min(prod(map(len, template.ranges)) for template in TEMPLATES.values())


def prompt_id_of(number: int) -> str:
    """Return prompt id `number`, 0 <= number < len(NAMES) * QUESTIONS_PER_TEMPLATE; all ids are different."""
    index, which = divmod(number, len(NAMES))
    ranges = TEMPLATES[NAMES[which]].ranges
    # The stride is a prime that divides no template's size: its multiples reach all its numbers, not the first alone.
    index, numbers = index * _STRIDE % prod(map(len, ranges)), []
    for values in ranges:
        index, place = divmod(index, len(values))
        numbers.append(values[place])
    return " ".join([NAMES[which], *map(str, numbers)])


def parsed(prompt_id: str) -> tuple[NumberTemplate, list[int]]:
    """Return the template and the numbers of a prompt id.

    Raises:
        ValueError: there is no such question.
    """
    name, *words = str(prompt_id).split(" ")
    template = TEMPLATES.get(name)
    if template is not None and len(words) == len(template.ranges):
        pairs = zip(words, template.ranges)
        if all(word.isascii() and word.isdecimal() and len(word) < 9 and int(word) in values for word, values in pairs):
            numbers = [int(word) for word in words]
            if " ".join([name, *map(str, numbers)]) == prompt_id:
                return template, numbers
    raise ValueError(f"prompt_id = {prompt_id!r}; expected a prompt such as 'power_mod 37 20 101'")


_STRIDE = 1_000_003
assert all(math.gcd(_STRIDE, prod(map(len, template.ranges))) == 1 for template in TEMPLATES.values())
