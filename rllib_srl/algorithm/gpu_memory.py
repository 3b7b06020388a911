"""Estimate the GPU memory of engines and learners, and refuse a run that does not fit before anything starts.

    learner   weights, gradients, optimiser, bf16 copies, activations of one micro-batch, frozen policies, reserve
    engine    weights, activations of vLLM's profile run, KV cache of at least one episode, within its reserved share

    who has the card            what must fit
    a learner                   the learner at its update
    an engine                   the engine's need, within engine_memory_utilization of the card
    both (`colocate`)           learner at its update + what a sleeping engine keeps;
                                learner without optimiser, twice its weights (the self-test) + the engine's share

Parameters are counted exactly for models with Llama's layers (tests compare them with meta tensors). Activations are
counted per layer as autograd keeps them in bfloat16. `RESERVE` covers the rest: CUDA's context, libraries'
workspaces and fragmentation. On an H100 a learner allocated 1 % more than is computed without it (135M), and 18 % less
(1.5B, checkpointing).

Source: Korthikanti et al. 2022, arXiv 2205.05198, section 4 (activations per layer; gated MLPs and no scores here).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from rllib_srl.algorithm.model_shape import SHAPES, ModelShape
from rllib_srl.algorithm.resources import PlacementError, engine_memory_share, gpu_shares
from rllib_srl.learner.reference import START
from rllib_srl.replay.diversity.neighbours import CARD_BYTES

GIB = 2**30
RESERVE = 2 * GIB  # for each process on a GPU
ASLEEP = 1 * GIB  # what a sleeping engine keeps: CUDA's context and graphs
CACHED = 0.5  # fraction of the activations: blocks that torch keeps for reuse; .44 measured on an H100
FREE = 0.03  # fraction of a card that is treated as unavailable
PROFILED_TOKENS = 8192  # tokens of one step of vLLM's profile run, at its default
HEAD_BYTES = 4 * 2**26  # one tile of logits (learner/scoring.py); two exist at once
OPTIMIZER_BYTES = {
    "adamw": 8.0,
    "sgd": 0.0,
    "adamw_8bit": 2.02,
    "paged_adamw": 0.0,
    "paged_adamw_8bit": 0.0,
}
READ = (  # settings that an estimate depends on
    *("num_env_runners", "num_learners", "engine_tensor_parallel_size", "engine_memory_utilization"),
    *("engine_max_num_seqs", "longest_episode", "micro_batch_tokens", "compute_dtype", "optimizer_name", "fsdp"),
    *("fsdp_gather_dtype", "lora_rank", "lora_send", "offload_frozen"),
    *("activation_checkpointing", "loss_settings", "made_regularisers", "replay_settings", "may_hold"),
)
CARDS = (24, 40, 80, 141)  # GiB; cards of the table in docs/gpu.md


@dataclass(frozen=True)
class Need:
    """Bytes that one process needs on its card, by part."""

    parts: dict[str, float]

    @property
    def total(self) -> float:
        """Bytes of all parts."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        shown = ", ".join(f"{name} {size / GIB:.1f}" for name, size in self.parts.items() if size >= 0.05 * GIB)
        return f"{self.total / GIB:.1f} GiB ({shown})"


def learner_need(shape: ModelShape, config: Any) -> Need:
    """Return what one learner needs at its update.

    Args:
        shape: the model's shape.
        config: an `SRLConfig`.
    """
    num, learners = shape.num_parameters, max(1, config.num_learners)
    parts = learners if config.fsdp else 1
    trained = shape.adapter_parameters(config.lora_rank) if config.lora_rank else num
    gradients = 4 * trained / parts * (2 if learners > 1 else 1)  # their sum over learners is a second copy
    block = trained / shape.num_layers if config.lora_rank else shape.layer_parameters
    is_bf16 = config.compute_dtype != "float32"
    kept_layers = 1 if config.activation_checkpointing else shape.num_layers
    per_token = kept_layers * shape.layer_activation_bytes() * (1 if is_bf16 else 1.6)
    num_inputs = 2 if config.activation_checkpointing == "offload" else shape.num_layers  # two are in transfer
    inputs = 4 * shape.hidden * num_inputs if config.activation_checkpointing else 0
    copies = 2.0 * num if is_bf16 else 0.0
    is_gathered_bf16 = bool(config.fsdp) and config.fsdp_gather_dtype == "bfloat16"
    if is_gathered_bf16:  # autocast copies the weights outside of the layers
        copies -= 2.0 * shape.num_layers * shape.layer_parameters
    largest = max(shape.layer_parameters, shape.vocab * shape.hidden)  # the largest unit that FSDP gathers
    width = 2.0 if is_gathered_bf16 and largest == shape.layer_parameters else 4.0
    if config.lora_rank and config.activation_checkpointing:
        copies /= shape.num_layers  # autocast caches the copies of trained weights only
    return Need(
        {
            "weights": 4 * (num + (trained if config.lora_rank else 0)) / parts,
            "gradients": gradients,
            # `Conflict` has two copies of the last block, beside the gradient of a domain.
            "held gradients": gradients + 8 * block / parts if config.may_hold() else 0.0,
            "optimiser": OPTIMIZER_BYTES[config.optimizer_name] * trained / parts,
            "bf16 copies": copies,
            "gathered layers": 2 * width * largest if config.fsdp else 0.0,
            "frozen": 0.0 if config.offload_frozen else _num_frozen(config) * _frozen_bytes(shape, is_bf16) / parts,
            "regularisers": 4.0 * trained / parts * sum(one.num_copies for one in config.made_regularisers().values()),
            "activations": config.micro_batch_tokens * (per_token + inputs + 8 * shape.hidden) + 2 * HEAD_BYTES,
            "reserve": RESERVE,
        }
    )


def _num_frozen(config: Any) -> int:
    """Return how many frozen policies have their own weights; with adapters the starting policy has none."""
    sources = {START} if config.loss_settings().needs_reference else set()
    sources.update(*(one.frozen_sources for one in config.made_regularisers().values()))
    return len(sources - ({START} if config.lora_rank else set()))


def _frozen_bytes(shape: ModelShape, is_bf16: bool) -> float:
    """Return the bytes of a frozen policy: its layers in the compute dtype, the rest in fp32."""
    return 4.0 * shape.num_parameters - 2.0 * shape.num_layers * shape.layer_parameters * is_bf16


def engine_need(shape: ModelShape, config: Any) -> Need:
    """Return the minimum that one engine needs on each of its cards; the rest of its share becomes KV cache."""
    size, width = max(1, config.engine_tensor_parallel_size), 4 if config.compute_dtype == "float32" else 2
    tokens = max(PROFILED_TOKENS, config.engine_max_num_seqs)
    profile = tokens * width * (2 * shape.hidden + 2 * shape.inner / size)
    is_adapted = config.lora_rank and config.lora_send == "adapter"
    adapters = shape.adapter_parameters(config.lora_rank) if is_adapted else 0
    return Need(
        {
            "weights": width * shape.num_parameters / size,
            "adapters": width * adapters,
            "activations": profile + 4 * config.engine_max_num_seqs * shape.vocab,
            "KV cache": shape.kv_bytes * config.longest_episode / min(size, shape.num_kv_heads) * width / 2,
            "reserve": RESERVE,
        }
    )


def memory_errors(shape: ModelShape, config: Any, card_bytes: float, cached: float = 0.0) -> Iterator[str]:
    """Yield a line for each need that cards of this size cannot meet; it says what to change.

    Args:
        shape: the model's shape.
        config: an `SRLConfig` after `validate`.
        card_bytes: memory of each card.
        cached: fraction of the activations that must fit a second time, see `CACHED`.
    """
    usable, card = card_bytes * (1 - FREE), f"a GPU of {card_bytes / GIB:.0f} GiB"
    learner, engine = learner_need(shape, config), engine_need(shape, config)
    utilization = config.engine_memory_utilization
    if utilization is None:
        utilization = engine_memory_share(config.num_gpus_per_env_runner)
    has_learner, has_engine = bool(config.num_gpus_per_learner), bool(config.num_gpus_per_env_runner)
    if has_engine and engine.total > utilization * card_bytes:
        yield (
            f"an engine needs {engine} within engine_memory_utilization = {utilization:g} of {card}; expected a higher "
            "share, a lower max_episode_tokens, or a larger engine_tensor_parallel_size"
        )
    memory = CARD_BYTES if config.replay_settings().searches_on_gpu else 0
    if not has_learner:
        return
    is_shared = has_engine and config.num_gpus_per_learner < 1 and config.num_gpus_per_env_runner < 1
    beside = (ASLEEP if config.colocate else utilization * card_bytes) if is_shared else 0.0
    if learner.total + cached * learner.parts["activations"] + beside + memory > usable:
        whose = f" next to an engine that keeps {beside / GIB:.1f} GiB" if beside else ""
        whose += f" next to the memory's {memory / GIB:.1f} GiB" if memory else ""
        would_fit = is_shared and not config.colocate and learner.total + ASLEEP + memory <= usable
        yield f"a learner needs {learner}{whose} on {card}; expected {_remedy(config, would_fit, learner)}"
    awake = 2 * learner.parts["weights"] + learner.parts["frozen"] + RESERVE + utilization * card_bytes + memory
    if is_shared and awake > usable:
        yield (
            f"learner and engine need {awake / GIB:.1f} GiB together when weights are tested on {card}; expected "
            "a lower engine_memory_utilization, or a GPU for each"
        )


def fit_awake(shape: ModelShape, config: Any, card_bytes: float) -> bool:
    """Return whether a learner and an engine that stays awake during updates fit onto one card together.

    There must be room for what torch keeps of the learner's memory for reuse: without turns it is never given back, and
    an engine that restarts needs its whole share free.

    Args:
        shape: the model's shape.
        config: an `SRLConfig` after `validate`; `colocate` is not read.
        card_bytes: memory of the card.
    """
    shares = {name: getattr(config, name) for name in ("num_gpus_per_env_runner", "num_gpus_per_learner")}
    return not any(memory_errors(shape, _changed(config, **shares, colocate=False), card_bytes, CACHED))


def _changed(config: Any, **changes: Any) -> SimpleNamespace:
    """Return the settings that an estimate depends on, some of them changed or added."""
    return SimpleNamespace(**{name: getattr(config, name) for name in READ} | changes)


def _remedy(config: Any, fits_in_turns: bool, learner: Need) -> str:
    steps = ["colocate = True"] if fits_in_turns else []
    if learner.parts["frozen"]:
        steps.append("offload_frozen = True")
    if not config.activation_checkpointing:
        steps.append("activation_checkpointing = True")
    if not config.lora_rank:
        steps.append("lora_rank = 16")
        steps.append(f"fsdp = True with num_learners above {max(1, config.num_learners)}")
    if learner.parts["held gradients"]:
        steps.append("replay_retain = 0")
    if config.micro_batch_tokens > 1024:
        steps.append(f"micro_batch_tokens below {config.micro_batch_tokens}")
    return ", ".join(steps[:-1]) + f" or {steps[-1]}" if len(steps) > 1 else (steps or ["a smaller model"])[0]


@dataclass(frozen=True)
class Variant:
    """A way to train a model on a number of equal cards, and what does not fit; [] if it fits."""

    name: str
    num_gpus: int
    learner: Need
    errors: list[str]


def variant(
    shape: ModelShape, config: Any, name: str, num_gpus: int, card_bytes: float, **changes: Any
) -> Variant:
    """Return a variant of the settings on a machine of `num_gpus` cards, placed as `validate` places it.

    Args:
        shape: the model's shape.
        config: an `SRLConfig`.
        name: the variant's name.
        num_gpus: cards.
        card_bytes: memory of each card.
        changes: settings that differ.
    """
    new_config = _changed(config, **changes)
    counts = new_config.num_env_runners, new_config.num_learners, new_config.engine_tensor_parallel_size
    shares = gpu_shares(num_gpus, *counts)
    new_config.num_gpus_per_env_runner, new_config.num_gpus_per_learner = shares.per_env_runner, shares.per_learner
    new_config.colocate = shares.is_colocated
    return Variant(name, num_gpus, learner_need(shape, new_config), list(memory_errors(shape, new_config, card_bytes)))


def variants(shape: ModelShape, config: Any, num_gpus: int, card_bytes: float) -> list[Variant]:
    """Return full training, adapters and, with three cards or more, FSDP, on one engine and the other cards.

    The rank of the adapters is `lora_rank`, 16 if it is 0; all other settings are as given.
    """
    rank, places = config.lora_rank or 16, (min(num_gpus, 2), card_bytes)
    candidates = [
        variant(shape, config, "full", *places, fsdp=False, lora_rank=0, num_learners=1),
        variant(shape, config, f"lora_rank = {rank}", *places, fsdp=False, lora_rank=rank, num_learners=1),
    ]
    if num_gpus > 2:
        sharded = {"fsdp": True, "lora_rank": 0, "num_learners": num_gpus - 1}
        candidates.append(variant(shape, config, f"fsdp over {num_gpus - 1}", num_gpus, card_bytes, **sharded))
    return candidates


def table(config: Any) -> list[str]:
    """Return the Markdown table of docs/gpu.md: what fits, by model size and card."""
    lines = [
        "| model | card | one card, shared: full | LoRA | two cards: full | LoRA | FSDP: learners' cards, at least |",
        "|---|---|---|---|---|---|---|",
    ]
    for size, shape in SHAPES.items():
        for gib in CARDS:
            cells = []
            for num_gpus in (1, 2):
                for candidate in variants(shape, config, num_gpus, gib * GIB):
                    cells.append(f"{'no' if candidate.errors else 'yes'}, {candidate.learner.total / GIB:.0f}")
            cells.append(_least_fsdp(shape, config, gib * GIB))
            lines.append(f"| {size} | {gib} GiB | {' | '.join(cells)} |")
    return lines


def _least_fsdp(shape: ModelShape, config: Any, card_bytes: float) -> str:
    for num in (2, 4, 8, 16, 32):
        candidate = variants(shape, config, num + 1, card_bytes)[-1]
        if not candidate.errors:
            return f"{num}, {candidate.learner.total / GIB:.0f} each"
    return "none up to 32"


def check_memory(shape: ModelShape | None, config: Any, card_bytes: float | None) -> None:
    """Refuse a run that does not fit; does nothing without GPUs or without `check_resources`.

    Raises:
        PlacementError: the lines of `memory_errors`.
    """
    if shape is None or card_bytes is None or not config.check_resources:
        return
    if errors := list(memory_errors(shape, config, card_bytes)):
        raise PlacementError("\n  ".join(errors))
