"""What was said in a stored episode: its token stream as turns by role, without secrets where the memory hides them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from rllib_srl.replay.secrets import Span, detect, token_spans
from rllib_srl.types import Group

Decode = Callable[[Sequence[int]], str]


def turns(group: Group, g: int, decode: Decode, is_redacted: bool) -> list[tuple[str, str]]:
    """Return role ("environment" or "policy") and text of each turn of an episode.

    Secrets are looked for in the whole stream, since a turn may begin one that the next ends.

    Args:
        group: a stored one.
        g: the episode.
        decode: token ids -> text, special tokens shown.
        is_redacted: whether secrets are replaced by their kinds in brackets.
    """
    ids = group.stream(g).tolist()
    mask_T = group.loss_mask_N[group.offsets[g] : group.offsets[g + 1]].copy()
    text, starts_T, ends_T = token_spans(ids, decode)
    spans = detect(text) if is_redacted else []
    if is_redacted and not spans and (hidden := detect(decode(ids))):  # pieces hide what the whole shows
        spans = [Span(0, len(text), hidden[0].kind)]
    for span in spans:  # admission took them out of the mask; what the policy began is still its own turn
        inside = np.flatnonzero((starts_T < span.end) & (ends_T > span.start))
        mask_T[inside] |= inside[0] > 0 and mask_T[inside[0] - 1]
    cuts = (np.flatnonzero(np.diff(mask_T)) + 1).tolist()
    borders = [0, *starts_T[cuts].tolist(), len(text)]
    roles = ["policy" if mask_T[at] else "environment" for at in [0, *cuts]]
    return [(role, _between(text, a, b, spans)) for role, (a, b) in zip(roles, pairwise(borders), strict=True)]


def _between(text: str, start: int, end: int, spans: Sequence[Span]) -> str:
    """Return a part of a text; a secret is shown by its kind where it begins."""
    pieces, at = [], start
    for span in spans:
        if span.end <= at or span.start >= end:
            continue
        pieces.append(text[at : max(at, span.start)])
        pieces += [f"[{span.kind}]"] if span.start >= start else []
        at = min(span.end, end)
    return "".join([*pieces, text[at:end]])
