"""The fast text engine: vLLM's V1 engine, started and driven step by step in this process.

    submit --add_request--> scheduler --step()--> finished outputs --> Turn         continuous batching, paged KV cache
    load_weights: verify -> start / update / finish of vLLM's weight-transfer API -> prefix cache dropped

vLLM is imported when an engine is built, never with this module: its environment variables are read at import.

Traps (vLLM 0.32) and the remedies used here:
1. It creates a default torch.distributed group in this process: never build one next to a DDP or FSDP learner.
2. On a CPU it samples from torch's global generator, and `SamplingParams(seed=)` crashes: the engine keeps its own
   generator state and installs it around each step, so that other users of the generator cannot change the samples.
3. `reset_prefix_cache()` does nothing while requests run, unless they are preempted and prefilled again.
4. It seeds Python's, numpy's and torch's global generators: their states are restored.
5. It replaces `torch.set_num_threads` by a no-op: the number of threads is set before the import.
6. Blocks of the default 128 tokens never share shorter prompts: on a CPU they are of 16, with kernels for AMX of 32.
7. The default log-prob mode ignores the temperature: `processed_logprobs` are those of the sampling distribution.
8. On a GPU it draws an unseeded request's seed from numpy's generator in the worker, and `torch.manual_seed` has no
   effect on samples: each request gets its own seed there (`request_seed`).
9. On a GPU attention in float32 runs in Triton, which rounds to TF32 (10 bits) by default: it is set to IEEE.
10. Its shutdown destroys process-wide state that the other engines in the process still need: see `stop_vllm`.
11. On a CPU a request without an adapter, in a batch with others that have one, is computed with theirs, and an adapted
    head fails on prompt log-probs: every request carries the adapter, and only the spec's layers can be adapted.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from copy import copy
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rllib_srl.engine.adapters import RANKS, AdapterSpec, expected_adapters
from rllib_srl.engine.fingerprint import Fingerprint
from rllib_srl.engine.heap import keep_freed_memory
from rllib_srl.engine.model_dir import checked_dir, expected_tensors, load_config, load_tokenizer
from rllib_srl.engine.protocol import EngineBrokenError, EngineError, Sampling, Turn, check_request, run_to_end, uses_in
from rllib_srl.engine.sync import WeightBundle, WeightSyncError, pack, torch_dtype, verify
from rllib_srl.engine.vllm_adapter import ADAPTER

_running: list[Any] = []  # vLLM's engines in this process
_stopped: list[Any] = []  # engines to shut down once none is running


def _cpu_block(dtype: str, tensor_parallel_size: int) -> int:
    """Return the tokens of a block: 16, unless the kernels are those for AMX or run in vLLM's own processes."""
    if tensor_parallel_size > 1 or (dtype == "bfloat16" and torch.cpu._is_amx_tile_supported()):
        return 32
    from rllib_srl.engine.small_blocks import BLOCK

    return BLOCK


def start_vllm(
    model_dir: Path,
    *,
    dtype: str,
    seed: int,
    context_length: int,
    tensor_parallel_size: int,
    memory_utilization: float,
    kv_cache_gib: float,
    max_num_seqs: int,
    num_threads: int | None,
    can_sleep: bool,
    adapter: AdapterSpec | None,
) -> tuple[Any, bool]:
    """Start vLLM in this process; return its `LLMEngine` and whether it runs on a CPU.

    The arguments are those of `VLLMEngine`.

    Raises:
        EngineError: if vLLM is not installed or does not start.
    """
    vllm, llm_engine = import_vllm(dtype, num_threads)
    is_cpu = bool(vllm.platforms.current_platform.is_cpu())
    place: dict[str, Any] = {"gpu_memory_utilization": memory_utilization, "enable_sleep_mode": can_sleep}
    if is_cpu:
        place = {"kv_cache_memory_bytes": int(kv_cache_gib * 2**30), "enforce_eager": True}
        place["block_size"] = _cpu_block(dtype, tensor_parallel_size)
        keep_freed_memory()
    place |= _room_for(adapter) if adapter else {}
    if tensor_parallel_size > 1:
        place["distributed_executor_backend"] = "mp"  # "ray" would use the placement group of the Tune trial
    args = vllm.EngineArgs(
        model=str(model_dir), dtype=dtype, seed=seed, max_model_len=context_length, max_num_seqs=max_num_seqs,
        tensor_parallel_size=tensor_parallel_size, logprobs_mode="processed_logprobs",
        enable_prefix_caching=True,
        disable_log_stats=True,
        weight_transfer_config=vllm.config.WeightTransferConfig(backend="object_store"),
        worker_extension_cls="rllib_srl.engine.vllm_transfer.WorkerExtension",
        **place,
    )
    try:
        with _global_generators_kept():
            _running.append(llm_engine.from_engine_args(args))
    except (RuntimeError, ValueError, OSError, AssertionError, ImportError) as error:
        raise EngineError(f"vLLM did not start on {model_dir.name}: {error}") from error
    return _running[-1], is_cpu


def import_vllm(dtype: str, num_threads: int | None) -> tuple[Any, Any]:
    """Return vLLM and its `LLMEngine`, imported after setting the variables of the environment that it reads then.

    The arguments are those of an engine.

    Raises:
        EngineError: it is not installed.
    """
    _prepare_process(num_threads, dtype)
    try:
        import vllm
        from vllm.v1.engine.llm_engine import LLMEngine
    except ImportError as error:
        raise EngineError(
            f"vLLM cannot be imported ({error}); install it with `pip install rllib_srl[cpu]` (no GPU) or "
            "`pip install rllib_srl[gpu]`, or use the engine 'transformers'"
        ) from error
    return vllm, LLMEngine


def _room_for(adapter: AdapterSpec) -> dict[str, Any]:
    rank = next(rank for rank in RANKS if rank >= adapter.rank)
    return {"enable_lora": True, "max_loras": 1, "lora_target_modules": list(adapter.targets), "max_lora_rank": rank}


def stop_vllm(llm: Any) -> None:
    """Shut down an engine of `start_vllm` once no other engine runs in this process.

    Until then it keeps its memory: even its garbage collection would destroy state that the others need. Stopping the
    last engine also destroys torch.distributed's default group.
    """
    _running.remove(llm)
    _stopped.append(llm)
    while _stopped and not _running:
        _stopped.pop().engine_core.shutdown()


@cache
def turn_params(sampling: Sampling) -> Any:
    """Return vLLM's sampling parameters for a turn."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        stop=list(sampling.stop) or None,
        stop_token_ids=None if sampling.runs_to_limit else list(sampling.end_ids) or None,
        ignore_eos=sampling.runs_to_limit,
        include_stop_str_in_output=True,
        detokenize=bool(sampling.stop),  # only stop strings need the text while sampling
        logprobs=0,  # only of the sampled token
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


@cache
def score_params() -> Any:
    """Return vLLM's sampling parameters for a request that scores its prompt."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=0,  # only of the given token; vLLM then does not read the prefix cache
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def request_seed(seed: int, request_id: str, use: int) -> int:
    """Return the seed of one request's samples, in [0, 2^63): equal arguments give equal seeds on every machine.

    `use` is the number of earlier requests with this id since the engine's last `reseed`.
    """
    digest = blake2b(f"{seed}/{use}/{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _prepare_process(num_threads: int | None, dtype: str) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine is stepped in this process
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # two engines would be bound to the same core
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if dtype == "float32":  # exact products; read when Triton compiles a kernel, also by the workers
        os.environ["TRITON_F32_DEFAULT"] = "ieee"
        os.environ["VLLM_FLOAT32_MATMUL_PRECISION"] = "highest"
    if torch.version.cuda is None and any(map(str.isspace, torch.__file__)):
        # inductor does not quote the paths that it gives to the C++ compiler: vLLM's functions run uncompiled
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # read by torch.compile, also in the workers of tensor parallelism
    if num_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(num_threads)  # for the workers of tensor parallelism
        torch.set_num_threads(num_threads)


@contextmanager
def _global_generators_kept() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


_REASONS = {"stop": "stop", "length": "length", "abort": "aborted"}
_SCORE_PREFIX = "score-"


class VLLMEngine:
    """`Engine` on vLLM.

    The same seed, submissions and steps give the same sampled tokens. Unlike with `TransformersEngine`, the tokens of
    a request depend on the other running requests.

    Invariant: the prefix cache and the keys and values of running requests are of the weights of `version`.
    """

    _uses: Counter[str]  # how often each request was submitted, for its seed
    _request: Any  # vLLM's request for the adapter, which every request carries; None without adapters
    is_reproducible = False  # its scheduler batches the requests that have arrived, so timing matters

    def __init__(
        self,
        model_dir: str | Path,
        *,
        dtype: str = "float32",
        seed: int = 0,
        context_length: int,  # maximum number of tokens of prompt and turn together
        tensor_parallel_size: int = 1,  # workers that each layer is split over; above 1 they are separate processes
        memory_utilization: float = 0.9,  # share of the GPU's memory to use
        kv_cache_gib: float = 1.0,  # on a CPU
        max_num_seqs: int = 256,  # concurrent requests; the others wait
        num_threads: int | None = None,  # torch's threads in this process; None leaves them unchanged
        can_sleep: bool = False,  # on a GPU: will `sleep` be called? Its allocator serves one engine per process
        adapter: AdapterSpec | None = None,  # `load_weights` receives such adapters in place of all weights
    ) -> None:
        """Start vLLM with a local Hugging Face directory of weights and tokenizer.

        Raises:
            ValueError: as `checked_dir`.
            EngineError: if vLLM is not installed, does not start, or cannot adapt a layer of the model.
        """
        path = checked_dir(model_dir, context_length)
        self.context_length, self.version = context_length, 0
        self._dtype, self._tensor_parallel_size = dtype, tensor_parallel_size
        self._can_sleep, self._is_asleep, self._broken = can_sleep, False, ""
        self._finished: list[Turn] = []  # turns that ended during `score`, for the next `step`
        self._running: set[str] = set()
        config = load_config(path)
        self._vocab_size = int(config.get_text_config().vocab_size)
        self._adapter, self._request = adapter, None
        self._expected = expected_adapters(config, adapter) if adapter else expected_tensors(config)
        self._tokenizer = load_tokenizer(path)
        options: dict[str, Any] = {"dtype": dtype, "seed": seed, "context_length": context_length}
        options |= {"tensor_parallel_size": tensor_parallel_size, "memory_utilization": memory_utilization}
        options |= {"kv_cache_gib": kv_cache_gib, "max_num_seqs": max_num_seqs, "num_threads": num_threads}
        options |= {"adapter": adapter, "can_sleep": can_sleep}
        self._llm, self._is_cpu = start_vllm(path, **options)
        # On a GPU each request has a seed; with several workers on a CPU, sampling uses the workers' own generators.
        self._owns_generator = self._is_cpu and tensor_parallel_size == 1
        self._llm.set_weight_version("0")
        self.reseed(seed)
        if adapter:
            self._start_adapter()

    def expect(self, group_ids: Collection[str]) -> None:
        """Forget how often requests of other groups were submitted; see `Engine.expect`."""
        self._uses = uses_in(self._uses, group_ids)

    def submit(self, request_id: str, token_ids: Sequence[int], sampling: Sampling) -> None:
        """Queue one turn; see `Engine.submit`."""
        self._check_usable("submit")
        self._add(request_id, token_ids, self._seeded(request_id, turn_params(sampling)))
        self._running.add(request_id)

    def step(self) -> list[Turn]:
        """Advance every running request; see `Engine.step`."""
        self._check_usable("step")
        turns, self._finished = self._finished, []
        if not self._running:
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

        Running requests advance meanwhile; the next `step` returns the turns that ended.
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

        If vLLM itself fails during loading, the engine refuses all further calls.
        """
        from rllib_srl.engine import vllm_transfer

        self._check_usable("load_weights")
        verify(bundle, self._expected, self._dtype)
        with closing(vllm_transfer.offers(bundle, is_one_process=self._tensor_parallel_size == 1)) as update_infos:
            self._receive(update_infos, bundle.version)

    def _start_adapter(self) -> None:
        """Load an adapter of zeros, so that every request, from the first one on, carries the adapter.

        Raises:
            EngineError: vLLM cannot adapt a layer that has an adapter.
        """
        from vllm.lora.request import LoRARequest

        assert self._adapter
        names = [name.removesuffix(".lora_A.weight") for name in self._expected if name.endswith(".lora_A.weight")]
        if missing := self._llm.collective_rpc("layers_without_adapter", args=(names,))[0]:
            self.close()
            raise EngineError(
                f"vLLM cannot apply adapters to {len(missing)} layers of the model, such as {missing[0]}; expected "
                "lora_send = 'merged', or other lora_targets"
            )
        if self._is_cpu:
            self._llm.collective_rpc("multiply_by_one_adapter")
        zeros = {name: torch.zeros(shape, dtype=torch_dtype(self._dtype)) for name, shape in self._expected.items()}
        self._request = LoRARequest(*ADAPTER)
        self.load_weights(pack(zeros.items(), 0, self._dtype))

    def _receive(self, update_infos: Iterable[dict[str, Any]], version: int) -> None:
        self._check_usable("receive")
        try:
            self._load(update_infos)
            # Running requests are preempted and prefilled again: their keys and values are of the old weights.
            is_reset = self._llm.reset_prefix_cache(reset_running_requests=True)
        except Exception as error:  # any: which weights are loaded is unknown
            self._broken = f"loading version {version} failed: {error}"
            if self._has_lost_worker(error):
                raise EngineBrokenError(f"vLLM lost a worker: {error}; create a new engine") from error
            raise WeightSyncError(f"vLLM failed to load weights: {error}; create a new engine", version) from error
        if not is_reset:
            self._broken = f"the prefix cache could not be reset after loading version {version}"
            raise WeightSyncError("the prefix cache could not be reset; create a new engine", version)
        self._llm.set_weight_version(str(version))
        self.version = version

    def _load(self, update_infos: Iterable[dict[str, Any]]) -> None:
        if self._adapter:
            for update_info in update_infos:
                self._llm.collective_rpc("receive_adapter", args=(update_info,))
            self._llm.collective_rpc("load_adapter", args=(self._adapter,))
        else:
            self._llm.collective_rpc("start_weight_update")
            for update_info in update_infos:
                self._llm.collective_rpc("update_weights", kwargs={"update_info": update_info})
            self._llm.collective_rpc("finish_weight_update")

    def load_noise(self) -> None:
        """Load noise in place of the weights; see `Engine.load_noise`."""
        self._check_usable("load_noise")
        call = ("adapter_noise", (self._adapter,)) if self._adapter else ("load_noise", ())
        with self._broken_by_lost_worker("load_noise"):
            self._llm.collective_rpc(call[0], args=(self._expected, self._dtype, *call[1]))

    def fingerprint(self) -> Fingerprint:
        """Return digests of the output of each module; see `Engine.fingerprint`."""
        self._check_usable("fingerprint")
        call = ("adapter_fingerprint", (self._adapter,)) if self._adapter else ("fingerprint", ())
        with self._broken_by_lost_worker("fingerprint"):
            by_rank = self._llm.collective_rpc(call[0], args=call[1])
        return {
            f"worker {rank} {name}" if self._tensor_parallel_size > 1 else name: values
            for rank, prints in enumerate(by_rank)
            for name, values in prints.items()
        }

    def reseed(self, seed: int) -> None:
        """Restart sampling: equal submissions and steps from here on give equal tokens."""
        self._rng_state = torch.Generator().manual_seed(seed).get_state()
        self._seed, self._uses = seed, Counter[str]()
        if self._is_cpu and not self._owns_generator:
            with self._broken_by_lost_worker("reseed"):
                self._llm.collective_rpc("reseed", args=(seed,))

    def sleep(self) -> None:
        """Free memory: on a GPU weights move to the host and the KV cache is dropped.

        vLLM has no sleep mode for the CPU: there only the prefix cache is dropped, with the same contract.
        """
        self._check_usable("sleep")
        if self.num_running():
            raise EngineError(f"sleep was called with {self.num_running()} requests running; finish or abort them")
        if not (self._is_cpu or self._can_sleep):
            raise EngineError("sleep was called on an engine that was started with can_sleep = False")
        with self._broken_by_lost_worker("sleep"):
            self._llm.reset_prefix_cache()
            if not self._is_cpu:
                self._llm.sleep(level=1)
        self._is_asleep = True

    def wake(self) -> None:
        """Undo `sleep`."""
        if self._is_asleep and not self._is_cpu:
            with self._broken_by_lost_worker("wake"):
                self._llm.wake_up()
        self._is_asleep = False

    def close(self) -> None:
        """Stop vLLM and its workers; the engine cannot be used afterwards."""
        if self._llm is not None:
            stop_vllm(self._llm)
        self._llm, self._broken = None, "the engine is closed"
        self._running, self._finished = set(), []

    def _seeded(self, request_id: str, params: Any) -> Any:
        """Return the parameters with the request's own seed; unchanged on a CPU, where vLLM fails with one."""
        if self._is_cpu:
            return params
        params = copy(params)
        params.seed = request_seed(self._seed, request_id, self._uses[request_id])
        self._uses[request_id] += 1
        return params

    def _add(self, request_id: str, token_ids: Sequence[int], params: Any) -> None:
        from vllm.inputs import tokens_input

        check_request(
            request_id,
            token_ids,
            context_length=self.context_length,
            vocab_size=self._vocab_size,
            running=self._running,
        )
        prompt = tokens_input([int(t) for t in token_ids])
        self._llm.add_request(request_id, prompt, params, lora_request=self._request)

    def _advance(self) -> list[Any]:
        """Run one vLLM step; return the finished outputs."""
        with self._own_generator():
            try:
                return [output for output in self._llm.step() if output.finished]
            except Exception as error:  # any: the state after a failed step is unknown
                self._broken = f"a step failed: {error}"
                raise EngineBrokenError(f"vLLM failed in a step: {error}; create a new engine") from error

    @contextmanager
    def _broken_by_lost_worker(self, action: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._has_lost_worker(error):
                raise
            self._broken = f"{action} failed: {error}"
            raise EngineBrokenError(f"vLLM lost a worker in {action}: {error}; create a new engine") from error

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
        num_said = len(token_ids) - isinstance(completion.stop_reason, int)  # a token of `end_ids` need not be special
        return Turn(
            request_id=output.request_id,
            token_ids=token_ids,
            logp=np.array(completion.logprobs.logprobs, np.float32),
            text=self._tokenizer.decode(token_ids[:num_said], skip_special_tokens=True),
            reason=_REASONS[completion.finish_reason],
            first_version=int(spans[0].version),
            last_version=int(spans[-1].version),
        )

    def _check_usable(self, action: str) -> None:
        if self._broken:
            raise EngineBrokenError(f"{action} was called on an unusable engine: {self._broken}")
        if self._is_asleep:
            raise EngineError(f"{action} was called on a sleeping engine; call wake() first")

    def _has_lost_worker(self, error: Exception) -> bool:
        """Return whether a call failed because a tensor-parallel worker is dead or silent (vLLM 0.32).

        The exception depends on how far vLLM has come in ending the other workers: "cancelled", "Executor failed.", an
        AssertionError, or the error of a worker whose connection to the dead one is closed.
        """
        executor = self._llm.model_executor
        workers = getattr(executor, "workers", None) or []
        is_lost = getattr(executor, "is_failed", False) or any(not worker.proc.is_alive() for worker in workers)
        return isinstance(error, TimeoutError) or is_lost
