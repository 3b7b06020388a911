"""srl stream on the tiny model: with and without memory, a stop and a resume, and what is refused."""

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from rllib_srl.algorithm.srl import SRL
from rllib_srl.cli.tuning import stream, trials, tune
from rllib_srl.studies.records import read_results
from rllib_srl.studies.study import Study
from rllib_srl.studies.trial import CONFIG, StudyTrial

SHORT = ["--short", "--evaluation_duration", "16", "--tokens", "300", "--max_turn_tokens", "8"]


def questions(path: Path, num: int) -> Path:
    rows = [{"question": f"Which is larger: {at} or {at + 7}?", "answer": str(at + 7)} for at in range(num)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def played_here(
    configs: list[dict], study: Study, directory: Path, max_failures: int, verbose: bool
) -> SimpleNamespace:
    """Run trials in this process, which saves the start of Tune's processes."""
    for config in configs:
        logs = str(directory / "logs" / config["_study"]["arm"])
        trial = StudyTrial({CONFIG: config | {"log_directory": logs}})
        try:
            while not trial.train()["done"]:
                pass
        finally:
            trial.stop()
    return SimpleNamespace(errors=[])


@pytest.mark.slow
def test_a_stream_that_is_stopped_goes_on_and_counts_first_answers(
    ray_here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """With the tiny model; the right answers to each fresh prompt at its first play, counted again from the groups."""
    played, kept, out = defaultdict(dict), SRL._kept, tmp_path / "out"

    def watched(algo, batches):
        groups, late = kept(algo, batches)
        for group in groups:
            if group.origin == "fresh":
                played[algo._arm].setdefault((group.prompt.domain, group.prompt.key), group.rewards_G.tolist())
        return groups, late

    def stopped_after_the_first(configs, *others):
        played_here(configs[:1], *others)
        raise KeyboardInterrupt

    monkeypatch.setattr(SRL, "_kept", watched)
    monkeypatch.setattr(trials, "fit", stopped_after_the_first)
    tasks = ["--tasks", "compare={num_shots: 0}", str(questions(tmp_path / "mine.jsonl", 400))]
    assert stream.main([*SHORT, *tasks, "--out", str(out), "--replay_revisit_fraction", "0.5", "--debug"]) == 130
    before = (out / "trials" / "memory--1.jsonl").read_bytes()
    monkeypatch.setattr(trials, "fit", played_here)
    assert f"--resume {out}" in capsys.readouterr().err
    assert stream.main(["--resume", str(out), "--debug"]) == 0
    assert (out / "trials" / "memory--1.jsonl").read_bytes() == before  # not run again
    printed = capsys.readouterr().out
    assert "online accuracy" in printed and "Undecided" in printed
    results = read_results(out)
    assert results.finished == {("memory", 1), ("no_memory", 1)}
    assert results.study.settings_of("memory", 1)["replay_revisit_fraction"] == 0.5
    without = results.study.settings_of("no_memory", 1)
    assert without["replay_capacity"] == 0 == without["replay_revisit_fraction"]
    for trial in results.trials:
        for domain, measures in trial.evaluations[-1].measures.items():  # every task was answered before it was learned
            first = [rewards for (of, _), rewards in played[trial.arm].items() if of == domain]
            shares = [sum(reward == 1 for reward in rewards) / len(rewards) for rewards in first]
            assert len(shares) == measures["online_prompts"] >= 8
            assert measures["online_accuracy"] == pytest.approx(sum(shares) / len(shares))


@pytest.mark.parametrize(("flags", "message"), [
    (["--tasks", "compare"], "tasks: 1; expected at least 2"),
    (["--tasks", "compare", "nowhere.jsonl"], "nowhere.jsonl: there is no such file"),
    (["--tasks", "compare", "compare"], "2 tasks have the domains compare; expected one each"),
    (["--config", "two.yaml"], "stream: fixed by the study; expected --tasks\n  seed: fixed by the study; expected"),
    (["--resume", "nowhere"], "nowhere/study.json does not exist; expected the results directory of a study"),
])  # fmt: skip
def test_bad_input_is_one_message_before_anything_starts(tmp_path, monkeypatch, capsys, flags, message):
    def refuse(verbose: bool) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(tune, "start_ray", refuse)
    monkeypatch.chdir(tmp_path)
    Path("two.yaml").write_text("model: tiny\nstream: [{env: compare, iterations: 2}]\nseed: 1\n")
    where = [] if "--resume" in flags else ["--out", str(tmp_path / "out")]
    assert stream.main([*flags, *where]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and message in said and said.count("error:") == 1
    assert not (tmp_path / "out").exists()


def test_other_settings_are_refused_where_a_stream_is_resumed(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        stream.main(["--resume", "x", "--lr", "1e-3"])
    assert "--resume DIR keeps all settings; expected no others, not lr" in capsys.readouterr().err


def test_the_arms_say_their_rates_and_what_the_memory_does() -> None:
    stages = stream.stages_of([], 5_000)
    study = stream.study_of("mine", stages, (1,), {"replay_retain": 3.0})
    assert study.arms[0].description == "Old prompts come back, stored right answers are held."
    rates = "learning rate: 0.0002 with memory, 5e-05 without memory"
    assert stream.rates_in_words(study) == f"{rates}; --lr sets one for both"
    for lr in (1e-4, [[0, 0.0], [100, 1e-4]]):
        same = stream.study_of("mine", stages, (1,), {"lr": lr})
        assert stream.rates_in_words(same) == f"learning rate: {lr} with memory, {lr} without memory"
