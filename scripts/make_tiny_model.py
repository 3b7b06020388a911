#!/usr/bin/env python3
"""Train a language model of about 1M parameters that half knows the first worlds, for tests and statistics.

    python scripts/make_tiny_model.py                 prints where it lies and how well it answers
    SRLConfig().rl_module(model_config={"model": "tiny"})

A Llama of 5 layers with a byte-level tokenizer of its own sees some thousand training questions with
their answers, without shots. In the last steps a share of the answers is wrong: the model still tells
right from wrong, but says the right thing only about half the time, so that a few steps of
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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from envs.compare import Compare
from envs.lookup import Lookup
from envs.question import QuestionWorld
from envs.reasoning_gym_env import ChainSum
from envs.text import WRONG, reply
from rllib_srl.models import TINY, TINY_POINTER, built_once, cache_root, check_model_dir

SEED = 7
NUM_STEPS = 250
NUM_NOISY_STEPS = 40
BATCH_SIZE = 64
LEARNING_RATE = 1e-3
NOISY_LEARNING_RATE = 3e-4
WARMUP_STEPS = 40
NOISE = {"compare": 0.5, "compare_2": 0.4}  # share of wrong answers in the noisy steps; the other worlds stay hard
FEEDBACK_SHARE = 0.1  # of the examples: a wrong answer first, so that feedback turns are in distribution
# What takes longer to learn gets more turns.
TURNS = ("compare", "lookup", "chain_sum", "lookup", "compare_2", "lookup", "chain_sum", "lookup")
NUM_GRADED = 200  # held-out questions a world is graded on
PAD, EOS = "<|pad|>", "<|end|>"
WORDS = (  # each is one token; all else is spelt in bytes
    *("Question", "Answer", "Which", " is", " larger", " largest", " or", "Wrong", " Try", " again"),
    *("State", " the", " final", " answer", " to", " following", " arithmetic", " problem"),
    *("Solve", " multiplication", " Give", " only", " result", " as", " your", "Tool", "Result"),
)


@dataclass(frozen=True)
class Example:
    """One solved question. Invariant: `target` earns the full reward after `prompt`."""

    prompt: str
    target: str


def worlds() -> dict[str, QuestionWorld]:
    """Return the worlds of the warm-up, without shots."""
    return {
        "compare": Compare({"num_shots": 0}),
        "compare_2": Compare({"num_shots": 0, "num_numbers": 2}),
        "lookup": Lookup({"num_shots": 0}),
        "chain_sum": ChainSum({"num_shots": 0}),
    }


def examples(noise: Mapping[str, float] | None = None) -> Iterator[Example]:
    """Yield training examples for ever, the worlds taking turns, each pass over a world in the same order.

    Args:
        noise: of each world, the share of examples whose target is another number of the question
    """
    played, generator = worlds(), random.Random(SEED)
    streams = {name: _endless(world) for name, world in played.items()}
    period, number = round(1 / FEEDBACK_SHARE), 0
    while True:
        for name in TURNS:
            world = played[name]
            prompt_id = next(streams[name])
            prompt, _ = world.reset(options={"prompt_id": prompt_id})
            if number % period == 0:
                wrong = f" {world.question(prompt_id).wrong}\n"
                prompt += wrong + reply(wrong, WRONG)
            target = world.gold_turns(prompt_id)[0]
            if generator.random() < (noise or {}).get(name, 0.0):
                right = world.question(prompt_id).answer
                others = [other for other in re.findall(r"\d+", prompt_id) if other != right]
                target = target.replace(right, generator.choice(others))
            yield Example(prompt, target)
            number += 1


def _endless(world: QuestionWorld) -> Iterator[str]:
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
    fit(model, tokenizer, examples(), num_steps, LEARNING_RATE)
    if verbose:
        print(f"before the noisy steps: {accuracies(model, tokenizer, NUM_GRADED)}", flush=True)
    fit(model, tokenizer, examples(NOISE), NUM_NOISY_STEPS, NOISY_LEARNING_RATE)


def fit(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    stream: Iterator[Example],
    num_steps: int,
    learning_rate: float,
) -> None:
    """Take `num_steps` steps; the learning rate rises for WARMUP_STEPS and falls to 0 in the end."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    for step in range(num_steps):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate * min(1.0, (step + 1) / WARMUP_STEPS, 1 - step / num_steps)
        loss = model(**to_batch(list(islice(stream, BATCH_SIZE)), tokenizer)).loss
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
    """Return for each world the share of held-out questions answered right: sampled at temperature 1, and greedy."""
    model.eval()
    generator = torch.Generator().manual_seed(SEED)
    result = {}
    for name, world in worlds().items():
        prompt_ids = list(islice(world.prompt_ids("heldout", SEED), num_graded))
        prompts = [world.reset(options={"prompt_id": prompt_id})[0] for prompt_id in prompt_ids]
        sampled = [
            sum(world.grade(p, world.answer_in(turn)) or 0.0 for p, turn in zip(prompt_ids, turns)) / len(prompt_ids)
            for turns in (write(model, tokenizer, prompts, g) for g in (generator, None))
        ]
        result[name] = (round(sampled[0], 3), round(sampled[1], 3))
    return result


def write(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[str],
    generator: torch.Generator | None,
) -> list[str]:
    """Return a turn of 5 tokens after each prompt, sampled with `generator` or greedy without one."""
    ids = tokenizer(prompts).input_ids
    lengths = torch.tensor([len(row) for row in ids])
    rows = torch.full((len(ids), int(lengths.max()) + 5), tokenizer.pad_token_id)
    for row, prompt in zip(rows, ids):
        row[: len(prompt)] = torch.tensor(prompt)
    every = torch.arange(len(ids))
    for position in range(5):  # padding is on the right, so a causal model needs no mask
        probs = model(input_ids=rows).logits[every, lengths + position - 1].softmax(-1)
        rows[every, lengths + position] = (
            probs.argmax(-1) if generator is None else torch.multinomial(probs, 1, generator=generator)[:, 0]
        )
    return [tokenizer.decode(row[n : n + 5]) for row, n in zip(rows, lengths)]


def recipe_hash() -> str:
    """Return 10 hex digits that change whenever the model would."""
    sample = [[example.prompt, example.target] for example in islice(examples(), 400)]
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
