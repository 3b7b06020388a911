"""SRLReplayBuffer: its calls; that each happens once or not at all is shown by test_buffer_twin."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from scripts.memory_laws import check_valid
from tests.replay.groups import a_buffer, a_group, a_prompt, everything, play, row_of
from tests.replay.stored import assert_same


def ids(prompts):
    return [prompt.prompt_id for prompt in prompts]


def test_a_batch_is_full_though_nothing_is_due_and_it_is_not_always_the_same():
    # The source drew due items only, the hardest first: a batch could be short or empty, and knew no chance.
    def drawn(seed, now=3):
        buffer = a_buffer(seed=seed, spacing="fixed", spacing_config={"interval": 500.0})
        buffer.add([a_group(i, 1, i, (1.0, 0.0)) for i in range(20)], 1)
        prompts = buffer.draw_prompts(8, now)
        assert buffer.stats(now)["num_due"] == 0
        return ids(prompts)

    assert len(set(drawn(0))) == 8 and drawn(0) != drawn(1)
    buffer = a_buffer()
    buffer.add([a_group(i, 1, i) for i in range(3)], 1)
    assert len(buffer.draw_prompts(8, 2)) == 3 and buffer.draw_prompts(8, 1) == []  # each at most once


def test_a_stored_group_comes_back_with_ids_log_probs_and_versions():
    # The source kept neither.
    buffer = a_buffer()
    group = a_group(a_prompt(0, history=("a", "b")), 7, 3, versions_G2=np.array([[5, 6]] * 4))
    buffer.add([group], 7)
    (drawn,) = buffer.draw_groups(1, 8)
    assert_same(replace(drawn, origin="fresh"), group)
    row = row_of(buffer, group.prompt)
    assert drawn.origin == "reuse" and row["version"] == 5
    assert row["nll"] == pytest.approx(-group.behaviour_logp_N[group.loss_mask_N].mean(dtype=float))


def test_dropped_groups_are_gone():
    buffer = a_buffer()
    buffer.add([a_group(i, 1, i) for i in range(4)], 1)
    first = [group.group_id for group in buffer.draw_groups(4, 2)]
    assert buffer.drop([*first[:2], "none"]) == 2
    assert buffer.tables.num_groups == 2 and buffer.stats(2)["num_dropped_drifted"] == 2
    assert buffer.drop(first[:2]) == 0
    last = [group.group_id for group in buffer.draw_groups(4, 3)]
    assert sorted(last) == sorted(first[2:])
    # A group that has been replaced since was not dropped.
    buffer.add([a_group(int(i.split(".")[1]), 4, salt=s) for s in (1, 2) for i in last], 4)
    assert buffer.drop(last) == 0 and buffer.stats(4)["num_dropped_drifted"] == 2
    check_valid(buffer)


def test_a_batch_is_drawn_in_parts_without_what_it_has():
    buffer = a_buffer()
    buffer.add([a_group(i, 1, i) for i in range(6)], 1)
    first = buffer.draw_prompts(4, 3)
    more = buffer.draw_prompts(4, 3, without=[prompt.key for prompt in first])
    assert len(more) == 2 and set(ids(first)) | set(ids(more)) == {f"p{i}" for i in range(6)}


def test_stats_name_every_count_from_the_beginning():
    buffer = a_buffer(on_group="tests.replay.test_intake:continued")
    empty = buffer.stats(0)
    buffer.add([a_group(i, 1, i, num_turns=2) for i in range(12)], 1)
    buffer.draw_groups(4, 3)
    later = buffer.stats(5)
    assert set(empty) == {name for name in later if not name.startswith("domains/")}
    assert all(isinstance(value, int | float) for value in later.values())
    zeros = Counter(name for name, value in empty.items() if value == 0)
    assert {"num_items", "num_refused", "num_evicted", "num_revisits", "num_reuses"} <= set(zeros)
    assert later["num_items"] == 12 + later["num_grown"] and later["num_reuses"] == 4


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
