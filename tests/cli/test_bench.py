"""The benchmarks of the memory, of held answers and of the number formats in a short mode, on the tiny model."""

import json

from rllib_srl.algorithm.resources import best_dtype
from scripts.bench import buffer, dtypes, held


def test_the_memory_is_timed_with_items_stored(tmp_path, capsys):
    path = tmp_path / "figures.json"
    words = ["--items", "300", "--iterations", "2", "--iteration-s", "1e9", "--model", "tiny", "--json", str(path)]
    assert buffer.main(words) == 0
    figures = json.loads(path.read_text())
    assert all(len(figures[name]) == 2 and figures[name][0][0] > 0 for name in buffer.CALLS)
    assert "300 items" in capsys.readouterr().out


def test_both_number_formats_are_timed(tmp_path, capsys):
    path = tmp_path / "figures.json"
    words = ["--num-iterations", "2", "--model", "tiny", "--engine", "transformers", "--json", str(path)]
    assert dtypes.main(words) == 0
    figures = json.loads(path.read_text())
    assert set(figures) == {"float32", "bfloat16"}
    assert all(0 < len(seconds) <= 4 and min(seconds) > 0 for seconds in figures.values())
    assert f"auto is {best_dtype(0)} here" in capsys.readouterr().out


def test_held_answers_are_timed_within_an_iteration(tmp_path, capsys):
    path = tmp_path / "figures.json"
    words = ["--num-iterations", "2", "--model", "tiny", "--engine", "transformers", "--json", str(path)]
    status = held.main(words)
    figures = json.loads(path.read_text())
    whole, spent = figures["iteration, s"], figures["held answers, s"]
    assert len(spent) == 2 and all(0 < part < of_all for part, of_all in zip(spent, whole, strict=True))
    share = sum(part / of_all for part, of_all in zip(spent, whole, strict=True)) / 2  # the median of two is their mean
    assert f"held answers take {share:.1%} of an iteration" in capsys.readouterr().out
    assert status == int(share > 0.1)
