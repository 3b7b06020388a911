"""srl export: weights and model card, on checkpoints made by hand and on a real run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rllib_srl.algorithm.checkpointing import MODULE
from rllib_srl.cli import export
from rllib_srl.cli.export import card, publishable
from rllib_srl.engine.adapters import AdapterSpec, add_adapters
from rllib_srl.engine.models import local_model
from rllib_srl.learner.model_setup import merged
from rllib_srl.learner.rl_module import CausalLMModule
from rllib_srl.storage.checkpoints import seal
from rllib_srl.storage.weight_file import WEIGHTS, write_weights


def evaluation(iteration: int, accuracy: float, **domains: float) -> dict[str, float]:
    numbers = {"accuracy": accuracy, "accuracy_low": accuracy - 0.1, "accuracy_high": accuracy + 0.1}
    numbers |= {"num_prompts": 64.0, "num_lost": 1.0}
    for name, value in domains.items():
        numbers |= {f"by_domain/{name}/accuracy": value, f"by_domain/{name}/num_prompts": 20.0}
    return {"iteration": iteration, **{f"evaluation/{name}": value for name, value in numbers.items()}}


def run_of(directory: Path, policy: CausalLMModule, **settings: Any) -> Path:
    """Write the run of a policy: settings, metrics and one checkpoint of iteration 3."""
    place = directory / "checkpoint_000003"
    (place / MODULE).mkdir(parents=True)
    write_weights(place / MODULE / WEIGHTS, policy.get_state())
    seal(place, {"iteration": 3, "version": 3})
    values = {"model": "tiny", "env": "compare", "env_config": {"num_shots": 0}, "lr": 1e-4, **settings}
    (directory / "settings.yaml").write_text(yaml.safe_dump(values))
    lines = [evaluation(1, 0.7, a=0.9, b=0.5), {"iteration": 2, "lr": 1e-4}, evaluation(3, 0.8, a=0.75, b=0.85)]
    lines.append(evaluation(4, 0.1, a=0.1, b=0.1))  # later than the checkpoint
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (directory / "metrics.jsonl").write_text(text + '{"iteration": 5, "evalu')  # a kill cut the last line short
    return directory


def test_an_export_is_the_checkpoints_weights_with_tokenizer_and_card(tmp_path: Path) -> None:
    policy = CausalLMModule(model_config={"model": "tiny"})
    for parameter in policy.parameters():
        parameter.data += 0.25
    run, out = run_of(tmp_path / "run", policy), tmp_path / "mine"
    assert export.main([str(run), str(out), "--debug"]) == 0
    exported = load_file(out / "model.safetensors")
    stored = load_file(run / "checkpoint_000003" / MODULE / WEIGHTS)
    assert exported and all(np.array_equal(array, stored[f"model.{name}"]) for name, array in exported.items())
    model = AutoModelForCausalLM.from_pretrained(out)
    assert AutoTokenizer.from_pretrained(out)("1")["input_ids"] and model.config.model_type == "llama"
    text = (out / "README.md").read_text()
    assert text.startswith("---\nlibrary_name: transformers\n") and "\n# mine\n" in text
    assert "Trained with rllib_srl (GRPO with experience replay) for 3 iterations." in text
    assert "env: compare\nenv_config:\n  num_shots: 0\n" in text and "\nlr: 0.0001\n" in text
    assert "group_size" not in text  # a default
    assert "Greedy answers to 63 held-out prompts:" in text and "| 0.800 | [0.700, 0.900] |" in text
    assert "torch 2." in text and "rllib_srl " in text


def test_adapters_are_merged(tmp_path: Path) -> None:
    policy = CausalLMModule(model_config={"model": "tiny"})
    add_adapters(policy.model, AdapterSpec(2, 8.0, ("q_proj",)), seed=1)
    for _, parameter in policy.saved_parameters():
        parameter.data += 0.5
    lora = {"lora_rank": 2, "lora_alpha": 8.0, "lora_targets": ["q_proj"]}
    out = tmp_path / "out"
    assert export.main([str(run_of(tmp_path / "run", policy, **lora)), str(out), "--debug"]) == 0
    exported = load_file(out / "model.safetensors")
    expected = {name: tensor.detach().numpy() for name, tensor in merged(policy.model)}
    base = load_file(local_model("tiny") / "model.safetensors")
    changed = {name for name in exported if not np.array_equal(exported[name], base[name])}
    assert changed == {name for name in exported if "q_proj" in name} != set()
    assert all(np.array_equal(exported[name], expected[name]) for name in exported)


def test_a_card_has_no_paths_and_no_secrets(tmp_path: Path) -> None:
    values = {"path": "/data/me/secret/my.jsonl", "reward": ["~/f.py:g"], "note": "key AKIAIOSFODNN7EXAMPLE"}
    assert publishable(values) == {**values, "path": "my.jsonl", "reward": ["f.py:g"]}
    values |= {"reward_url": "https://me:hunter2@host/f", "api_key": "qq1", "agents": [{"token": "qq2"}]}
    text = card("x", {"model": "/data/me/model", "env_config": values, "seal_key_file": "/data/me/key"}, 1)
    assert not any(secret in text for secret in ("/data/me", "AKIA", "hunter2", "qq1", "qq2")) and "[aws_key]" in text
    assert "`model`, which is not on the hub" in text
    assert "This run has no evaluation on held-out prompts." in text
    older = card("x", {"model": "tiny"}, 9, evaluation(5, 0.5))
    assert "63 held-out prompts, measured at iteration 5:" in older
