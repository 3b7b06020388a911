"""srl episodes on a transcript file: layout, filters, colours, and a pipe that closes early."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rllib_srl.cli import episodes


def line(iteration: int, index: int, reward: float, stop_reason: str = "terminated", answer: str = " 93\n") -> str:
    turns = [
        {"role": "environment", "text": "Question: Which is larger: 17 or 93?\nAnswer:"},
        {"role": "policy", "text": answer},
    ]
    return json.dumps(
        {"iteration": iteration, "group_id": f"{iteration}.0", "index": index, "env_id": "compare"}
        | {"prompt_id": "17, 93", "turns": turns, "reward": reward, "stop_reason": stop_reason, "version": 0}
        | {"advantage": reward - 0.5 if index else None, "origin": "fresh"}
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    lines = [line(1, 0, 0.0, "unparsable", "\x1b[2J?"), line(1, 1, 1.0)]
    lines += [line(2, 0, 0.5), line(2, 1, 1.0), line(3, 0, 1.0)]
    (tmp_path / "transcripts.jsonl").write_text("\n".join(lines) + '\n{damaged}\n{"iteration": 4, "tur')
    return tmp_path


def test_an_episode_reads_like_a_conversation(run: Path, capsys: pytest.CaptureFixture) -> None:
    assert episodes.main([str(run), "--iteration", "1", "--reward", "1"]) == 0
    shown = capsys.readouterr()
    assert shown.out == (
        "── iteration 1  group 1.0 episode 1  reward 1  advantage +0.50  stop terminated  origin fresh  version 0"
        "  compare [17, 93]\n"
        "environment │ Question: Which is larger: 17 or 93?\n"
        "            │ Answer:\n"
        "     policy │  93\n\n"
    )
    assert "line 6: damaged, skipped" in shown.err


@pytest.mark.parametrize(("filters", "expected"), [
    ([], ["1/0", "1/1", "2/0", "2/1", "3/0"]), (["--limit", "2"], ["1/0", "1/1"]),
    (["--iteration", "2-3"], ["2/0", "2/1", "3/0"]), (["--reward", "<1"], ["1/0", "2/0"]),
    (["--reward", ">=0.5", "--iteration", "2"], ["2/0", "2/1"]), (["--stop-reason", "unparsable"], ["1/0"]),
])  # fmt: skip
def test_filters(run: Path, capsys: pytest.CaptureFixture, filters: list[str], expected: list[str]) -> None:
    assert episodes.main([str(run), *filters]) == 0
    words = [row.split() for row in capsys.readouterr().out.splitlines() if row.startswith("──")]
    assert [f"{row[2]}/{row[6]}" for row in words] == expected


def test_control_characters_are_written_out_and_colours_wait_for_a_terminal() -> None:
    episode = json.loads(line(1, 0, 0.0, answer="\x1b[2J?"))
    assert "\\x1b[2J?" in episodes.shown(episode, has_colours=False)
    assert "\x1b" not in episodes.shown(episode, has_colours=False)
    assert f"{episodes.RED}reward 0{episodes.PLAIN}" in episodes.shown(episode, has_colours=True)


def test_nothing_found_and_no_file(run: Path, capsys: pytest.CaptureFixture) -> None:
    assert episodes.main([str(run), "--iteration", "9"]) == 0
    assert "no episode matches these filters" in capsys.readouterr().err
    assert episodes.main([str(run / "none")]) == 1
    assert "does not exist; expected the directory of a run" in capsys.readouterr().err
    for wrong in (["--iteration", "x"], ["--reward", "~1"], ["--limit", "0"]):
        with pytest.raises(SystemExit):
            episodes.main([str(run), *wrong])
