r"""Name what is uncertain about a right answer: other readings that its author may have meant.

doubt_about("1,234")     Doubt(3, "a number with a thousands separator; or the list 1, 234")
doubt_about("(1, 2)")    Doubt(2, "a tuple or an interval: both need these brackets")
doubt_about("21")        None
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rllib_srl.envs.math.answer_text import bracketed, inner, is_delimited, plain
from rllib_srl.envs.math.classes import class_of
from rllib_srl.envs.math.quantity import quantity_of
from rllib_srl.envs.math.units import KNOWN_BASES

_MOST_WORDS = 4  # of an answer in words that a policy can be expected to repeat


@dataclass(frozen=True)
class Doubt:
    """A doubt. Invariant: `weight` is at least 1, more for worse doubts."""

    weight: int
    reason: str


def doubt_about(gold: str, kind: str = "auto") -> Doubt | None:
    """Return the strongest doubt about a right answer, None for a plain one."""
    text, name = plain(gold), class_of(gold, kind)
    found = [Doubt(weight, reason) for weight, reason, holds in _doubts(gold, text, name, kind) if holds]
    return max(found, key=lambda doubt: doubt.weight, default=None)


def _doubts(gold: str, text: str, name: str, kind: str) -> list[tuple[int, str, bool]]:
    has_digits = re.search(r"\d", text) is not None
    number = quantity_of(inner(gold), is_gold=True) if name == "number" else None
    held = bracketed(inner(gold))
    nouns = (
        number is not None and number.unit is not None and not {base for base, _ in number.unit.kinds} <= KNOWN_BASES
    )
    return [
        (6, "a formula that only math-verify can compare", name == "formula"),
        (5, "words, although it has digits or signs: compared as a whole", name == "word" and kind == "auto"
         and (has_digits or re.search(r"[\\=^_{}+*<>|]", text) is not None)),
        (5, f"a sentence of {len(text.split())} words, which an answer must repeat", name == "word"
         and len(text.split()) > _MOST_WORDS),
        (4, "letters without a vowel, read as a word; between dollars they are a product", name == "word"
         and re.fullmatch(r"[B-DF-HJ-NP-TV-Zb-df-hj-np-tv-z]{2,}", text) is not None),
        (3, f"a number with a thousands separator; or the list {', '.join(re.split('[, ]', text))}", number is not None
         and re.fullmatch(r"\d{1,3}([, ])\d{3}(?:\1\d{3})*", text) is not None),
        (3, "a letter, read as a choice; between dollars it is a variable", name == "choice" and kind == "auto"
         and not is_delimited(gold)),
        (3, "a product of letters, in any order", name == "product"),
        (3, "a time of day; or a ratio", name == "time" and re.fullmatch(r"\d+:\d+", text) is not None),
        (2, "a tuple or an interval: both need these brackets", name == "bracket" and held is not None
         and len(held.items) == 2 and (held.opened, held.closed) == ("(", ")")),
        (2, "a number with a noun as its unit: an answer may leave it out, but not name another", nouns),
        (2, "a percentage, which an answer may also state as a fraction", number is not None and number.is_percent),
        (1, "a list, in any order", name == "list"),
    ]  # fmt: skip
