"""The benchmarks of the memory and of the number formats in a short mode, on the tiny model."""

import json

from rllib_srl.algorithm.resources import best_dtype
from scripts.bench import buffer, dtypes


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
