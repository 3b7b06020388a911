"""Engines that apply adapters themselves: exact, verified, and with requests under way when a new adapter comes."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from rllib_srl.engine import make_engine
from rllib_srl.engine.adapters import AdapterSpec, adapter_tensors, add_adapters, expected_adapters
from rllib_srl.engine.canary import FP32_MAX_GAP, CanaryGap
from rllib_srl.engine.fingerprint import unmoved
from rllib_srl.engine.model_dir import load_config
from rllib_srl.engine.protocol import Engine, Sampling
from rllib_srl.engine.sync import WeightBundle, WeightSyncError, pack
from tests.engine.small_llama import CONTEXT_LENGTH, Learner, moved
from tests.engine.test_errors import noise_of, run_self_test, tampered

SPEC = AdapterSpec(4, 6.0, ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"))  # parts of stacked matrices, too
ONE = "model.layers.1.self_attn.v_proj.lora_B.weight"


class AdapterLearner(Learner):
    """A learner that trains and sends adapters."""

    def __init__(self, model_dir: Path, dtype: str) -> None:
        """Load the base and add adapters with a B that training has moved."""
        super().__init__(model_dir, dtype)
        add_adapters(self.model, SPEC, seed=5)
        generator = torch.Generator().manual_seed(3)
        for name, tensor in adapter_tensors(self.model):
            tensor.requires_grad_(False)
            if "lora_B" in name:
                tensor.normal_(0, 0.05, generator=generator)

    def tensors(self, scale: float) -> dict[str, torch.Tensor]:
        return moved(adapter_tensors(self.model), scale) if scale else dict(adapter_tensors(self.model))

    def score(self, scale: float = 0.0, sequences: list[list[int]] | None = None) -> list[np.ndarray]:
        own = dict(adapter_tensors(self.model))
        kept = {name: tensor.clone() for name, tensor in own.items()}
        for name, tensor in self.tensors(scale).items():
            own[name].copy_(tensor)
        try:
            with torch.no_grad():
                return super().score(0.0, sequences)
        finally:
            for name, tensor in kept.items():
                own[name].copy_(tensor)

    def pack(self, version: int, scale: float = 0.0) -> WeightBundle:
        return pack(self.tensors(scale).items(), version, self.dtype)


@pytest.fixture
def learner(random_llama_dir: Path, dtype: str) -> AdapterLearner:
    return AdapterLearner(random_llama_dir, dtype)


@pytest.fixture(scope="module")
def started(kind: str, dtype: str, random_llama_dir: Path) -> Iterator[Engine]:
    settings = {"kv_cache_gib": 0.125, "num_threads": 1} if kind == "vllm" else {"device": "cpu"}
    engine = make_engine(
        kind, random_llama_dir, dtype=dtype, context_length=CONTEXT_LENGTH, max_num_seqs=16, adapter=SPEC, **settings
    )
    yield engine
    engine.close()


@pytest.fixture
def engine(started: Engine, learner: AdapterLearner) -> Engine:
    """Return it with the learner's adapter of version 0."""
    started.load_weights(learner.pack(0))
    return started


def test_a_new_engine_is_the_base_and_a_loaded_one_the_learner(started, learner, random_llama_dir, dtype) -> None:
    zeros = pack([(name, torch.zeros_like(one)) for name, one in learner.tensors(0.0).items()], 0, dtype)
    started.load_weights(zeros)
    base = started.score(learner.sequences)
    plain = Learner(random_llama_dir, dtype).score()
    started.load_weights(learner.pack(1))
    assert started.version == 1
    gap = CanaryGap.between(started.score(learner.sequences), learner.score())
    moved = CanaryGap.between(base, learner.score())
    rounding = CanaryGap.between(base, plain)
    if dtype == "float32":
        assert gap.max <= FP32_MAX_GAP and rounding.max <= FP32_MAX_GAP
    assert moved.mean > 10 * max(gap.mean, rounding.mean)


def test_the_self_test_passes_and_every_matrix_is_in_the_fingerprint(engine, learner) -> None:
    before = engine.score(learner.sequences)
    run_self_test(engine, learner)
    assert CanaryGap.between(engine.score(learner.sequences), before).max == 0
    before = engine.fingerprint()
    assert len(before) == 2 * 2 * len(SPEC.targets)  # A and B, two layers
    engine.load_weights(learner.pack(1, scale=0.05))
    assert unmoved(before, engine.fingerprint()) == []
    engine.load_weights(learner.pack(0))
    assert engine.fingerprint() == before


def test_a_stale_matrix_is_found_and_named(engine, learner, monkeypatch) -> None:
    old = noise_of(engine)[ONE]
    tampered(monkeypatch, engine, lambda name, tensor: [(name, old.to(tensor.dtype) if name == ONE else tensor)])
    with pytest.raises(WeightSyncError, match="did not take the weights sent") as caught:
        run_self_test(engine, learner)
    assert [("layers.1" in name, "v_proj" in name, "lora_B" in name) for name in caught.value.tensors] == [(True,) * 3]


def test_one_corrupted_entry_is_found(engine, learner, monkeypatch, dtype) -> None:
    def corrupted(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        tensor = tensor.clone()
        if name == ONE:
            tensor[7, 2] += 4.0
        return [(name, tensor)]

    healthy = run_self_test(engine, learner)
    tampered(monkeypatch, engine, corrupted)
    engine.load_weights(learner.pack(2))
    gap = CanaryGap.between(engine.score(learner.sequences), learner.score())
    assert gap.max > FP32_MAX_GAP if dtype == "float32" else gap.mean > 1.5 * healthy.mean


def test_requests_under_way_go_on_with_the_new_adapter(engine, learner, dtype) -> None:
    prompt = list(range(40, 60))
    engine.submit("r0/0/0", prompt, Sampling(max_tokens=12, temperature=0.0, runs_to_limit=True))
    turns = [turn for _ in range(5) for turn in engine.step()]
    assert not turns
    engine.load_weights(learner.pack(3, scale=0.2))
    engine.submit("r1/0/0", prompt, Sampling(max_tokens=4, temperature=0.0, runs_to_limit=True))
    while engine.num_running():
        turns += engine.step()
    first, second = sorted(turns, key=lambda turn: turn.request_id)
    assert (first.first_version, first.last_version) == (0, 3)
    assert (second.first_version, second.last_version) == (3, 3)
    if dtype == "float32":  # the last tokens are of the new adapter over all that was written, the first of the old one
        tokens = [*prompt, *first.token_ids.tolist()]
        (old,), (new,) = learner.score(0.0, [tokens]), learner.score(0.2, [tokens])
        assert np.abs(first.logp[:3] - old[len(prompt) - 1 :][:3]).max() < 1e-3
        assert np.abs(first.logp[-6:] - new[-6:]).max() < 1e-3
        tokens = [*prompt, *second.token_ids.tolist()]  # not from the prefixes of before
        assert np.abs(second.logp - learner.score(0.2, [tokens])[0][-4:]).max() < 1e-3


def test_names_and_shapes_are_known_before_weights_are(random_llama_dir, learner) -> None:
    wanted = {name: tuple(tensor.shape) for name, tensor in learner.tensors(0.0).items()}
    assert expected_adapters(load_config(random_llama_dir), SPEC) == wanted
    with pytest.raises(ValueError, match=r"lora_targets = \['qq'\]; the model has no layers \['qq'\], expected "):
        expected_adapters(load_config(random_llama_dir), AdapterSpec(2, 4.0, ("qq",)))
