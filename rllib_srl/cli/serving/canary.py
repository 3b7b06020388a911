"""Check that the server computes a version as the trainer did: fixed prompts, greedy tokens, their log-probs.

    trainer   expected = its own next tokens after each prompt, and the learner's log-probs of them
    server    the same prompts, greedy, with the adapter under test ──> gap in nats ──> `engine.canary.check_canary`

Where the two choose different tokens, nothing after that token is comparable; the choice itself must then be a tie:
the log-probs of the two tokens may differ by no more than the tolerance.

vLLM 0.32 with adapters on a CPU fails on `prompt_logprobs` (lora/punica_wrapper/punica_cpu.py has one index a request,
not one a token) and ends its engine, so given tokens cannot be scored there; generated ones can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rllib_srl.cli.serving.adapter import CANARY
from rllib_srl.cli.serving.job import JsonFile
from rllib_srl.engine.canary import CanaryGap, check_canary
from rllib_srl.engine.sync import WeightSyncError

NUM_TOKENS = 8  # generated after each prompt
PROMPT_TOKENS = 48
MIN_COMPARED = 12  # tokens; with fewer the check shows nothing


@dataclass(frozen=True)
class Continuation:
    """What follows a fixed prompt. Invariant: one log-prob, in nats, for each of `ids`."""

    prompt_ids: list[int]
    ids: list[int]
    logps: list[float]


class Canary(JsonFile):
    """The canary of a version, as its trainer wrote it."""

    name: ClassVar[str] = CANARY

    continuations: list[Continuation]


@dataclass(frozen=True)
class ServedContinuation:
    """What the server generated. Invariant: `top[i]` has the log-probs of the likeliest tokens at position i."""

    ids: list[int]
    logps: list[float]
    top: list[dict[int, float]]


def gap_of(expected: Sequence[Continuation], served: Sequence[ServedContinuation]) -> CanaryGap:
    """Return the gap between trainer and server over all tokens that can be compared.

    Raises:
        WeightSyncError: they choose other tokens so early that next to nothing can be compared.
    """
    ours: list[float] = []
    theirs: list[float] = []
    for want, got in zip(expected, served, strict=True):
        for at, token in enumerate(want.ids):
            if at >= len(got.ids):
                break
            ours.append(want.logps[at])
            theirs.append(got.top[at].get(token, -np.inf))
            if got.ids[at] != token:  # a tie, or another policy: then the log-probs differ
                break
    if len(ours) < MIN_COMPARED and np.isfinite(theirs).all():
        raise WeightSyncError(f"only {len(ours)} tokens of the canary can be compared; expected {MIN_COMPARED}", 0)
    return CanaryGap.between([np.array(ours)], [np.array(theirs)])


def check(
    expected: Sequence[Continuation], served: Sequence[ServedContinuation], version: int, dtype: str = "float32"
) -> CanaryGap:
    """Check that the server computes the version that was trained; return the gap, or raise a WeightSyncError with it.

    In bfloat16 the bound is that of rounding, which hides a small adapter.
    """
    gap = gap_of(expected, served)
    check_canary(gap, None, dtype, version)
    return gap
