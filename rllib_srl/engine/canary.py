"""Canary check: compare the log-probs that engine and learner give to the same fixed text.

    gap = CanaryGap.between(engine.score(sequences), learner's log-probs)       nats per token
    check_canary(gap, healthy, dtype, version)      fp32: max <= 1e-3        bf16: mean <= 1.5 x the healthy mean

The canary after an ordinary update proves little: in bf16 one small step moves the policy less than rounding does.
Therefore `self_test` runs at start-up and after every restart of an engine. It sends weights in which every tensor is
perturbed, then the true weights. The canary must follow the perturbation; in the engine's fingerprint every block of
every module must change, and return to the same bits with the true weights.

Both checks are needed. In bf16 a single stale matrix among the 270 of a 135M model changes the canary by less than
rounding (measured: 1.12 to 1.4 x healthy for 21 of 29 tensors), so only the fingerprint detects it. Only the canary
covers the whole policy, however the engine computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
SELF_TEST_MOVE = 10.0  # times the healthy gap, at least, or the self-test shows nothing
SELF_TEST_SCALES = (0.05, 0.1, 0.2)  # the first that moves the canary enough; more noise also means more rounding
SELF_TEST_BF16_GROWTH = 3.0  # times the healthy mean: perturbed weights round worse (measured: 1.16 to 1.4)
MAX_SEQUENCE_TOKENS = 64
UPDATE_TOKENS = 16  # of each text: scored after ordinary updates, which prove little and should cost little

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

    Args:
        gap: the current gap between engine and learner.
        healthy: the gap at version 0, whose weights the engine read from disk itself; None if `gap` is that one.
        dtype: the dtype the engine computes in.
        version: of the weights under test.

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


def perturbed(
    named_tensors: Iterable[tuple[str, torch.Tensor]], scale: float, seed: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the self-test's weights: every tensor perturbed by its own seeded noise, the originals unchanged.

    Each number x becomes x (1 + scale s) with s = +-1 at random, which keeps outliers where they are. A zero, of which
    whole rows may exist (tokens never seen), becomes scale s times the tensor's root mean square, or 0.02 if that is 0.

    Args:
        named_tensors: as from `named_parameters()`.
        scale: relative size of the perturbation.
        seed: equal seeds give equal weights, in every process and on every device.
    """
    for index, (name, tensor) in enumerate(named_tensors):
        if not tensor.is_floating_point():
            yield name, tensor
            continue
        move = signs(tensor, seed, index).mul_(scale)
        values = tensor.detach()
        typical = values.square().mean().sqrt().item() or 0.02
        yield name, torch.where(values == 0, move * typical, values * (1 + move))


def signs(tensor: torch.Tensor, seed: int, index: int) -> torch.Tensor:
    """Return +-1 at random, equal on every device, in the shape and dtype and on the device of a tensor.

    Args:
        tensor: gives shape, dtype and device.
        seed: of all tensors.
        index: of this tensor among them.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
    sign = torch.randint(0, 2, tensor.shape, generator=generator, dtype=torch.int8).mul_(2).sub_(1)
    return sign.to(device=tensor.device, dtype=tensor.dtype)


@dataclass(frozen=True)
class SelfTestReport:
    """Measurements of a passed self-test.

    Invariant: `move.mean` is at least 10 times `healthy.mean`.
    """

    healthy: CanaryGap  # engine against learner at version 0
    healthy_update: CanaryGap  # the same before this test, over the canary of updates
    perturbed: CanaryGap  # engine against learner, both with perturbed weights
    move: CanaryGap  # the engine with perturbed weights against itself with the true weights
    restored: CanaryGap  # engine against learner, after the true weights were loaded again
    scale: float  # of the perturbation


def self_test(
    score_engine: Callable[[], Sequence[np.ndarray]],
    score_learner: Callable[[float], Sequence[np.ndarray]],
    load: Callable[[float], None],
    fingerprint: Callable[[], Fingerprint],
    *,
    dtype: str,
    version: int,
    healthy: CanaryGap | None = None,
) -> SelfTestReport:
    """Check that the engine computes with every tensor that it receives.

    `score_learner` and `load` take the scale of `perturbed`; 0 means the true weights.

    Args:
        score_engine: scores the canary with the engine's current weights.
        score_learner: scores the canary with the learner's weights at a scale; leaves the learner unchanged.
        load: sends the learner's weights at a scale to the engine and waits until they are loaded.
        fingerprint: `Engine.fingerprint` of the engine.
        dtype: the dtype the engine computes in.
        version: of the true weights, which the engine must hold at the start.
        healthy: the gap at version 0; None at start-up, when it is measured here.

    Raises:
        WeightSyncError: the message names the failed step and the modules at fault. The engine may then hold
            perturbed weights: do not play with it.
    """
    (report,) = self_tests(
        lambda: {0: score_engine()},
        score_learner,
        load,
        lambda: {0: fingerprint()},
        dtype=dtype,
        version=version,
        healthy=healthy,
    ).values()
    return report


def self_tests(
    score_engines: Callable[[], Mapping[int, Sequence[np.ndarray]]],
    score_learner: Callable[[float], Sequence[np.ndarray]],
    load: Callable[[float], None],
    fingerprints: Callable[[], Mapping[int, Fingerprint]],
    *,
    dtype: str,
    version: int,
    healthy: CanaryGap | None = None,
    num_of_updates: int | None = None,
) -> dict[int, SelfTestReport]:
    """Run `self_test` on several engines together, so that each set of weights is sent once.

    Args:
        score_engines: the scores of all engines, by id.
        score_learner: as for `self_test`.
        load: sends the learner's weights at a scale to all engines.
        fingerprints: the fingerprints of all engines, by id.
        dtype: as for `self_test`.
        version: as for `self_test`.
        healthy: the gap at version 0; None: that of the first engine, measured here.
        num_of_updates: how many of the first sequences are the canary of updates; None: all.

    Raises:
        WeightSyncError: as for `self_test`; with several engines the message names one that failed.
    """
    before, learner, prints = score_engines(), score_learner(0.0), fingerprints()
    starts = {i: CanaryGap.between(before[i], learner) for i in before}
    updates = {i: CanaryGap.between(before[i][:num_of_updates], learner[:num_of_updates]) for i in before}

    for start in starts.values():
        check_canary(start, healthy, dtype, version)
        healthy = healthy or start
    if healthy is None:
        return {}

    for scale in SELF_TEST_SCALES:
        load(scale)
        after = score_engines()
        moves = {i: CanaryGap.between(after[i], before[i]) for i in before}
        if all(move.mean >= SELF_TEST_MOVE * healthy.mean for move in moves.values()):
            break
    prints_after, learner_after = fingerprints(), score_learner(scale)
    follows = {i: CanaryGap.between(after[i], learner_after) for i in before}
    for i, move in moves.items():
        if stale := unmoved(prints[i], prints_after[i]):
            raise _failed(before, i, "parts of the engine kept their old weights", version, stale)
        if fault := _fault(move, follows[i], healthy, dtype, scale):
            raise _failed(before, i, fault, version)

    load(0.0)
    prints_restored = fingerprints()
    for i in before:
        if misplaced := moved(prints[i], prints_restored[i]):
            raise _failed(before, i, "the original weights were not restored exactly", version, misplaced)
    ends = {i: CanaryGap.between(scored, learner) for i, scored in score_engines().items()}
    for end in ends.values():
        check_canary(end, healthy, dtype, version)
    return {i: SelfTestReport(healthy, updates[i], follows[i], moves[i], ends[i], scale) for i in before}


def _fault(move: CanaryGap, follow: CanaryGap, healthy: CanaryGap, dtype: str, scale: float) -> str:
    """Return what is wrong with an engine whose weights were perturbed by `scale`; "" if nothing is.

    Args:
        move: how far its log-probs went from those before.
        follow: how far they are from the learner's with the same perturbation.
        healthy: the gap between engine and learner at version 0.
    """
    if not move.mean >= SELF_TEST_MOVE * healthy.mean:
        return (
            f"perturbing the weights by {scale:g} changed the engine's log-probs by {move}; expected a mean "
            f"of at least {SELF_TEST_MOVE:g} x the initial {healthy.mean:.2g}"
        )
    is_near = follow.max <= FP32_MAX_GAP if dtype == "float32" else follow.mean <= SELF_TEST_BF16_GROWTH * healthy.mean
    return "" if is_near else f"with perturbed weights, engine and learner differ by {follow}"


def _failed(
    engines: Collection[int], engine: int, message: str, version: int, tensors: Sequence[str] = ()
) -> WeightSyncError:
    where = f"engine {engine}: " if len(engines) > 1 else ""
    return WeightSyncError(f"{where}self-test: {message}", version, tensors)
