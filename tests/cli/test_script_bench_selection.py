"""The benchmark of draws in a short mode: every side is timed, and the summary has its numbers."""

from __future__ import annotations

from scripts.bench import selection


def test_every_rule_is_timed():
    times = selection.measure(num_items=300, num_draws=3)
    assert set(times) == set(selection.SIDES) and all(len(took) == 3 and min(took) > 0 for took in times.values())
    told = selection.summary({side: [5.0] for side in selection.SIDES}, 2.0, 300)
    assert "signal with posterior 5.00" in told
    assert "take 5.00 + 2.00 ms, 0.35% of an iteration of 2 s; at most 0.5%:" in told
