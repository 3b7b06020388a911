"""srl stream on the tiny model: every order with and without memory, a stop and a resume, and what is refused."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from rllib_srl.algorithm.srl import SRL
from rllib_srl.cli.continual import stream
from rllib_srl.cli.tuning.plan import Plan, config_of
from rllib_srl.studies.results import read_results
from rllib_srl.studies.trial import CONFIG, StudyTrial

SHORT = ["--short", "--evaluation_duration", "16", "--tokens", "300", "--max_turn_tokens", "8"]


def questions(path: Path, num: int) -> Path:
    rows = [{"question": f"Which is larger: {at} or {at + 7}?", "answer": str(at + 7)} for at in range(num)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def played_here(plan: Plan, missing: list[tuple[str, int]], verbose: bool, trust: bool, retries: int) -> list:
    """Run trials in this process, which saves the start of Tune's processes."""
    for arm, seed in missing:
        config = config_of(plan, arm, seed, plan.directory, trust=trust)
        trial = StudyTrial({CONFIG: config | {"log_directory": str(plan.directory / "logs" / arm)}})
        try:
            while not trial.train()["done"]:
                pass
        finally:
            trial.stop()
    return []


@pytest.mark.slow
def test_a_stream_that_is_stopped_goes_on_and_compares_the_memory_over_all_orders(
    ray_here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    out, played, orders = tmp_path / "out", stream.play, []

    def stopped_in_the_second(plan, missing, verbose, trust, retries):
        orders.append(plan.study.name)
        if len(orders) == 2:
            raise KeyboardInterrupt
        return played(plan, missing, verbose, trust, retries)

    monkeypatch.setattr(stream, "play", stopped_in_the_second)
    tasks = ["--tasks", "compare={num_shots: 0}", str(questions(tmp_path / "mine.jsonl", 400))]
    assert stream.main([*SHORT, *tasks, "--out", str(out), "--replay_revisit_fraction", "0.5", "--debug"]) == 130
    assert f"--resume {out}" in capsys.readouterr().err
    monkeypatch.setattr(stream, "play", played_here)
    before = (out / "order_0" / "trials" / "memory--1.jsonl").read_bytes()
    assert stream.main(["--resume", str(out), "--debug"]) == 0
    assert (out / "order_0" / "trials" / "memory--1.jsonl").read_bytes() == before  # not run again
    printed = capsys.readouterr().out
    assert "online accuracy" in printed and "worst disparity" in printed and "memory - no_memory" in printed
    found = json.loads((out / "stream.json").read_text())
    assert found["orders"] == [["compare", "mine"], ["mine", "compare"]] and found["seeds"] == [1]
    assert [(one["order"], one["arm"]) for one in found["trials"]] == [
        (order, arm) for order in (0, 1) for arm in ("memory", "no_memory")
    ]
    for one in found["trials"]:  # every task was answered before it was learned
        assert set(one["online_accuracy_of"]) == {"compare", "mine"} == set(one["final_accuracy_of"])
    assert found["differences"]["memory - no_memory"]["final_accuracy"]["num"] == 2
    settings = {trial.header.arm: trial.header.settings for trial in read_results(out / "order_0").trials}
    assert settings["memory"]["replay_revisit_fraction"] == 0.5
    assert settings["no_memory"]["replay_capacity"] == 0 == settings["no_memory"]["replay_revisit_fraction"]
    row = read_results(out / "order_0").trials[1].rows[-1]
    assert row.measures["online_prompts"] >= 8  # at least one iteration of fresh prompts


@pytest.mark.slow
def test_the_online_accuracy_is_that_of_the_first_answers(ray_here, tmp_path, monkeypatch, capsys):
    """With the tiny model; the right answers to each fresh prompt at its first play, counted again from the groups."""
    played, kept = defaultdict(list), SRL._kept

    def watched(algo, batches):
        groups, late = kept(algo, batches)
        order = [Path(algo._directory).name, algo._arm]
        played[tuple(order)] += [(group.prompt, group.origin, group.rewards_G.tolist()) for group in groups]
        return groups, late

    monkeypatch.setattr(SRL, "_kept", watched)
    monkeypatch.setattr(stream, "play", played_here)
    out = tmp_path / "out"
    flags = ["--short", "--engine", "transformers", "--evaluation_duration", "16", "--out", str(out), "--debug"]
    assert stream.main(flags) == 0
    assert "online accuracy" in capsys.readouterr().out
    trials = json.loads((out / "stream.json").read_text())["trials"]
    assert len(trials) == 4 == len(played)
    for trial in trials:
        first = {}
        for prompt, origin, rewards in played[f"order_{trial['order']}", trial["arm"]]:
            if origin == "fresh":
                first.setdefault((prompt.domain, prompt.key), rewards)
        for domain, online in trial["online_accuracy_of"].items():
            shares = [sum(one == 1 for one in own) / len(own) for (name, _), own in first.items() if name == domain]
            assert len(shares) >= 8 and online == pytest.approx(sum(shares) / len(shares))
            assert 0 < online < 1
        means = list(trial["online_accuracy_of"].values())
        assert len(means) == 2 and trial["measures"]["online_accuracy"] == pytest.approx(sum(means) / 2)


@pytest.mark.parametrize(("flags", "message"), [
    (["--tasks", "compare"], "tasks: 1; expected at least 2"),
    (["--tasks", "compare", "nowhere.jsonl"], "nowhere.jsonl: there is no such file"),
    (["--tasks", "compare", "nowhere"], "environment 'nowhere' is unknown"),
    (["--tasks", "compare", "compare"], "2 tasks have the domains compare; expected one each"),
    (["--tasks", "compare", "lookup", "--stream", "cpu"], "--tasks and --stream cpu; expected one of the two"),
    (["--stream", "nowhere"], "--stream nowhere; expected one of cpu"),
    (["--stream", "cpu_blend"], "--stream cpu_blend; expected one of cpu"),  # it has no boundaries
    (["--tasks", "compare", "lookup", "--orders", "3"], "orders = 3; expected 1 to 2, the orders of 2 tasks"),
    (["--stream", "cpu", "--group_size", "1"], "group_size = 1; expected"),
    (["--stream", "cpu", "--prompt_format", "chat"], "chat template"),
    (["--resume", "nowhere"], "nowhere has no order_0/study.json; expected the directory of a stream"),
])  # fmt: skip
def test_bad_input_is_one_message_before_anything_starts(tmp_path, monkeypatch, capsys, flags, message):
    def refuse(verbose: bool) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(stream, "start_ray", refuse)
    where = [] if "--resume" in flags else ["--out", str(tmp_path / "out")]
    assert stream.main([*flags, *where]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and message in said and said.count("error:") == 1
    assert not (tmp_path / "out").exists()


def test_a_file_without_questions_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    tasks = ["--tasks", "compare", str(questions(tmp_path / "mine.jsonl", 0))]
    assert stream.main([*SHORT, *tasks, "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "mine.jsonl" in said and "Traceback" not in said


@pytest.mark.parametrize(("flags", "message"), [
    (["--resume", "x", "--lr", "1e-3"], "--resume DIR keeps all settings; expected no others, not lr"),
    (["--seeds", "1", "1"], "--seeds 1 1; expected different integers"),
    (["--tokens", "0"], "'0'; expected an integer of at least 1"),
    (["--env", "compare"], "--env"),
])  # fmt: skip
def test_wrong_flags_are_refused(capsys: pytest.CaptureFixture, flags: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as stop:
        stream.main(flags)
    assert stop.value.code == 2 and message in capsys.readouterr().err
