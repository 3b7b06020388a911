"""Every program of docs/examples/ runs as it stands, and does what its docstring promises."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

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
    result = subprocess.run(
        [sys.executable, "-m", "tests.quick_workers", str(EXAMPLES / name), *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": paths(), "TMPDIR": str(cwd), "RAY_TMPDIR": tempfile.gettempdir()},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert result.returncode == 0, f"{name}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
    return result.stdout


def paths() -> str:
    """Return a PYTHONPATH with this checkout, so that one that is not installed works too."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


def rewards(text: str) -> list[float]:
    """Return the rewards of the iterations, in their order."""
    return [float(found) for found in re.findall(r"^iteration +\d+  reward (\d\.\d+)", text, re.MULTILINE)]


def rises(text: str, num_iterations: int) -> bool:
    """Say whether the mean reward of the last three iterations is above that of the first two."""
    found = rewards(text)
    assert len(found) == num_iterations, text
    return sum(found[-3:]) / 3 > sum(found[:2]) / 2 + 0.1


def test_every_example_is_run_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(re.findall(r'"(\w+\.py)"', Path(__file__).read_text()))


def test_minimal_grpo_learns_in_less_than_200_lines(tmp_path: Path) -> None:
    text = printed("minimal_grpo.py", cwd=tmp_path)
    before, after = map(float, ACCURACIES.search(text).groups())
    assert rises(text, 15) and after > before + 0.15, text
    assert len((EXAMPLES / "minimal_grpo.py").read_text().splitlines()) <= 200


def test_a_memory_in_plain_torch_keeps_the_first_task(tmp_path: Path) -> None:
    text = printed("torch_memory.py", cwd=tmp_path)
    without, held = (list(map(float, re.findall(r"\d\.\d+", line))) for line in text.splitlines()[-2:])
    assert held[0] > without[0] + 0.05 and min(held[1], without[1]) > 0.6, text
    assert len((EXAMPLES / "torch_memory.py").read_text().splitlines()) <= 65


def test_a_file_of_questions_is_learned(tmp_path: Path) -> None:
    text = printed("own_jsonl.py", cwd=tmp_path)
    before, after = map(float, ACCURACIES.search(text).groups())
    assert rises(text, 8) and after > before + 0.1, text
    (written,) = tmp_path.glob("own_jsonl_*/transcripts.jsonl")
    prompts = [json.loads(line)["turns"][0]["text"] for line in written.read_text(encoding="utf-8").splitlines()]
    assert prompts and all(prompt.startswith("Question: Which is largest: ") for prompt in prompts)


def test_a_tool_agent_learns_to_call_and_then_to_answer(tmp_path: Path) -> None:
    text = printed("tool_agent.py", cwd=tmp_path)
    turns = [float(found) for found in re.findall(r"turns (\d\.\d+)", text)]
    assert rises(text, 10) and min(turns) > 1.8, text
    (written,) = tmp_path.glob("tool_agent_*/transcripts.jsonl")
    assert "Result: " in written.read_text(encoding="utf-8")


def test_an_agent_learns_through_the_endpoint(tmp_path: Path) -> None:
    pytest.importorskip("openai")  # vLLM brings it, or the extra `agents`
    text = printed("agent.py", cwd=tmp_path)
    before, after = map(float, ACCURACIES.search(text).groups())
    assert rises(text, 10) and after > before + 0.15, text
    assert set(re.findall(r"calls (\d\.\d+)", text)) == {"2.00"}
    (written,) = tmp_path.glob("agent_*/transcripts.jsonl")
    turns = json.loads(written.read_text(encoding="utf-8").splitlines()[0])["turns"]
    assert [turn["role"] for turn in turns] == ["environment", "policy"] * 2  # both conversations


def test_a_stream_of_tasks_uses_the_memory(tmp_path: Path) -> None:
    text = printed("replay_stream.py", cwd=tmp_path)
    items, revisits, reuses = map(int, re.search(r"(\d+) items, (\d+) prompts.*, (\d+) groups", text).groups())
    # 17 iterations of 16 prompts, of which .4 may be revisits; .25 of the trained groups are reused ones.
    assert 17 * 16 - revisits == items and 60 <= revisits <= 0.4 * 17 * 16, text
    assert 50 <= reuses <= 17 * 16 / 3, text
    assert len(re.findall(r"largest \d\.\d+  smallest \d\.\d+", text)) == 2


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
