"""A buffer that goes on where another one stopped: from its own journal, or from a copy of it in another place."""

from __future__ import annotations

import pytest

from scripts.memory_laws import check_valid
from tests.replay.groups import a_buffer, everything, play

VARIANTS = {
    "default": {"reuse_selection": "uniform", "selection": "uniform", "spacing": "none"},
    "diverse": {"diversity_coeff": 0.5, "capacity": 200, "turns": 2},
    "sm2_full": {"spacing": "contrib.spacings:SM2", "capacity": 20, "turns": 2},
    "balanced": {"selection": "balanced", "eviction": "largest_domain", "capacity": 30, "reuse_selection": "per"},
    "growth": {"on_group": "contrib.growth", "turns": 3, "capacity": 150},
}


def split(variant):
    """Return the settings of a buffer, and how it is played."""
    settings = {"capacity": 64, "max_age": 8, **VARIANTS[variant]}
    how = {"num_turns": settings.pop("turns", 1), "num_prompts": settings.pop("num_prompts", 8)}
    return settings, how


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_copy_goes_on_draw_for_draw_in_another_place(variant, tmp_path):
    settings, how = split(variant)
    assert_goes_on(a_buffer(seed=3, **settings), a_buffer(seed=77, **settings), tmp_path / "copy", how, 8, 20)


def assert_goes_on(stopped, resumed, path, how, at, end):
    """Play one buffer straight on, and another from a copy of it; its own seed is another one, and does not count."""
    for now in range(1, at + 1):
        play(stopped, now, **how)
    stopped.snapshot(path)
    straight = [play(stopped, now, **how) for now in range(at + 1, end + 1)]
    assert resumed.restore(path) == 0
    for now, expected in enumerate(straight, at + 1):
        assert play(resumed, now, **how) == expected, now
    assert everything(resumed) == everything(stopped)
    check_valid(resumed)
    assert sum(len(one["due"]) for one in straight) > 10 and sum(len(one["reused"]) for one in straight) > 10


def test_a_buffer_without_a_directory_restores_and_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    buffer = a_buffer()
    play(buffer, 1)
    buffer.snapshot(tmp_path / "copy")
    play(buffer, 2)
    assert buffer.restore(tmp_path / "copy") == 8
    check_valid(buffer)
    play(buffer, 2)
    assert list((tmp_path / "scratch").iterdir())
    buffer.close()
    assert not list((tmp_path / "scratch").iterdir())


def test_opening_fails_whole_and_can_be_tried_again(tmp_path, monkeypatch):
    buffer = a_buffer(tmp_path, run="a")
    play(buffer, 1)
    buffer.close()
    with monkeypatch.context() as patch:
        patch.setattr("rllib_srl.replay.buffer.Recall", None)
        with pytest.raises(TypeError):
            a_buffer(tmp_path, run="a")
    assert len(a_buffer(tmp_path, run="a")) == 8  # the lock is free
