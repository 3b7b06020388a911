"""Where a served model computes: on the CPU in float32, or on one card in bfloat16, shared by server and trainer.

    server     weights, adapters, activations of vLLM's profile run, KV cache of at least one conversation
    trainer    as a learner with adapters, and the weights and KV cache of the engine that plays held-out prompts
    share      of the card that vLLM reserves: all that the trainer leaves

vLLM's kernels for adapters compute in bfloat16 or float16 only. The estimates are those of `algorithm/gpu_memory.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rllib_srl.algorithm.gpu_memory import FREE, GIB, Need, engine_need, learner_need
from rllib_srl.algorithm.model_shape import ModelShape
from rllib_srl.algorithm.resources import PlacementError
from rllib_srl.cli.serving.job import CONTEXT, Job, KeptDomain, TrainingSettings
from rllib_srl.cli.serving.trainer.rated_run import NUM_PLAYED, rated_config
from rllib_srl.cli.serving.vllm_server import MAX_ADAPTERS, NUM_REQUESTS, rank_of
from rllib_srl.cli.shared.diagnosis import FAILURE, OK, Line
from rllib_srl.engine.models import local_model, sizes_of

MOST = 0.9  # share of a card that vLLM reserves, at most


@dataclass(frozen=True)
class Place:
    """Where server and trainer compute. Invariant: `share` is above 0 on a card only."""

    dtype: str = "float32"
    share: float = 0.0  # of the card that vLLM reserves

    @property
    def is_card(self) -> bool:
        """Return whether it is a card."""
        return self.share > 0


def place_of(job: Job, card_bytes: float | None, is_trained: bool = True) -> Place:
    """Return where a model is served and trained on this machine.

    Args:
        job: of any version.
        card_bytes: memory of the card; None: there is none.
        is_trained: whether versions are trained, too.

    Raises:
        PlacementError: they do not fit on the card; the message says what each needs.
    """
    if card_bytes is None:
        return Place()
    server, trainer = needs_of(job)
    left = card_bytes * (1 - FREE) - (trainer.total if is_trained else 0.0)
    if server.total > left:
        beside = f" and its trainer {trainer}" if is_trained else ""
        raise PlacementError(
            f"the server of {Path(job.model).name} needs {server}{beside} on a card of {card_bytes / GIB:.0f} GiB; "
            "expected a larger card, a smaller model" + (", or --train-after 0" if is_trained else "")
        )
    return Place("bfloat16", min(MOST, int(100 * left / card_bytes) / 100))


def needs_of(job: Job) -> tuple[Need, Need]:
    """Return what server and trainer need on a card.

    Raises:
        PlacementError: the sizes of the model are not known.
    """
    shape = ModelShape.of(Path(job.model))
    if shape is None:
        raise PlacementError(f"{job.model}: expected a config.json with a Llama-like model's sizes, to plan for a card")
    config = rated_config(replace(job, dtype="bfloat16"), Path()).flat()
    trainer = learner_need(shape, config)
    own = 2.0 * shape.num_parameters + NUM_PLAYED * job.context_length * shape.kv_bytes
    config.engine_max_num_seqs = NUM_REQUESTS
    server = engine_need(shape, config)
    adapters = 2.0 * MAX_ADAPTERS * shape.adapter_parameters(rank_of(job.settings.rank))
    return Need({**server.parts, "adapters": adapters}), Need({**trainer.parts, "its engine": own})


def fit(model: str, number: int, gib: float) -> Iterator[Line]:
    """Report for `srl doctor --serve` whether a model can be served and trained on one card, with usual settings."""
    directory = local_model(model)
    context = min(CONTEXT, sizes_of(directory).context or CONTEXT)
    job = Job(0, str(directory), "", context, 1.0, 0, TrainingSettings(), [KeptDomain("compare", "compare", {})], [])
    try:
        place = place_of(job, gib * GIB if number else None)
        server, trainer = needs_of(job)
    except PlacementError as error:
        yield Line(FAILURE, "serving", str(error))
        return
    if not place.is_card:
        yield Line(OK, "serving", f"{model} on the CPU, in {place.dtype}; --gpus 1x80 plans for a card")
        return
    shares = f"vLLM reserves {place.share:.0%} of a card of {gib:.0f} GiB (it needs {server}), the trainer {trainer}"
    yield Line(OK, "serving", f"{model} in {place.dtype}: {shares}; an estimate, see docs/gpu.md")
