"""Check on the real weights that prefix sharing is exact: a trie and padding must give the same log-probs."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from rllib_srl.learner.scoring import Scorer

logger = logging.getLogger(__name__)

SHARING_TOLERANCE = 1e-3  # largest allowed |log-prob difference| of trie and padded layout in fp32, nats
CHECK_TOKENS = 192  # the check's longest stream has this many tokens beyond the sliding window


def is_sharing_exact(scorer: Scorer, model: Any, max_tokens: int) -> bool:
    """Return whether trie and padded log-probs agree; log a warning if not.

    Args:
        scorer: forward passes of the model.
        model: the Hugging Face model.
        max_tokens: maximum tokens of an episode.
    """
    config = model.config.get_text_config()
    streams = check_streams(int(config.vocab_size), _window(config), max_tokens)
    try:
        shared = scorer.score(streams, share_prefixes=True, is_exact=True)
        padded = [scorer.score([stream], is_exact=True)[0] for stream in streams]
        gap = max(float(np.abs(a - b).max()) for a, b in zip(shared, padded, strict=True))
        reason = f"its log-probs differ by {gap:.3g} nats"
    except (TypeError, ValueError, RuntimeError) as error:  # the architecture does not support a trie
        gap, reason = float("inf"), f"{type(error).__name__}: {error}"
    if gap <= SHARING_TOLERANCE:
        return True
    logger.warning(
        "prefix sharing is off for %s: %s; training goes on with padding, slower and correct",
        type(model).__name__,
        reason,
    )
    return False


def check_streams(vocab_size: int, window: int | None, longest: int) -> list[list[int]]:
    """Return random token streams that exercise every kind of rectangle of a trie and exceed the sliding window.

    Args:
        vocab_size: token ids are in [0, vocab_size).
        window: window of the widest sliding layer, tokens; None if there is none.
        longest: maximum tokens of an episode, and of a stream.
    """
    length = min(longest, CHECK_TOKENS + (window or 0))
    ids = np.random.default_rng(0).integers(0, vocab_size, (5, length))
    fork, early = max(1, 5 * length // 8), max(1, length // 4)
    branches = [ids[0], np.concatenate([ids[0][:fork], ids[1][: max(1, length // 6)]])]
    branches += [np.concatenate([ids[0][:fork], ids[1][:1], ids[2][:2]]), ids[4][: max(2, length // 8)]]
    branches.append(np.concatenate([ids[0][:early], ids[3][: max(1, length // 8)]]))
    return [branch.tolist() for branch in branches]


def _window(config: Any) -> int | None:
    is_sliding = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    return int(config.sliding_window) if is_sliding and config.sliding_window else None
