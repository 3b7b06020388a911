"""An engine without a model: it writes known turns, one byte per step.

    GoldEngine(Bytes(), {"compare/17, 93, 40": [" 93\\n"]})       request "compare/17, 93, 40/0/0" -> " 93\\n"

A request id is "<group id>/<index>/<turn>", as in the player.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rllib_srl.engine.protocol import Sampling, Turn


class Bytes:
    """A tokeniser of UTF-8 bytes; id 256 ends a sequence."""

    eos_token_id = 256
    eos_token = "<eos>"
    name_or_path = "bytes"

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """Return the ids of a text."""
        return {"input_ids": list(text.encode())}


class GoldEngine:
    """Writes the known turns of each group, in order.

    Invariant: a request is running from `submit` until its turn is returned or aborted.
    """

    def __init__(self, tokenizer: Bytes, turns: Mapping[str, Sequence[str]], context_length: int = 1 << 20) -> None:
        """Store the turns of each group id."""
        self.tokenizer, self.turns, self.context_length = tokenizer, turns, context_length
        self.version, self.is_reproducible = 1, False
        self._running: dict[str, list[Any]] = {}  # request id -> ids, how many are written

    def submit(self, request_id: str, token_ids: Sequence[int], sampling: Sampling) -> None:
        """Queue one turn."""
        group_id, _, turn = request_id.rsplit("/", 2)
        text = self.turns[group_id][int(turn)]
        self._running[request_id] = [self.tokenizer(text)["input_ids"], 0, text]

    def step(self) -> list[Turn]:
        """Write a byte of every turn; return those that ended."""
        ended = []
        for request_id, running in list(self._running.items()):
            running[1] += 1
            ids, num_written, text = running
            if num_written >= len(ids):
                del self._running[request_id]
                tokens = np.array(ids, np.int32)
                ended.append(Turn(request_id, tokens, np.full(len(ids), -0.5, np.float32), text, "stop", 1, 1))
        return ended

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests."""
        for request_id in request_ids:
            self._running.pop(request_id, None)
