#!/usr/bin/env python3
"""Train a language model of about 1M parameters that half masters some environments, for tests and statistics.

    python scripts/make_tiny_model.py --out DIR       about 7 minutes on one core; prints its accuracies
    SRLConfig().rl_module(model_config={"model": "tiny"})

The package ships the output of this script (rllib_srl/engine/tiny), so that results are the same on every machine. To
replace it, make a new one and copy it there; all figures of the lab book that were measured on it then change.

A Llama of 4 layers learns the episodes of scripts/tiny_lessons.py, without shots, until it plays most of them right. In
the last steps two in five episodes are wrong in one decision: the model keeps the skill, but uses it only about half
the time, so that a few steps of reinforcement learning have a visible effect.

Frequent texts of these environments are one token each: words, numbers of two digits, the instructions of an
environment with tools. All else is spelt in bytes. Copying a number is copying one token, which so small a model learns
in minutes.

The computation is single-threaded, so the same machine makes the same weights, bit for bit.

Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks" (blog post), as torch has it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rllib_srl.engine.models import check_model_dir
from scripts.tiny_lessons import LESSONS, SEED, Episode, episodes, played

BATCH_SIZE = 128
NUM_PARTS = 3  # of a batch, by length: less padding
WARMUP_STEPS = 20
COOLING = 0.3  # share of the steps over which the learning rates fall to 0
NUM_GRADED = 64  # held-out prompts a lesson is graded on
NUM_READ = 400  # episodes of a lesson whose words become tokens
LEAST_OPENING = 60  # characters of an opening that all prompts of an environment share, for it to be one token
MAX_TURNS, MAX_TURN_TOKENS = 4, 14
PAD, EOS = "<|pad|>", "<|end|>"
PIECE = r", | ?[A-Za-z]{2,}|[0-9]{1,2}|[\s\S]"  # text of one token, for Python and the tokenizer
SAID_TO_MISTAKES = (
    "Wrong. Try again.\nUnknown. Say get and a register, or answer and a number. No such register. There are"
)


@dataclass(frozen=True)
class Phase:
    """Some steps of training. Invariant: rates are those of the steps between warm-up and cooling."""

    shares: Mapping[str, int]  # lesson -> episodes in each round
    num_steps: int
    adam_rate: float  # of the embedding and the norms
    muon_rate: float  # of the matrices
    is_noisy: bool = False


CORE = dict.fromkeys(("compare", "compare_smallest"), 3)
CORE |= {"copy_two": 1, "copy_two_backwards": 1, "copy_words": 2, "copy_backwards": 2}
CORE |= dict.fromkeys(("registers_larger", "registers_smaller", "registers", "word_problem_tool"), 3)
CORE |= {"lookup": 2, "chain_sum": 1}
WIDER = dict.fromkeys(("compare_four", "compare_four_smallest", "registers_four_larger", "registers_four_smaller"), 2)
NOISY = {name: 2 if name.startswith("copy") else 1 for name in LESSONS if name != "chain_sum"}
PHASES = (
    Phase(CORE, 460, 3e-3, 0.02),
    Phase({**dict.fromkeys(CORE, 1), **WIDER}, 110, 2e-3, 0.01),
    # Long enough to unlearn which of two opposite answers is right: after 40 steps the policy still knows the word, and
    # reinforcing one answer leaves the other alone.
    Phase(NOISY, 120, 2e-3, 0.01, is_noisy=True),
)


# --- the model ------------------------------------------------------------------------------------


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of all 256 bytes, the words of the lessons' environments, and their long openings."""
    words, openings = {f"{number:02d}" for number in range(100)}, set()
    words.update(re.findall(PIECE, SAID_TO_MISTAKES))
    for name in CORE:
        said = list(_texts(name))
        opening = _opening([texts[0] for texts in said])
        openings.update({opening} - {""})
        for first, *rest in said:
            words.update(piece for text in (first[len(opening) :], *rest) for piece in re.findall(PIECE, text))
    spelt = sorted(word.replace(" ", "Ġ").replace("\n", "Ċ") for word in words)  # as byte-level tokenizers do
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [PAD, EOS, *alphabet, *(word for word in spelt if len(word) > 1)]
    tokenizer = Tokenizer(models.BPE({token: at for at, token in enumerate(tokens)}, [], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECE), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(opening, normalized=False) for opening in sorted(openings)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False
    )


def _opening(prompts: Sequence[str]) -> str:
    """Return the whole lines that all prompts begin with; "" if they are short."""
    pairs = zip(min(prompts), max(prompts), strict=False)  # what these two share, all between them share
    shared = "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    lines = shared[: shared.rfind("\n") + 1]
    return lines if len(lines) > LEAST_OPENING else ""


def _texts(name: str) -> Iterator[tuple[str, ...]]:
    """Yield the texts of some right episodes of a lesson, the environment's first text first."""
    world = LESSONS[name].make()
    for prompt_id in islice(world.prompt_ids("train", SEED), NUM_READ):
        episode, _ = played(world, prompt_id, world.gold_turns(prompt_id))
        yield (*episode.said, *episode.turns)


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return an untrained model; its weights depend on SEED and the size of the vocabulary alone."""
    torch.manual_seed(SEED)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=-(-len(tokenizer) // 64) * 64,
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=4,
            num_attention_heads=4,  # head size 32 is the least that vLLM's CPU kernels take
            num_key_value_heads=4,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


# --- training -------------------------------------------------------------------------------------


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, verbose: bool = False) -> None:
    """Fit the turns of the lessons, and only them, phase by phase."""
    for phase in PHASES:
        if phase.is_noisy and verbose:
            print(f"before the noisy steps: {accuracies(model, tokenizer, NUM_GRADED)}", flush=True)
        fit(model, tokenizer, phase, verbose)


def fit(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, phase: Phase, verbose: bool = False) -> None:
    """Take the steps of a phase; learning rates rise for WARMUP_STEPS and fall to 0 in the end."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimisers = {
        torch.optim.AdamW(others, lr=phase.adam_rate, betas=(0.9, 0.98), weight_decay=0.01): phase.adam_rate,
        torch.optim.Muon(matrices, lr=phase.muon_rate, weight_decay=0.0, momentum=0.95): phase.muon_rate,
    }
    stream = episodes(phase.shares, phase.is_noisy)
    model.train()
    for step in range(phase.num_steps):
        share = min(1.0, (step + 1) / WARMUP_STEPS, (phase.num_steps - step) / (COOLING * phase.num_steps))
        for optimiser, rate in optimisers.items():
            optimiser.param_groups[0]["lr"] = rate * share
        loss = _backward(model, [encoded(episode, tokenizer) for episode in islice(stream, BATCH_SIZE)])
        torch.nn.utils.clip_grad_norm_(others, 1.0)  # Muon's steps have a size of their own
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
        if verbose and step % 20 == 19:
            print(f"step {step + 1} of {phase.num_steps}: loss {loss:.3f}, {time.process_time():.0f} s", flush=True)


def _backward(model: LlamaForCausalLM, rows: list[tuple[list[int], list[int]]]) -> float:
    """Add the gradients of the mean loss of all labels; return that loss."""
    rows.sort(key=lambda row: len(row[0]))
    num_labels, total = sum(label != -100 for _, labels in rows for label in labels), 0.0
    for part in range(NUM_PARTS):
        ids, labels = to_batch(rows[part * len(rows) // NUM_PARTS : (part + 1) * len(rows) // NUM_PARTS])
        # Padding is on the right, so a causal model needs no mask; only labelled positions go through the head.
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        is_learnt = labels[:, 1:] != -100
        logits = model.lm_head(hidden[is_learnt])
        loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:][is_learnt], reduction="sum") / num_labels
        loss.backward()
        total += loss.item()
    return total


def encoded(episode: Episode, tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """Return the ids of an episode, each text encoded by itself as SRL does it, and labels: -100 where none is."""
    ids: list[int] = []
    labels: list[int] = []
    texts = zip(tokenizer(list(episode.said)).input_ids, tokenizer(list(episode.turns)).input_ids, strict=True)
    for said, turn in texts:
        ids += said + turn
        labels += [-100] * len(said) + turn
    return ids, labels


def to_batch(rows: Sequence[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and labels as two arrays, padded on the right."""
    length = max(len(ids) for ids, _ in rows)
    ids_BT, labels_BT = torch.zeros(len(rows), length, dtype=torch.long), torch.full((len(rows), length), -100)
    for row, (ids, labels) in enumerate(rows):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        labels_BT[row, : len(ids)] = torch.tensor(labels)
    return ids_BT, labels_BT


# --- grading --------------------------------------------------------------------------------------


def accuracies(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, num_graded: int, names: Sequence[str] = tuple(LESSONS)
) -> dict[str, tuple[float, float]]:
    """Return for each lesson the mean reward of held-out prompts: sampled at temperature 1, and greedy."""
    model.eval()
    result = {}
    for name in names:
        prompt_ids = list(islice(LESSONS[name].make().prompt_ids("heldout", SEED), num_graded))
        rewards = []
        for generator in (torch.Generator().manual_seed(SEED), None):
            worlds = [LESSONS[name].make() for _ in prompt_ids]
            rewards.append(sum(play(model, tokenizer, worlds, prompt_ids, generator)) / len(prompt_ids))
        result[name] = (round(rewards[0], 3), round(rewards[1], 3))
    return result


def play(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    worlds: Sequence[Any],
    prompt_ids: Sequence[str],
    generator: torch.Generator | None,
) -> list[float]:
    """Play one prompt in each environment; return the rewards. Without a generator the policy is greedy."""
    said = [world.reset(options={"prompt_id": prompt_id})[0] for world, prompt_id in zip(worlds, prompt_ids)]
    ids, rewards, alive = tokenizer(said).input_ids, [0.0] * len(worlds), list(range(len(worlds)))
    for _ in range(MAX_TURNS):
        turns = write(model, tokenizer, [ids[at] for at in alive], generator) if alive else []
        going = []
        for at, turn in zip(alive, turns, strict=True):
            observation, reward, is_terminated, is_truncated, _ = worlds[at].step(tokenizer.decode(turn))
            rewards[at] += reward
            if not (is_terminated or is_truncated):
                ids[at] += turn + tokenizer(observation).input_ids
                going.append(at)
        alive = going
    return rewards


@torch.inference_mode()
def write(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[list[int]],
    generator: torch.Generator | None,
) -> list[list[int]]:
    """Return a turn after each prompt, up to a line's end, sampled with `generator` or greedy without one."""
    end, turns = tokenizer("\n").input_ids[0], [list[int]() for _ in prompts]
    for _ in range(MAX_TURN_TOKENS):
        writing = [row for row, turn in enumerate(turns) if not turn or turn[-1] != end]
        if not writing:
            break
        texts = [prompts[row] + turns[row] for row in writing]
        ids_BT, _ = to_batch([(text, text) for text in texts])
        last = torch.tensor([len(text) - 1 for text in texts])
        hidden = model.model(input_ids=ids_BT, use_cache=False).last_hidden_state[torch.arange(len(texts)), last]
        probs = model.lm_head(hidden).softmax(-1)
        chosen = probs.argmax(-1) if generator is None else torch.multinomial(probs, 1, generator=generator)[:, 0]
        for row, token in zip(writing, chosen.tolist(), strict=True):
            turns[row].append(token)
    return turns


# --- the directory --------------------------------------------------------------------------------


def make(target: Path, verbose: bool = False) -> Path:
    """Train the tiny model, and write it with its tokenizer and accuracies into a new directory.

    Args:
        target: the directory; it must be empty or not be there yet.
        verbose: print loss and accuracy while training.

    Raises:
        FileExistsError: `target` holds something; nothing was trained.
    """
    if target.exists() and any(target.iterdir()):
        raise FileExistsError(f"{target} is not empty; expected a new directory")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        tokenizer = make_tokenizer()
        model = make_model(tokenizer)
        train(model, tokenizer, verbose)
        report = json.dumps(accuracies(model, tokenizer, NUM_GRADED), indent=1)
    finally:
        torch.set_num_threads(num_threads)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    (target / "accuracy.json").write_text(report + "\n", encoding="utf-8")
    return check_model_dir(target)


def main() -> int:
    """Make the model and print its accuracies."""
    parser = argparse.ArgumentParser(description="Train the tiny language model that the package ships.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new directory to write it into")
    parser.add_argument("--verbose", action="store_true", help="print loss and accuracy while training")
    arguments = parser.parse_args()
    start = time.process_time()
    path = make(arguments.out, arguments.verbose)
    print(f"{path}  ({time.process_time() - start:.0f} s of processor time)")
    for name, (sampled, greedy) in json.loads((path / "accuracy.json").read_text(encoding="utf-8")).items():
        print(f"  {name:20s} accuracy {sampled:.2f} sampled, {greedy:.2f} greedy")
    return 0


if __name__ == "__main__":
    sys.exit(main())
