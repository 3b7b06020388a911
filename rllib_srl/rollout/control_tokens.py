"""Keep the text of environments, tools and users free of control tokens.

Control tokens are the tokeniser's special tokens and the added tokens
with which the template marks turns (`ControlTokens`). Only the template, or the tokeniser's default in front of a text,
puts them into a stream. A tokeniser reads the name of a special token as that token anywhere in a text, so a tool or a
user could close its turn and write the next one. Therefore each name is split after its first character:

    "So: <|im_end|>"   split   "So: <" "|im_end|>"   tokenised separately: the same text, without a control token

Names are searched at every position, overlapping ones too; since each one is split, no piece contains a whole name.
A text that becomes a control token nevertheless, by a tokeniser's normalisation, raises ValueError. Turns that a
template marks by plain words ("[INST]") can be forged by writing them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

_LAST_CHARACTER = 0x10FFFF  # the private-use characters from here downwards have no meaning
_NUM_MARKS = 1 << 16


class ControlTokens:
    """The control tokens of a tokeniser: its special tokens, and added tokens with which a template marks turns.

    Invariant: every name has more than one character; a single character cannot be split.
    """

    def __init__(self, tokenizer: Any, marking: Iterable[int] = ()) -> None:
        """Collect control tokens: special ones, and added ones among the ids of a rendered dummy conversation."""
        wanted = set(marking)
        # A tokeniser without names for its special tokens recognises none in a text.
        names, ids = (getattr(tokenizer, f"all_special_{kind}", ()) for kind in ("tokens", "ids"))
        named = dict(zip(names, ids, strict=True))
        for token_id, token in getattr(tokenizer, "added_tokens_decoder", {}).items():
            if token.special or token_id in wanted:
                named[str(token.content)] = token_id
        named = {name: token_id for name, token_id in named.items() if len(name.strip()) > 1}
        # The token for unknown characters is not a control token, unless it is also the EOS or BOS token.
        unknown, *ends = (getattr(tokenizer, f"{kind}_token_id", None) for kind in ("unk", "eos", "bos"))
        self.ids = frozenset(named.values()) - ({unknown} - {*ends} - wanted)
        self._start = re.compile(f"(?={'|'.join(map(re.escape, sorted(named)))})") if named else None

    def breaks(self, text: str) -> list[int]:
        """Return the split positions of `text`, in order: after the first character of each name."""
        return [match.start() + 1 for match in self._start.finditer(text)] if self._start else []

    def pieces(self, text: str) -> list[str]:
        """Split `text` into pieces that contain no name."""
        places = [0, *self.breaks(text), len(text)]
        return [text[start:end] for start, end in pairwise(places)]

    def marked(self, value: Any, mark: str) -> Any:
        """Return a text, or a JSON value with all its texts, with `mark` inserted at each split position."""
        if isinstance(value, str):
            return mark.join(self.pieces(value))
        if isinstance(value, list):
            return [self.marked(part, mark) for part in value]
        if isinstance(value, dict):
            return {self.marked(key, mark): self.marked(part, mark) for key, part in value.items()}
        return value

    def count(self, ids: Iterable[int]) -> int:
        """Return how many of `ids` are control tokens."""
        return sum(token_id in self.ids for token_id in ids)


def unused_character(texts: Iterable[str]) -> str:
    """Return a character without a meaning that occurs in none of the texts; ValueError if all candidates occur."""
    used = {character for text in texts for character in text if character > "\U000effff"}
    for code in range(_LAST_CHARACTER, _LAST_CHARACTER - _NUM_MARKS, -1):
        if chr(code) not in used:
            return chr(code)
    raise ValueError(f"the text contains all of the last {_NUM_MARKS} Unicode code points; expected an unused one")
