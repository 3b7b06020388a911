"""An engine without a model: it writes right, wrong or malformed answers with the chances of a law (`law.py`).

    expect({group id: prompt})    what the coming requests are about; a request id is "<group id>/<index>/<turn>"
    submit -> step                every request ends in the next step

One outcome holds for all turns of an episode, so its chance is the chance of the episode. It is a hash of the seed, the
group, the index and the number of earlier uses of the request: the same run writes the same answers, whatever the
timing. The first token of an episode carries the outcome's log-prob, all others 0: given the outcome they are certain.
A greedy answer (temperature 0) is the most likely outcome.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rllib_srl.engine.fingerprint import Fingerprint, digests
from rllib_srl.engine.model_dir import load_tokenizer
from rllib_srl.engine.protocol import EngineError, Sampling, Turn, check_request, group_of, uses_in
from rllib_srl.engine.stub.answers import MALFORMED, Answers
from rllib_srl.engine.stub.law import NUM_SLOTS, OUTCOMES, Law, canary_logps, drawn, uniform
from rllib_srl.engine.sync import WeightBundle, unpack, verify
from rllib_srl.types import Prompt

SKILLS = "skills"  # name of the only tensor


class StubEngine:
    """`Engine` that follows a `Law`. Invariant: `skills_S` are those of `version`."""

    is_reproducible = True
    _num_uses: Counter[str]  # how often each request was submitted, for its seed

    def __init__(self, model_dir: str | Path, *, law: Law, answers: Answers, seed: int, context_length: int) -> None:
        """Load the tokeniser; nothing else of the model is read.

        Args:
            model_dir: a directory with config and tokenizer.
            law: chances and their change.
            answers: the texts of answers.
            seed: of the outcomes.
            context_length: maximum number of tokens of prompt and turn together.
        """
        self.context_length, self.version, self.is_paused = context_length, 0, False
        self.law, self.answers = law, answers
        self.skills_S = np.zeros(NUM_SLOTS, np.float32)
        self._tokenizer = load_tokenizer(Path(model_dir))
        self._ids = lru_cache(65_536)(self._tokens)
        self._prompts: Mapping[str, Prompt] = {}
        self._waiting: dict[str, tuple[int, Sampling]] = {}  # request id -> earlier uses, sampling
        self._is_asleep = False
        self.reseed(seed)

    def expect(self, prompts: Mapping[str, Prompt]) -> None:
        """Set the prompts of the coming requests by group id."""
        self._prompts = prompts
        self._num_uses = uses_in(self._num_uses, prompts)

    def submit(self, request_id: str, token_ids: Sequence[int], sampling: Sampling) -> None:
        """Queue one turn; see `Engine.submit`."""
        self._check_awake("submit")
        check_request(
            request_id, token_ids, context_length=self.context_length, vocab_size=len(self._tokenizer),
            running=self._waiting,
        )  # fmt: skip
        if sampling.top_p != 1 or sampling.top_k or sampling.runs_to_limit:
            raise EngineError("top_p, top_k or runs_to_limit; expected none of them with engine = 'stub'")
        if group_of(request_id) not in self._prompts:
            raise EngineError(f"request {request_id!r}; engine = 'stub' only answers prompts of a run's environments")
        nth, self._num_uses[request_id] = self._num_uses[request_id], self._num_uses[request_id] + 1
        self._waiting[request_id] = (nth, sampling)

    def step(self) -> list[Turn]:
        """Return the turn of every request; see `Engine.step`."""
        self._check_awake("step")
        if self.is_paused:
            return []
        waiting, self._waiting = self._waiting, {}
        return [self._turn(request_id, nth, sampling) for request_id, (nth, sampling) in waiting.items()]

    def _turn(self, request_id: str, nth: int, sampling: Sampling) -> Turn:
        group_id, index, number = request_id.rsplit("/", 2)
        prompt = self._prompts[group_id]
        logps = self.law.logps(prompt, self.skills_S)
        outcome = drawn(logps, sampling.temperature, uniform(self._seed, group_id, index, nth))
        turns: tuple[str, ...] = (MALFORMED,)
        if OUTCOMES[outcome] != "malformed":
            chance = float(np.exp(logps[0]))
            is_best = chance >= 0.5 if not sampling.temperature else uniform(self._seed, group_id, index, "g") < chance
            turns = self.answers.turns(prompt, OUTCOMES[outcome] == "right", is_best)
        text = turns[min(len(prompt.history) + int(number), len(turns) - 1)]
        ids, shown = self._ids(text, text.endswith(sampling.stop) if sampling.stop else False)
        is_cut = len(ids) > sampling.max_tokens
        ids = ids[: sampling.max_tokens]
        logp_T = np.zeros(len(ids), np.float32)
        if number == "0":
            logp_T[0] = _tempered(logps, sampling.temperature)[outcome]
        shown = self._tokenizer.decode(ids, skip_special_tokens=True) if is_cut else shown
        reason = "length" if is_cut else "stop"
        return Turn(request_id, np.array(ids, np.int32), logp_T, shown, reason, self.version, self.version)

    def _tokens(self, text: str, is_stopped: bool) -> tuple[list[int], str]:
        """Return the tokens of a text, with the end of sequence unless a stop string ended it, and their text."""
        ids = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        end = self._tokenizer.eos_token_id
        ids += [] if is_stopped or end is None else [end]
        return ids, self._tokenizer.decode(ids, skip_special_tokens=True)

    def num_running(self) -> int:
        """Return how many submitted requests have not ended."""
        return len(self._waiting)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests; see `Engine.abort`."""
        for request_id in request_ids:
            self._waiting.pop(request_id, None)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Turn]:
        """Refuse: without an environment there are no right answers.

        Raises:
            EngineError: always.
        """
        raise EngineError("engine = 'stub' has no model and writes no free text; expected 'vllm' or 'transformers'")

    def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Return log-probs that depend on the skills; see `law.canary_logps`."""
        self._check_awake("score")
        return canary_logps(self.skills_S, sequences)

    def load_weights(self, bundle: WeightBundle) -> None:
        """Verify and load skills; see `Engine.load_weights`."""
        self._check_awake("load_weights")
        verify(bundle, {SKILLS: (NUM_SLOTS,)}, "float32")
        ((_, skills),) = unpack(bundle)
        self.skills_S, self.version = skills.numpy().copy(), bundle.version

    def load_noise(self) -> None:
        """Load noise in place of the skills."""
        self.skills_S = np.full_like(self.skills_S, 0.02)

    def fingerprint(self) -> Fingerprint:
        """Return digests of the skills."""
        return {SKILLS: digests(torch.from_numpy(self.skills_S))}

    def reseed(self, seed: int) -> None:
        """Restart the outcomes."""
        self._seed = seed
        self._num_uses = Counter()

    def sleep(self) -> None:
        """Refuse further calls until `wake`; there is no memory to free."""
        if self._waiting:
            raise EngineError(f"sleep was called with {len(self._waiting)} requests running")
        self._is_asleep = True

    def wake(self) -> None:
        """Undo `sleep`."""
        self._is_asleep = False

    def pause(self) -> None:
        """Make `step` a no-op until `resume`."""
        self.is_paused = True

    def resume(self) -> None:
        """Undo `pause`."""
        self.is_paused = False

    def close(self) -> None:
        """Close the environments of the answers."""
        self.answers.close()

    def _check_awake(self, call: str) -> None:
        if self._is_asleep:
            raise EngineError(f"{call} was called on a sleeping engine; call wake() first")


def _tempered(logps_K: np.ndarray, temperature: float) -> Any:
    """Return log softmax(logps / temperature); at temperature 0 that at temperature 1."""
    scaled_K = logps_K / (temperature or 1.0)
    return np.minimum(scaled_K - np.logaddexp.reduce(scaled_K), 0.0)
