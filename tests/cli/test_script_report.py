"""srl report on a run: its facts by hand, the page, and what is no run."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from rllib_srl.cli import report
from rllib_srl.cli.report import MOST_POINTS, page_of_run, thinned
from rllib_srl.cli.shared.run_log import LEARNER, LIVE_TOKENS, REWARD, RunFacts, episodes_in
from rllib_srl.studies.report.charts import Line
from rllib_srl.studies.report.page import Notice, to_html


def row(iteration: int, reward: float, **more: float) -> dict[str, float]:
    numbers = {"num_groups": 4.0, "num_groups_zero_variance": 1.0, "num_generated_tokens": 100.0}
    numbers |= {"stop_reason/terminated": 6.0, "stop_reason/out_of_tokens": 2.0, "num_unparsed": 0.0}
    played = {f"env_runners/{name}": number for name, number in numbers.items()}
    return {"iteration": iteration, **played, REWARD: reward, "time_this_iter_s": 4.0, "timers/rollout": 2.0, **more}


def evaluation(accuracy: float, **domains: float) -> dict[str, float]:
    found = {"accuracy": accuracy, "accuracy_low": accuracy - 0.05, "accuracy_high": accuracy + 0.05}
    found |= {f"by_domain/{name}/accuracy": value for name, value in domains.items()}
    return {f"evaluation/{name}": value for name, value in found.items()}


def episode(iteration: int, index: int, reward: float, text: str = "7") -> dict[str, Any]:
    turns = [{"role": "environment", "text": "1 <b>?\nA:"}, {"role": "policy", "text": text}]
    about = {"iteration": iteration, "group_id": f"{iteration}.0", "index": index, "env_id": "sums", "prompt_id": "1"}
    return {**about, "turns": turns, "reward": reward, "stop_reason": "terminated"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "mine"
    directory.mkdir()
    secret = {"reward_headers": {"Authorization": "Bearer hunter2"}, "num_shots": 0}
    settings = {"model": "tiny", "env": "sums", "env_config": secret, "lr": 1e-4, "group_size": 8, "iterations": 4}
    (directory / "settings.yaml").write_text(yaml.safe_dump(settings))
    memory = {"replay/num_items": 12.0, "replay/revisit_share_prompts": 0.25, "retention/num_held": 16.0}
    rows = [
        row(1, 0.0, **evaluation(0.8, a=0.9, b=0.7)),
        row(2, 0.25, num_empty_batches=1.0, **{f"{LEARNER}/entropy": 0.5, f"{LEARNER}/kl": 0.0}),
        row(3, 0.5),
        {"iteration": 3, **evaluation(0.6, a=0.4, b=0.8)},  # evaluated apart
        row(4, 0.75, num_empty_batches=2.0, **memory),
    ]
    text = "".join(json.dumps(one) + "\n" for one in rows) + '{"iteration": 5, "env'
    (directory / "metrics.jsonl").write_text(text)
    episodes = [episode(1, 0, 0.0), episode(1, 1, 1.0), episode(2, 0, 0.5)]
    episodes += [episode(4, 0, 1.0, "x\x1b[31m"), episode(4, 1, 0.0)]
    (directory / "transcripts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in episodes))
    return directory


def test_an_iteration_counts_once_and_a_cut_line_not_at_all(run: Path) -> None:
    facts = RunFacts.read(run)
    assert facts.iterations.tolist() == [1, 2, 3, 4] and facts.values(REWARD).tolist() == [0.0, 0.25, 0.5, 0.75]
    assert facts.total("env_runners/num_generated_tokens") == 400 and facts.last("num_empty_batches") == 2
    assert math.isnan(facts.last("nothing"))
    assert list(facts.by_name("evaluation/by_domain/", "/accuracy")) == ["a", "b"]
    assert facts.endings == {"terminated": 24.0, "out_of_tokens": 8.0}


def test_damaged_lines_are_counted_and_left_out(tmp_path: Path) -> None:
    broken = [{"iteration": 1}, [], {**episode(1, 0, 1.0), "turns": [{"role": "x", "text": 3}]}, episode(1, 0, 0.5)]
    (tmp_path / "transcripts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in broken) + '{"iteration": 9')
    assert episodes_in(tmp_path) == ([broken[3]], 3)
    bad = '{x}\n[1]\n{"a": 1}\n{"iteration": 1e999}\n{"iteration": 1, "a": "b"}\n'
    (tmp_path / "metrics.jsonl").write_text(bad + '{"iteration": 7, "a": 2}\n{"iteration": 8}\n')
    facts = RunFacts.read(tmp_path)
    assert facts.iterations.tolist() == [7, 8] and facts.columns["a"][0] == 2 and math.isnan(facts.columns["a"][1])
    assert next(facts.warnings()) == "metrics.jsonl has 5 damaged lines, which are left out"


def test_a_long_line_is_drawn_as_means(run: Path) -> None:
    x = np.arange(2.0 * MOST_POINTS)
    few = thinned(Line(x, 2 * x, x, 3 * x))
    assert len(few.x) == MOST_POINTS and few.x[:2].tolist() == [0.5, 2.5] and few.mean[1] == 5 and few.high[1] == 7.5


@pytest.mark.parametrize("values", [[math.nan], [math.inf], [5.0, 5.0], [-1e-9, 1e12]])
def test_any_values_can_be_drawn(tmp_path: Path, values: list[float]) -> None:
    rows = [row(number, value) for number, value in enumerate(values, 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    assert to_html(page_of_run(RunFacts.read(tmp_path), 0))


def test_errors_and_signs_are_counted(run: Path) -> None:
    assert list(RunFacts.read(run).warnings()) == [
        "iterations with nothing to train on: 2",
        "25% of the episodes ran out of tokens",
        "held-out accuracy fell from 0.800 in iteration 1 to 0.600, whose interval ends at 0.650",
    ]


def test_only_what_is_not_trained_on_is_a_sign(tmp_path: Path) -> None:
    """Groups of one have equal rewards and are trained on with a baseline from history."""
    counts = {"env_runners/num_groups_zero_variance": 4.0, "env_runners/stop_reason/out_of_tokens": 0.0}
    found = {}
    for live in (0.9, 0.19):
        (tmp_path / "metrics.jsonl").write_text(json.dumps(row(1, 0.5, **counts, **{LIVE_TOKENS: live})) + "\n")
        found[live] = list(RunFacts.read(tmp_path).warnings())
    assert found == {0.9: [], 0.19: ["81% of the generated tokens are in groups that are not trained on"]}


def test_the_page_has_every_part_and_no_secret(run: Path, capsys: pytest.CaptureFixture) -> None:
    assert report.main([str(run), "--transcripts", "3", "--debug"]) == 0
    html = (run / "report.html").read_text()
    assert "hunter2" not in html and "[secret]" in html
    assert "Mean reward 0.125 at the start, 0.625 at the end" in html and "3 of 5, spread evenly" in html
    for part in ("Reward and accuracy", "Held-out accuracy by domain", "Memory", "Time"):
        assert part in html
    assert "http" not in html.replace("http://www.w3.org", "")  # nothing is loaded
    assert "&lt;b&gt;" in html and "\x1b" not in html and "<script" not in html
    assert "tiny on sums: 4 of 4 iterations, 400 " in html
    assert '<th scope="row">a</th><td>0.900</td><td>0.900</td><td>0.400</td><td>0.500</td>' in html
    assert '<th scope="row">stored answers held by the last update</th><td>16</td>' in html
    assert "iterations with nothing to train on: 2" in capsys.readouterr().out.lower()


def test_held_out_accuracy_before_and_after_comes_first(tmp_path: Path) -> None:
    """Evaluations around the training have lines of their own, as srl quickstart writes them."""
    rows = [{"iteration": 0, **evaluation(0.4)}, row(1, 0.5), row(2, 0.9), {"iteration": 2, **evaluation(0.9)}]
    for num, expected in ((1, "before training"), (4, "before training, 0.900 [0.850, 0.950] after iteration 2")):
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows[:num]))
        page = page_of_run(RunFacts.read(tmp_path), 0)
        box = next(block for block in page.blocks if isinstance(block, Notice))
        assert box.title == f"Held-out accuracy 0.400 [0.350, 0.450] {expected}" and to_html(page)
    assert RunFacts.read(tmp_path).values(REWARD)[1:].tolist() == [0.5, 0.9] and box.tone == "good"


def test_a_run_without_evaluation_memory_or_transcripts_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"iteration": 1, REWARD: 0.0}) + "\n")
    page = page_of_run(RunFacts.read(tmp_path), 3)
    boxes = [block for block in page.blocks if isinstance(block, Notice)]
    assert "not measured" in boxes[0].lines[1]
    assert boxes[1].lines == ["Every reward is 0: nothing is learned (docs/grading.md)."]


@pytest.mark.parametrize(("files", "message"), [
    ({}, "has neither; expected the directory of a run (metrics.jsonl) or of a study (study.json)"),
    ({"metrics.jsonl": ""}, "has no finished iteration"),
    ({"metrics.jsonl": "{x}\n"}, "has no finished iteration and 1 damaged lines"),
    (None, "does not exist"),
])  # fmt: skip
def test_what_is_no_run_is_one_message(files, message, tmp_path, capsys):
    directory = tmp_path / "it"
    if files is not None:
        directory.mkdir()
    for name, text in (files or {}).items():
        (directory / name).write_text(text)
    assert report.main([str(directory)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
