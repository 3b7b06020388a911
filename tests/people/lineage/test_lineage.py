"""The lineage: states, one active version, rollback, stale and withdrawn ratings; against a naive twin."""

from __future__ import annotations

import os
import random
import sqlite3

import pytest

from rllib_srl.people.lineage.versions import Lineage, LineageError

FILES = {"adapter_model.safetensors": "ab" * 32}


@pytest.fixture
def lineage(tmp_path):
    with Lineage(tmp_path / "versions.db") as store:
        yield store


def candidate(lineage, uses):
    version = lineage.begin(uses, {"lr": 1e-3})
    return lineage.finish(version.number, FILES, {"kl": 0.1}).number


def test_a_version_is_trained_activated_and_followed(lineage):
    assert lineage.active() is None
    first = candidate(lineage, {"a/0": "good"})
    lineage.activate(first)
    second = candidate(lineage, {"b/0": "bad"})
    assert [lineage.version(second).parent, lineage.version(first).parent] == [first, 0]
    lineage.activate(second)
    assert [(one.number, one.state) for one in lineage.all()] == [(1, "superseded"), (2, "active")]
    assert lineage.active().files == FILES and lineage.active().metrics == {"kl": 0.1}
    assert [state for state, _, _ in lineage.history(1)] == ["training", "candidate", "active", "superseded"]


def test_rolling_back_restores_the_parent_and_withdraws_its_ratings(lineage):
    lineage.activate(candidate(lineage, {"a/0": "good", "b/0": "good"}))
    lineage.activate(candidate(lineage, {"b/0": "good", "c/0": "bad"}))
    assert lineage.roll_back("it was rude") == (2, 1)
    assert lineage.active().number == 1 and lineage.version(2).reason == "it was rude"
    assert lineage.withdrawn_by(2) == ["c/0"]
    assert lineage.withdrawn() == {("c/0", "bad")}  # version 1 still stands for the rating of b
    assert lineage.roll_back("") == (1, 0) and lineage.active() is None
    assert lineage.withdrawn() == {("a/0", "good"), ("b/0", "good"), ("c/0", "bad")}
    assert lineage.withdrawn_by(1) == ["a/0", "b/0"]  # and not c, which was withdrawn before
    with pytest.raises(LineageError, match="expected a trained version to roll back"):
        lineage.roll_back("")


def test_a_roll_back_of_another_version_than_the_active_one_changes_nothing(lineage):
    lineage.activate(candidate(lineage, {"a/0": "good"}))
    lineage.activate(candidate(lineage, {"b/0": "good"}), "canary gap 0")
    seen = lineage.newest_change()
    for number in (0, 1, 7):
        with pytest.raises(LineageError, match=f"version {number} is not active, version 2 is; nothing was rolled"):
            lineage.roll_back("", number)
    assert lineage.newest_change() == seen and lineage.history(2)[-1][2] == "canary gap 0"
    assert lineage.roll_back("", 2) == (2, 1) and lineage.newest_change() == seen + 2


def test_a_changed_rating_makes_versions_stale_and_is_free_again(lineage):
    number = candidate(lineage, {"a/0": "good", "b/0": "bad"})
    today = {"a/0": "good", "b/0": "bad"}
    assert lineage.stale_answers(number, today) == {}
    assert lineage.stale_answers(number, today | {"b/0": "none"}) == {"b/0": ("bad", "none")}
    assert lineage.used_up() == {("a/0", "good"), ("b/0", "bad")}
    lineage.reject(number, "a rating has changed", is_stale=True)
    assert lineage.used_up() == set() and lineage.version(number).state == "stale"


def test_a_version_remembers_what_its_ancestors_were_trained_on(lineage):
    lineage.activate(candidate(lineage, {"a/0": "good", "b/0": "good"}))
    lineage.reject(candidate(lineage, {"c/0": "bad"}), "kept compare: lost")
    lineage.activate(candidate(lineage, {"b/0": "bad"}))
    assert lineage.remembered(0) == {} and lineage.remembered(1) == {"a/0": "good", "b/0": "good"}
    assert lineage.remembered(3) == {"a/0": "good", "b/0": "bad"}


def test_what_a_rejected_version_learned_from_is_not_used_again(lineage):
    number = candidate(lineage, {"a/0": "good"})
    lineage.reject(number, "kept compare: lost", {"kl": 9})
    assert lineage.used_up() == {("a/0", "good")} and lineage.withdrawn() == set()
    assert lineage.version(number).metrics == {"kl": 9}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda store: store.activate(1), "is training; it can become candidate or rejected or stale, not active"),
        (lambda store: store.activate(7), "version = 7; expected one that srl versions lists"),
        (lambda store: store.begin({"b/0": "bad"}, {}), "version 1 is in training; expected none"),
        (lambda store: store.begin({}, {}), "needs ratings to train on"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(lineage, change, message):
    lineage.begin({"a/0": "good"}, {})
    before = lineage.all()
    with pytest.raises(LineageError, match=message):
        change(lineage)
    assert lineage.all() == before


def test_a_candidate_of_another_parent_is_not_activated(lineage):
    first, second = candidate(lineage, {"a/0": "good"}), candidate(lineage, {"b/0": "good"})
    lineage.activate(first)
    with pytest.raises(LineageError, match="version 2 was trained from version 0; active is version 1"):
        lineage.activate(second)
    assert lineage.active().number == first


def test_the_database_itself_refuses_two_active_versions(lineage, tmp_path):
    lineage.activate(candidate(lineage, {"a/0": "good"}))
    candidate(lineage, {"b/0": "good"})
    with sqlite3.connect(tmp_path / "versions.db") as other, pytest.raises(sqlite3.IntegrityError):
        other.execute("UPDATE versions SET state = 'active'")


def test_the_file_is_private_and_lasts(tmp_path):
    path = tmp_path / "versions.db"
    with Lineage(path) as store:
        number = candidate(store, {"a/0": "5"})
    assert os.stat(path).st_mode & 0o777 == 0o600
    with Lineage(path) as store:
        assert store.uses(number) == {"a/0": "5"} and store.candidates()[0].number == number


def test_random_histories_agree_with_a_list(lineage):
    """A stack of active versions is the whole truth about which one is active."""
    rng, stack = random.Random(7), [0]
    for number in range(40):
        kind = rng.choice(["activate", "activate", "reject", "back"])
        if kind == "back" and len(stack) > 1:
            assert lineage.roll_back("") == (stack.pop(), stack[-1])
        elif kind in ("activate", "reject"):
            made = candidate(lineage, {f"{number}/0": "good"})
            if kind == "activate":
                lineage.activate(made)
                stack.append(made)
            else:
                lineage.reject(made, "worse")
        active = lineage.active()
        assert (active.number if active else 0) == stack[-1]
        states = {one.number: one.state for one in lineage.all()}
        assert all(states[one] == "superseded" for one in stack[1:-1])
