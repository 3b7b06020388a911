"""srl rate: from a pipe, by id, as a list and as a file; what it refuses; and a resumed run with its ratings."""

import io
import json
import stat
from functools import partial
from pathlib import Path

import pytest

from rllib_srl.cli import rate as script
from rllib_srl.cli import train
from rllib_srl.people.rating_store import RATINGS, RatingStore
from rllib_srl.replay.reading import reading
from tests.small_buffer import a_group, by_hand


@pytest.fixture
def memory(tmp_path):
    (tmp_path / "run").mkdir()
    buffer = by_hand(tmp_path / "run/replay")
    buffer.add([a_group(0, (0, 0), 1, ids=[40, 41]), a_group(1, (0, 1), 1, ids=[42])], 1)
    yield buffer
    buffer.close()


@pytest.fixture
def run(memory, tmp_path, capsys, monkeypatch):
    """Return a function that calls `srl rate` on the run, with lines on its standard input."""
    return partial(said, capsys, monkeypatch, tmp_path / "run")


def said(capsys, monkeypatch, directory: Path, *argv: object, lines: str = "", status: int = 0) -> str:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    capsys.readouterr()
    found = script.main([str(directory), "--model", "tiny", *map(str, argv)])
    shown = capsys.readouterr()
    assert found == status, shown
    return shown.out if status == 0 else shown.err


def test_replies_come_from_a_pipe(run, tmp_path):
    out = run("--rater", "ann", lines="good\n4\nwhat\nskip\n")
    assert "rated 1.1/0 good, reward 1\n" in out and "rated 1.1/1 4, reward 0.75\n" in out
    assert "── 1.0/0  domain sums, model version 0\n" in out and "'what'; expected good, bad, 1 to 5" in out
    assert out.endswith("2 answers rated; the run applies new ratings before its next iteration\n")
    with RatingStore(tmp_path / "run" / RATINGS) as store:
        found = [(one.answer.answer_id, one.value, one.rater) for one in store.all()]
    assert found == [("1.1/0", "good", "ann"), ("1.1/1", "4", "ann")]
    assert stat.S_IMODE((tmp_path / "run" / RATINGS).stat().st_mode) == 0o600
    assert run(lines="").count("── ") == 1  # what is left: the first of the other group


def test_a_rating_is_set_changed_repeated_and_taken_back_by_its_id(run):
    assert run("--set", "1.0/1", "2") == "rated 1.0/1 2, reward 0.25\n"
    assert run("--set", "1.0/1", "bad") == "rated 1.0/1 bad (it was 2), reward 0\n"
    assert run("--set", "1.0/1", "bad") == "rated 1.0/1 bad already, reward 0\n"
    rows = run("--list").splitlines()
    assert rows[0].split() == ["id", "rating", "reward", "rater", "at", "domain", "answer", "state"]
    assert rows[1].startswith("1.0/1  bad     0       -")
    assert rows[1].endswith("waits for the next iteration of the run")
    assert rows[2:] == ["1 ratings"]
    assert run("--set", "1.0/1", "none") == "rated 1.0/1 none (it was bad)\n"


def test_a_rating_of_an_answer_that_is_gone_is_kept_and_said_to_be_unused(run, memory, tmp_path):
    run("--set", "1.0/1", "2")
    for now in (2, 3):  # two newer groups of the prompt replace it
        memory.add([a_group(0, (0, 1), now, ids=[50 + now])], now)
    unused = "; unused: the answer is no longer in the memory\n"
    assert run("--set", "1.0/1", "5") == f"rated 1.0/1 5 (it was 2), reward 1{unused}"
    assert run("--export", tmp_path / "all.jsonl") == f"1 ratings in {tmp_path / 'all.jsonl'}\n"


def test_a_scheme_is_set_once_and_its_rewards_are_shown(run):
    assert run("--scheme", "hybrid", "--set", "1.0/1", "good 4") == "rated 1.0/1 good 4, reward 0.8\n"
    assert run("--set", "1.0/1", "bad 2") == "rated 1.0/1 bad 2 (it was good 4), reward -0.4\n"
    assert run("--list").splitlines()[1].startswith("1.0/1  bad 2   -0.4")
    assert "has scheme 'hybrid' already; leave the scheme out" in run("--scheme", "binary", "--list", status=1)


def test_ratings_are_exported_with_their_texts(run, tmp_path):
    run("--set", "1.0/1", "2", "--rater", "ann")
    run("--set", "1.0/0", "good")
    run("--set", "1.1/0", "good")
    run("--set", "1.1/0", "none")
    run("--export", tmp_path / "all.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert [(row["id"], row["rating"], row["reward"], row["rater"]) for row in rows] == [
        *(("1.0/1", "2", 0.25, "ann"), ("1.0/0", "good", 1.0, ""))
    ]
    assert rows[0]["prompt"] and rows[0]["answer"] and rows[0]["domain"] == "sums" and not rows[0]["is_unused"]
    assert stat.S_IMODE((tmp_path / "all.jsonl").stat().st_mode) == 0o600


@pytest.mark.parametrize(("argv", "message"), [
    (["--set", "9.9/0", "good"], "id = '9.9/0' is not in the memory of the run; expected the id"),
    (["--set", "1.0/0", "6"], "rating = '6'; expected good, bad, 1 to 5, or none (taken back)"),
    (["--list"], "has no ratings yet; rate some answers first: srl rate"),
])  # fmt: skip
def test_bad_input_is_one_clear_error(run, argv, message):
    error = run(*argv, status=1)
    assert message in error and error.count("\n") == 1


@pytest.mark.slow
def test_a_run_that_is_resumed_elsewhere_takes_its_ratings_along(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("good\nbad\n3\n"))
    assert script.main([str(trained)]) == 0  # with the tokenizer of the run's model
    out = capsys.readouterr().out
    assert "Which is largest" in out and "3 answers rated" in out
    resumed = tmp_path / "resumed"
    assert train.main(["--resume", str(trained), "--out", str(resumed), "--iterations", "3", "--debug"]) == 0
    capsys.readouterr()
    assert script.main([str(resumed), "--list"]) == 0
    assert capsys.readouterr().out.count("applied") == 3
    with reading(resumed) as memory:
        assert memory.state["rated"]["num_applied"] == 3
