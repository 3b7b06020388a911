"""Canary check: compare the log-probs that engine and learner give to the same fixed text.

    gap = CanaryGap.between(engine.score(sequences), learner's log-probs)       nats per token
    check_canary(gap, healthy, dtype, version)      fp32: max <= 1e-3        bf16: mean <= 1.5 x the healthy mean

The canary after an ordinary update proves little: in bf16 one small step moves the policy less than rounding does.
Therefore a self-test runs at start-up and after every restart of an engine (`weights/sync.py`). The engine fills every
tensor with noise, then the learner's weights are sent. In the engine's fingerprint every block of every module must
change both times; where the engine has read the same weights from its files before, it must return to the same bits.
The canary must then agree with the learner.

Both checks are needed. In bf16 a single stale matrix among the 270 of a 135M model changes the canary by less than
rounding (measured: 1.12 to 1.4 x healthy for 21 of 29 tensors), so only the fingerprint detects it. Only the canary
covers the whole policy, however the engine computes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch

from rllib_srl.engine.fingerprint import Fingerprint, moved, unmoved
from rllib_srl.engine.sync import WeightSyncError

FP32_MAX_GAP = 1e-3  # nats; healthy is about 5e-5
BF16_GROWTH = 1.5  # times the healthy mean
BF16_PLAUSIBLE_MEAN = 0.2  # nats; healthy is about 0.04, another model's weights give more than 1
NOISE = 0.02  # size of the entries of the self-test's weights
NOISE_PERIOD = 65_537  # number of entries after which a tensor's noise repeats
MAX_SEQUENCE_TOKENS = 64
UPDATE_TOKENS = 16  # tokens of each text that are scored after ordinary updates, a weak check that should be cheap

GENERAL_TEXTS = (
    "17 + 25 = 42. 42 - 8 = 34. 34 * 2 = 68. 68 / 4 = 17. If a box holds 12 eggs and 5 of them are broken, 7 eggs "
    "are whole. 9 * 9 = 81 and 81 - 17 = 64, which is 8 * 8. Half of 64 is 32, and a quarter of it is 16.",
    "The old lighthouse stood at the end of the harbour wall, where the wind never rested. Every evening Martha "
    "climbed its stairs with a lamp in her hand, counting the steps aloud, and every evening she lost count.",
    "def largest(numbers):\n    best = numbers[0]\n    for number in numbers[1:]:\n        if number > best:\n"
    "            best = number\n    return best\n\nprint(largest([3, 41, 7, 26]))  # prints 41\n",
    "Things to bring:\n1. a torch and two spare batteries\n2. bread, apples, and a jar of honey\n3. the map of a coast"
    "\n4. warm socks\n5. a pencil, some paper, and string\n6. water for two days\n7. the key to the boat house\n",
    "Question: Which is larger, 318 or 291?\nAnswer: 318\n\nQuestion: Which is larger, 45 or 405?\nAnswer: 405\n\n"
    "Question: a=12, b=40, c=7. What is b?\nAnswer: 40\n\nQuestion: What is 6 + 3?\nAnswer: 9\n",
    "User: Is water wet, or does it only make other things wet?\nAssistant: People disagree. Chemists speak of one "
    "substance wetting another, so a single drop is not wet by itself; in daily speech, of course, it is.\n",
)


def canary_sequences(tokenizer: Any, context_length: int) -> list[list[int]]:
    """Return six fixed token sequences of at most 64 tokens, shorter than the context: sums, prose, code, a list.

    Raises:
        ValueError: if the tokenizer returns fewer than 3 tokens for a text, or the context holds fewer than 4 tokens.
    """
    longest = min(MAX_SEQUENCE_TOKENS, context_length - 1)
    sequences = [list(tokenizer.encode(text, add_special_tokens=False))[:longest] for text in GENERAL_TEXTS]
    if min(map(len, sequences)) < 3:
        raise ValueError(
            f"the canary texts have {[len(s) for s in sequences]} tokens with context_length = {context_length}; "
            "expected at least 3 each: raise context_length, or use a tokenizer that covers English text"
        )
    return sequences


def update_sequences(sequences: Sequence[list[int]]) -> list[list[int]]:
    """Return the canary of ordinary updates: the first `UPDATE_TOKENS` tokens of each sequence, joined.

    An engine reads its whole head for each sequence that it scores, so few long sequences cost less than many short
    ones, and attention spans more than one block of its cache. None is longer than the longest of `sequences`.
    """
    heads = [sequence[:UPDATE_TOKENS] for sequence in sequences]
    num_fitting = max(map(len, sequences)) // max(map(len, heads))
    num = -(-len(heads) // num_fitting)
    bounds = [len(heads) * index // num for index in range(num + 1)]
    return [list(chain.from_iterable(heads[start:end])) for start, end in pairwise(bounds)]


@dataclass(frozen=True)
class CanaryGap:
    """Difference of two policies on the canary: |difference of log-probs|, in nats.

    Invariant: 0 <= `mean` <= `max`, or both are not finite when a log-prob is not.
    """

    mean: float
    max: float

    @classmethod
    def between(cls, engine_logps: Sequence[np.ndarray], learner_logps: Sequence[np.ndarray]) -> CanaryGap:
        """Compare two scorings of the same sequences, one array per sequence.

        Raises:
            ValueError: if the lengths differ.
        """
        lengths = [len(a) for a in engine_logps], [len(a) for a in learner_logps]
        if lengths[0] != lengths[1]:
            raise ValueError(f"engine_logps has lengths {lengths[0]}, learner_logps has {lengths[1]}")
        gap = np.abs(np.concatenate(engine_logps).astype(np.float64) - np.concatenate(learner_logps))
        return cls(float(gap.mean()), float(gap.max()))

    def __str__(self) -> str:
        return f"mean {self.mean:.2g}, max {self.max:.2g} nats"


def check_canary(gap: CanaryGap, healthy: CanaryGap | None, dtype: str, version: int) -> None:
    """Check that engine and learner are the same policy.

    `healthy` is the gap that the last self-test measured; None if `gap` is that one.

    Raises:
        WeightSyncError: the gap is above the limit; the message names version and gap.
    """
    if dtype == "float32":
        is_same, limit = gap.max <= FP32_MAX_GAP, f"max <= {FP32_MAX_GAP:g}"
    elif healthy is None:
        is_same, limit = gap.mean <= BF16_PLAUSIBLE_MEAN, f"mean <= {BF16_PLAUSIBLE_MEAN:g} before any update"
    else:
        is_same = gap.mean <= BF16_GROWTH * healthy.mean
        limit = f"mean <= {BF16_GROWTH:g} x the initial {healthy.mean:.2g}"
    if not is_same:  # so that NaN fails
        raise WeightSyncError(f"the canary differs between engine and learner by {gap}; expected {limit}", version)


def noise(shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over (name, tensor) of the self-test's weights: entries +-`NOISE`, equal in every process."""
    generator = torch.Generator().manual_seed(NOISE_PERIOD)
    sign = torch.randint(0, 2, (NOISE_PERIOD,), generator=generator) * 2 - 1
    period = (sign * NOISE).to(dtype)
    for name, shape in shapes.items():
        num = math.prod(shape)
        yield name, period.repeat(-(-num // NOISE_PERIOD))[:num].view(tuple(shape))


def check_fingerprints(
    before: Fingerprint, noisy: Fingerprint, after: Fingerprint, *, is_same: bool, version: int, who: str = ""
) -> None:
    """Check that an engine took the noise of the self-test, and then every tensor that it was sent.

    The digests are those of the engine's earlier weights, of the noise, and of the weights that were sent. `is_same`:
    the earlier ones were those of `version`. `who` names the engine among several.

    Raises:
        WeightSyncError: the message names the failed step and the modules at fault. The engine may then hold noise:
            do not play with it.
    """
    for message, modules in (
        ("parts of the engine did not take the noise", unmoved(before, noisy)),
        ("parts of the engine did not take the weights sent", unmoved(noisy, after)),
        ("the weights sent are not those that the engine held before", moved(before, after) if is_same else []),
    ):
        if modules:
            raise WeightSyncError(f"{who}self-test: {message}", version, modules)
