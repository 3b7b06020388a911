"""Where a served model computes: on the CPU in float32, or on one card in bfloat16, shared by server and trainer.

    server     weights, adapters, activations of vLLM's profile run, KV cache of at least one conversation
    trainer    as a learner with adapters, and the weights and KV cache of the engine that plays held-out prompts
    share      of the card that vLLM reserves: all that the trainer leaves

The estimates are those of `algorithm/gpu_memory.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rllib_srl.algorithm.gpu_memory import FREE, GIB, Need, engine_need, learner_need
from rllib_srl.algorithm.model_shape import ModelShape
from rllib_srl.algorithm.resources import PlacementError
from rllib_srl.cli.serving.job import CONTEXT, Job, KeptDomain, ServedSettings
from rllib_srl.cli.serving.rated_run import NUM_PLAYED, rated_config
from rllib_srl.cli.serving.vllm_server import MAX_ADAPTERS, NUM_REQUESTS, rank_of
from rllib_srl.cli.shared.diagnosis import FAILURE, OK, Line
from rllib_srl.engine.models import local_model, sizes_of

MOST = 0.9  # share of a card that vLLM reserves, at most


def card_share(job: Job, card_bytes: float | None, is_trained: bool = True) -> float:
    """Return the share of the card that vLLM reserves for a model, 0 without one; PlacementError: it is too small."""
    if card_bytes is None:
        return 0.0
    server, trainer = needs_of(job)
    left = card_bytes * (1 - FREE) - (trainer.total if is_trained else 0.0)
    if server.total > left:
        name, beside = Path(job.served.model).name, f", its trainer {trainer}" if is_trained else ""
        raise PlacementError(
            f"{name} does not fit on a card of {card_bytes / GIB:.0f} GiB: its server needs {server}{beside}; expected "
            "a larger card, a smaller model" + (", or --train-after 0" if is_trained else "")
        )
    return min(MOST, int(100 * left / card_bytes) / 100)


def dtype_of(share: float) -> str:
    """Return the number format of server and trainer: vLLM's kernels for adapters take no float32 on a card."""
    return "bfloat16" if share else "float32"


def needs_of(job: Job) -> tuple[Need, Need]:
    """Return what server and trainer need on a card; PlacementError: the sizes of the model are not known."""
    model = job.served.model
    if (shape := ModelShape.of(Path(model))) is None:
        expected = "expected a config.json with a Llama-like model's sizes"
        raise PlacementError(f"the memory that model {model} needs is unknown; {expected}")
    on_card = job.served.model_copy(update={"dtype": "bfloat16"})
    config = rated_config(job.model_copy(update={"served": on_card}), Path())
    trainer = learner_need(shape, config)
    engine_bytes = 2.0 * shape.num_parameters + NUM_PLAYED * job.served.context * shape.kv_bytes
    config.engine_max_num_seqs = NUM_REQUESTS
    server = engine_need(shape, config)
    adapters = 2.0 * MAX_ADAPTERS * shape.adapter_parameters(rank_of(job.served.rank))
    return Need({**server.parts, "adapters": adapters}), Need({**trainer.parts, "its engine": engine_bytes})


def fit(model: str, number: int, gib: float) -> Iterator[Line]:
    """Report for `srl doctor --serve` whether a model can be served and trained on one card, with usual settings."""
    directory = local_model(model)
    context = min(CONTEXT, sizes_of(directory).context or CONTEXT)
    settings = ServedSettings(model=str(directory), context=context, temperature=1.0)
    job = Job(served=settings, keep=[KeptDomain(env="compare", domain="compare")])
    if not number:
        yield Line(OK, "serving", f"{model} on the CPU, in {dtype_of(0)}; --gpus 1x80 plans for a card")
        return
    try:
        share = card_share(job, gib * GIB)
        server, trainer = needs_of(job)
    except PlacementError as error:
        yield Line(FAILURE, "serving", str(error))
        return
    shares = f"vLLM reserves {share:.0%} of a card of {gib:.0f} GiB (it needs {server}), the trainer {trainer}"
    yield Line(OK, "serving", f"{model} in {dtype_of(share)}: {shares}; an estimate, see docs/gpu.md")
