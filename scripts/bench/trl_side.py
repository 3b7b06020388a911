#!/usr/bin/env python3
"""TRL's side of scripts/bench/trl.py: GRPOTrainer on given prompts, timed step by step.

That script runs it in TRL's own virtual environment. It reads one JSON object from standard input and prints one line
of JSON last. It does not import rllib_srl, so that only TRL and Transformers are measured.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

MICRO_BATCH = 16  # episodes; activations of all 128 at once would take 28 GB


def train(job: Mapping[str, Any]) -> dict[str, Any]:
    """Run the steps of a job.

    Args:
        job: `model` (directory), `dtype`, `rows` (each `prompt` and `answer`, in order), `group_size`, `num_prompts` a
            step, `num_steps`, `max_tokens` of an answer, `stop` (None: no string), `lr`, `temperature`, `seed`,
            `num_threads`; `reward` ("even" pays for an even sum of code points, without `answer`), `on_card` (with
            vLLM in this process).

    Returns:
        Of each step `seconds` and `rewards` (the mean).
    """
    import torch
    from datasets import Dataset
    from trl import GRPOTrainer

    torch.set_num_threads(job["num_threads"])
    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        trainer = GRPOTrainer(
            model=job["model"],
            reward_funcs=is_even if job.get("reward") == "even" else is_right,
            args=config_of(job, directory),
            train_dataset=Dataset.from_list(list(job["rows"])),
            processing_class=tokenizer_of(job),
            callbacks=[clock(seconds)],
        )
        trainer.train()
        rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    return {"seconds": seconds, "rewards": rewards}


def is_right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Return the reward of each answer."""
    return [float(text.split("\n")[0].strip() == gold) for text, gold in zip(completions, answer, strict=True)]


def is_even(completions: list[str], **_: Any) -> list[float]:
    """Return 1 for each answer whose code points have an even sum."""
    return [float(sum(map(ord, text)) % 2 == 0) for text in completions]


def tokenizer_of(job: Mapping[str, Any]) -> Any:
    """Return the model's tokenizer with the stop string as its end token, so that an answer ends with its line.

    Raises:
        ValueError: the stop string is not one token.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    if job["stop"] is None:
        return tokenizer
    stops = tokenizer.encode(job["stop"], add_special_tokens=False)
    if len(stops) != 1:
        raise ValueError(f"stop = {job['stop']!r} is {len(stops)} tokens; expected one, which ends an answer")
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(stops)[0]
    return tokenizer


def clock(seconds: list[float]) -> Any:
    """Return a callback that records the seconds of each whole step: generation, grading, loss, optimiser."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        """Times steps."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            """Start."""
            self.begin = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            """Stop."""
            seconds.append(time.perf_counter() - self.begin)

    return Clock()


def config_of(job: Mapping[str, Any], directory: str) -> Any:
    """Return TRL's settings for the job.

    Raises:
        ValueError: the episodes of a step do not fill whole micro-batches.
    """
    from trl import GRPOConfig

    on_card = bool(job.get("on_card"))
    num_episodes, size = job["num_prompts"] * job["group_size"], 4 * MICRO_BATCH if on_card else MICRO_BATCH
    if num_episodes % size:
        raise ValueError(f"{num_episodes} episodes a step; expected a multiple of {size}, one micro-batch")
    engine = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3} if on_card else {}
    return GRPOConfig(
        output_dir=directory,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=num_episodes // size,
        generation_batch_size=num_episodes,
        num_generations=job["group_size"],
        max_completion_length=job["max_tokens"],
        max_steps=job["num_steps"],
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        temperature=job["temperature"],
        max_grad_norm=1.0,
        beta=0.0,
        seed=job["seed"],
        shuffle_dataset=False,
        use_cpu=not on_card,
        bf16=on_card,
        gradient_checkpointing=on_card,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        model_init_kwargs={"dtype": job["dtype"]},
        **engine,
    )


if __name__ == "__main__":
    print(json.dumps(train(json.load(sys.stdin))))
