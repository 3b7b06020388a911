"""The study of distillation: its table, and a seed that is not run again."""

from __future__ import annotations

import json

from scripts.regain import main, table


def result(teacher, student, grpo, distill, regained=True):
    arms = {"grpo": {"tokens": grpo, "regained": regained}, "distill": {"tokens": distill, "regained": True}}
    return {"teacher": teacher, "student": student, **arms}


def test_a_student_that_lost_nothing_does_not_count():
    text = table({1: result(0.9, 0.2, 4000, 3000), 2: result(0.9, 0.85, 10, 20), 3: result(0.9, 0.1, 40, 39, False)})
    assert text.splitlines()[1:] == [
        "   1  0.900  0.200  4,000  3,000",
        "   2  0.900  0.850  10  20  no loss",
        "   3  0.900  0.100  40 (never)  39",
        "distillation is ahead in 2 of 2 seeds, p = 0.500",
    ]


def test_a_finished_seed_is_read(tmp_path, capsys):
    (tmp_path / "4").mkdir()
    (tmp_path / "4" / "result.json").write_text(json.dumps(result(0.9, 0.2, 5, 4)))
    main(["--out", str(tmp_path), "--seeds", "4"])
    assert "distillation is ahead in 1 of 1 seeds" in capsys.readouterr().out
