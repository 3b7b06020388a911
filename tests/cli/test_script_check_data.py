"""srl check-data: what it prints about good data, and about bad data."""

import json
import shlex
from pathlib import Path

from rllib_srl.cli import check_data, train
from rllib_srl.cli.shared.settings import given_settings

FLAGS = ("--engine", "transformers", "--max_turn_tokens", "12", "--max_episode_tokens", "96")
ROWS = [{"question": f"Which is largest: {n}, {n + 5} or {n + 9}?", "answer": str(n + 9)} for n in range(10, 60)]


def written(path: Path, rows) -> str:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return str(path)


def checked(capsys, *flags: str) -> tuple[int, str]:
    status = check_data.main([*flags, *FLAGS])
    said = capsys.readouterr()
    return status, said.out + said.err


def test_good_data_needs_no_look(tmp_path: Path, capsys) -> None:
    path = written(tmp_path / "good.jsonl", [*ROWS, ROWS[0]])
    status, text = checked(capsys, "--data", path, "--model", "tiny")
    assert status == 0
    assert "39 questions to train on, 11 held out by a hash of the question" in text
    assert "rows: 1 repeated, counted once; 0 contradictory; 0 unusable" in text
    assert text.count("\nQuestion: Which is largest: ") == 5 and text.count("\nAnswer:\n") == 5
    assert text.count("(class: number, reward 1)") == 5
    assert "right answers: 50 of 50 earn 1; mean reward 1.00" in text
    assert "wrong answers (of other rows): 50 of 50 earn 0; mean reward 0.00" in text
    assert "prompts: median 17, 90 % 17, 99 % 17, longest 17 (max_episode_tokens 96)" in text
    assert "nothing needs a look; train with the same flags:" in text
    (config := tmp_path / "a run.yaml").write_text("lr: 2e-5\n")
    flags = ("--data", path, "--model", "tiny", "--config", str(config), "--env-config", "num_shots=1", "bad_rows=skip")
    _, text = checked(capsys, *flags, "--debug")
    words = shlex.split(text.splitlines()[-1].partition("train with the same flags: ")[2])
    of_train = train.main.parse(words[words.index("train") + 1 :])
    assert given_settings(of_train) == given_settings(train.main.parse([*flags, *FLAGS]))
    assert "39 questions to train on, 10 held out by a hash of the question, 1 shown as examples" in text


def test_what_needs_a_look_is_listed_with_examples(tmp_path: Path, capsys) -> None:
    rows = [
        *ROWS, {**ROWS[0], "answer": "99"}, {**ROWS[1], "question": ROWS[1]["question"].upper()}, "not json",
        {"question": "Who?"}, {"question": "How long? " * 30, "answer": "7"},
        {"question": "Which long answer?", "answer": "a very long answer indeed " * 3},
    ]  # fmt: skip
    status, text = checked(capsys, "--data", written(tmp_path / "bad.jsonl", rows), "--model", "tiny")
    assert status == 1
    assert "1 contradictory; 2 unusable" in text
    assert "- rows with the question of an earlier row, but another answer: 1\n    row 51, field 'ans" in text
    assert "- rows that cannot be used (fix them, or set bad_rows to skip): 2\n    row 53, field '(row)' is" in text
    assert "- prompts of 96 tokens or more, which a run leaves out: 1; raise max_episode_tokens" in text
    assert "- right answers of more than 12 tokens: 1; raise max_turn_tokens to" in text
    assert text.rstrip().splitlines()[-1].startswith(("- ", "    "))


def test_a_reward_that_cannot_tell_right_from_wrong_needs_a_look(tmp_path: Path, capsys) -> None:
    (tmp_path / "rewards.py").write_text("def f(prompt, answer, row): return 0.5\n")
    flags = ("--data", written(tmp_path / "rows.jsonl", ROWS), "--reward", f"{tmp_path}/rewards.py:f")
    status, text = checked(capsys, *flags, "--model", "tiny")
    assert status == 1
    assert "right answers: 0 of 50 earn 1; mean reward 0.50" in text
    assert "- wrong answers that earn at least as much as the right one: 50\n    Which is largest: " in text
