r"""Strip the markup of an answer, and take its text apart at its outer commas and brackets.

plain(r"$\text{East}$")                  "East"
is_delimited(r"$xyz$")                   True: between mathematical delimiters letters are a product
items_of(r"1 \text{ or } -2")            ["1", "-2"]
items_of("f(1, 2), 3")                   ["f(1, 2)", "3"]
bracketed(r"\left[2, 7\right)")          Bracketed("[", ")", ("2", "7"))
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_AROUND = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"))
_SPACING = (r"\!", r"\,", r"\;", r"\:", r"\left", r"\right", r"\displaystyle")
_WRAPPED = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|boxed|mbox)\s*\{(?P<inside>[^{}]*)\}")
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{(?P<inside>.*)\}", re.DOTALL)
_STYLED = re.compile(  # bold or in colour as a whole
    r"\\(?:boldsymbol|bm|mathbf|textbf|underline|(?:text)?color\s*\{[a-zA-Z]+\})\s*\{(?P<inside>.*)\}", re.DOTALL
)
_JOIN = re.compile(
    r"\s*(?:\\(?:text|textrm|mathrm|mbox)\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])"
    r"|\\(?:lor|vee|land|wedge|qquad|quad)(?![A-Za-z])|&(?![^{]*\\end))\s*",
    re.IGNORECASE,
)
_EDGES = re.compile(r"^(?:\\[,;:!]|\\(?:quad|qquad)(?![a-zA-Z])|~|\s)+|(?:\\[,;:! ]|\\(?:quad|qquad)|~|\s)+$")
_SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])\s*")
_GROUP = re.compile(r",\d{3}(?!\d)", re.ASCII)


@dataclass(frozen=True)
class Bracketed:
    """Items in one pair of brackets. Invariant: `opened` is one of ( [ { ⟨, `closed` one of ) ] } ⟩."""

    opened: str
    closed: str
    items: tuple[str, ...]


def plain(answer: str) -> str:
    r"""Return an answer without its markup: dollars, \text, \boxed, spacing, a final full stop."""
    text = answer.strip().removesuffix(".").strip()
    for left, right in _AROUND:
        if _is_around(text, left, right):
            text = text[len(left) : -len(right)].strip()
    for command in _SPACING:
        text = re.sub(re.escape(command) + ("(?![a-zA-Z])" if command[1].isalpha() else ""), "", text)
    text = _WRAPPED.sub(lambda match: match["inside"], text)
    text = text.replace("\\ ", " ").replace(r"\$", "").replace(r"\%", "%").replace("\u2212", "-").removeprefix("$")
    return text.strip().removesuffix(".").strip()


def inner(answer: str) -> str:
    r"""Return an answer without its delimiters, box, bold and final stop; fonts and spacing stay."""
    text = answer.strip()
    for _ in range(6):
        before = text
        text = _without_stop(_EDGES.sub("", text))
        for left, right in (*_AROUND, ("*", "*"), ("`", "`")):
            if _is_around(text, left, right):
                text = text[len(left) : -len(right)].strip()
        box = _BOXED.fullmatch(text) or _STYLED.fullmatch(text)
        if box and _is_balanced(box["inside"]):
            text = box["inside"].strip()
        if text == before:
            break
    return text


def is_delimited(answer: str) -> bool:
    r"""Return whether an answer stands between mathematical delimiters or in a box."""
    text = answer.strip().removesuffix(".").strip()
    box = _BOXED.fullmatch(text)
    pairs = [(left, right) for left, right in _AROUND if left != "**"]
    return (box is not None and _is_balanced(box["inside"])) or any(_is_around(text, *pair) for pair in pairs)


def items_of(text: str, splits_words: bool = True) -> list[str]:
    """Return the parts of a text between its outer commas, semicolons, "and" and "or"; empty ones are left out.

    A comma inside a number (1,234) stays if others are followed by spaces.
    """
    text = _SIZES.sub("", text)
    keeps_groups = re.search(r"[,;]\s", text) is not None or "{,}" in text
    parts, start, depth, at = [], 0, 0, 0
    while at < len(text):
        sign = text[at]
        if sign == "\\":
            if text[at + 1 : at + 2] in ("{", "}"):
                depth += 1 if text[at + 1] == "{" else -1
                at += 2
                continue
            join = _JOIN.match(text, at) if depth == 0 and splits_words else None
            if join:
                parts.append(text[start:at])
                at = start = join.end()
                continue
            at += 2
            continue
        if sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth -= 1
        elif depth <= 0 and sign in ",;" and text[at - 1 : at + 2] != "{,}":
            is_group = sign == "," and at and text[at - 1].isdigit() and _GROUP.match(text, at) and keeps_groups
            if not is_group:
                parts.append(text[start:at])
                start = at + 1
        elif depth <= 0 and splits_words and (sign.isalpha() or sign == "&"):
            join = _JOIN.match(text, at)
            if join:
                parts.append(text[start:at])
                at = start = join.end()
                continue
        at += 1
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]


def bracketed(text: str) -> Bracketed | None:
    """Return the items of a text that is one pair of brackets, None for another text."""
    text = _SIZES.sub("", text.strip()).replace(r"\lbrace", r"\{").replace(r"\rbrace", r"\}")
    text = text.replace(r"\{", "\u27ea").replace(r"\}", "\u27eb")
    text = text.replace(r"\langle", "⟨").replace(r"\rangle", "⟩")
    if len(text) < 2 or text[0] not in "([\u27ea⟨" or text[-1] not in ")]\u27eb⟩":
        return None
    depth = 0
    for at, sign in enumerate(text):
        depth += (sign in "([{\u27ea⟨") - (sign in ")]}\u27eb⟩")
        if depth == 0 and at < len(text) - 1:
            return None
    if depth:
        return None
    inside = text[1:-1].replace("\u27ea", r"\{").replace("\u27eb", r"\}")
    names = {"\u27ea": "{", "\u27eb": "}"}
    opened, closed = names.get(text[0], text[0]), names.get(text[-1], text[-1])
    if (opened == "{") != (closed == "}") or (opened == "⟨") != (closed == "⟩"):
        return None
    return Bracketed(opened, closed, tuple(items_of(inside, splits_words=opened == "{")))


def squeezed(text: str) -> str:
    """Return a text without the white space that has no meaning: "7 8" is not 78, nor is "1, 234" 1,234."""
    return re.sub(r"(?<![\w.,]) | (?!\w)|(?<=[.,]) (?!\d)", "", " ".join(text.split()))


def _is_around(text: str, left: str, right: str) -> bool:
    inside = text[len(left) : -len(right)].replace("\\$", "")
    return len(text) > len(left + right) and text.startswith(left) and text.endswith(right) and left not in inside


def _without_stop(text: str) -> str:
    return text[:-1].rstrip() if text.endswith(".") and not text.endswith("..") else text


def _is_balanced(text: str) -> bool:
    depth = 0
    for sign in text.replace(r"\{", "").replace(r"\}", ""):
        depth += (sign == "{") - (sign == "}")
        if depth < 0:
            return False
    return depth == 0
