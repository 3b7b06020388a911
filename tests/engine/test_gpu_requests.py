"""What the vLLM engine does on a GPU only, with vLLM's own classes and without a GPU: seeds, exact float32, sleep."""

import os
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rllib_srl.engine.protocol import EngineBrokenError, EngineError, Sampling
from rllib_srl.engine.sync import WeightSyncError, pack
from rllib_srl.engine.vllm_engine import VLLMEngine, _prepare_process, request_seed, turn_params


class Llm:
    """Stands in for vLLM's engine; notes requests and remote calls."""

    def __init__(self):
        self.params, self.calls = {}, []
        self.model_executor = SimpleNamespace(is_failed=False, workers=[])

    def add_request(self, request_id, prompt, params, lora_request):
        self.params[request_id] = params

    def collective_rpc(self, method, args=(), kwargs=None):
        self.calls.append((method, args))
        return [{}]

    def reset_prefix_cache(self, **_):
        return True


def engine_on(is_cpu, tensor_parallel_size=1, can_sleep=False):
    """Return an engine as it is after its start, with vLLM replaced."""
    engine = VLLMEngine.__new__(VLLMEngine)
    engine._llm, engine._is_cpu, engine._can_sleep = Llm(), is_cpu, can_sleep
    engine._adapter = engine._request = None
    engine._tensor_parallel_size, engine._owns_generator = tensor_parallel_size, is_cpu and tensor_parallel_size == 1
    engine._broken, engine._is_asleep = "", False
    engine._running, engine._finished, engine.context_length, engine._vocab_size = set(), [], 64, 512
    engine.reseed(7)
    return engine


def seeds_of(engine, ids):
    for name in ids:
        engine.submit(name, [1, 2, 3], Sampling(max_tokens=4))
        engine._running.clear()
    return [engine._llm.params[name].seed for name in ids]


@pytest.mark.parametrize(("place", "is_off"), [("/a b/torch/__init__.py", True), ("/ab/torch/__init__.py", False)])
def test_nothing_is_compiled_where_a_blank_in_the_path_would_stop_the_compiler(monkeypatch, place, is_off):
    monkeypatch.setattr(torch, "__file__", place)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_LOGGING_LEVEL"):
        monkeypatch.setenv(name, os.environ.get(name, "0"))
    _prepare_process(None, "bfloat16")
    assert os.environ["TORCHDYNAMO_DISABLE"] == str(int(is_off))


def test_seeds_of_requests_are_fixed_and_differ():
    assert request_seed(7, "3.1-0", 0) == 8136909663411011198
    seeds = [request_seed(s, name, use) for s in range(20) for name in ("3.1", "3.11", "31") for use in range(20)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)
    assert abs(np.mean(seeds) / 2**63 - 0.5) < 0.03


@pytest.mark.engine
def test_each_request_on_a_gpu_has_its_own_seed():
    engine = engine_on(is_cpu=False)
    first = seeds_of(engine, ["a", "b"])
    assert first == [request_seed(7, "a", 0), request_seed(7, "b", 0)]
    assert seeds_of(engine, ["a"]) == [request_seed(7, "a", 1)]  # the next turn under the same id
    engine.reseed(7)
    assert seeds_of(engine, ["b", "a"]) == first[::-1]  # whatever the order
    assert engine._llm.calls == []
    assert turn_params(Sampling(max_tokens=4)).seed is None  # shared between requests, so never changed


@pytest.mark.engine
@pytest.mark.parametrize("workers", [1, 2])
def test_requests_on_a_cpu_have_no_seed(workers):
    engine = engine_on(is_cpu=True, tensor_parallel_size=workers)
    assert seeds_of(engine, ["a", "b"]) == [None, None]
    assert engine._llm.calls == ([] if workers == 1 else [("reseed", (7,))])


@pytest.mark.engine
def test_vllms_sampler_on_gpus_takes_the_seed(monkeypatch):
    """Without a seed vLLM's own class draws one from numpy; `torch.manual_seed` never reaches it."""
    from vllm.v1.worker.gpu.sample import states

    def buffer(size, dtype):
        numbers = np.zeros(size, np.int64 if dtype == torch.int64 else np.float64)
        return SimpleNamespace(copy_to_uva=lambda: None, np=numbers)

    monkeypatch.setattr(states, "UvaBackedTensor", buffer)
    kept = states.SamplingStates(max_num_reqs=4, vocab_size=512)
    engine = engine_on(is_cpu=False)
    (seed,) = seeds_of(engine, ["a"])
    kept.add_request(0, engine._llm.params["a"])
    assert kept.seeds.np[0] == seed and kept.any_explicit_seed(np.array([0]))


@pytest.mark.engine
def test_float32_attention_in_triton_is_exact(monkeypatch):
    """Only Triton's attention takes float32 on a GPU, and its products are rounded to TF32 by default."""
    from triton import knobs
    from vllm import envs
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

    assert torch.float32 in TritonAttentionBackend.supported_dtypes
    assert torch.float32 not in FlashAttentionBackend.supported_dtypes
    monkeypatch.setenv("VLLM_FLOAT32_MATMUL_PRECISION", "high")
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    _prepare_process(None, "bfloat16")
    assert "TRITON_F32_DEFAULT" not in os.environ
    _prepare_process(None, "float32")
    assert os.environ["TRITON_F32_DEFAULT"] == "ieee"
    assert envs.VLLM_FLOAT32_MATMUL_PRECISION == "highest"
    assert knobs.language.fp32_default == "ieee"


def test_what_only_an_engine_on_a_gpu_refuses_or_a_worker():
    with pytest.raises(EngineError, match="started with can_sleep = False"):
        engine_on(is_cpu=False).sleep()
    engine_on(is_cpu=True).sleep()
    engine = engine_on(is_cpu=True)
    engine._llm.collective_rpc = failing_with(RuntimeError("Worker failed with error 'shapes differ'"))
    with pytest.raises(WeightSyncError, match="vLLM failed to load weights: Worker failed with error 'shapes differ'"):
        engine._receive([{}], 3)


def dead_worker():
    return SimpleNamespace(proc=SimpleNamespace(is_alive=lambda: False))


def failing_with(error):
    def fail(*args, **kwargs):
        raise error

    return fail


@pytest.mark.parametrize("error", [TimeoutError("no answer"), RuntimeError("Executor failed."), OSError("pipe")])
def test_an_engine_whose_step_failed_is_broken(error):
    engine = engine_on(is_cpu=True)
    engine.submit("a", [1, 2, 3], Sampling(max_tokens=4))
    engine._llm.step = failing_with(error)
    with pytest.raises(EngineBrokenError) as caught:
        engine.step()
    assert str(caught.value) == f"vLLM failed in a step: {error}; create a new engine"
    with pytest.raises(EngineBrokenError, match=f"score was called on an unusable engine: a step failed: {error}"):
        engine.score([[1, 2]])


@pytest.mark.parametrize(("error", "executor"), [
    (TimeoutError("RPC call timed out."), {}),
    (AssertionError("collective_rpc should not be called on follower node"), {"is_failed": True}),
    (AttributeError("'NoneType' object has no attribute 'enqueue'"), {"is_failed": True}),
    (RuntimeError("Worker failed with error 'Connection closed by peer'"), {"workers": [dead_worker()]}),
])  # fmt: skip
def test_a_lost_worker_breaks_the_engine_wherever_it_is_noticed(error, executor):
    told = rf"^vLLM lost a worker.*: {re.escape(str(error))}; create a new engine$"
    for action, arguments in (("fingerprint", ()), ("sleep", ()), ("_receive", ([{}], 3)), ("reseed", (1,))):
        engine = engine_on(is_cpu=True, tensor_parallel_size=2)
        vars(engine._llm.model_executor).update(executor)
        engine._llm.collective_rpc = engine._llm.reset_prefix_cache = failing_with(error)
        with pytest.raises(EngineBrokenError, match=told):
            getattr(engine, action)(*arguments)
        with pytest.raises(EngineBrokenError, match="score was called on an unusable engine"):
            engine.score([[1, 2]])


@pytest.mark.engine
def test_several_workers_get_a_bundle_in_parts_through_one_block(monkeypatch):
    from rllib_srl.engine import vllm_transfer

    lengths = 100, 5, 3000, 7, 16, 1
    bundle = pack([(f"w{i}", torch.arange(float(length)) + i) for i, length in enumerate(lengths)], 3, "float32")
    assert [[spec.name for spec in part] for part in vllm_transfer.parts_of(bundle, 1024)] == [
        ["w0", "w1"], ["w2"], ["w3", "w4", "w5"],
    ]  # fmt: skip
    monkeypatch.setattr(vllm_transfer, "PART_BYTES", 1024)
    monkeypatch.setattr(vllm_transfer.parts_of, "__defaults__", (1024,))
    loaded, handles, sizes = [], set(), []
    worker = vllm_transfer.BundleTransferEngine.__new__(vllm_transfer.BundleTransferEngine)
    worker.model = SimpleNamespace(load_weights=lambda named: loaded.extend(named))
    for info in vllm_transfer.offers(bundle, is_one_process=False):
        handles.add(info["handle"])
        sizes.append(sum(spec.num_bytes for spec in info["specs"]))
        worker.receive_weights(vllm_transfer.BundleUpdateInfo(**info))
    assert len(handles) == 1 and sizes == [420, 12000, 96]
    assert [name for name, _ in loaded] == [f"w{i}" for i in range(6)]
    for i, (_, tensor) in enumerate(loaded):  # intact although the block is gone
        assert torch.equal(tensor, torch.arange(len(tensor), dtype=torch.float32) + i)
    with pytest.raises(FileNotFoundError):
        vllm_transfer.shared_memory.SharedMemory(handles.pop())
