"""A text engine on plain Hugging Face transformers: runs anywhere, samples the same tokens for the same seed.

    submit -> waiting --prefill--> rows of one batch --decode, one token a step--> Turn
              (left-padded,        (finished rows leave the batch, new rows join it)
              duplicates once)

Exactness before speed: each request has its own generator, seeded with (seed, request id, number of earlier uses of
the id since the seed). Its tokens therefore do not depend on the other requests, except for rounding in the batched
arithmetic. The player steps this engine only while no environment call is open, so that timing does not change the
batches either.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rllib_srl.engine.adapters import AdapterSpec, adapter_tensors, add_adapters
from rllib_srl.engine.canary import noise
from rllib_srl.engine.fingerprint import Fingerprint, digests
from rllib_srl.engine.model_dir import checked_dir, end_token_ids, load_tokenizer
from rllib_srl.engine.protocol import EngineError, Sampling, Turn, check_request, run_to_end, uses_in
from rllib_srl.engine.sync import WeightBundle, torch_dtype, unpack, verify

KeysValues = list[tuple[torch.Tensor, torch.Tensor]]  # (keys, values) per layer, each [B, heads, T, D]


@dataclass
class _Running:
    """A request between `submit` and its turn.

    Invariant: `new_ids` and `logp` have the same length.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: Sampling
    rng: np.random.Generator
    new_ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    first_version: int = 0
    last_version: int = 0


@dataclass
class _Rows:
    """The prefilled requests as one batch.

    Invariant: row b of `mask_BT` marks the tokens of request b whose keys and values are in `cache`: all but
    its last sampled token. Rows are padded on the left.
    """

    requests: list[_Running]
    mask_BT: torch.Tensor
    cache: KeysValues

    def keep(self, is_kept: Sequence[bool]) -> _Rows:
        """Return the kept rows, without the columns that only dropped rows used."""
        index = torch.tensor([b for b, kept in enumerate(is_kept) if kept], device=self.mask_BT.device)
        mask_BT = self.mask_BT[index]
        first = int(mask_BT.any(0).int().argmax()) if len(index) else mask_BT.shape[1]
        cache = [(k[index, :, first:], v[index, :, first:]) for k, v in self.cache]
        return _Rows([r for r, kept in zip(self.requests, is_kept, strict=True) if kept], mask_BT[:, first:], cache)

    def join(self, other: _Rows) -> _Rows:
        """Append the rows of `other`."""
        longest = max(self.mask_BT.shape[1], other.mask_BT.shape[1])

        def widen(x: torch.Tensor, dim: int) -> torch.Tensor:
            shape = list(x.shape)
            shape[dim] = longest - shape[dim]
            return torch.cat([x.new_zeros(shape), x], dim)

        mask_BT = torch.cat([widen(self.mask_BT, 1), widen(other.mask_BT, 1)])
        cache = [
            (torch.cat([widen(k, 2), widen(k2, 2)]), torch.cat([widen(v, 2), widen(v2, 2)]))
            for (k, v), (k2, v2) in zip(self.cache, other.cache, strict=True)
        ]
        return _Rows(self.requests + other.requests, mask_BT, cache)


class TransformersEngine:
    """`Engine` on a Hugging Face causal language model.

    Invariant: the keys and values of running requests are of the weights of `version`.
    """

    is_reproducible = True
    _num_uses: Counter[str]  # how often each request was submitted, for its seed

    def __init__(
        self,
        model_dir: str | Path,
        *,
        dtype: str = "float32",
        seed: int = 0,
        context_length: int,  # maximum number of tokens of prompt and turn together
        max_num_seqs: int = 256,  # concurrent requests; the others wait
        device: str | None = None,  # None uses the GPU if there is one
        adapter: AdapterSpec | None = None,  # `load_weights` receives such adapters in place of all weights
    ) -> None:
        """Load the model from a local Hugging Face directory of weights and tokenizer.

        Raises:
            ValueError: as `checked_dir`.
        """
        from transformers import AutoModelForCausalLM

        path = checked_dir(model_dir, context_length)
        self.context_length, self.version = context_length, 0
        self._dtype, self._max_num_seqs = dtype, max_num_seqs
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._tokenizer = load_tokenizer(path)
        self._end_ids = end_token_ids(path, self._tokenizer)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch_dtype(dtype), local_files_only=True)
        self._model: Any = model.to(self._device).eval().requires_grad_(False)
        self._vocab_size = int(self._model.config.get_text_config().vocab_size)
        self._has_adapters = adapter is not None
        if adapter:
            add_adapters(self._model, adapter, seed=0)
            for _, parameter in adapter_tensors(self._model):
                parameter.data = parameter.data.to(self._device, torch_dtype(dtype))
            self._model.requires_grad_(False)
        self._expected = {name: tuple(p.shape) for name, p in self._loaded().items()}
        self._waiting: list[_Running] = []
        self._rows: _Rows | None = None
        self._is_asleep = False
        self.reseed(seed)

    def expect(self, group_ids: Collection[str]) -> None:
        """Forget how often requests of other groups were submitted; see `Engine.expect`."""
        self._num_uses = uses_in(self._num_uses, group_ids)

    def submit(self, request_id: str, token_ids: Sequence[int], sampling: Sampling) -> None:
        """Queue one turn; see `Engine.submit`."""
        self._check_awake("submit")
        running = {request.request_id for request in self._all_running()}
        check_request(
            request_id, token_ids, context_length=self.context_length, vocab_size=self._vocab_size, running=running
        )
        nth, self._num_uses[request_id] = self._num_uses[request_id], self._num_uses[request_id] + 1
        rng = np.random.default_rng([self._seed, zlib.crc32(request_id.encode()), nth])
        self._waiting.append(_Running(request_id, [int(t) for t in token_ids], sampling, rng))

    def step(self) -> list[Turn]:
        """Sample one token for every running request; see `Engine.step`."""
        self._check_awake("step")
        turns = self._decode() if self._rows else []
        num_free = self._max_num_seqs - (len(self._rows.requests) if self._rows else 0)
        admitted, self._waiting = self._waiting[:num_free], self._waiting[num_free:]
        return turns + (self._prefill(admitted) if admitted else [])

    def num_running(self) -> int:
        """Return how many submitted requests have not ended."""
        return len(self._waiting) + (len(self._rows.requests) if self._rows else 0)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests; see `Engine.abort`."""
        dropped = set(request_ids)
        self._waiting = [request for request in self._waiting if request.request_id not in dropped]
        if self._rows:
            self._replace_rows(self._rows, [r.request_id not in dropped for r in self._rows.requests])

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Turn]:
        """Run `prompts` to the end; see `Engine.generate`."""
        return run_to_end(self, prompts, sampling)

    @torch.inference_mode()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Return the log-probs of given tokens, one unpadded forward pass per sequence; see `Engine.score`."""
        self._check_awake("score")
        scores = []
        for index, sequence in enumerate(sequences):
            check_request(
                f"score-{index}", sequence, context_length=self.context_length, vocab_size=self._vocab_size, running=()
            )
            ids_T = torch.tensor(list(sequence), device=self._device)
            logits_TV = self._model(input_ids=ids_T[None], use_cache=False).logits[0].float()
            logp_T = logits_TV[:-1].log_softmax(-1).gather(-1, ids_T[1:, None])[:, 0]
            scores.append(logp_T.cpu().numpy())
        return scores

    def load_weights(self, bundle: WeightBundle) -> None:
        """Verify and load `bundle`; see `Engine.load_weights`."""
        self._check_awake("load_weights")
        verify(bundle, self._expected, self._dtype)
        parameters = self._loaded()
        for name, tensor in unpack(bundle):
            parameters[name].data.copy_(tensor)
        self._waiting, self._rows = self._all_running(), None  # prefilled again, with these weights
        self.version = bundle.version

    def load_noise(self) -> None:
        """Load noise in place of the weights; see `Engine.load_noise`."""
        self._check_awake("load_noise")
        parameters = self._loaded()
        for name, tensor in noise(self._expected, torch_dtype(self._dtype)):
            parameters[name].data.copy_(tensor)

    def fingerprint(self) -> Fingerprint:
        """Return digests of what `load_weights` sets: modules compute with it directly; see `Engine.fingerprint`."""
        self._check_awake("fingerprint")
        return {name: digests(parameter) for name, parameter in self._loaded().items()}

    def reseed(self, seed: int) -> None:
        """Restart sampling: requests submitted from now on sample as in a new engine with this seed."""
        self._seed, self._num_uses = seed, Counter[str]()

    def sleep(self) -> None:
        """Move the weights off the GPU (on a CPU there is nothing to free); see `Engine.sleep`."""
        if self.num_running():
            raise EngineError(f"sleep was called with {self.num_running()} requests running; finish or abort them")
        self._is_asleep = True
        if self._device.type != "cpu":
            self._model.to("cpu")
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Undo `sleep`."""
        self._model.to(self._device)
        self._is_asleep = False

    def close(self) -> None:
        """Drop the model; the engine cannot be used afterwards."""
        self._waiting, self._rows, self._model, self._is_asleep = [], None, None, True

    def _check_awake(self, action: str) -> None:
        if self._is_asleep:
            raise EngineError(f"{action} was called on a sleeping or closed engine; call wake() first")

    def _loaded(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that `load_weights` sets, by name."""
        return dict(adapter_tensors(self._model) if self._has_adapters else self._model.named_parameters())

    def _all_running(self) -> list[_Running]:
        return (self._rows.requests if self._rows else []) + self._waiting

    @torch.inference_mode()
    def _prefill(self, requests: list[_Running]) -> list[Turn]:
        seen: dict[tuple[int, ...], int] = {}  # episodes of a group share their prompt: prefill each one once
        index_B = [seen.setdefault((*request.prompt_ids, *request.new_ids), len(seen)) for request in requests]
        streams = [list(stream) for stream in seen]
        longest = max(map(len, streams))
        mask_BT = torch.tensor([[0] * (longest - len(s)) + [1] * len(s) for s in streams], device=self._device)
        ids_BT = torch.tensor([[0] * (longest - len(s)) + s for s in streams], device=self._device)
        position_BT = (mask_BT.cumsum(-1) - 1).clamp(min=0)
        logits_BV, cache = self._forward(ids_BT, mask_BT, position_BT, None)
        if len(seen) < len(requests):
            mask_BT, logits_BV = mask_BT[index_B], logits_BV[index_B]
            cache = [(keys[index_B], values[index_B]) for keys, values in cache]
        rows = _Rows(requests, mask_BT, cache)
        turns, is_kept = self._sample(requests, logits_BV)
        if not self._rows:
            self._replace_rows(rows, is_kept)
        elif any(is_kept):
            self._rows = self._rows.join(rows.keep(is_kept))
        return turns

    @torch.inference_mode()
    def _decode(self) -> list[Turn]:
        rows = self._rows
        assert rows is not None
        ids_B1 = torch.tensor([[request.new_ids[-1]] for request in rows.requests], device=self._device)
        mask_BT = torch.cat([rows.mask_BT, torch.ones_like(ids_B1)], 1)
        logits_BV, cache = self._forward(ids_B1, mask_BT, mask_BT.sum(-1, keepdim=True) - 1, rows.cache)
        turns, is_kept = self._sample(rows.requests, logits_BV)
        self._replace_rows(_Rows(rows.requests, mask_BT, cache), is_kept)
        return turns

    def _replace_rows(self, rows: _Rows, is_kept: Sequence[bool]) -> None:
        if all(is_kept):
            self._rows = rows
        else:
            self._rows = rows.keep(is_kept) if any(is_kept) else None

    def _forward(
        self, ids_BT: torch.Tensor, mask_BT: torch.Tensor, position_BT: torch.Tensor, cache: KeysValues | None
    ) -> tuple[torch.Tensor, KeysValues]:
        from transformers import DynamicCache

        # Without a config every layer keeps all keys; a sliding window is then applied by the mask only.
        past = DynamicCache(cache) if cache else DynamicCache()
        output = self._model(
            input_ids=ids_BT,
            attention_mask=mask_BT,
            position_ids=position_BT,
            past_key_values=past,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].float(), [(layer.keys, layer.values) for layer in output.past_key_values.layers]

    def _sample(self, requests: list[_Running], logits_BV: torch.Tensor) -> tuple[list[Turn], list[bool]]:
        """Sample the next token of each request; return the turns that ended and which requests continue."""
        logp_BV = torch.stack([_log_softmax(row, r.sampling) for row, r in zip(logits_BV, requests, strict=True)])
        turns, is_kept = [], []
        for request, logp_V in zip(requests, logp_BV.cpu(), strict=True):
            token = _draw(logp_V, request)
            request.last_version = self.version
            if not request.new_ids:
                request.first_version = self.version
            request.new_ids.append(token)
            request.logp.append(float(logp_V[token]))
            reason = self._ending(request)
            is_kept.append(reason is None)
            if reason:
                turns.append(self._turn(request, reason))
        return turns, is_kept

    def _ending(self, request: _Running) -> str | None:
        is_end = request.new_ids[-1] in (*self._end_ids, *request.sampling.end_ids)
        if (is_end and not request.sampling.runs_to_limit) or self._has_stop_string(request):
            return "stop"
        num_tokens = len(request.prompt_ids) + len(request.new_ids)
        is_full = num_tokens >= self.context_length or len(request.new_ids) >= request.sampling.max_tokens
        return "length" if is_full else None

    def _has_stop_string(self, request: _Running) -> bool:
        if not request.sampling.stop:
            return False
        # A token is at least one byte, so this tail holds every stop string the last token can complete.
        num_tail = max(len(stop.encode()) for stop in request.sampling.stop) + 8
        text = self._tokenizer.decode(request.new_ids[-num_tail:], skip_special_tokens=True)
        return any(stop in text for stop in request.sampling.stop)

    def _turn(self, request: _Running, reason: str) -> Turn:
        num_said = len(request.new_ids) - (reason == "stop" and request.new_ids[-1] in request.sampling.end_ids)
        return Turn(
            request_id=request.request_id,
            token_ids=np.array(request.new_ids, np.int32),
            logp=np.array(request.logp, np.float32),
            text=self._tokenizer.decode(request.new_ids[:num_said], skip_special_tokens=True),
            reason=reason,
            first_version=request.first_version,
            last_version=request.last_version,
        )


def _log_softmax(logits_V: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return the log-probs of the sampling distribution, in nats."""
    return (logits_V / (sampling.temperature or 1.0)).log_softmax(-1)


def _draw(logp_V: torch.Tensor, request: _Running) -> int:
    if request.sampling.temperature == 0:
        return int(logp_V.argmax())
    cdf_V = logp_V.double().exp().cumsum(-1)
    # Scaled by the last entry, so that rounding cannot exceed the total mass; right=True skips probability 0.
    point = torch.tensor(request.rng.random() * float(cdf_V[-1]), dtype=torch.float64)
    return int(torch.searchsorted(cdf_V, point, right=True))
