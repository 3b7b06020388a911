"""The benchmark of the memory in a short mode, on the tiny model."""

import json

from scripts.bench import buffer


def test_the_memory_is_timed_with_items_stored(tmp_path, capsys):
    path = tmp_path / "figures.json"
    words = ["--items", "300", "--iterations", "2", "--iteration-s", "1e9", "--model", "tiny", "--json", str(path)]
    assert buffer.main(words) == 0
    figures = json.loads(path.read_text())
    assert all(len(figures[name]) == 2 and figures[name][0][0] > 0 for name in buffer.CALLS)
    assert "300 items" in capsys.readouterr().out
