"""Every program of docs/examples/ runs as it stands, and does what its docstring promises."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rllib_srl.common.decoder import decoder_of
from rllib_srl.engine.models import local_model
from rllib_srl.memory import SRLReplayBuffer
from tests.cli.test_job import cluster  # noqa: F401 (a fixture)
from tests.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(660)]
EXAMPLES = ROOT / "docs" / "examples"
TIMEOUT_S = 600  # each takes about a minute on free cores
ACCURACIES = re.compile(r"(\d\.\d+) before, (\d\.\d+) after")


def printed(name: str, *arguments: str, cwd: Path) -> str:
    """Run an example with a directory for what it leaves behind; return what it printed.

    Ray keeps its own temporary directory: names of its sockets must be short.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))  # it may not be installed
    result = subprocess.run(
        [sys.executable, "-m", "tests.quick_workers", str(EXAMPLES / name), *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(cwd), "RAY_TMPDIR": tempfile.gettempdir()},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert result.returncode == 0, f"{name}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
    return result.stdout


def rises(text: str, num_iterations: int) -> bool:
    """Say whether the mean reward of the last three iterations is above that of the first two."""
    found = [float(one) for one in re.findall(r"^iteration +\d+  reward (\d\.\d+)", text, re.MULTILINE)]
    assert len(found) == num_iterations, text
    return sum(found[-3:]) / 3 > sum(found[:2]) / 2 + 0.1


@pytest.fixture
def one_ray(ray_here, monkeypatch) -> None:
    """Let the examples use one Ray."""
    monkeypatch.setenv("RAY_ADDRESS", ray_here.get_runtime_context().gcs_address)


def test_every_example_is_run_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(re.findall(r'"(\w+\.py)"', Path(__file__).read_text()))


def test_minimal_grpo_learns_in_at_most_150_lines(tmp_path: Path) -> None:
    text = printed("minimal_grpo.py", cwd=tmp_path)
    before, after = map(float, ACCURACIES.search(text).groups())
    assert rises(text, 15) and after > before + 0.15, text
    assert len((EXAMPLES / "minimal_grpo.py").read_text().splitlines()) <= 150


def test_a_memory_in_plain_torch_keeps_the_first_task(tmp_path: Path) -> None:
    text = printed("torch_memory.py", cwd=tmp_path)
    without, held = (list(map(float, re.findall(r"\d\.\d+", line))) for line in text.splitlines()[-2:])
    assert held[0] > without[0] + 0.05 and min(held[1], without[1]) > 0.6, text
    assert len((EXAMPLES / "torch_memory.py").read_text().splitlines()) <= 65


@pytest.mark.usefixtures("one_ray")
def test_a_file_of_questions_is_learned(tmp_path: Path) -> None:
    text = printed("own_jsonl.py", cwd=tmp_path)
    before, after = map(float, ACCURACIES.search(text).groups())
    assert rises(text, 8) and after > before + 0.1, text
    (written,) = tmp_path.glob("own_jsonl_*/transcripts.jsonl")
    prompts = [json.loads(line)["turns"][0]["text"] for line in written.read_text(encoding="utf-8").splitlines()]
    assert prompts and all(prompt.startswith("Question: Which is largest: ") for prompt in prompts)


@pytest.mark.usefixtures("one_ray")
def test_a_tool_agent_learns_to_call_and_then_to_answer(tmp_path: Path) -> None:
    text = printed("tool_agent.py", cwd=tmp_path)
    turns = [float(found) for found in re.findall(r"turns (\d\.\d+)", text)]
    assert rises(text, 10) and min(turns) > 1.8, text
    (written,) = tmp_path.glob("tool_agent_*/transcripts.jsonl")
    assert "Result: " in written.read_text(encoding="utf-8")


@pytest.mark.usefixtures("one_ray")
def test_an_agent_learns_through_the_endpoint(tmp_path: Path) -> None:
    pytest.importorskip("openai")  # vLLM brings it, or the extra `agents`
    text = printed("agent.py", cwd=tmp_path)
    before, after = map(float, ACCURACIES.search(text).groups())
    assert rises(text, 10) and after > before + 0.15, text
    assert set(re.findall(r"calls (\d\.\d+)", text)) == {"2.00"}
    (written,) = tmp_path.glob("agent_*/transcripts.jsonl")
    turns = json.loads(written.read_text(encoding="utf-8").splitlines()[0])["turns"]
    assert [turn["role"] for turn in turns] == ["environment", "policy"] * 2  # both conversations


@pytest.mark.usefixtures("one_ray")
def test_a_stream_of_tasks_uses_the_memory(tmp_path: Path) -> None:
    text = printed("replay_stream.py", cwd=tmp_path)
    items, revisits, reuses = map(int, re.search(r"(\d+) items, (\d+) prompts.*, (\d+) groups", text).groups())
    # 17 iterations of 16 prompts, of which .4 may be revisits; .25 of the trained groups are reused ones.
    assert 17 * 16 - revisits == items and 60 <= revisits <= 0.4 * 17 * 16, text
    assert 50 <= reuses <= 17 * 16 / 3, text
    assert len(re.findall(r"largest \d\.\d+  smallest \d\.\d+", text)) == 2


@pytest.mark.usefixtures("one_ray")
def test_a_search_tells_learning_rates_apart(tmp_path: Path) -> None:
    text = printed("tune_search.py", cwd=tmp_path)
    found = dict(re.findall(r"^lr (\S+)  reward of the last iteration (\d\.\d+)", text, re.MULTILINE))
    assert set(found) == {"1e-06", "0.0003"}
    assert float(found["0.0003"]) > float(found["1e-06"]) + 0.05, text


@pytest.fixture
def srl_on_path(monkeypatch) -> None:
    """Put the console command on the PATH of the cluster that is started next, as an activated environment does."""
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))


@pytest.mark.usefixtures("srl_on_path")
def test_a_job_trains_on_a_cluster(cluster, tmp_path: Path) -> None:  # noqa: F811
    address, _ = cluster
    text = printed("ray_job.py", "--address", address, "--out", str(tmp_path / "run"), cwd=tmp_path)
    assert ": SUCCEEDED" in text
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [1, 2]
    assert all(line["env_runners/num_groups"] == 16 for line in lines)


@pytest.fixture
def trl_memory() -> Any:
    """Return the example as a module; `scripts/test.sh --all` installs TRL, where a broken one is a failure."""
    if importlib.util.find_spec("trl") is None:
        pytest.skip("trl is not installed; see scripts/test.sh")
    spec = importlib.util.spec_from_file_location("trl_memory", EXAMPLES / "trl_memory.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def questions(seed: int) -> list[dict[str, Any]]:
    """Return 48 questions for the largest of three numbers, distinct within and between seeds."""
    asked_N3 = 10 + 40 * seed + np.random.default_rng(seed).permuted(np.tile(np.arange(40), (48, 1)), axis=1)[:, :3]
    texts = [f"Question: Which is largest: {a}, {b} or {c}?\nAnswer:" for a, b, c in asked_N3]
    rights = asked_N3.max(1).tolist()
    return [{"prompt": text, "right": right, "domain": f"d{seed}"} for text, right in zip(texts, rights, strict=True)]


class TRLRun:
    """A trainer of TRL with the memory: 8 prompts a batch, of which 2 may be revisits, 4 answers each, 6 batches."""

    def __init__(self, trl_memory: Any, directory: Path, rows: list[dict[str, Any]], **settings: Any) -> None:
        self.played: list[list[str]] = []  # by batch
        model = local_model("tiny")
        self.memory = SRLReplayBuffer(revisit_fraction=0.25, directory=directory / "memory", decode=decoder_of(model))
        shape = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2, "num_generations": 4}
        quick = {"max_completion_length": 6, "use_cpu": True, "bf16": False, "gradient_checkpointing": False}
        quiet = {"logging_steps": 1, "save_strategy": "no", "report_to": []}
        args = {"output_dir": str(directory / "trainer"), "num_train_epochs": 1, **shape, **quick, **quiet, **settings}
        self.trainer = trl_memory.MemoryGRPOTrainer(
            self.memory,
            trl_memory.Dataset.from_list(rows),
            model=str(model),
            reward_funcs=self.is_right,
            args=trl_memory.trl.GRPOConfig(**args),
        )

    def is_right(self, prompts: list[str], completions: list[str], right: list[int], **_: Any) -> list[float]:
        """Grade by the column of the row that is played, and note the prompts."""
        assert all(max(map(int, re.findall(r"\d+", text))) == one for text, one in zip(prompts, right, strict=True))
        assert prompts == [prompt for prompt in prompts[::4] for _ in range(4)]
        self.played.append(prompts[::4])
        return [float(text.split("\n")[0].strip() == str(one)) for text, one in zip(completions, right, strict=True)]

    def visits(self) -> Counter[str]:
        """Return how often the memory counts each prompt."""
        tables = self.memory.tables
        slots = tables.slots().tolist()
        prompts = [json.loads(tables.prompt_of(slot).prompt_id)["prompt"] for slot in slots]
        return Counter(dict(zip(prompts, tables.items["visits"][slots].tolist(), strict=True)))


def test_a_trainer_of_trl_revisits_and_a_second_one_goes_on(trl_memory: Any, tmp_path: Path) -> None:
    first = TRLRun(trl_memory, tmp_path, questions(1))  # "trl_memory.py"
    first.trainer.train()
    fresh, seen = list[int](), set[str]()
    for batch in first.played:
        assert len(set(batch)) == 8
        fresh.append(len(set(batch) - seen))
        seen |= set(batch)
    assert fresh == [8, 8, 6, 6, 6, 6]  # the loader reads a batch ahead, when the memory is empty
    played = Counter(prompt for batch in first.played for prompt in batch)
    assert first.visits() == played and first.memory.stats(7)["num_revisits"] == 8
    logged = [line for line in first.trainer.state.log_history if "memory/items" in line]
    assert [line["memory/revisit_share"] for line in logged] == [0, 0, *[0.25] * 4]
    assert [line["memory/items"] for line in logged] == [8, 16, 22, 28, 34, 40]
    first.memory.close()

    second = TRLRun(trl_memory, tmp_path, questions(2))  # with other questions: those before are revisits alone
    assert len(second.trainer.train_dataset) == 48 + 40 and len(second.memory) == 40
    second.trainer.train()
    assert [len(set(batch) & seen) for batch in second.played[:2]] == [2, 2]
    fresh_2 = {row["prompt"] for row in questions(2)}
    assert sum(len(set(batch) & fresh_2) for batch in second.played) >= 36
    played += Counter(prompt for batch in second.played for prompt in batch)
    assert second.visits() == played and second.memory.stats(13)["num_revisits"] == 8 + 12
    assert len(second.memory) == 40 + 36 and second.trainer.now == 12
    second.memory.close()

    with pytest.raises(ValueError, match=r"data set has the columns \['prompt'\], a row of the memory \['domain', "):
        TRLRun(trl_memory, tmp_path, [{"prompt": "Question: ?"}])


def test_a_resumed_trainer_of_trl_draws_nothing_for_what_it_leaves_out(trl_memory: Any, tmp_path: Path) -> None:
    first = TRLRun(trl_memory, tmp_path, questions(1), max_steps=3, save_strategy="steps", save_steps=3)
    first.trainer.train()
    first.memory.close()
    second = TRLRun(trl_memory, tmp_path, questions(1), max_steps=6)
    before = second.memory.stats(4)["num_revisits"]
    second.trainer.train(resume_from_checkpoint=str(tmp_path / "trainer" / "checkpoint-3"))
    assert (len(first.played), len(second.played)) == (3, 3)
    assert 2 * 3 <= second.memory.stats(7)["num_revisits"] - before <= 2 * (3 + 1)  # one batch is read ahead
    assert all(len(set(batch)) == 8 for batch in second.played)  # fresh prompts that the memory knows come once
    assert second.visits() == Counter(prompt for run in (first, second) for batch in run.played for prompt in batch)
    second.memory.close()


def test_a_version_of_trl_without_a_hook_is_refused(
    trl_memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trl_memory.trl.GRPOTrainer, "_calculate_rewards", lambda self, inputs: None)
    with pytest.raises(RuntimeError, match=r"lacks _calculate_rewards\(inputs prompts .*\); expected trl 1\.16"):
        TRLRun(trl_memory, tmp_path, questions(1))
