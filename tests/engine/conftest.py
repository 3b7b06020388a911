"""Engines of each kind and dtype on a small random Llama, each started once in a session."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: engines and learners share the cores

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rllib_srl.engine import make_engine
from rllib_srl.engine.protocol import Engine
from tests.engine.small_llama import CONTEXT_LENGTH, Learner

StartEngine = Callable[[str, str], Engine]


@pytest.fixture(params=["transformers", pytest.param("vllm", marks=pytest.mark.engine)], scope="session")
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["float32", "bfloat16"], scope="session")
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def start_engine(random_llama_dir: Path) -> Iterator[StartEngine]:
    """Return a function that gives the engine of a kind and dtype; each is started once, since vLLM takes long."""
    engines: dict[tuple[str, str], Engine] = {}

    def start(kind: str, dtype: str) -> Engine:
        if (kind, dtype) not in engines:
            # On a GPU the engines of both number formats share one card, and sleep.
            on_gpu = {"memory_utilization": 0.2, "can_sleep": True}
            settings = {"kv_cache_gib": 0.125, "num_threads": 1, **on_gpu} if kind == "vllm" else {}
            engines[kind, dtype] = make_engine(
                kind, random_llama_dir, dtype=dtype, seed=0, context_length=CONTEXT_LENGTH, max_num_seqs=64, **settings
            )
        return engines[kind, dtype]

    yield start
    for engine in engines.values():
        engine.close()


@pytest.fixture
def engine(kind: str, dtype: str, start_engine: StartEngine, learner: Learner) -> Iterator[Engine]:
    """Return an idle engine with the weights of version 0 and a fresh generator."""
    engine = start_engine(kind, dtype)
    yield engine
    engine.wake()
    engine.abort([f"r{i}" for i in range(100)])
    while engine.num_running():
        engine.step()
    engine.reseed(0)
    if engine.version != 0:
        engine.load_weights(learner.pack(version=0))


@pytest.fixture
def learner(random_llama_dir: Path, dtype: str) -> Learner:
    return Learner(random_llama_dir, dtype)
