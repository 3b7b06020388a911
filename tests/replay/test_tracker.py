"""Diversity of a buffer's items: vectors, raw parts, ranks, and the index behind them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from rllib_srl.replay.diversity import tracker
from rllib_srl.replay.diversity.neighbours import Neighbours
from rllib_srl.replay.diversity.tracker import DiversityTracker, packed, turns_of, unpacked
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.replay.store.records import key_of
from tests.replay.groups import a_buffer, a_group, a_prompt, everything, hidden_of

ALL_PARTS = ("variance", "novelty", "centroid", "rarity", "episodic")
FIELDS = {"novelty": "novelty", "centroid": "centroid", "rarity": "rarity", "episodic": "spread"}


def rows(buffer):
    return buffer.store.items[buffer.store.slots()]


def test_parts_by_hand_through_hidden_states():
    # Unit vectors at right angles, and one between the first two.
    buffer = a_buffer(embedding="policy", diversity_parts=("variance", "novelty", "centroid", "rarity"), neighbours=2)
    prompts = [a_prompt(i) for i in range(4)]
    buffer.add([a_group(prompt, 1, rewards=(1, 0)) for prompt in prompts], 1)
    assert not rows(buffer)["has_vector"].any() and set(rows(buffer)["diversity"]) <= {0.5}
    vectors = np.eye(4, dtype=np.float32)
    assert buffer.embed({prompts[i].key: np.stack([vectors[i]] * 2) for i in range(3)}, 1) == 3
    # Compared with what was there before the call: nothing, so everything is novel and nothing is rare.
    assert rows(buffer)["novelty"].tolist() == [1, 1, 1, 0] and rows(buffer)["centroid"].tolist() == [1, 1, 1, 0]
    between = (vectors[0] + vectors[1]) / 2
    assert buffer.embed({prompts[3].key: np.stack([between + 0.1 * vectors[3], between - 0.1 * vectors[3]])}, 1) == 1
    row = buffer.store.items[buffer.store.slot_of(key_of(prompts[3]))]
    # Cosine to both neighbours is 1/sqrt 2; to the mean (1, 1, 1) / 3 it is 2 / sqrt 6. One cluster: nothing is rare.
    assert row["novelty"] == pytest.approx(1 - np.sqrt(0.5)) and row["centroid"] == pytest.approx(1 - 2 / np.sqrt(6))
    assert row["rarity"] == 0 and row["has_vector"]
    # Ranks among what was seen: all variances are equal (0.5), novelty and centroid the lowest of four (1/8), rarity
    # the lowest of 1, 1, 1, 0 (1/8).
    assert row["diversity"] == pytest.approx((0.5 + 3 / 8) / 4)
    assert buffer.embed({"0" * 16: np.ones((2, 4))}, 1) == 0
    buffer.check_valid()


@pytest.mark.slow
def test_diversity_lies_between_0_and_1_and_is_not_flat():
    for parts in [(part,) for part in ALL_PARTS] + [ALL_PARTS]:
        buffer = a_buffer(capacity=400, diversity_parts=parts)
        generator = np.random.default_rng(1)
        for now in range(1, 7):
            groups = [
                a_group(50 * now + i, now, i, (generator.random(4) < i / 40).astype(float), num_turns=1 + i % 3)
                for i in range(40)
            ]
            buffer.add(groups, now)
        diversity_N = rows(buffer)["diversity"]
        assert ((diversity_N >= 0) & (diversity_N <= 1)).all(), parts
        assert diversity_N.std() > 0.1 and len(np.unique(diversity_N)) > 3, parts
        buffer.check_valid()


def test_two_items_and_many_random_ones_cannot_make_diversity_large_or_flat():
    # The source system's D was 350,000 for 2 items, and 33.6 for each of 256 random unit vectors.
    for num in (2, 256):
        buffer = a_buffer(embedding="policy", capacity=300, diversity_parts=("variance", "centroid"))
        buffer.add([a_group(i, 1, i) for i in range(num)], 1)
        generator = np.random.default_rng(0)
        for now, index in enumerate(range(0, num, 64 if num > 2 else 1), 1):
            part = range(index, min(num, index + (64 if num > 2 else 1)))
            buffer.embed({a_prompt(i).key: generator.normal(size=(2, 64)) for i in part}, now)
        diversity_N = rows(buffer)["diversity"]
        assert ((diversity_N >= 0) & (diversity_N <= 1)).all()
        assert num == 2 or (diversity_N.max() - diversity_N.min() > 0.4 and len(np.unique(diversity_N)) > 100)


def test_identical_items_share_the_middle():
    buffer = a_buffer(embedding="policy", diversity_parts=("novelty", "centroid", "rarity"))
    buffer.add([a_group(i, 1, i) for i in range(20)], 1)
    buffer.embed({a_prompt(i).key: np.ones((2, 8)) for i in range(10)}, 1)
    buffer.embed({a_prompt(i).key: np.ones((2, 8)) for i in range(10)}, 2)
    last = rows(buffer)["diversity"][9]
    # Novelty was 1 ten times and 0 ten times: an item is never its own neighbour, the nine others are.
    assert rows(buffer)["novelty"][:10] == pytest.approx(0, abs=1e-6) and 0 < last < 0.5


def test_the_variance_is_refreshed_with_every_visit():
    buffer = a_buffer(diversity_parts=("variance",))
    buffer.add([a_group(i, 1, i, (1, 1, 1, 1)) for i in range(8)], 1)
    before = rows(buffer)["diversity"][0]
    buffer.add([a_group(0, 2, rewards=(1, 0, 1, 0))], 2)
    assert rows(buffer)["variance"][0] == 0.25 and rows(buffer)["diversity"][0] > before
    buffer.add([a_group(0, 3, rewards=(0, 0, 0, 0))], 3)
    assert rows(buffer)["variance"][0] == 0 and rows(buffer)["diversity"][0] < 0.5


def test_an_item_is_not_compared_with_itself():
    buffer = a_buffer(diversity_parts=("novelty",), neighbours=1)
    buffer.add([a_group(0, 1), a_group(1, 1)], 1)
    apart = float(rows(buffer)["novelty"][1])
    assert apart == 1.0  # nothing was stored before
    buffer.add([a_group(0, 2)], 2)
    assert rows(buffer)["novelty"][0] > 0.8  # to the other; its own earlier vector is closer
    assert buffer.add([replace(a_group(0, 3), prompt=a_prompt(2))], 3)[0].is_new
    assert rows(buffer)["novelty"][2] < 0.8  # to p0, of the same words


def test_vectors_of_a_call_that_failed_do_not_come_with_the_next(monkeypatch):
    buffer = a_buffer(capacity=4, eviction="fifo")
    buffer.add([a_group(i, 1, i) for i in range(4)], 1)
    vectors = everything(buffer)["vectors"]
    with monkeypatch.context() as patch:
        patch.setattr(buffer.ledger.journal, "commit", lambda commit: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            buffer.add([a_group(i, 2, i) for i in range(2, 6)], 2)
    buffer.due(2, 3)
    assert everything(buffer)["vectors"] == vectors
    buffer.check_valid()


def test_evicted_items_take_their_vectors_with_them():
    buffer = a_buffer(capacity=5, eviction="fifo")
    for now in range(1, 5):
        buffer.add([a_group(10 * now + i, now, i) for i in range(4)], now)
        buffer.check_valid()
        assert len(everything(buffer)["vectors"]) == len(buffer)


def test_what_changes_what_is_measured():
    def measured(**given):
        buffer = a_buffer(**given)
        for now in (1, 2, 3):
            buffer.add([a_group(10 * now + i, now, i, num_turns=2) for i in range(8)], now)
        return {name: rows(buffer)[name].tolist() for name in (*FIELDS.values(), "diversity")}

    plain = measured()
    assert measured(neighbours=2)["novelty"] != plain["novelty"]
    assert measured(diversity_parts=("centroid",))["diversity"] != plain["diversity"]
    assert set(plain["spread"]) == {0.0} and set(measured(diversity_parts=("episodic",))["spread"]) != {0.0}
    assert set(measured(diversity_parts=())["diversity"]) == {0.5}
    assert set(measured(embedding="policy")["novelty"]) == {0.0}


def test_bonus_of_episodes():
    group = a_group(0, 1)
    distance_G = None
    for mode in ("mean1", "minmax", "paper"):
        buffer = a_buffer(diversity_bonus=mode)
        (visit,) = buffer.add([group], 1)
        bonus_G = np.array(visit.bonus_G)
        assert len(bonus_G) == group.size and bonus_G.std() > 0
        if mode == "mean1":
            distance_G = bonus_G
            assert bonus_G.mean() == pytest.approx(1)
        else:
            assert np.argsort(bonus_G).tolist() == np.argsort(distance_G).tolist()
    assert a_buffer().add([group], 1)[0].bonus_G == ()


def test_turns_of_an_episode():
    group = a_group(0, 1, num_turns=3)
    span = slice(group.offsets[1], group.offsets[2])
    ids, mask = group.token_ids_N[span], group.loss_mask_N[span]
    turns = turns_of(group, 1)
    assert [len(turn) for turn in turns] == [5, 5, 5]
    np.testing.assert_array_equal(np.concatenate(turns), ids[mask])
    silent = a_group(0, 1, loss_mask_N=np.zeros_like(group.loss_mask_N), num_turns=3)
    assert turns_of(silent, 0) == []


def test_a_group_in_which_the_policy_wrote_nothing_can_be_measured():
    group = a_group(0, 1)
    silent = a_group(
        0, 1, loss_mask_N=np.zeros_like(group.loss_mask_N), behaviour_logp_N=np.zeros_like(group.behaviour_logp_N)
    )
    buffer = a_buffer(diversity_parts=ALL_PARTS)
    assert buffer.add([silent], 1)[0].refused == ""
    buffer.check_valid()


def test_the_fit_travels_as_json():
    state = {"dim": 3, "lists": None, "clusters": np.arange(6, dtype=np.float32).reshape(2, 3) / 7}
    back = unpacked(json.loads(json.dumps(packed(state))))
    assert back["dim"] == 3 and back["lists"] is None
    np.testing.assert_array_equal(back["clusters"], state["clusters"])


def test_a_refit_is_committed_with_the_next_call_and_found_without():
    buffer = a_buffer(diversity_parts=("rarity",))
    buffer.add([a_group(i, 1, i) for i in range(32)], 1)
    stored = buffer.ledger.journal.load().state
    assert "fitted" not in stored and buffer.tracker.get_state()["fitted"] is not None
    variety = DiversityTracker(buffer.settings, None, 0)
    variety.load(buffer.ledger.journal.vectors(), None)
    assert variety.get_state()["fitted"] == buffer.tracker.get_state()["fitted"]
    buffer.add([a_group(40, 2)], 2)
    assert buffer.ledger.journal.load().state["fitted"] == buffer.tracker.get_state()["fitted"]


def test_a_large_index_searches_lists_and_goes_on_after_a_restart(tmp_path, monkeypatch):
    monkeypatch.setattr(tracker, "Neighbours", partial(Neighbours, exact_up_to=256))
    given = {"capacity": 700, "embedding": "policy", "diversity_parts": ("novelty",)}
    buffer = a_buffer(tmp_path, run="a", **given)
    for now in range(1, 6):
        groups = [a_group(100 * now + i, now, i) for i in range(70)]
        buffer.add(groups, now)
        buffer.embed({group.prompt.key: hidden_of(group, 16) for group in groups}, now)
    assert not buffer.tracker._neighbours.is_exact
    buffer.snapshot(tmp_path / "copy")
    other = a_buffer(**given)
    other.restore(tmp_path / "copy")
    groups = [a_group(900 + i, 7, i) for i in range(20)]
    for one in (buffer, other):
        one.add(groups, 7)
        one.embed({group.prompt.key: hidden_of(group, 16) for group in groups}, 7)
    assert everything(other) == everything(buffer)


def test_settings_that_hidden_states_cannot_serve_are_refused():
    faults = ReplaySettings(
        embedding="policy", diversity_parts=("episodic",), diversity_bonus="mean1", near_duplicate=0.9
    ).faults()
    assert len(faults) == 3 and all("embedding = 'policy'" in fault for fault in faults)


def test_a_vector_that_is_missing_is_found():
    buffer = a_buffer()
    buffer.add([a_group(i, 1, i) for i in range(4)], 1)
    buffer.tracker._neighbours.remove([2])
    with pytest.raises(ValueError, match="3 vectors are held; expected those of 4"):
        buffer.check_valid()
