"""The files of a version: the adapter as peft and vLLM read it, its checksums, and the canary.

    adapter_model.safetensors   A and B of each layer, under peft's names
    adapter_config.json         rank, scale, layers
    canary.json                 fixed prompts, the version's own next tokens and their log-probs

The canary shows that the server computes a version as its trainer did:

    trainer   expected = its own next tokens after each prompt, and the learner's log-probs of them
    server    the same prompts, greedy, with the adapter under test ──> gap in nats ──> `engine.canary.check_canary`

Where the two choose different tokens, nothing after that token is comparable; the choice itself must then be a tie:
the log-probs of the two tokens may differ by no more than the tolerance.

vLLM 0.32 with adapters on a CPU fails on `prompt_logprobs` (lora/punica_wrapper/punica_cpu.py has one index a request,
not one a token) and ends its engine, so given tokens cannot be scored there; generated ones can.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from rllib_srl.cli.serving.job import FileError, JsonFile
from rllib_srl.engine.canary import CanaryGap, check_canary
from rllib_srl.engine.sync import WeightSyncError
from rllib_srl.storage.weight_file import write_weights

WEIGHTS, CONFIG, CANARY = "adapter_model.safetensors", "adapter_config.json", "canary.json"
FILES = (WEIGHTS, CONFIG, CANARY)
NUM_TOKENS = 8  # generated after each prompt of the canary
PROMPT_TOKENS = 48
MIN_COMPARED = 12  # tokens; with fewer the check shows nothing
_PREFIX, _ADAPTER = "base_model.model.", ".default"  # of peft's names in files; of its names in a model


def write_adapter(model: torch.nn.Module, directory: Path, rank: int, alpha: float, base: str) -> None:
    """Write the adapters of a model (`learner/model_setup.py`), scaled by alpha / rank; `base` is for readers."""
    trained = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
    names = {name: f"{_PREFIX}{name.replace(_ADAPTER, '')}" for name in trained}
    weights = {names[name]: tensor.detach().cpu().float().numpy() for name, tensor in trained.items()}
    write_weights(directory / WEIGHTS, weights)
    layers = sorted({name.split(".")[-3] for name in weights})
    about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": rank}
    about |= {"lora_alpha": alpha, "lora_dropout": 0.0, "bias": "none", "target_modules": layers}
    (directory / CONFIG).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def checksums(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of each of `FILES`; FileError: one cannot be read."""
    sums = {}
    for name in FILES:
        try:
            with (directory / name).open("rb") as file:
                sums[name] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise FileError(f"{directory / name} cannot be read: {error.strerror}") from error
    return sums


def verify(directory: Path, files: Mapping[str, str]) -> None:
    """Check the files of a version against the lineage's checksums; FileError: one is missing or was changed."""
    for name, checksum in checksums(directory).items():
        if checksum != files.get(name):
            expected = str(files.get(name))[:12]
            raise FileError(f"{directory / name} was changed: sha256 {checksum[:12]}...; expected {expected}...")


@dataclass(frozen=True)
class Continuation:
    """What follows a fixed prompt. Invariant: one log-prob, in nats, for each of `ids`."""

    prompt_ids: list[int]
    ids: list[int]
    logps: list[float]


class Canary(JsonFile):
    """The canary of a version, as its trainer wrote it."""

    name: ClassVar[str] = CANARY

    continuations: list[Continuation]


@dataclass(frozen=True)
class ServedContinuation:
    """What the server generated. Invariant: `top[i]` has the log-probs of the likeliest tokens at position i."""

    ids: list[int]
    logps: list[float]
    top: list[dict[int, float]]


def gap_of(expected: Sequence[Continuation], served: Sequence[ServedContinuation]) -> CanaryGap:
    """Return the gap between trainer and server over all tokens that can be compared.

    Raises:
        WeightSyncError: they choose other tokens so early that next to nothing can be compared.
    """
    ours: list[float] = []
    theirs: list[float] = []
    for want, got in zip(expected, served, strict=True):
        for at, token in enumerate(want.ids):
            if at >= len(got.ids):
                break
            ours.append(want.logps[at])
            theirs.append(got.top[at].get(token, -np.inf))
            if got.ids[at] != token:  # a tie, or another policy: then the log-probs differ
                break
    if len(ours) < MIN_COMPARED and np.isfinite(theirs).all():
        raise WeightSyncError(f"only {len(ours)} tokens of the canary can be compared; expected {MIN_COMPARED}", 0)
    return CanaryGap.between([np.array(ours)], [np.array(theirs)])


def check_served(
    expected: Sequence[Continuation], served: Sequence[ServedContinuation], version: int, dtype: str = "float32"
) -> CanaryGap:
    """Check that the server computes the version that was trained; return the gap, or raise a WeightSyncError with it.

    In bfloat16 the bound is that of rounding, which hides a small adapter.
    """
    gap = gap_of(expected, served)
    check_canary(gap, None, dtype, version)
    return gap
