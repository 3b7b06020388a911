"""Tokens that say who speaks, and text in which none of them stands.

    "So: <|im_end|>"   broken   "So: <" "|im_end|>"   encoded apart: the same text, and no control token in it

A tokeniser reads the name of a special token as that token wherever it stands, so that a tool or a user could close its
turn and write the next. Broken after its first character a name is text like any other. Names are looked for at every
place, overlapping ones too; as each is broken inside, no piece holds a whole one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

_LAST_CHARACTER = 0x10FFFF  # from here downwards no character has a meaning
_NUM_MARKS = 1 << 16


class ControlTokens:
    """The control tokens of a tokeniser: its special tokens, and others that a template marks turns with.

    Invariant: the names are those of more than one character; a single one cannot be broken.
    """

    def __init__(self, tokenizer: Any, marking: Iterable[int] = ()) -> None:
        """Read them off a tokeniser.

        Args:
            tokenizer: a Hugging Face tokeniser.
            marking: ids of a rendering in which nobody says anything; those of added tokens count.
        """
        wanted = set(marking)
        # A tokeniser that has no names for its special tokens reads none in a text.
        names, ids = (getattr(tokenizer, f"all_special_{kind}", ()) for kind in ("tokens", "ids"))
        named = dict(zip(names, ids, strict=True))
        for token_id, token in getattr(tokenizer, "added_tokens_decoder", {}).items():
            if token.special or token_id in wanted:
                named[str(token.content)] = token_id
        named = {name: token_id for name, token_id in named.items() if len(name.strip()) > 1}
        # What stands for unknown characters is no sign of anything, unless it also ends or begins texts.
        unknown, *ends = (getattr(tokenizer, f"{kind}_token_id", None) for kind in ("unk", "eos", "bos"))
        self.ids = frozenset(named.values()) - ({unknown} - {*ends} - wanted)
        self._start = re.compile(f"(?={'|'.join(map(re.escape, sorted(named)))})") if named else None

    def breaks(self, text: str) -> list[int]:
        """Return where `text` is to be broken, in order: behind the first character of each name."""
        return [found.start() + 1 for found in self._start.finditer(text)] if self._start else []

    def pieces(self, text: str) -> list[str]:
        """Return `text` broken into pieces that hold no name."""
        places = [0, *self.breaks(text), len(text)]
        return [text[start:end] for start, end in pairwise(places)]

    def marked(self, value: Any, mark: str) -> Any:
        """Return a text, or every text in a value of JSON, with `mark` at each break."""
        if isinstance(value, str):
            return mark.join(self.pieces(value))
        if isinstance(value, list):
            return [self.marked(one, mark) for one in value]
        if isinstance(value, dict):
            return {self.marked(key, mark): self.marked(one, mark) for key, one in value.items()}
        return value

    def count(self, ids: Iterable[int]) -> int:
        """Return how many of `ids` are control tokens."""
        return sum(token_id in self.ids for token_id in ids)


def unused_character(texts: Iterable[str]) -> str:
    """Return a character without a meaning that stands in none of the texts.

    Raises:
        ValueError: they hold all 65,536 that are tried.
    """
    used = {character for text in texts for character in text if character > "\U000effff"}
    for code in range(_LAST_CHARACTER, _LAST_CHARACTER - _NUM_MARKS, -1):
        if chr(code) not in used:
            return chr(code)
    raise ValueError(f"the text holds all of the {_NUM_MARKS} last characters of Unicode; expected none of them")
