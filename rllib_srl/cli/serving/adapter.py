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
from typing import Any

import torch

from rllib_srl.storage.weight_file import read_weights, write_weights

WEIGHTS, CONFIG, CANARY = "adapter_model.safetensors", "adapter_config.json", "canary.json"
FILES = (WEIGHTS, CONFIG, CANARY)
Kinds = Mapping[str, type | tuple[type, ...]]  # entry of a JSON object -> its type
_PREFIX, _ADAPTER = "base_model.model.", ".default"  # of peft's names in files; of its names in a model


class AdapterError(ValueError):
    """The files of a version are missing, damaged or of another model; the message names the file."""


def write_adapter(model: torch.nn.Module, directory: Path, rank: int, alpha: float, base: str) -> None:
    """Write the adapters of a model.

    Args:
        model: with adapters of `learner/model_setup.py`.
        directory: existing.
        rank: of the adapters.
        alpha: they are scaled by alpha / rank.
        base: name of the model, for readers.
    """
    weights = {name: tensor.detach().cpu().float().numpy() for name, tensor in _trained(model).items()}
    write_weights(directory / WEIGHTS, weights)
    layers = sorted({name.split(".")[-3] for name in weights})
    about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": rank}
    about |= {"lora_alpha": alpha, "lora_dropout": 0.0, "bias": "none", "target_modules": layers}
    (directory / CONFIG).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def read_adapter(model: torch.nn.Module, directory: Path) -> None:
    """Load the adapters that `write_adapter` wrote into a model with such adapters.

    Raises:
        AdapterError: they are of another model or rank.
        CheckpointError: the file cannot be read.
    """
    found, own = read_weights(directory / WEIGHTS), _trained(model)
    shapes = {name: tuple(array.shape) for name, array in found.items()}
    wanted = {name: tuple(tensor.shape) for name, tensor in own.items()}
    if shapes != wanted:
        name = next(name for name in sorted(shapes.keys() | wanted.keys()) if shapes.get(name) != wanted.get(name))
        what = f"{name} has shape {shapes.get(name)}; expected {wanted.get(name)}"
        raise AdapterError(f"{directory / WEIGHTS} does not fit the model or its rank: {what}")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(torch.from_numpy(found[name]))


def _trained(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {f"{_PREFIX}{name.replace(_ADAPTER, '')}": parameter for name, parameter in named.items()}


def checksums(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of each of `FILES`.

    Raises:
        AdapterError: one cannot be read.
    """
    sums = {}
    for name in FILES:
        try:
            with (directory / name).open("rb") as file:
                sums[name] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise AdapterError(f"{directory / name} cannot be read: {error.strerror}") from error
    return sums


def verify(directory: Path, files: Mapping[str, str]) -> None:
    """Check the files of a version against the checksums that the lineage has.

    Raises:
        AdapterError: a file is missing or was changed.
    """
    found = checksums(directory)
    for name in FILES:
        if found[name] != files.get(name):
            expected = str(files.get(name))[:12]
            raise AdapterError(f"{directory / name} was changed: sha256 {found[name][:12]}...; expected {expected}...")


def read_json(path: Path) -> Any:
    """Return the content of a JSON file of a version.

    Raises:
        AdapterError: it cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AdapterError(f"{path} cannot be read: {error}") from error


def read_object(path: Path, kinds: Kinds) -> dict[str, Any]:
    """Return the content of a JSON file that holds an object.

    Args:
        path: of the file.
        kinds: of the entries that it must have; it may have others.

    Raises:
        AdapterError: it cannot be read, or holds something else.
    """
    found = read_json(path)
    if not isinstance(found, dict):
        raise AdapterError(f"{path} holds a {type(found).__name__}; expected an object with {', '.join(kinds)}")
    for name, kind in kinds.items():
        if name not in found:
            raise AdapterError(f"{path} has no entry {name}; expected {', '.join(kinds)}")
        if not isinstance(found[name], kind) or (isinstance(found[name], bool) and kind is not bool):
            raise AdapterError(f"{path} is damaged: {name} = {str(found[name])[:60]!r}")
    return found
