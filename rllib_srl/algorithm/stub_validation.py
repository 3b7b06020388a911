"""Validates the settings of a run with engine = "stub"; returns error messages "name = value; expected ..."."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rllib_srl.engine.stub.law import faults_of_law

# Settings that need a model, and their only value without one.
WITHOUT_MODEL = {
    "lora_rank": 0,
    "fsdp": False,
    "colocate": False,
    "activation_checkpointing": False,
    "evaluation_iterations": 0,
    "regularisers": None,
}
LAW = ("chance", "malformed", "learns", "forgets", "spread")


def faults_of_stub(config: Any) -> Iterator[str]:
    """Yield all errors of an `SRLConfig` with engine = "stub"; nothing with another engine."""
    if config.engine != "stub":
        return
    for name, expected in faults_of_law(*(getattr(config, f"stub_{one}") for one in LAW)).items():
        yield f"stub_{name} = {getattr(config, f'stub_{name}')!r}; expected {expected}"
    for name, value in WITHOUT_MODEL.items():
        if (getattr(config, name) or value) != value:  # None is left open
            yield _needs_model(name, getattr(config, name), value)
    for name in ("num_gpus_per_env_runner", "num_gpus_per_learner"):
        if getattr(config, name):
            yield _needs_model(name, getattr(config, name), 0)
    if config.compute_dtype == "bfloat16":
        yield _needs_model("compute_dtype", config.compute_dtype, "float32")
    if config.replay_embedding == "policy":
        yield _needs_model("replay_embedding", config.replay_embedding, "ngram")
    if config.replay_history_by == "kl":
        yield _needs_model("replay_history_by", config.replay_history_by, "versions")
    if config.replay_grade_reuse:
        yield _needs_model("replay_grade_reuse", config.replay_grade_reuse, False)
    loss = config.loss_settings()
    for name, only in (("kl_coeff", 0), ("use_critic", False)):
        if getattr(loss, name) != only:
            yield _needs_model(name, getattr(loss, name), only)


def _needs_model(name: str, given: Any, value: Any) -> str:
    return f"{name} = {given!r} with engine = 'stub'; expected {value!r}: the stub has no model"
