"""The benchmark of histories in a short mode: its parts are parts of what they are compared with."""

from __future__ import annotations

from statistics import median

from scripts.bench import history


def test_history_is_a_small_part_of_storing(tmp_path):
    times = history.measure(tmp_path / "memory", num_items=300, num_iterations=4)
    assert len(times.add) == len(times.history) == len(times.posterior) == len(times.group) == 4
    assert 0 < median(times.history) < median(times.add) and times.added > 0
    assert history.summary(times, 300).startswith("300 items, medians of 4 iterations in ms: add ")
