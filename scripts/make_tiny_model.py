#!/usr/bin/env python3
"""Train a language model of about 1M parameters that half knows the first worlds, for tests and statistics.

    python scripts/make_tiny_model.py                 prints where it lies and how well it answers
    SRLConfig().rl_module(model_config={"model": "tiny"})

A Llama of 5 layers with a byte-level tokenizer of its own sees some thousand training prompts with
their gold turns, mostly without shots. In the last steps a share of the turns is wrong: the model still
tells right from wrong, but says the right thing only about half the time, so that a few steps of
reinforcement learning show.

The model is made once. Its place in the cache carries a hash of its recipe: this file, the questions as
the worlds put them, and the versions of what computes it. One thread computes it, so that the same
machine makes the same weights, bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from envs.compare import Compare
from envs.lookup import Lookup
from envs.reasoning_gym_env import ChainSum
from envs.registers import Registers
from envs.text import WRONG, reply
from envs.word_problem import WordProblem
from rllib_srl.models import TINY, TINY_POINTER, built_once, cache_root, check_model_dir

SEED = 7
NUM_STEPS = 430
NUM_NOISY_STEPS = 50
BATCH_SIZE = 64
LEARNING_RATE = 1e-3
NOISY_LEARNING_RATE = 3e-4
WARMUP_STEPS = 40
# Share of wrong turns in the noisy steps; the other worlds stay hard.
NOISE = {"compare": 0.5, "compare_2": 0.4}
FEEDBACK_SHARE = 0.1  # of the examples: a wrong answer first, so that feedback turns are in distribution
WORLD_TURNS = ("registers", "word_problem")  # worlds of two turns, which no feedback interrupts
# What takes longer to learn gets more turns.
TURNS = (
    *("compare", "lookup", "registers", "chain_sum", "lookup"),
    *("registers", "compare_2", "lookup", "chain_sum", "lookup", "registers"),
)
LONG_TURNS = ("word_problem",)  # prompts four times as long, which get batches of their own
LONG_EVERY = 5  # batches
NUM_GRADED = 200  # held-out questions a world is graded on
TURN_TOKENS = 12  # that a turn may take there
MOST_TURNS = 4
PAD, EOS = "<|pad|>", "<|end|>"
WORDS = (  # each is one token; all else is spelt in bytes
    *("Question", "Answer", "Which", " is", " larger", " largest", " or", "Wrong", " Try", " again"),
    *("State", " the", " final", " answer", " to", " following", " arithmetic", " problem"),
    *("Solve", " multiplication", " Give", " only", " result", " as", " your", "Tool", "Result"),
    *("Action", "What", " Registers", " in", " get", " How", " many", " has", " have", " does", " and", " more"),
    *(" buys", " bags", " gives", " away", " are", " left", " shares", " equally", " friends"),
)


@dataclass(frozen=True)
class Example:
    """One solved question. Invariant: `target` earns the full reward after `prompt`."""

    prompt: str
    target: str


# Without shots where they can do without.
WORLDS: dict[str, Callable[[], Any]] = {
    "compare": lambda: Compare({"num_shots": 0}),
    "compare_2": lambda: Compare({"num_shots": 0, "num_numbers": 2}),
    "lookup": lambda: Lookup({"num_shots": 0}),
    "chain_sum": lambda: ChainSum({"num_shots": 0}),
    "registers": lambda: Registers({"num_shots": 0}),
    "word_problem": lambda: WordProblem({"num_shots": 1, "tools_in": "shots", "num_steps": 1, "highest": 9}),
}


def examples(noise: Mapping[str, float] | None = None, turns: Sequence[str] = TURNS) -> Iterator[Example]:
    """Yield training examples for ever, the worlds taking turns, each pass over a world in the same order.

    Args:
        noise: of each world, the share of examples whose target is another number of the question
        turns: names of worlds, in the order they come
    """
    played, generator = {name: WORLDS[name]() for name in dict.fromkeys(turns)}, random.Random(SEED)
    streams = {name: _endless(world) for name, world in played.items()}
    period, number = round(1 / FEEDBACK_SHARE), 0
    while True:
        for name in turns:
            world = played[name]
            prompt_id = next(streams[name])
            gold = world.gold_turns(prompt_id)
            at = generator.randrange(len(gold))
            prompt, _ = world.reset(options={"prompt_id": prompt_id, "history": gold[:at]})
            if number % period == 0 and name not in WORLD_TURNS:
                wrong = f" {world.question(prompt_id).wrong}\n"
                prompt += wrong + reply(wrong, WRONG)
            target = gold[at]
            if generator.random() < (noise or {}).get(name, 0.0):
                right = world.question(prompt_id).answer
                others = [other for other in re.findall(r"\d+", prompt_id) if other != right]
                target = target.replace(right, generator.choice(others))
            yield Example(prompt, target)
            number += 1


def batches(noise: Mapping[str, float] | None = None) -> Iterator[list[Example]]:
    """Yield batches for ever, each of short prompts or of long ones: what shares a batch is padded to one length."""
    short, long = examples(noise), examples(noise, LONG_TURNS)
    for number in count(1):
        yield list(islice(long if number % LONG_EVERY == 0 else short, BATCH_SIZE))


def _endless(world: Any) -> Iterator[str]:
    while True:
        yield from world.prompt_ids("train", SEED)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of all 256 bytes and the words of the worlds, each word merged from left to right."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *alphabet])}
    merges: list[tuple[str, str]] = []
    for word in (word.replace(" ", "Ġ") for word in WORDS):  # byte-level tokenizers spell a space so
        for end in range(2, len(word) + 1):
            if word[:end] not in vocabulary:
                vocabulary[word[:end]] = len(vocabulary)
                merges.append((word[: end - 1], word[end - 1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return an untrained model; its weights depend on SEED alone."""
    torch.manual_seed(SEED)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=5,
            num_attention_heads=4,  # head size 32 is the least that vLLM's CPU kernels take
            num_key_value_heads=4,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, num_steps: int, verbose: bool) -> None:
    """Fit the answers, and only them: `num_steps` batches as they should be, then the noisy ones."""
    fit(model, tokenizer, batches(), num_steps, LEARNING_RATE)
    if verbose:
        print(f"before the noisy steps: {accuracies(model, tokenizer, NUM_GRADED)}", flush=True)
    fit(model, tokenizer, batches(NOISE), NUM_NOISY_STEPS, NOISY_LEARNING_RATE)


def fit(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    stream: Iterator[list[Example]],
    num_steps: int,
    learning_rate: float,
) -> None:
    """Take `num_steps` steps; the learning rate rises for WARMUP_STEPS and falls to 0 in the end."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    for step in range(num_steps):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate * min(1.0, (step + 1) / WARMUP_STEPS, 1 - step / num_steps)
        loss = model(**to_batch(next(stream), tokenizer)).loss
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()


def to_batch(batch: list[Example], tokenizer: PreTrainedTokenizerFast) -> dict[str, torch.Tensor]:
    """Return padded columns in which only the targets carry a label."""
    prompts = tokenizer([example.prompt for example in batch]).input_ids
    targets = tokenizer([example.target for example in batch]).input_ids
    length = max(len(prompt) + len(target) for prompt, target in zip(prompts, targets))
    ids = torch.full((len(batch), length), tokenizer.pad_token_id)
    labels = torch.full((len(batch), length), -100)
    for row, (prompt, target) in enumerate(zip(prompts, targets)):
        end = len(prompt) + len(target)
        ids[row, :end] = torch.tensor(prompt + target)
        labels[row, len(prompt) : end] = torch.tensor(target)
    return {"input_ids": ids, "attention_mask": (ids != tokenizer.pad_token_id).long(), "labels": labels}


@torch.inference_mode()
def accuracies(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, num_graded: int
) -> dict[str, tuple[float, float]]:
    """Return for each world the share of held-out prompts that succeed: sampled at temperature 1, and greedy."""
    model.eval()
    generator = torch.Generator().manual_seed(SEED)
    result = {}
    for name in WORLDS:
        sampled, greedy = (_success(model, tokenizer, name, num_graded, g) for g in (generator, None))
        result[name] = (round(sampled, 3), round(greedy, 3))
    return result


def _success(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    name: str,
    num_graded: int,
    generator: torch.Generator | None,
) -> float:
    world = WORLDS[name]()
    prompt_ids = list(islice(world.prompt_ids("heldout", SEED), num_graded))
    histories: dict[str, list[str]] = {prompt_id: [] for prompt_id in prompt_ids}
    live, total = prompt_ids, 0.0
    for _ in range(MOST_TURNS):
        asked = [{"prompt_id": prompt_id, "history": histories[prompt_id]} for prompt_id in live]
        going = []
        for options, line in zip(asked, write(model, tokenizer, [world.reset(options=o)[0] for o in asked], generator)):
            turn = line.split("\n", 1)[0] + "\n"
            world.reset(options=options)
            _, reward, is_over, is_cut, _ = world.step(turn)
            total += reward
            histories[options["prompt_id"]].append(turn)
            going += [] if is_over or is_cut else [options["prompt_id"]]
        live = going
        if not live:
            break
    return total / len(prompt_ids)


def write(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[str],
    generator: torch.Generator | None,
) -> list[str]:
    """Return a line of at most `TURN_TOKENS` after each prompt, sampled with `generator` or greedy without one."""
    ids = tokenizer(prompts).input_ids
    lengths = torch.tensor([len(row) for row in ids])
    rows = torch.full((len(ids), int(lengths.max()) + TURN_TOKENS), tokenizer.pad_token_id)
    for row, prompt in zip(rows, ids):
        row[: len(prompt)] = torch.tensor(prompt)
    line_end, live = tokenizer("\n").input_ids[0], torch.arange(len(ids))
    for _ in range(TURN_TOKENS):  # padding is on the right, so a causal model needs no mask
        ends = lengths[live]
        logits = model(input_ids=rows[live, : int(ends.max())]).logits[torch.arange(len(live)), ends - 1]
        probs = logits.softmax(-1)
        said = probs.argmax(-1) if generator is None else torch.multinomial(probs, 1, generator=generator)[:, 0]
        rows[live, ends] = said
        lengths[live] += 1
        live = live[said != line_end]
        if not len(live):
            break
    return [tokenizer.decode(row[len(prompt) : end]) for row, prompt, end in zip(rows, ids, lengths.tolist())]


def recipe_hash() -> str:
    """Return 10 hex digits that change whenever the model would."""
    sample = [[one.prompt, one.target] for turns in (TURNS, LONG_TURNS) for one in islice(examples(None, turns), 400)]
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "tokenizers")}
    recipe = json.dumps([sample, versions]) + Path(__file__).read_text(encoding="utf-8")
    return hashlib.sha256(recipe.encode()).hexdigest()[:10]


def make(cache_dir: str | Path | None = None, verbose: bool = False) -> Path:
    """Return the directory of the tiny model, trained now if this recipe has not been followed before."""
    root = cache_root(cache_dir)
    target = root / f"{TINY}-{recipe_hash()}"
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with built_once(target) as scratch:
            if scratch is not None:
                tokenizer = make_tokenizer()
                model = make_model(tokenizer)
                train(model, tokenizer, NUM_STEPS, verbose)
                model.save_pretrained(scratch)
                tokenizer.save_pretrained(scratch)
                report = json.dumps(accuracies(model, tokenizer, NUM_GRADED), indent=1)
                (scratch / "accuracy.json").write_text(report + "\n", encoding="utf-8")
    finally:
        torch.set_num_threads(num_threads)
    _point_to(target, root / TINY_POINTER)
    return check_model_dir(target)


def _point_to(target: Path, pointer: Path) -> None:
    partial = pointer.with_name(f"{pointer.name}.{os.getpid()}.partial")
    partial.write_text(target.name + "\n", encoding="utf-8")
    partial.replace(pointer)


def main() -> int:
    """Make the model and say where it lies."""
    parser = argparse.ArgumentParser(description="Train the tiny language model of the tests, once.")
    parser.add_argument("--cache-dir", help="default: $RLLIB_SRL_CACHE, else ~/.cache/rllib_srl")
    parser.add_argument("--verbose", action="store_true", help="print loss and accuracy while training")
    arguments = parser.parse_args()
    start = time.monotonic()
    path = make(arguments.cache_dir, arguments.verbose)
    print(f"{path}  ({time.monotonic() - start:.0f} s)")
    for name, (sampled, greedy) in json.loads((path / "accuracy.json").read_text(encoding="utf-8")).items():
        print(f"  {name:10s} accuracy {sampled:.2f} sampled, {greedy:.2f} greedy")
    return 0


if __name__ == "__main__":
    sys.exit(main())
