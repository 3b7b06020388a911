"""The fast text engine: vLLM's V1 engine, driven step by step in this process.

    submit --add_request--> scheduler --step()--> finished outputs --> Turn         continuous batching, paged KV cache
    load_weights: verify -> start / update / finish of vLLM's weight-transfer API -> prefix cache dropped

vLLM is imported when an engine is built, never with this module: its environment variables are read at import.

Traps (vLLM 0.32), and what is done about them:
1. It makes a default torch.distributed group in this process: never build one next to a DDP or FSDP learner.
2. On a CPU it samples from torch's global generator, and `SamplingParams(seed=)` crashes: the engine owns a generator
   state and puts it in place around each step, so that nothing else in the process disturbs sampling.
3. `reset_prefix_cache()` does nothing while requests run, unless they are preempted and read again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rllib_srl.engine.fingerprint import Fingerprint
from rllib_srl.engine.model_dir import check_settings, expected_tensors, load_config, load_tokenizer
from rllib_srl.engine.protocol import EngineError, Sampling, Turn, check_request, run_to_end
from rllib_srl.engine.sync import WeightBundle, WeightSyncError, verify
from rllib_srl.engine.vllm_start import TRANSFERS, score_params, start_vllm, stop_vllm, turn_params

_REASONS = {"stop": "stop", "length": "length", "abort": "aborted"}
_SCORE_PREFIX = "score-"


class VLLMEngine:
    """`Engine` on vLLM.

    Sampled tokens repeat for the same seed, submissions and steps: unlike the `TransformersEngine`'s they depend on
    what else is running.

    Invariant: the prefix cache and the keys and values of running requests are of the weights of `version`.
    """

    def __init__(
        self,
        model_dir: str | Path,
        *,
        dtype: str = "float32",
        seed: int = 0,
        context_length: int,
        tensor_parallel_size: int = 1,
        memory_utilization: float = 0.9,
        kv_cache_gib: float = 1.0,
        max_num_seqs: int = 256,
        weight_transfer: str = "object_store",
        num_threads: int | None = None,
    ) -> None:
        """Start vLLM.

        Args:
            model_dir: a local Hugging Face directory with weights and tokenizer.
            dtype: "float32" or "bfloat16".
            seed: of sampling.
            context_length: the most tokens of prompt and turn together.
            tensor_parallel_size: over how many workers each layer is split; above 1 they are processes of their own.
            memory_utilization: share of the GPU's memory to take; unused on a CPU.
            kv_cache_gib: size of the KV cache on a CPU.
            max_num_seqs: how many requests run at once; the others wait.
            weight_transfer: "object_store" (`load_weights`), or "nccl" or "ipc" (`receive`; GPU only).
            num_threads: torch's threads in this process; None leaves them.

        Raises:
            ValueError: if the directory or a setting is unfit.
            EngineError: if vLLM is not installed or does not start.
        """
        path = check_settings(model_dir, dtype, context_length)
        if weight_transfer not in TRANSFERS:
            raise ValueError(f"weight_transfer = {weight_transfer!r}; expected one of {', '.join(TRANSFERS)}")
        self.context_length, self.version, self.is_paused = context_length, 0, False
        self._dtype, self._transfer, self._tensor_parallel_size = dtype, weight_transfer, tensor_parallel_size
        self._is_asleep, self._broken = False, ""
        self._finished: list[Turn] = []  # by a step that `score` made
        self._running: set[str] = set()
        config = load_config(path)
        self._vocab_size = int(config.get_text_config().vocab_size)
        self._expected = expected_tensors(config)
        self._tokenizer = load_tokenizer(path)
        self._llm, self._is_cpu = start_vllm(
            path,
            dtype=dtype,
            seed=seed,
            context_length=context_length,
            tensor_parallel_size=tensor_parallel_size,
            memory_utilization=memory_utilization,
            kv_cache_gib=kv_cache_gib,
            max_num_seqs=max_num_seqs,
            weight_transfer=weight_transfer,
            num_threads=num_threads,
        )
        # Elsewhere the workers' own generators are the only ones drawn from.
        self._owns_generator = self._is_cpu and tensor_parallel_size == 1
        self._llm.set_weight_version("0")
        self.reseed(seed)

    def submit(self, request_id: str, token_ids: Sequence[int], sampling: Sampling) -> None:
        """Queue one turn; see `Engine.submit`."""
        self._check_usable("submit")
        self._add(request_id, token_ids, turn_params(sampling))
        self._running.add(request_id)

    def step(self) -> list[Turn]:
        """Advance every running request; see `Engine.step`."""
        self._check_usable("step")
        turns, self._finished = self._finished, []
        if self.is_paused or not self._running:
            return turns
        for output in self._advance():
            turns.append(self._turn(output))
        return turns

    def num_running(self) -> int:
        """Return how many submitted requests have not been returned by `step`."""
        return len(self._running) + len(self._finished)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests; see `Engine.abort`."""
        dropped = set(request_ids)
        self._finished = [turn for turn in self._finished if turn.request_id not in dropped]
        if running := sorted(dropped & self._running):
            self._llm.abort_request(running)
            self._running.difference_update(running)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Turn]:
        """Run `prompts` to the end; see `Engine.generate`."""
        return run_to_end(self, prompts, sampling)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Return the log-probs of given tokens; see `Engine.score`.

        Requests that are running advance meanwhile, even on a paused engine; a turn that ends is in the next `step`.
        """
        self._check_usable("score")
        names = [f"{_SCORE_PREFIX}{index}" for index in range(len(sequences))]
        scores: dict[str, np.ndarray] = {}
        try:
            for name, sequence in zip(names, sequences, strict=True):
                self._add(name, sequence, score_params())
            while len(scores) < len(sequences):
                for output in self._advance():
                    if output.request_id in self._running:
                        self._finished.append(self._turn(output))
                    else:
                        scores[output.request_id] = np.array(output.prompt_logprobs.logprobs, np.float32)
        except EngineError:
            self._llm.abort_request([name for name in names if name not in scores])
            raise
        return [scores[name] for name in names]

    def load_weights(self, bundle: WeightBundle) -> None:
        """Verify and load `bundle`; see `Engine.load_weights`.

        A fault that vLLM itself raises in the middle of loading leaves an engine that refuses all further work.
        """
        from rllib_srl.engine import vllm_transfer

        self._check_usable("load_weights")
        if self._transfer != "object_store":
            raise EngineError(
                f"load_weights needs weight_transfer = 'object_store', not {self._transfer!r}; use receive"
            )
        verify(bundle, self._expected, self._dtype)
        with vllm_transfer.offer(bundle, is_one_process=self._tensor_parallel_size == 1) as update_info:
            self.receive(update_info, bundle.version)

    def init_transfer(self, init_info: dict[str, Any]) -> None:
        """Connect to the trainer ("nccl", "ipc"): `init_info` is that of vLLM's backend. Not tested without GPUs."""
        self._check_usable("init_transfer")
        self._llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": init_info})

    def receive(self, update_info: dict[str, Any], version: int) -> None:
        """Take one whole update through vLLM's weight-transfer API and take `version`.

        With "nccl" and "ipc" the trainer sends while this runs, `update_info` is that of vLLM's backend, and nothing
        is verified but the canary. Not tested without GPUs.

        Raises:
            WeightSyncError: if vLLM fails; the engine is then of no further use.
        """
        self._check_usable("receive")
        try:
            self._llm.collective_rpc("start_weight_update")
            self._llm.collective_rpc("update_weights", kwargs={"update_info": update_info})
            self._llm.collective_rpc("finish_weight_update")
            # Running requests are preempted and read again: their keys and values are of the old weights.
            is_reset = self._llm.reset_prefix_cache(reset_running_requests=True)
        except (RuntimeError, ValueError, KeyError, AssertionError) as error:
            self._broken = f"loading version {version} failed: {error}"
            raise WeightSyncError(f"vLLM failed while loading: {error}; build the engine anew", version) from error
        if not is_reset:
            self._broken = f"the prefix cache could not be dropped after loading version {version}"
            raise WeightSyncError("the prefix cache could not be dropped; build the engine anew", version)
        self._llm.set_weight_version(str(version))
        self.version = version

    def fingerprint(self) -> Fingerprint:
        """Return digests of what each module computes; see `Engine.fingerprint`."""
        self._check_usable("fingerprint")
        return {
            f"worker {rank} {name}" if self._tensor_parallel_size > 1 else name: found
            for rank, prints in enumerate(self._llm.collective_rpc("fingerprint"))
            for name, found in prints.items()
        }

    def reseed(self, seed: int) -> None:
        """Restart sampling: equal submissions and steps from here on give equal tokens."""
        self._rng_state = torch.Generator().manual_seed(seed).get_state()
        if not self._owns_generator:
            self._llm.collective_rpc("reseed", args=(seed,))

    def sleep(self) -> None:
        """Free memory: on a GPU weights move to the host and the KV cache is dropped.

        vLLM has no sleeping allocator for the CPU: there only the prefix cache is dropped, and the contract kept.
        """
        self._check_usable("sleep")
        if self.num_running():
            raise EngineError(f"sleep was called while {self.num_running()} requests run; finish or abort them first")
        self._llm.reset_prefix_cache()
        if not self._is_cpu:
            self._llm.sleep(level=1)
        self._is_asleep = True

    def wake(self) -> None:
        """Undo `sleep`."""
        if self._is_asleep and not self._is_cpu:
            self._llm.wake_up()
        self._is_asleep = False

    def pause(self) -> None:
        """Make `step` do nothing; see `Engine.pause`."""
        self.is_paused = True

    def resume(self) -> None:
        """Undo `pause`."""
        self.is_paused = False

    def close(self) -> None:
        """Stop vLLM and its workers; the engine is of no use afterwards."""
        if self._llm is not None:
            stop_vllm(self._llm)
        self._llm, self._broken = None, "the engine is closed"
        self._running, self._finished = set(), []

    def _add(self, request_id: str, token_ids: Sequence[int], params: Any) -> None:
        from vllm.inputs import tokens_input

        check_request(
            request_id,
            token_ids,
            context_length=self.context_length,
            vocab_size=self._vocab_size,
            running=self._running,
        )
        self._llm.add_request(request_id, tokens_input([int(t) for t in token_ids]), params)

    def _advance(self) -> list[Any]:
        """Make one vLLM step; return the outputs that finished."""
        with self._own_generator():
            try:
                return [output for output in self._llm.step() if output.finished]
            except (RuntimeError, ValueError, AssertionError) as error:
                self._broken = f"a step failed: {error}"
                raise EngineError(f"vLLM failed in a step: {error}; build the engine anew") from error

    @contextmanager
    def _own_generator(self) -> Iterator[None]:
        if not self._owns_generator:
            yield
            return
        outer = torch.get_rng_state()
        torch.set_rng_state(self._rng_state)
        try:
            yield
        finally:
            self._rng_state = torch.get_rng_state()
            torch.set_rng_state(outer)

    def _turn(self, output: Any) -> Turn:
        self._running.discard(output.request_id)
        completion = output.outputs[0]
        spans = completion.weight_versions
        token_ids = np.array(completion.token_ids, np.int32)
        return Turn(
            request_id=output.request_id,
            token_ids=token_ids,
            logp=np.array(completion.logprobs.logprobs, np.float32),
            text=self._tokenizer.decode(token_ids, skip_special_tokens=True),
            reason=_REASONS[completion.finish_reason],
            first_version=int(spans[0].version),
            last_version=int(spans[-1].version),
        )

    def _check_usable(self, action: str) -> None:
        if self._broken:
            raise EngineError(f"{action} was called on an engine that is out of use: {self._broken}")
        if self._is_asleep:
            raise EngineError(f"{action} was called on an engine that sleeps; call wake() first")
