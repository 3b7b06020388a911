"""What a default run loads: nothing of contrib, and of heavy packages only those below."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.conftest import ROOT

# In one process; the second iteration draws from the memory.
RUN = """
import json, sys
from rllib_srl import SRLConfig

model, directory, target = sys.argv[1:]
settings = {"num_env_runners": 0, "num_learners": 0, "engine": "transformers", "log_directory": directory}
settings |= {"num_prompts_per_batch": 2, "group_size": 2, "replay_min_buffer_size": 1, "checkpoint_every": 0}
settings |= {"max_turns": 2, "max_turn_tokens": 8, "max_episode_tokens": 128, "seed": 1}
config = SRLConfig().environment("compare", env_config={"num_shots": 0}).rl_module(model_config={"model": model})
algo = config.update_from_dict(settings).build_algo()
algo.train()
algo.train()
algo.stop()
with open(target, "w") as file:
    json.dump(sorted(sys.modules), file)
"""
# Packages that are large, slow to import, or for a method that is off.
HEAVY = {
    "aiohttp", "bm25s", "datasets", "faiss", "gguf", "jax", "matplotlib", "mlflow", "nltk", "openai", "optuna", "peft",
    "playwright", "reasoning_gym", "sentence_transformers", "sklearn", "spacy", "starlette", "tensorflow", "trackio",
    "uvicorn", "verifiers", "vllm", "wandb",
}  # fmt: skip
LOADED = {"aiohttp", "sklearn", "starlette"}  # of HEAVY, by Ray and transformers themselves where they are installed


@pytest.mark.slow
def test_a_default_run_loads_nothing_of_contrib_and_no_package_that_it_does_not_use(tmp_path):
    target = tmp_path / "modules.json"
    command = [sys.executable, "-c", RUN, "tiny", str(tmp_path / "log"), str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    modules = json.loads(target.read_text())
    assert [name for name in modules if name.startswith("rllib_srl.contrib.")] == []
    assert "rllib_srl.replay.buffer" in modules
    assert [name for name in modules if name.startswith("rllib_srl.") and name.endswith("retention")] == []
    assert {name for name in modules if "." not in name} & HEAVY == {name for name in LOADED if find_spec(name)}
