"""Each way a weight update can go wrong is injected into a real engine, and must be caught in fp32 and in bf16."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch

from rllib_srl.engine import make_engine
from rllib_srl.engine.canary import CanaryGap, check_canary, check_fingerprints, noise
from rllib_srl.engine.fingerprint import unmoved
from rllib_srl.engine.protocol import Engine, EngineBrokenError, Sampling
from rllib_srl.engine.sync import WeightBundle, WeightSyncError, torch_dtype, unpack
from rllib_srl.engine.transformers_engine import TransformersEngine
from tests.engine.conftest import StartEngine
from tests.engine.small_llama import CONTEXT_LENGTH, Learner
from tests.waiting import wait_until

LAYER = "model.layers.1."


def run_self_test(engine: Engine, learner: Learner) -> CanaryGap:
    """Run the self-test as the algorithm does; return the gap of a healthy engine."""
    before = engine.fingerprint()
    engine.load_noise()
    noisy = engine.fingerprint()
    engine.load_weights(learner.pack(0))
    check_fingerprints(before, noisy, engine.fingerprint(), is_same=True, version=0)
    gap = CanaryGap.between(engine.score(learner.sequences), learner.score())
    check_canary(gap, None, learner.dtype, version=0)
    return gap


def noise_of(engine: Engine) -> dict[str, torch.Tensor]:
    return dict(noise(engine._expected, torch_dtype(engine._dtype)))


@pytest.fixture
def engine(kind: str, dtype: str, start_engine: StartEngine, learner: Learner) -> Iterator[Engine]:
    engine = start_engine(kind, dtype)
    engine.load_weights(learner.pack(0))
    yield engine
    if isinstance(engine, TransformersEngine):
        engine._model.tie_weights()


def tampered(monkeypatch: pytest.MonkeyPatch, engine: Engine | None, change: Callable) -> None:
    """Let an engine (None: any of transformers) load the list of (name, tensor) that `change` makes of each."""

    def loaded(bundle: WeightBundle) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in unpack(bundle):
            yield from change(name, tensor)

    module = "transformers_engine" if isinstance(engine, TransformersEngine | None) else "vllm_transfer"
    monkeypatch.setattr(f"rllib_srl.engine.{module}.unpack", loaded)


def stale_head(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the head tied to the embedding keep its old matrix."""
    if isinstance(engine, TransformersEngine):
        head = engine._model.lm_head
        head.weight = torch.nn.Parameter(head.weight.clone(), requires_grad=False)
    else:
        transfer = "rllib_srl.engine.vllm_transfer.BundleTransferEngine"
        monkeypatch.setattr(f"{transfer}.start_weight_update", start_with_kept_heads)
        monkeypatch.setattr("rllib_srl.engine.vllm_transfer.repack_heads", lambda model: None)


def start_with_kept_heads(self) -> None:
    """Prepare the layers for loading, the heads with a copy of their weight, as where the processor prepacks it."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    for layer in self.model.modules():
        if isinstance(layer, ParallelLMHead):
            # The same function, so that equal weights give equal bits; it ignores the weight if it has prepacked one.
            compute, kept = layer.cpu_linear, layer.weight.detach().clone()
            layer.cpu_linear = lambda x, weight, bias, compute=compute, kept=kept: compute(x, kept, bias)
    initialize_layerwise_reload(self.model)


def modules_of(names: Iterable[str]) -> set[str]:
    """Return the modules that entries of a fingerprint belong to; where nothing is prepacked, a module has two."""
    return {name.removesuffix(" (answer)").removesuffix(".weight") for name in names}


def stale_layer(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    return [] if name.startswith(LAYER) else [(name, tensor)]


def swapped_keys_and_values(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    if name.startswith(LAYER):
        name = name.replace("k_proj", "~").replace("v_proj", "k_proj").replace("~", "v_proj")
    return [(name, tensor)]


def caught_by_canary(engine: Engine, learner: Learner, healthy: CanaryGap) -> bool:
    """Say whether the check after an ordinary, large update sees the error."""
    engine.load_weights(learner.pack(1, scale=0.1))
    gap = CanaryGap.between(engine.score(learner.sequences), learner.score(scale=0.1))
    try:
        check_canary(gap, healthy, learner.dtype, version=1)
    except WeightSyncError as error:
        return "version 1" in str(error) and f"mean {gap.mean:.2g}" in str(error)
    return False


@pytest.mark.slow
def test_a_healthy_engine_passes_and_keeps_its_weights(engine: Engine, learner: Learner) -> None:
    before = engine.score(learner.sequences)
    healthy = run_self_test(engine, learner)
    assert CanaryGap.between(engine.score(learner.sequences), before).max == 0
    assert run_self_test(engine, learner) == healthy
    engine.load_noise()
    with pytest.raises(WeightSyncError, match="expected m"):
        check_canary(CanaryGap.between(engine.score(learner.sequences), learner.score()), healthy, learner.dtype, 0)


def test_a_stale_tied_head_is_caught(engine: Engine, learner: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = CanaryGap.between(engine.score(learner.sequences), learner.score())
    stale_head(engine, monkeypatch)
    with pytest.raises(WeightSyncError) as caught:
        run_self_test(engine, learner)
    assert any("lm_head" in name for name in caught.value.tensors)
    assert caught_by_canary(engine, learner, healthy)


@pytest.mark.parametrize("error", ["a stale layer", "swapped keys and values", "a skipped sync"])
def test_an_error_is_caught_by_self_test_and_canary(engine, learner, monkeypatch, error: str) -> None:
    healthy = CanaryGap.between(engine.score(learner.sequences), learner.score())
    if error == "a skipped sync":
        monkeypatch.setattr(engine, "load_weights", lambda bundle: setattr(engine, "version", bundle.version))
    else:
        tampered(monkeypatch, engine, stale_layer if error == "a stale layer" else swapped_keys_and_values)
    with pytest.raises(WeightSyncError) as caught:
        run_self_test(engine, learner)
    assert error.startswith("swapped") or "did not take the weights sent" in str(caught.value)
    if error == "a stale layer":
        assert caught.value.tensors and all(name.startswith(LAYER) for name in caught.value.tensors)
    assert caught_by_canary(engine, learner, healthy)


@pytest.mark.slow
def test_each_single_stale_tensor_is_caught(engine: Engine, learner: Learner, monkeypatch) -> None:
    old = noise_of(engine)
    stacks = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj")
    stacks |= dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj")
    for stale in old:
        tampered(monkeypatch, engine, lambda name, one, stale=stale: [(name, old[name] if name == stale else one)])
        with pytest.raises(WeightSyncError, match="did not take the weights sent") as caught:
            run_self_test(engine, learner)
        module, part = stale.removesuffix(".weight").rpartition(".")[::2]
        places = {f"{module}.{part}", f"{module}.{stacks.get(part, part)}", "lm_head" if part == "embed_tokens" else ""}
        assert modules_of(caught.value.tensors) <= places
        tampered(monkeypatch, engine, lambda name, tensor: [(name, tensor)])
        engine.load_weights(learner.pack(0))


def test_a_flipped_byte_and_a_missing_tensor_are_caught_before_loading(engine: Engine, learner: Learner) -> None:
    before = engine.score(learner.sequences)
    bundle = learner.pack(4, scale=0.1)
    buffer = bundle.buffer.copy()
    buffer[-1 - 64] ^= 1
    name = bundle.tensors[7].name
    lost = tuple(spec for spec in bundle.tensors if spec.name != name)
    with pytest.raises(WeightSyncError, match="differ"):
        engine.load_weights(dataclasses.replace(bundle, buffer=buffer))
    with pytest.raises(WeightSyncError, match=rf"missing \[{name}\]"):
        engine.load_weights(dataclasses.replace(bundle, tensors=lost))
    assert engine.version == 0
    assert CanaryGap.between(engine.score(learner.sequences), before).max == 0


def test_every_module_of_the_engine_is_in_its_fingerprint(engine: Engine, learner: Learner) -> None:
    before = engine.fingerprint()
    modules = modules_of(before)
    num_matrices = sum("proj" in name for name in modules)
    # of two layers: 7 matrices each as they are named by Hugging Face, 4 where vLLM stacks q, k, v and gate, up
    assert num_matrices == (14 if isinstance(engine, TransformersEngine) else 8)
    assert sum("norm" in name for name in modules) == 5
    engine.load_weights(learner.pack(1, scale=0.05))
    assert unmoved(before, engine.fingerprint()) == []
    engine.load_weights(learner.pack(0))
    assert engine.fingerprint() == before


@pytest.mark.slow
@pytest.mark.engine
def test_two_workers_follow_too(random_llama_dir) -> None:
    engine = make_engine(
        "vllm", random_llama_dir, context_length=CONTEXT_LENGTH, kv_cache_gib=0.125, num_threads=1,
        tensor_parallel_size=2,
    )  # fmt: skip
    try:
        learner = Learner(random_llama_dir, "float32")
        run_self_test(engine, learner)
        prints = engine.fingerprint()
        assert sum(name.startswith("worker 1 ") for name in prints) == len(prints) // 2
        engine.load_weights(learner.pack(3, scale=0.1))
        gap = CanaryGap.between(engine.score(learner.sequences), learner.score(0.1))
        assert gap.max < 1e-3
        runs = []
        for _ in range(2):
            engine.reseed(4)
            runs.append([turn.token_ids.tolist() for turn in engine.generate([[1, 2, 3]] * 4, Sampling(max_tokens=8))])
        assert runs[0] == runs[1]
        executor = engine._llm.model_executor
        executor.workers[0].proc.kill()
        assert wait_until(lambda: executor.rpc_broadcast_mq is None, 60)  # vLLM has ended the other worker as well
        with pytest.raises(EngineBrokenError, match=r"vLLM lost a worker in reseed: .*; create a new engine"):
            engine.reseed(5)
    finally:
        engine.close()
