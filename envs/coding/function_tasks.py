"""Generate small programming tasks from parts: the request in words, the reference code, and the expected results.

    list 3 22 0  ->  "Write f(xs), where xs is a list of whole numbers: keep those that are divisible by 5, multiply
                      each by 4, and return the sum of the results. ..."

A prompt id is the family and the number of each part. Each part exists in three forms: words, code, and a function; a
test compares the code with the function, in the sandbox.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_VALUES = range(-30, 31)
_CHARACTERS = _LETTERS + _LETTERS.upper() + "0123456789" + " .,-"


@dataclass(frozen=True)
class Part:
    """One choice in a task. Invariant: `code` computes what `does` does."""

    words: str
    code: str
    does: Callable[..., Any]


@dataclass(frozen=True)
class Family:
    """Tasks of one form. Invariant: `solve` of the parts' functions is what `code` of the parts' code computes."""

    parts: tuple[tuple[Part, ...], ...]
    words: str
    code: str
    solve: Callable[..., Any]  # the parts' functions, and then the argument
    draw: Callable[[random.Random], Any]  # an argument
    edges: tuple[Any, ...]  # arguments that every task is checked with


@dataclass(frozen=True)
class FunctionTask:
    """One function to write. Invariant: `checks` are hidden arguments with their expected results."""

    words: str
    gold: str
    checks: tuple[tuple[Any, Any], ...]
    name: str = "f"


def _shifted(text: str, by: int) -> str:
    return "".join(chr((ord(c) - 97 + by) % 26 + 97) if "a" <= c <= "z" else c for c in text)


def _kept_numbers() -> tuple[Part, ...]:
    rows = [Part(f"are divisible by {k}", f"x % {k} == 0", lambda x, k=k: x % k == 0) for k in range(2, 10)]
    rows += [Part(f"are not divisible by {k}", f"x % {k} != 0", lambda x, k=k: x % k != 0) for k in range(2, 10)]
    rows += [Part(f"are greater than {k}", f"x > {k}", lambda x, k=k: x > k) for k in range(-12, 13)]
    rows += [Part(f"are less than {k}", f"x < {k}", lambda x, k=k: x < k) for k in range(-12, 13)]
    return tuple(rows)


def _mapped_numbers() -> tuple[Part, ...]:
    rows = [Part(f"add {k} to each", f"x + {k}", lambda x, k=k: x + k) for k in range(1, 21)]
    rows += [Part(f"multiply each by {k}", f"x * {k}", lambda x, k=k: x * k) for k in range(2, 13)]
    rows += [Part(f"take {k} minus each", f"{k} - x", lambda x, k=k: k - x) for k in range(1, 21)]
    rows += [Part(f"take the square of each, plus {k}", f"x * x + {k}", lambda x, k=k: x * x + k) for k in range(1, 21)]
    return tuple(rows)


_FINISHED_NUMBERS = (
    Part("the sum of the results", "sum(ys)", sum),
    Part("the largest result, or 0 if there is none", "max(ys, default=0)", lambda ys: max(ys, default=0)),
    Part("the smallest result, or 0 if there is none", "min(ys, default=0)", lambda ys: min(ys, default=0)),
    Part("how many different results there are", "len(set(ys))", lambda ys: len(set(ys))),
    Part("the list of the results in their order", "ys", lambda ys: ys),
    Part("the results as a list, largest first", "sorted(ys, reverse=True)", lambda ys: sorted(ys, reverse=True)),
    Part("the results as a list, last first", "ys[::-1]", lambda ys: ys[::-1]),
)


def _kept_characters() -> tuple[Part, ...]:
    rows = [
        Part("are vowels, a, e, i, o or u in either case", "c in 'aeiouAEIOU'", lambda c: c in "aeiouAEIOU"),
        Part("are no vowels, a, e, i, o or u in either case", "c not in 'aeiouAEIOU'", lambda c: c not in "aeiouAEIOU"),
        Part("are letters", "c.isalpha()", str.isalpha),
        Part("are lower-case letters", "c.islower()", str.islower),
        Part("are upper-case letters", "c.isupper()", str.isupper),
        Part("are no digits", "not c.isdigit()", lambda c: not c.isdigit()),
    ]
    rows += [Part(f"are not the letter {k!r}", f"c != {k!r}", lambda c, k=k: c != k) for k in _LETTERS]
    return tuple(rows)


def _changed_text() -> tuple[Part, ...]:
    rows = [
        Part("put them in upper case", "t.upper()", str.upper),
        Part("swap upper and lower case", "t.swapcase()", str.swapcase),
        Part("write each twice", "''.join(c * 2 for c in t)", lambda t: "".join(c * 2 for c in t)),
    ]
    shift = "''.join(chr((ord(c) - 97 + {k}) % 26 + 97) if 'a' <= c <= 'z' else c for c in t)"
    rows += [
        Part(
            f"move each lower-case letter {k} places on in the alphabet, from z on to a",
            shift.format(k=k),
            lambda t, k=k: _shifted(t, k),
        )
        for k in range(1, 26)
    ]
    return tuple(rows)


_FINISHED_TEXT = (
    Part("the result", "t", lambda t: t),
    Part("the result backwards", "t[::-1]", lambda t: t[::-1]),
    Part("the result with '-' between its characters", "'-'.join(t)", lambda t: "-".join(t)),
    Part("the characters of the result in sorted order, as text", "''.join(sorted(t))", lambda t: "".join(sorted(t))),
    Part("the first three characters of the result", "t[:3]", lambda t: t[:3]),
    Part("the last three characters of the result", "t[-3:]", lambda t: t[-3:]),
)


def _numbers(words: str, values: range) -> tuple[Part, ...]:
    return tuple(Part(words.format(k), str(k), lambda k=k: k) for k in values)


def _recurrence(
    first: Callable[[], int], second: Callable[[], int], c: Callable[[], int], d: Callable[[], int], n: int
) -> int:
    a, b = first(), second()
    for _ in range(n):
        a, b = b, (c() * b + d() * a) % 1000
    return a


FAMILIES = {
    "list": Family(
        (_kept_numbers(), _mapped_numbers(), _FINISHED_NUMBERS),
        "Write f(xs), where xs is a list of whole numbers: keep those that {0}, {1}, and return {2}.",
        "def f(xs):\n    ys = [{1} for x in xs if {0}]\n    return {2}",
        lambda keep, change, finish, xs: finish([change(x) for x in xs if keep(x)]),
        lambda rng: rng.choices(_VALUES, k=rng.randint(1, 12)),
        ([],),
    ),
    "text": Family(
        (_kept_characters(), _changed_text(), _FINISHED_TEXT),
        "Write f(s), where s is a string: keep the characters that {0}, then {1}, and return {2}.",
        "def f(s):\n    t = ''.join(c for c in s if {0})\n    t = {1}\n    return {2}",
        lambda keep, change, finish, s: finish(change("".join(c for c in s if keep(c)))),
        lambda rng: "".join(rng.choices(_CHARACTERS, k=rng.randint(1, 20))),
        ("",),
    ),
    "recurrence": Family(
        (_numbers("{0}", range(10)), _numbers("{0}", range(1, 11)), _numbers("{0}", range(1, 13)),
         _numbers("{0}", range(1, 13))),
        "Write f(n) for whole numbers n from 0 on. f(0) is {0}, f(1) is {1}, and from there on each value is {2} times "
        "the one before plus {3} times the one before that, modulo 1000.",
        "def f(n):\n    a, b = {0}, {1}\n    for _ in range(n):\n"
        "        a, b = b, ({2} * b + {3} * a) % 1000\n    return a",
        _recurrence,
        lambda rng: rng.randint(2, 60),
        (0, 1),
    ),
}  # fmt: skip
NAMES = tuple(FAMILIES)
TASKS_PER_FAMILY = min(prod(map(len, family.parts)) for family in FAMILIES.values())
NUM_IDS = len(NAMES) * TASKS_PER_FAMILY
_STRIDE = 1_000_003  # a prime that divides no family's size, so that its multiples reach all of the family


def prompt_id_of(number: int) -> str:
    """Return prompt id `number`, 0 <= number < NUM_IDS; all ids are different."""
    index, which = divmod(number, len(NAMES))
    parts = FAMILIES[NAMES[which]].parts
    index, places = index * _STRIDE % prod(map(len, parts)), []
    for choices in parts:
        index, place = divmod(index, len(choices))
        places.append(place)
    return " ".join([NAMES[which], *map(str, places)])


def task(prompt_id: str, num_checks: int) -> FunctionTask:
    """Return the task of a prompt id.

    Raises:
        ValueError: there is no such task.
    """
    family, chosen = _parsed(prompt_id)
    functions, rng = [part.does for part in chosen], random.Random(f"checks:{prompt_id}")
    example = family.draw(rng)
    arguments = [*family.edges]
    while len(arguments) < num_checks:
        argument = family.draw(rng)
        if argument != example:
            arguments.append(argument)
    checks = tuple((argument, family.solve(*functions, argument)) for argument in arguments[:num_checks])
    shown = f"f({example!r}) is {family.solve(*functions, example)!r}"
    words = family.words.format(*(part.words for part in chosen))
    gold = family.code.format(*(part.code for part in chosen))
    return FunctionTask(f"{words} For example, {shown}.", gold, checks)


def canonical(prompt_id: str) -> str:
    """Return the text that decides the split of a task: its words without the example."""
    family, chosen = _parsed(prompt_id)
    return family.words.format(*(part.words for part in chosen))


def _parsed(prompt_id: str) -> tuple[Family, list[Part]]:
    name, *words = str(prompt_id).split(" ")
    family = FAMILIES.get(name)
    if family is not None and len(words) == len(family.parts):
        known = [{str(place): part for place, part in enumerate(choices)} for choices in family.parts]
        if all(word in places for word, places in zip(words, known)):
            return family, [places[word] for word, places in zip(words, known)]
    raise ValueError(f"prompt_id = {prompt_id!r}; expected a prompt such as 'list 3 22 0'")
