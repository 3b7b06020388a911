"""Free ratings and stale versions, kept up to date by what has changed: equal to reading all of it, at a small cost."""

from __future__ import annotations

import random

import pytest

from rllib_srl.cli.serving.served_directory import ServedDirectory
from rllib_srl.cli.serving.stores import Stores
from rllib_srl.people.lineage.conversations import Conversation, Tokens
from rllib_srl.storage.private_database import PrivateDatabase
from tests.cli.serving.small_engine import FIXED


@pytest.fixture
def served(tmp_path):
    served = ServedDirectory(tmp_path / "served")
    served.fix_settings(FIXED)
    return served


@pytest.fixture
def stores(served):
    opened = Stores(served)
    yield opened
    opened.close()


def logged(stores, number, is_trainable=True):
    tokens = Tokens([1], [2], [-0.5]) if is_trainable else None
    said = [{"role": "user", "content": "Which?"}]
    about = ("2026-11-01T10:00:00+00:00", said, "This.", "stop", tokens, "" if is_trainable else "temperature")
    return stores.conversations.log(Conversation(f"c{number}", 0, *about))


class Twin:
    """Reads all of the stores each time, as the gateway once did."""

    def __init__(self, stores):
        self._stores = stores

    def today(self):
        return {one.answer.answer_id: one.value for one in self._stores.ratings.all()}

    def free(self):
        used, find = self._stores.lineage.used_up(), self._stores.conversations.find
        today = {one.answer.answer_id: (one, one.value) for one in self._stores.ratings.all() if one.is_given}
        return {
            name: value
            for name, (one, value) in today.items()
            if not find(one.answer.group_id).untrainable and (name, value) not in used
        }

    def stale(self):
        lineage, today = self._stores.lineage, self.today()
        counts = {one.number: len(lineage.stale_answers(one.number, today)) for one in lineage.all()}
        return {number: num for number, num in counts.items() if num}


def change(stores, rng, answers):
    """Make one random change of the stores."""
    lineage = stores.lineage
    in_training, candidates = lineage.in_training(), lineage.candidates()
    what = rng.choice(["log", "rate", "rate", "rate", "begin", "end", "end", "back"])
    if what == "log" or not answers:
        answers.append(logged(stores, len(answers), rng.random() < 0.8).as_answer())
    elif what == "rate":
        stores.ratings.rate(rng.choice(answers), rng.choice(["good", "bad", "3", "none"]))
    elif what == "begin" and in_training is None and (free := stores.free_ratings()):
        lineage.begin(dict(rng.sample(sorted(free.items()), rng.randint(1, len(free)))), {})
    elif what == "end" and in_training is not None:
        if rng.random() < 0.6:
            lineage.finish(in_training.number, {}, {})
        else:
            lineage.reject(in_training.number, "worse", None, rng.random() < 0.5)
    elif what == "end" and candidates:
        active = lineage.active()
        if candidates[0].parent == (active.number if active else 0) and rng.random() < 0.8:
            lineage.activate(candidates[0].number)
        else:
            lineage.reject(candidates[0].number, "stale", None, True)
    elif what == "back" and lineage.active() is not None:
        lineage.roll_back("rude")


@pytest.mark.parametrize("seed", range(2))
def test_random_histories_agree_with_reading_all(served, stores, seed):
    """Half of the changes are those of another process; the values agree in order, too."""
    other, rng, answers, seen = Stores(served), random.Random(seed), [], set()
    twin = Twin(stores)
    for _ in range(250):
        who = rng.choice([stores, other])
        who.now(lambda who=who: change(who, rng, answers))
        if rng.random() < 0.7:  # else several changes come at once
            found = stores.now(lambda: (stores.ratings_today(), stores.free_ratings(), stores.stale_versions()))
            expected = stores.now(lambda: (twin.today(), twin.free(), twin.stale()))
            assert [list(one.items()) for one in found] == [list(one.items()) for one in expected]
            seen |= {"several free" * (len(found[1]) > 2), "several stale" * (len(found[2]) > 1)}
    assert seen == {"", "several free", "several stale"}
    other.close()


def test_without_a_change_two_numbers_are_read(stores, monkeypatch):
    rows = []
    read = PrivateDatabase._read

    def counted(self, query, *values):
        found = read(self, query, *values)
        rows.extend(found)
        return found

    answers = [stores.now(lambda number=number: logged(stores, number).as_answer()) for number in range(20)]
    stores.now(lambda: [stores.ratings.rate(one, "good") for one in answers])
    assert len(stores.now(stores.free_ratings)) == 20
    monkeypatch.setattr(PrivateDatabase, "_read", counted)
    assert len(stores.now(stores.free_ratings)) == 20 and len(rows) == 2
