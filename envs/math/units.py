r"""Read the unit of a quantity, and what it is worth in others of its kind.

    split_unit("35 cm^2")          ("35", Unit(1/10000, (("m", 2),)))
    split_unit("12 red apples")    ("12", Unit(1, (("apple", 1),)))
    split_unit("$4.50")            ("4.50", Unit(1, (("dollar", 1),)))
    split_unit("2x")               ("2x", None)

A unit that the table below does not know is a noun: its last word, in the singular. Words that only go on with the
sentence ("12 in total", "5 left") are not units.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from rllib_srl.envs.math.number_words import MULTIPLES

_MAX_CHARS = 100

_KINDS: dict[str, dict[str, str]] = {  # base -> worth of a unit in it -> spellings
    "m": {
        "1/1000": "mm millimeter millimetre", "1/100": "cm centimeter centimetre", "1/10": "dm decimeter decimetre",
        "1": "m meter metre", "1000": "km kilometer kilometre", "0.0254": "inch inches in", "0.3048": "ft foot feet",
        "0.9144": "yd yard", "1609.344": "mi mile",
    },
    "g": {
        "1/1000": "mg milligram", "1": "g gram gramme", "1000": "kg kilogram kilo", "1000000": "tonne",
        "453.59237": "lb pound", "28.349523125": "oz ounce",
    },
    "s": {
        "1": "s sec second", "60": "min minute", "3600": "h hr hour", "86400": "day", "604800": "week",
    },
    "year": {"1": "year yr", "1/12": "month"},
    "l": {"1/1000": "ml mL milliliter millilitre", "1/100": "cl centiliter", "1/10": "dl", "1": "l L liter litre"},
    "dollar": {"1": "dollar USD buck", "1/100": "cent ¢"},
    "euro": {"1": "euro EUR €"},
    "sterling": {"1": "GBP £"},
    "degree": {"1": "degree deg °"},
    "celsius": {"1": "°C celsius"},
    "fahrenheit": {"1": "°F fahrenheit"},
    "percent": {"1": "percent"},
    "J": {"1": "J joule", "1000": "kJ kilojoule"}, "N": {"1": "N newton"}, "W": {"1": "W watt", "1000": "kW kilowatt"},
    "V": {"1": "V volt"}, "A": {"1": "ampere amp"}, "Hz": {"1": "Hz hertz"}, "kelvin": {"1": "K kelvin"},
    "Pa": {"1": "Pa pascal", "1000": "kPa"},
}  # fmt: skip
_KNOWN = {
    name: (Fraction(worth), base)
    for base, worths in _KINDS.items()
    for worth, names in worths.items()
    for name in names.split()
}
KNOWN_BASES = frozenset(_KINDS)
_COMPOUND = {"mph": "mi/h", "kph": "km/h", "kmh": "km/h", "sqft": "ft^2", "sqm": "m^2", "fps": "ft/s",
             "degrees? [Cc]elsius": "celsius", "degrees? [Ff]ahrenheit": "fahrenheit"}  # fmt: skip
_CURRENCIES = {"$": "dollar", "€": "euro", "£": "sterling"}
_STOPS = frozenset((
    "in", "left", "total", "altogether", "now", "remaining", "more", "of", "is", "are", "was", "were", "and", "or",
    "because", "since", "which", "so", "for", "at", "on", "to", "by", "with", "each", "per", "long", "away", "old",
    "tall", "wide", "deep", "high", "ago", "later", "if", "when", "that", "this", "it", "he", "she", "they", "we",
    "you", "i", "as", "but", "not", "than", "then", "here", "there", "only", "exactly", "overall", "again",
    "together", "too", "also", "from", "after", "before", "have", "has", "had", "will", "would", "can", "equals",
    "equal", "looks", "seems", "may", "might", "must", "does", "did", "fails", "plus", "minus", "times", "over", "mod",
    "choose", "squared", "cubed", "factorial", "x",
))  # fmt: skip
_OPERATIONS = frozenset((
    "percent", "th", "st", "nd", "rd", "squared", "cubed", "factorial", "mod", "choose", "times", "plus", "minus",
    "over", "log", "ln", "sin", "cos", "tan", "sqrt", "pi", "root", "base",
))  # fmt: skip
_POWER_WORDS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_WORD = r"(?:°\s?[CF]?(?![a-z])|[€£¢]|[A-Za-z][A-Za-zÀ-ÿ'’-]*\.?)"
_POWERED = rf"{_WORD}(?:\s*\^\s*\{{?\s*-?[1-3]\s*\}}?|[2-3](?![\d\w]))?"
_TAIL = re.compile(rf"(?P<unit>{_POWERED}(?:\s*(?:/|\*)\s*{_POWERED}|\s+{_POWERED}){{0,5}})")
_PART = re.compile(rf"(?P<divided>/|\bper\b)|(?P<word>{_WORD})\s*(?:\^?\s*\{{?\s*(?P<power>-?[1-3])\s*\}}?)?")
_SINGLE = frozenset(["m", "g", "s", "h", "l", "L", "J", "N", "W", "V", "K", "A"])
_FUNCTION = re.compile(r"(?:sin|cos|tan|log|ln|exp|sqrt|pi)[a-z]?$")
_NUMBER_END = re.compile(r"[\d)}\]!|π]|\\(?:pi|infty)")


@dataclass(frozen=True)
class Unit:
    """A unit. Invariant: `kinds` is sorted and has no power 0."""

    worth: Fraction  # in the bases of `kinds`
    kinds: tuple[tuple[str, int], ...]  # (base or noun, its power)


def is_same_kind(one: Unit | None, other: Unit | None) -> bool:
    """Return whether two units can be compared; a missing one fits every unit, a bare degree fits °C and °F."""
    if one is None or other is None or one.kinds == other.kinds:
        return True
    degrees = ((("celsius", 1),), (("fahrenheit", 1),))
    return (("degree", 1),) in (one.kinds, other.kinds) and (one.kinds in degrees or other.kinds in degrees)


def split_unit(text: str, is_loose: bool = True) -> tuple[str, Unit | None]:
    """Return the text in front of a unit, and the unit; the whole text and None if it has none.

    Args:
        text: a quantity, without delimiters, with fonts still around its unit or not
        is_loose: one letter behind a space is a unit ("5 m"); else only inside \\text{...}, since it may be a variable
    """
    if len(text) > 10 * _MAX_CHARS:
        return text, None
    said = text.strip()
    currency = None
    match = re.match(r"([+-]?)\s*(?:\\\$|[$€£])\s*(?=[\d.(\\])", said)
    if match:
        currency = Unit(Fraction(1), ((_CURRENCIES[match[0].strip(" +-\\")], 1),))
        said = match[1] + said[match.end() :]
    said = re.sub(r"\^\s*\{?\s*\\circ\s*\}?", "°", said)
    said = re.sub(r"\\(?:text|textrm|mathrm|mbox|rm)\s*\{([^{}]*)\}", r"⟨\1⟩", said)
    said = said.replace("²", "^2").replace("³", "^3").replace("\\,", " ").replace("\\ ", " ").replace("~", " ")
    said = re.sub(r"(?<=[\s⟨])an?\s+(?=[a-z])", "per ", said)  # "$18 an hour"
    flat = re.sub("[⟨⟩]", " ", said)
    at = _start_of_unit(flat, is_loose, said.find("⟨"))
    if at is None:
        return (said if currency else text).replace("⟨", " ").replace("⟩", " ").strip() if currency else text, currency
    body, tail = flat[:at].strip(), flat[at:].strip()
    unit = unit_of(tail)
    if unit is None:
        return text, currency
    return body, unit if currency is None else currency


def _start_of_unit(text: str, takes_letters: bool, wrapped: int) -> int | None:
    r"""Return where the unit at the end of a quantity begins; `wrapped` is where \text{...} does, -1 for nowhere."""
    for match in re.finditer(r"(?<=[\d)}\]!%|\w])\s*(?=[A-Za-z°€£¢])|(?<=[\d)}])(?=°)", text):
        at = match.end()
        before, gap = text[: match.start()], match[0]
        if not before or not (_NUMBER_END.search(before[-1]) or re.search(r"\\(?:pi|infty)$", before)):
            continue
        tail = text[at:].strip()
        if len(tail) > _MAX_CHARS or not _TAIL.fullmatch(tail.rstrip(".")):
            continue
        first = re.match(r"[A-Za-z]+", tail)
        if first and not _is_name(first[0], bool(gap), takes_letters, 0 <= wrapped < at):
            continue
        return at
    return None


def _is_name(word: str, is_apart: bool, takes_letters: bool, is_wrapped: bool) -> bool:
    """Return whether a word behind a number names a unit, and is neither a factor nor a variable."""
    if word.casefold() in MULTIPLES | _OPERATIONS or _FUNCTION.match(word):
        return False
    if is_wrapped:
        return True
    if len(word) == 1:
        return word in _SINGLE and takes_letters and is_apart
    if _known(word) or word in _COMPOUND or word.casefold() in _POWER_WORDS:
        return True
    return (
        is_apart and word.islower() and bool(re.search("[aeiouy]", word)) and len(word) >= (3 if takes_letters else 4)
    )


def unit_of(tail: str) -> Unit | None:
    """Return the unit that a text states, None for none."""
    said = tail.strip().rstrip(".,;:!")
    for name, meaning in _COMPOUND.items():
        said = re.sub(rf"\b{name}\b", meaning, said)
    said = re.sub(r"(?:^|(?<=square )|(?<=cubic )|(?<=sq )|(?<=cu ))in(?=\s*(?:\^|[23]\b|/|$))", "inch", said)
    kinds: dict[str, int] = {}
    worth, sign, raised = Fraction(1), 1, 0
    noun: str | None = None
    words = list(_PART.finditer(said))
    for number, part in enumerate(words):
        if part["divided"]:
            if noun:
                kinds[noun] = kinds.get(noun, 0) + sign
                noun = None
            sign = -1
            continue
        word = part["word"].rstrip(".").replace(" ", "")
        lower = word.casefold()
        if lower in _POWER_WORDS:
            raised = _POWER_WORDS[lower]
            continue
        if lower in ("squared", "cubed") and kinds:
            last = list(kinds)[-1]
            kinds[last] *= 2 if lower == "squared" else 3
            worth = worth ** (2 if lower == "squared" else 3)
            continue
        if len(lower) == 1 and number and not _known(word):
            return None  # a variable
        if lower in _STOPS:
            if number == 0:
                return None
            break
        power = sign * (int(part["power"]) if part["power"] else raised or 1)
        raised = 0
        known = _known(word)
        if known:
            noun = None
            worth *= known[0] ** power
            kinds[known[1]] = kinds.get(known[1], 0) + power
        else:
            noun = _singular(lower)
    if noun:
        kinds[noun] = kinds.get(noun, 0) + sign
    kept = tuple(sorted((base, power) for base, power in kinds.items() if power))
    return Unit(worth, kept) if kept else None


def _known(word: str) -> tuple[Fraction, str] | None:
    for spelling in (word, word.casefold(), word.casefold().removesuffix("s")):
        if spelling in _KNOWN:
            return _KNOWN[spelling]
    return None


def _singular(noun: str) -> str:
    for ending, put in (("ies", "y"), ("ches", "ch"), ("shes", "sh"), ("xes", "x"), ("sses", "ss")):
        if noun.endswith(ending) and len(noun) > len(ending) + 1:
            return noun.removesuffix(ending) + put
    irregular = {"people": "person", "children": "child", "men": "man", "women": "woman", "mice": "mouse"}
    return irregular.get(noun, noun.removesuffix("s") if not noun.endswith("ss") else noun)
