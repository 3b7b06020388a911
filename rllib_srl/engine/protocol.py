"""The protocol of a text engine: generate with continuous batching, score, load weights, sleep.

    submit(id, ids, sampling) ... step() -> [Turn, ...]    many requests at once; finished ones leave the batch
    load_weights(bundle)                                   verified receipt, new version, prefix cache reset
    sleep / wake, abort                                    colocation, deadlines

Two engines implement it: `VLLMEngine` (fast) and `TransformersEngine` (simple and exact). The same
contract tests run on both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rllib_srl.engine.fingerprint import Fingerprint
from rllib_srl.engine.sync import WeightBundle
from rllib_srl.types import ProcessBrokenError


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one turn.

    Invariant: the log-probs of a turn are those of the full softmax at `temperature`, as the learner computes them; for
    a greedy turn, those at temperature 1.
    """

    max_tokens: int
    temperature: float = 1.0  # 0 is greedy
    stop: tuple[str, ...] = ()  # the turn ends with the token that completes one of these
    end_ids: tuple[int, ...] = ()  # tokens that end the turn, besides those of the model; not part of its text
    runs_to_limit: bool = False  # True: only max_tokens and the context end the turn (benchmarks)

    def __post_init__(self) -> None:
        """Validate every value; report all errors at once."""
        errors = []
        if self.max_tokens < 1:
            errors.append(f"max_tokens = {self.max_tokens}; expected at least 1")
        if self.temperature != 0 and not 0.01 <= self.temperature <= 100:  # vLLM raises smaller ones to 0.01
            errors.append(f"temperature = {self.temperature}; expected 0 (greedy) or 0.01 to 100")
        if self.runs_to_limit and self.stop:
            errors.append(f"runs_to_limit = True with stop = {self.stop!r}; expected only one of the two")
        if isinstance(self.stop, str) or not all(self.stop):
            errors.append(f"stop = {self.stop!r}; expected a tuple of non-empty strings")
        if errors:
            raise ValueError("sampling: " + "; ".join(errors))


@dataclass(frozen=True)
class Turn:
    """One finished generation.

    Invariant: `token_ids` and `logp` have the same length; ids are exactly those sampled,
    end-of-sequence and stop tokens included.
    """

    request_id: str
    token_ids: np.ndarray  # int32 [T]
    logp: np.ndarray  # float32 [T], nats, of the distribution sampled from
    text: str  # the decoded ids, without special tokens and `Sampling.end_ids`
    reason: str  # "stop", "length" or "aborted"
    first_version: int
    last_version: int


class EngineError(RuntimeError):
    """The engine cannot execute a call; the message names the call and the reason."""


class EngineBrokenError(EngineError, ProcessBrokenError):
    """The engine failed and cannot execute any further call; its process must be replaced."""


class TurnWriter(Protocol):
    """The part of an engine that the player uses: submit turns, generate them concurrently, abort them.

    Invariant: `version` is that of the weights the next token is sampled from.
    """

    context_length: int
    version: int
    is_reproducible: bool  # the same requests in the same steps give the same bits, independent of timing

    def submit(self, request_id: str, token_ids: Sequence[int], sampling: Sampling) -> None:
        """Queue one turn. Raises `EngineError` if the engine sleeps or the prompt fills the context."""

    def step(self) -> list[Turn]:
        """Advance every running request by at least one token; return the turns that ended.

        Raises:
            EngineBrokenError: the engine cannot be used any further; any other exception costs the running turns only.
        """

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests; `step` never returns them. Ids that are not running are ignored."""


def group_of(request_id: str) -> str:
    """Return the group id in a request id "<group id>/<place in the group>/<turn>"."""
    return request_id.rsplit("/", 2)[0]


def uses_in(uses: Counter[str], groups: Collection[str]) -> Counter[str]:
    """Return the counts of the requests of some groups, so that they do not grow with the length of a run."""
    return Counter({request_id: num for request_id, num in uses.items() if group_of(request_id) in groups})


class Engine(TurnWriter, Protocol):
    """A causal language model that generates and scores text with the weights of the last `load_weights`."""

    def expect(self, group_ids: Collection[str]) -> None:
        """Set the groups of the next requests.

        The counts of other groups' requests, from which seeds are made, are dropped.
        """

    def num_running(self) -> int:
        """Return how many submitted requests have not ended."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Turn]:
        """Run `prompts` to the end and return their turns in order. The engine must be idle."""

    def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Return for each sequence of T tokens the log-probs of tokens 1..T-1, float32 [T - 1], at temperature 1.

        Always computed with the current weights, never from the prefix cache.
        """

    def load_weights(self, bundle: WeightBundle) -> None:
        """Verify `bundle`, load every tensor, reset the prefix cache and set `version`.

        Running requests continue: the keys and values of their tokens so far are recomputed with the new weights.

        Raises:
            WeightSyncError: the message names the version and the tensors at fault; the old version stays loaded.
            EngineError: if the engine sleeps.
        """

    def load_noise(self) -> None:
        """Load noise into every tensor that `load_weights` sets, which must be called before the engine is used."""

    def fingerprint(self) -> Fingerprint:
        """Return digests of the output of each module on a fixed input, with the current weights."""

    def reseed(self, seed: int) -> None:
        """Restart the sampling generator."""

    def sleep(self) -> None:
        """Free memory (KV cache; on a GPU also weights). No request may be running."""

    def wake(self) -> None:
        """Undo `sleep`."""

    def close(self) -> None:
        """Release all resources."""


def check_request(
    request_id: str, token_ids: Sequence[int], *, context_length: int, vocab_size: int, running: Container[str]
) -> None:
    """Validate the arguments of `submit` and `score`.

    Raises:
        EngineError: the id is running already, or the tokens are empty, too many or outside the vocabulary.
    """
    if request_id in running:
        raise EngineError(f"request {request_id!r} is already running; expected an unused id")
    if not 0 < len(token_ids) < context_length:
        raise EngineError(
            f"request {request_id!r} has {len(token_ids)} tokens; expected 1 to {context_length - 1}, so that one more "
            f"fits context_length = {context_length}: shorten the prompt or raise context_length"
        )
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        unknown = [t for t in token_ids if not 0 <= t < vocab_size]
        raise EngineError(f"request {request_id!r} has the token {unknown[0]}; expected 0 to {vocab_size - 1}")


def run_to_end(engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Turn]:
    """Generate from `prompts` on an idle `engine` until all have ended; return their turns in order.

    Raises:
        EngineError: if a request is running already: its turn would be lost.
    """
    if engine.num_running():
        raise EngineError(f"generate was called with {engine.num_running()} requests running; use submit and step")
    names = [f"generate-{index}" for index in range(len(prompts))]
    turns: dict[str, Turn] = {}
    try:
        for name, token_ids in zip(names, prompts, strict=True):
            engine.submit(name, token_ids, sampling)
        while engine.num_running():
            turns.update((turn.request_id, turn) for turn in engine.step())
    except BaseException:
        engine.abort(names)
        raise
    return [turns[name] for name in names]
