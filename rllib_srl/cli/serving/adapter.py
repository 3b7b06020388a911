"""Files of a version: the adapter as peft and vLLM read it, with a checksum of each file, and the canary.

adapter_model.safetensors   A and B of each layer, under peft's names
adapter_config.json         rank, scale, layers
canary.json                 fixed prompts, the version's own next tokens and their log-probs (canary.py)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch

from rllib_srl.cli.serving.job import FileError
from rllib_srl.storage.weight_file import write_weights

WEIGHTS, CONFIG, CANARY = "adapter_model.safetensors", "adapter_config.json", "canary.json"
FILES = (WEIGHTS, CONFIG, CANARY)
_PREFIX, _ADAPTER = "base_model.model.", ".default"  # of peft's names in files; of its names in a model


def write_adapter(model: torch.nn.Module, directory: Path, rank: int, alpha: float, base: str) -> None:
    """Write the adapters of a model (`learner/model_setup.py`), scaled by alpha / rank; `base` is for readers."""
    weights = {name: tensor.detach().cpu().float().numpy() for name, tensor in _trained(model).items()}
    write_weights(directory / WEIGHTS, weights)
    layers = sorted({name.split(".")[-3] for name in weights})
    about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": rank}
    about |= {"lora_alpha": alpha, "lora_dropout": 0.0, "bias": "none", "target_modules": layers}
    (directory / CONFIG).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def _trained(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {f"{_PREFIX}{name.replace(_ADAPTER, '')}": parameter for name, parameter in named.items()}


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
    found = checksums(directory)
    for name in FILES:
        if found[name] != files.get(name):
            expected = str(files.get(name))[:12]
            raise FileError(f"{directory / name} was changed: sha256 {found[name][:12]}...; expected {expected}...")
