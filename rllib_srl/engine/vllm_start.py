"""How vLLM is started here, and what it is asked for with each request.

vLLM is imported by these functions, never with this module: its environment variables are read at import.

Traps (vLLM 0.32):
1. It seeds Python's, numpy's and torch's global generators: their states are put back.
2. It replaces `torch.set_num_threads` by a function that does nothing: the threads are set before.
3. Blocks of the default 128 tokens never share shorter prompts: 32 on a CPU.
4. `processed_logprobs` are those of the distribution sampled from; the default mode ignores the temperature.
5. Its shutdown takes down process-wide state that every other engine in the process still needs.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rllib_srl.engine.protocol import EngineError, Sampling

TRANSFERS = ("object_store", "nccl", "ipc")

_running: list[Any] = []  # vLLM's engines in this process
_stopped: list[Any] = []  # those waiting for the others to stop


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
    weight_transfer: str,
    num_threads: int | None,
) -> tuple[Any, bool]:
    """Start vLLM in this process; return its `LLMEngine`, and whether it runs on a CPU.

    The arguments are those of `VLLMEngine`.

    Raises:
        ValueError: if `weight_transfer` needs GPUs and there are none.
        EngineError: if vLLM is not installed or does not start.
    """
    _prepare_process(num_threads)
    try:
        from vllm import EngineArgs
        from vllm.config import WeightTransferConfig
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine
    except ImportError as error:
        raise EngineError(
            f"vLLM cannot be imported ({error}); install it with `pip install rllib_srl[cpu]` (no GPU) or "
            "`pip install rllib_srl[gpu]`, or use the engine 'transformers'"
        ) from error
    is_cpu = bool(current_platform.is_cpu())
    if is_cpu and weight_transfer != "object_store":
        raise ValueError(f"weight_transfer = {weight_transfer!r} needs GPUs; expected 'object_store' on a CPU")
    place: dict[str, Any] = {"gpu_memory_utilization": memory_utilization, "enable_sleep_mode": True}
    if is_cpu:
        place = {"kv_cache_memory_bytes": int(kv_cache_gib * 2**30), "block_size": 32, "enforce_eager": True}
    if tensor_parallel_size > 1:
        place["distributed_executor_backend"] = "mp"  # "ray" would take the placement group of the Tune trial
    args = EngineArgs(
        model=str(model_dir),
        dtype=dtype,
        seed=seed,
        max_model_len=context_length,
        max_num_seqs=max_num_seqs,
        tensor_parallel_size=tensor_parallel_size,
        logprobs_mode="processed_logprobs",
        enable_prefix_caching=True,
        disable_log_stats=True,
        weight_transfer_config=WeightTransferConfig(backend=weight_transfer),
        worker_extension_cls="rllib_srl.engine.vllm_transfer.WorkerExtension",
        **place,
    )
    try:
        with _global_generators_kept():
            _running.append(LLMEngine.from_engine_args(args))
    except (RuntimeError, ValueError, OSError, AssertionError) as error:
        raise EngineError(f"vLLM did not start on {model_dir.name}: {error}") from error
    return _running[-1], is_cpu


def stop_vllm(llm: Any) -> None:
    """Stop what `start_vllm` started, once no other engine runs in this process.

    Until then it keeps its memory: even its garbage collection would take down what the others need. With the last
    one torch.distributed's default group goes.
    """
    _running.remove(llm)
    _stopped.append(llm)
    while _stopped and not _running:
        _stopped.pop().engine_core.shutdown()


@cache
def turn_params(sampling: Sampling) -> Any:
    """Return vLLM's parameters of a turn."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    is_greedy = sampling.temperature == 0
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=1.0 if is_greedy else sampling.top_p,
        top_k=0 if is_greedy else sampling.top_k,
        stop=list(sampling.stop) or None,
        ignore_eos=sampling.runs_to_limit,
        include_stop_str_in_output=True,
        detokenize=bool(sampling.stop),  # only stop strings need the text while sampling
        logprobs=0,  # the sampled token's alone
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


@cache
def score_params() -> Any:
    """Return vLLM's parameters of a request that scores its prompt."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=0,  # the given token's alone; vLLM then reads nothing from the prefix cache
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _prepare_process(num_threads: int | None) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine is stepped in this process
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # two engines would be bound to the same core
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
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
