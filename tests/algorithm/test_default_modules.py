"""What a default run loads: nothing of contrib, and of heavy packages only those below; and how few files it enters."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from scripts import house
from tests.conftest import ROOT

# In one process; the last iteration draws from the memory.
RUN = """
import json, sys
from pathlib import Path

import ray

from scripts import house

directory, target = map(Path, sys.argv[1:])
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
walks = house.walk(Path.cwd(), directory)
files = {name: [str(path) for path in walks[name].paths(without)] for name, (_, without) in house.WALKS.items()}
target.write_text(json.dumps({"modules": sorted(sys.modules), "files": files}))
"""
# Packages that are large, slow to import, or for a method that is off.
HEAVY = {
    "aiohttp", "bm25s", "datasets", "faiss", "gguf", "jax", "matplotlib", "mlflow", "nltk", "openai", "optuna", "peft",
    "playwright", "reasoning_gym", "sentence_transformers", "sklearn", "spacy", "starlette", "tensorflow", "trackio",
    "uvicorn", "verifiers", "vllm", "wandb",
}  # fmt: skip
LOADED = {"aiohttp", "sklearn", "starlette"}  # of HEAVY, by Ray and transformers themselves where they are installed


@pytest.mark.slow
def test_a_default_run_loads_and_enters_only_what_it_uses(tmp_path):
    target = tmp_path / "run.json"
    command = [sys.executable, "-c", RUN, str(tmp_path / "log"), str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    run = json.loads(target.read_text())
    assert [name for name in run["modules"] if name.startswith("rllib_srl.contrib.")] == []
    assert "rllib_srl.replay.buffer" in run["modules"]
    assert [name for name in run["modules"] if name.startswith("rllib_srl.") and name.endswith("retention")] == []
    assert {name for name in run["modules"] if "." not in name} & HEAVY == {name for name in LOADED if find_spec(name)}
    for walk, files in run["files"].items():
        assert 0 < len(files) <= house.WALKS[walk][0], (walk, files)
