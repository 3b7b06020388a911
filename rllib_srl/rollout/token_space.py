"""The space of token sequences that runners report to RLlib."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.env import INPUT_ENV_SINGLE_SPACES, INPUT_ENV_SPACES


class TokenSpace(gym.Space[np.ndarray]):
    """Token sequences of any length over a vocabulary.

    Invariant: two spaces are equal when their vocabularies have the same size.
    """

    def __init__(self, vocab_size: int, seed: int | None = None) -> None:
        """Create the space of sequences of ids in [0, vocab_size)."""
        super().__init__(shape=None, dtype=np.int32, seed=seed)
        self.vocab_size = vocab_size

    def sample(self, mask: Any = None, probability: Any = None) -> np.ndarray:
        """Return a random sequence of 1 to 8 tokens."""
        return self.np_random.integers(0, self.vocab_size, self.np_random.integers(1, 9)).astype(np.int32)

    def contains(self, x: Any) -> bool:
        """Return whether x is a one-dimensional array of ids of the vocabulary."""
        array = np.asarray(x)
        is_ids = array.ndim == 1 and (array.size == 0 or np.issubdtype(array.dtype, np.integer))
        return bool(is_ids and ((array >= 0) & (array < self.vocab_size)).all())

    @property
    def is_np_flattenable(self) -> bool:
        """Return False: sequences of unequal length cannot be flattened."""
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenSpace) and other.vocab_size == self.vocab_size

    def __repr__(self) -> str:
        return f"TokenSpace({self.vocab_size})"


def token_spaces(vocab_size: int) -> dict[str, Any]:
    """Return the token spaces of a model under every key that RLlib uses."""
    space = TokenSpace(vocab_size)
    return dict.fromkeys((INPUT_ENV_SPACES, INPUT_ENV_SINGLE_SPACES, DEFAULT_MODULE_ID), (space, space))
