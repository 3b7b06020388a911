"""Fixtures that several rooms share."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

import gc
from pathlib import Path

import hypothesis
import pytest

from rllib_srl.storage.seal_key import VARIABLE
from tests.engine.small_llama import save_random_llama
from tests.quick_workers import IMPORTS, VLLM, quick_workers
from tests.watchdog import (  # noqa: F401
    pytest_configure,
    pytest_exception_interact,
    pytest_timeout_cancel_timer,
    pytest_timeout_set_timer,
    pytest_xdist_make_scheduler,
)

ROOT = Path(__file__).resolve().parent.parent

# What is tested is not at fault if the machine is busy.
hypothesis.settings.register_profile("shared", max_examples=50, deadline=None)
hypothesis.settings.load_profile("shared")


def pytest_make_parametrize_id(val) -> str | None:
    """Name a parameter of bytes by its length: pytest-xdist wants the same names in each process."""
    return f"{len(val)} bytes" if isinstance(val, bytes) else None


gc.disable()  # until the tests are collected: hardly anything that an import makes is garbage


def pytest_collection_finish(session):
    """Leave what was imported out of all further garbage collections, which then take a fraction of the time."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def own_seal_key(tmp_path_factory):
    """Let the tests and the processes they start seal checkpoints with a key of their own, not the user's."""
    os.environ[VARIABLE] = str(tmp_path_factory.mktemp("seal_key") / "seal.key")


@pytest.fixture(scope="session")
def random_llama_dir(tmp_path_factory):
    """Return the directory of a small Llama with random weights."""
    return save_random_llama(tmp_path_factory.mktemp("random_llama"))


@pytest.fixture
def config(random_llama_dir):
    """Return settings of which only environment and model are given; many files have others under this name."""
    from rllib_srl import SRLConfig

    return SRLConfig().environment("compare").rl_module(model_config={"model": str(random_llama_dir)})


@pytest.fixture(scope="session")
def quick_ray():
    """Let every Ray that starts in this process fork its workers."""
    with quick_workers():
        yield


@pytest.fixture(scope="session", autouse=True)
def quick_ray_of_slow_tests(request):
    """Do so if a slow test was collected."""
    if any(item.get_closest_marker(name) for item in request.session.items for name in ("slow", "engine", "smoke")):
        request.getfixturevalue("quick_ray")


@pytest.fixture(scope="session")
def ray_here(quick_ray, request):
    """Start a local Ray of two CPUs, once: whoever starts actors on it ends them."""
    import ray

    ray.shutdown()
    # Workers import the package and the classes that tests define from here.
    paths = {"PYTHONPATH": str(ROOT)}
    with pytest.MonkeyPatch.context() as patch:
        if any(item.get_closest_marker("engine") for item in request.session.items):
            patch.setenv(IMPORTS, VLLM)
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": paths})
    yield ray
    ray.shutdown()


@pytest.fixture
def build(tmp_path):
    """Return a function that builds an algorithm with a log directory of its own; check and stop all afterwards."""
    from tests.small_memory import check_memory

    built = []

    def of(config, **training):
        own = config.copy(copy_frozen=False).training(**training)
        built.append(own.training(log_directory=str(tmp_path / f"log{len(built)}")).build_algo())
        return built[-1]

    yield of
    for algo in built:
        if algo.memory.is_on:
            check_memory(algo)
        algo.stop()
