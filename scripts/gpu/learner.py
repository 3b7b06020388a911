"""The learner's speed on random weights, without Ray or vLLM: where its time goes, retention, packing.

    python -m scripts.gpu.learner train 1.5B            AdamW, passes of 32,768 tokens
    python -m scripts.gpu.learner train 8B --lora       adapters of rank 16
    python -m scripts.gpu.learner retention 1.5B        an update with 16 held answers against one without
    python -m scripts.gpu.learner packing 1.5B          weights into the buffer that engines read

    utilisation = 6 N D / seconds / peak              N parameters, D tokens; with adapters 4 N D (a frozen base)
    lost to     recompute_s   a forward pass without gradient: checkpointing computes it again
                optimiser_s   AdamW's step
                launch_s      step less the time in kernels (on a CPU: in operators), by torch's profiler
                padding       share of computed tokens that belong to no answer

The peak is the card's data sheet's in bfloat16, dense; for others, and on a CPU, that of a large product measured here.
`--short` runs a small model on the CPU. The last line has the figures of the table.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch

from rllib_srl.algorithm.model_shape import SHAPES, ModelShape
from rllib_srl.batch.layout import Episode, micro_batch, trie_layout
from rllib_srl.engine.adapters import TARGETS, AdapterSpec, add_adapters
from rllib_srl.engine.sync import pack
from rllib_srl.learner.scoring import as_tensors, autocast, token_logps
from rllib_srl.learner.trie_attention import register
from scripts.gpu.random_model import SHORT, llama_config

PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "B200": 2250.0, "A100": 312.0, "L40S": 362.0}  # bfloat16, without sparsity
NUM_WARM = 2  # steps that compile kernels and fill torch's cache
HELD = 16  # answers that an update holds
GIB = 2**30


def print_figures(**figures: Any) -> None:
    """Print one JSON line."""
    print(json.dumps(figures), flush=True)


def make_model(shape: ModelShape, device: str) -> Any:
    """Return a Llama with random float32 weights."""
    from transformers import AutoModelForCausalLM

    config = llama_config(shape, max_position_embeddings=131072)
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=register()).eval()


def streams(num_tokens: int, vocab: int, seed: int) -> list[list[int]]:
    """Return four groups of four answers to one prompt, about `num_tokens` tokens without the repeated prompts."""
    rng = np.random.default_rng(seed)
    each = max(8, num_tokens // 20)
    sequences = []
    for _ in range(4):
        prompt = rng.integers(0, vocab, each)
        sequences += [np.concatenate([prompt, rng.integers(0, vocab, each)]).tolist() for _ in range(4)]
    return sequences


def digits(value: float) -> float:
    """Return a figure with three digits."""
    return float(f"{value:.3g}")


class Timer:
    """Seconds of actions on a device, work under way included."""

    def __init__(self, device: str) -> None:
        """Set the device."""
        self.device = device

    def sync(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def __call__(self, action: Callable[[], Any]) -> float:
        """Return how long an action takes."""
        self.sync()
        start = time.perf_counter()
        action()
        self.sync()
        return time.perf_counter() - start

    def busy(self, action: Callable[[], Any]) -> float:
        """Return the seconds that an action spends in kernels, on a CPU in operators."""
        from torch.profiler import ProfilerActivity, profile

        is_gpu = self.device == "cuda"
        with profile(activities=[ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU]) as profiler:
            self(action)
        name = "self_device_time_total" if is_gpu else "self_cpu_time_total"
        return float(sum(getattr(event, name) for event in profiler.key_averages())) / 1e6


def peak_tflops(timer: Timer) -> float:
    """Return the TFLOP/s that the device can do in bfloat16."""
    card = torch.cuda.get_device_name() if timer.device == "cuda" else ""
    for name, value in PEAK_TFLOPS.items():
        if name in card:
            return value
    size = 8192 if timer.device == "cuda" else 1024
    a, b = (torch.randn(size, size, device=timer.device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / min(timer(lambda: a @ b) for _ in range(5)) / 1e12


def checkpointed(model: Any) -> None:
    """Let each decoder layer keep its input and compute the rest again."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = True


class Policy:
    """A model in training with AdamW. Invariant: only what requires a gradient is trained."""

    def __init__(self, size: str, is_short: bool, has_adapters: bool = False) -> None:
        """Make random weights on the card, or a small model on the CPU."""
        self.device = "cpu" if is_short or not torch.cuda.is_available() else "cuda"
        self.shape = SHORT if is_short else SHAPES[size]
        self.timer = Timer(self.device)
        self.model = make_model(self.shape, self.device)
        if has_adapters:
            add_adapters(self.model, AdapterSpec.of(16, None, TARGETS), seed=0)
        checkpointed(self.model)
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimiser = torch.optim.AdamW(self.trained, lr=1e-6, fused=True)

    def batch(self, episodes: Sequence[Episode]) -> Any:
        """Return the pass over some episodes on the device."""
        return as_tensors(micro_batch(episodes, True), torch.device(self.device), 1.0)

    def forward(self, batch: Any) -> dict[str, torch.Tensor]:
        """Return what the head gives."""
        with autocast(torch.device(self.device), "bfloat16"):
            return token_logps(self.model, batch)

    def loss(self, batch: Any) -> torch.Tensor:
        """Return the policy gradient's loss of a pass."""
        loss: torch.Tensor = -(batch["advantage"] * self.forward(batch)["logp"]).mean()
        return loss

    def step(self) -> None:
        """Make AdamW's step and drop the gradients."""
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)


def answers(sequences: Sequence[Sequence[int]], written: int) -> list[Episode]:
    """Return sequences as episodes whose last `written` tokens the policy wrote."""
    episodes, rng = [], np.random.default_rng(0)
    for index, ids in enumerate(sequences):
        mask = np.arange(len(ids)) >= len(ids) - written
        logp = np.where(mask, -1.0, 0.0).astype(np.float32)
        episodes.append(Episode(np.asarray(ids, np.int32), mask, logp, float(rng.normal()), index))
    return episodes


def train(size: str, is_short: bool, num_tokens: int, has_adapters: bool) -> None:
    """Time whole steps, and their parts."""
    policy = Policy(size, is_short, has_adapters)
    timer, num_steps = policy.timer, 2 if is_short else 4
    times: dict[str, list[float]] = {"forward_s": [], "backward_s": [], "optimiser_s": [], "step_s": []}
    for step in range(NUM_WARM + num_steps):
        sequences = streams(num_tokens, policy.shape.vocab, step)
        batch, kept = policy.batch(answers(sequences, len(sequences[0]) // 2)), []
        forward = timer(lambda: kept.append(policy.loss(batch)))  # noqa: B023 (called at once)
        backward, optimiser = timer(lambda: kept[0].backward()), timer(policy.step)  # noqa: B023
        parts = (forward, backward, optimiser, forward + backward + optimiser)
        print_figures(step=step, **dict(zip(times, (round(duration, 4) for duration in parts), strict=True)))
        if step >= NUM_WARM:
            for name, duration in zip(times, parts, strict=True):
                times[name].append(duration)

    def whole() -> None:
        policy.loss(batch).backward()
        policy.step()

    with torch.no_grad():
        recompute = median(timer(lambda: policy.forward(batch)) for _ in range(2))
    seconds, in_kernels = median(times["step_s"]), timer.busy(whole)
    computed = batch["token_ids"].numel()
    unique = trie_layout([np.asarray(ids, np.int32) for ids in sequences]).token_ids_RT.size
    flops = (4 if has_adapters else 6) * policy.shape.num_parameters * computed
    peak = peak_tflops(timer)
    print_figures(
        model="short" if is_short else size, tokens=computed, tokens_per_s=round(computed / seconds),
        tflops=digits(flops / seconds / 1e12), utilisation=digits(flops / seconds / 1e12 / peak),
        step_s=digits(seconds), recompute_s=digits(recompute), optimiser_s=digits(median(times["optimiser_s"])),
        launch_s=digits(max(0.0, seconds - in_kernels)), padding=digits(1 - unique / computed),
        peak_tflops=digits(peak), peak_gib=peak_gib(policy.device),
    )  # fmt: skip


def peak_gib(device: str) -> float:
    """Return the most memory that torch has allocated on the card, GiB, 0 on a CPU."""
    return round(torch.cuda.max_memory_allocated() / GIB, 2) if device == "cuda" else 0.0


def retention(size: str, is_short: bool) -> None:
    """Time an update of 64 answers, and what 16 stored answers that are held add to it."""
    policy = Policy(size, is_short)
    prompts, each, written = (2, 2, 8) if is_short else (8, 8, 256)
    held_answers = 4 if is_short else HELD
    rng = np.random.default_rng(0)

    def texts(num: int, group: int) -> list[list[int]]:
        sequences = []
        for _ in range(num):
            prompt = rng.integers(0, policy.shape.vocab, written).tolist()
            sequences += [prompt + rng.integers(0, policy.shape.vocab, written).tolist() for _ in range(group)]
        return sequences

    played = policy.batch(answers(texts(prompts, each), written))
    held = policy.batch(answers(texts(held_answers, 1), written))
    actions = {
        "plain_s": lambda: policy.loss(played).backward(),
        "held_s": lambda: (-policy.forward(held)["logp"]).mean().backward(),
    }
    times: dict[str, list[float]] = {name: [] for name in actions}
    for step in range(NUM_WARM + 3):
        for name, action in actions.items():
            seconds = policy.timer(action)
            if step >= NUM_WARM:
                times[name].append(seconds)
        policy.step()
    plain, of_held = (median(durations) for durations in times.values())
    print_figures(
        **{name: digits(median(durations)) for name, durations in times.items()},
        share_of_update=digits(of_held / (plain + of_held)),
        held=held_answers,
        peak_gib=peak_gib(policy.device),
    )


def packing(size: str, is_short: bool) -> int:
    """Time the packing of all weights in bfloat16; return 1 if a tensor differs from its cast."""
    from rllib_srl.engine.sync import unpack

    policy = Policy(size, is_short)
    named, memory, seconds = list(policy.model.named_parameters()), None, []
    for version in range(1, 4):
        start = time.perf_counter()
        bundle = pack(named, version, "bfloat16", memory)
        seconds.append(time.perf_counter() - start)
        memory = bundle.buffer
        print_figures(version=version, pack_s=round(seconds[-1], 4))
    tensors = dict(named)
    wrong = [name for name, sent in unpack(bundle) if not torch.equal(sent, tensors[name].detach().bfloat16().cpu())]
    print_figures(
        gib=digits(bundle.buffer.size / GIB), first_s=digits(seconds[0]), pack_s=digits(min(seconds[1:])),
        gib_per_s=digits(bundle.buffer.size / GIB / min(seconds[1:])), wrong_tensors=len(wrong),
    )  # fmt: skip
    return int(bool(wrong))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one check; return the exit status."""
    parser = argparse.ArgumentParser(description="Measure the learner on random weights.")
    parser.add_argument("what", choices=("train", "retention", "packing"))
    parser.add_argument("size", nargs="?", choices=SHAPES, default="1.5B")
    parser.add_argument("--tokens", type=int, default=32768, help="of a pass (default: 32768)")
    parser.add_argument("--lora", action="store_true", help="train adapters of rank 16")
    parser.add_argument("--short", action="store_true", help="a small model on the CPU")
    args = parser.parse_args(argv)
    if args.what == "train":
        train(args.size, args.short, 400 if args.short else args.tokens, args.lora)
        return 0
    if args.what == "retention":
        retention(args.size, args.short)
        return 0
    return packing(args.size, args.short)


if __name__ == "__main__":
    sys.exit(main())
