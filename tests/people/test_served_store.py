"""The file of a served model: private and redacted conversations, and versions with their ratings, against twins."""

import json
import os
import random
import sqlite3

import pytest

from rllib_srl.people.rating import TAKEN_BACK
from rllib_srl.people.rating_store import RatingsError
from rllib_srl.people.served_store import CANDIDATE, FILE, HAS_SECRET, Conversation, LineageError, ServedStore, Tokens

TOKENS = Tokens([1, 2], [3, 4], [-0.5, -0.1])
FILES = {"adapter_model.safetensors": "ab" * 32}


def conversation(name="c1", question="What is 3 + 4?", answer=" 7", **changes):
    said = [{"role": "user", "content": question}]
    return Conversation(**{
        "id": name, "version": 2, "at": "2026-01-01T00:00:00+00:00", "messages": said, "answer": answer,
        "finish_reason": "stop", "tokens": TOKENS, **changes,
    })  # fmt: skip


@pytest.fixture
def store(tmp_path):
    with ServedStore(tmp_path / FILE) as opened:
        yield opened


def candidate(store, uses):
    version = store.begin(uses, {"lr": 1e-3})
    return store.finish(version.number, FILES, {"kl": 0.1}).number


def test_what_is_logged_is_found_once_and_is_private(store, tmp_path):
    assert store.find("c1") is None
    assert store.log(conversation()) == store.find("c1") == conversation() and len(store.search("", None, 2)[0]) == 1
    with pytest.raises(RatingsError, match="logging c1 failed"):
        store.log(conversation(answer="another"))
    assert store.find("c1").answer == " 7" and os.stat(tmp_path / FILE).st_mode & 0o777 == 0o600


@pytest.mark.parametrize("where", ["question", "answer", "messages"])
def test_a_secret_is_not_in_the_file_neither_as_text_nor_as_tokens(store, tmp_path, where):
    key = "AKIAIOSFODNN7EXAMPLE"
    called = {"id": "c", "type": "function", "function": {"name": "add", "arguments": json.dumps({"key": key})}}
    said = [{"role": "assistant", "tool_calls": [called]}] if where == "messages" else f"my key is {key}"
    logged = store.log(conversation(**{where: said}))
    assert logged.tokens is None and logged.untrainable == HAS_SECRET
    store.close()
    stored = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert key.encode() not in stored and b"[" in stored


@pytest.mark.parametrize(("tokens", "error"), [
    (Tokens([], [1], [0.0]), "0 prompt tokens"),
    (Tokens([1], [1, 2], [0.0]), "1 log-probs"),
    (Tokens([1], [], []), "0 tokens"),
    (Tokens([1], [1], [0.5]), "above 0"),
    (TOKENS, ""),
])  # fmt: skip
def test_tokens_that_cannot_be_trained_on(tokens, error):
    assert error in tokens.errors() and bool(tokens.errors()) == bool(error)


def test_rolling_back_restores_the_parent_and_withdraws_what_only_the_child_used(store):
    assert store.active() is None
    store.activate(candidate(store, {"a/0": "good", "b/0": "good"}))
    store.activate(candidate(store, {"b/0": "good", "c/0": "bad"}))
    assert [(one.number, one.parent, one.state) for one in store.versions()] == [(1, 0, "superseded"), (2, 1, "active")]
    assert store.active().files == FILES and store.active().metrics == {"kl": 0.1}
    begun = store.begin({"d/0": "good"}, {})
    assert store.roll_back("rude") == {"rolled_back": 2, "active": 1, "withdrawn_ratings": ["c/0"]}
    assert store.active().number == 1 and store.version(2).reason == "rude"
    assert store.version(begun.number).state == "stale"  # it was trained from version 2
    assert store.roll_back("") == {"rolled_back": 1, "active": 0, "withdrawn_ratings": ["a/0", "b/0"]}
    assert store.active() is None and [one["num_withdrawn_ratings"] for one in store.rows()] == [2, 2, 0]
    with pytest.raises(LineageError, match="expected a trained version to roll back"):
        store.roll_back("")


def test_a_version_remembers_what_its_ancestors_were_trained_on(store):
    store.activate(candidate(store, {"a/0": "good", "b/0": "good"}))
    store.reject(candidate(store, {"c/0": "bad"}), "kept compare: lost", {"kl": 9})
    store.activate(candidate(store, {"b/0": "bad"}))
    assert store.remembered(0) == {} and store.remembered(1) == {"a/0": "good", "b/0": "good"}
    assert store.remembered(3) == {"a/0": "good", "b/0": "bad"} and store.version(2).metrics == {"kl": 9}


@pytest.mark.parametrize(("change", "message"), [
    (lambda store: store.activate(1), "is training; it can become candidate or rejected or stale, not active"),
    (lambda store: store.activate(7), "version = 7; expected one that srl versions lists"),
])  # fmt: skip
def test_what_cannot_be_is_refused_and_changes_nothing(store, change, message):
    store.begin({"a/0": "good"}, {})
    before = store.versions()
    with pytest.raises(LineageError, match=message):
        change(store)
    assert store.versions() == before


def test_a_candidate_of_another_parent_is_not_activated(store):
    first, second = candidate(store, {"a/0": "good"}), candidate(store, {"b/0": "good"})
    store.activate(first)
    with pytest.raises(LineageError, match="version 2 was trained from version 0; active is version 1"):
        store.activate(second)
    with sqlite3.connect(store.path) as other, pytest.raises(sqlite3.IntegrityError):
        other.execute("UPDATE versions SET state = 'active'")
    assert store.active().number == first


@pytest.mark.parametrize("between", ["bad", TAKEN_BACK])
def test_a_rating_that_is_changed_back_after_a_version_was_begun_trains_again(store, between):
    first, other = (store.log(conversation(name)).as_answer() for name in ("c1", "c2"))
    store.rate(first, "good")
    store.activate(candidate(store, store.free_ratings()))
    store.rate(first, between)
    store.rate(other, "good")
    store.activate(candidate(store, store.free_ratings()))  # its memory has no "good" of c1
    store.rate(first, "good")
    assert store.free_ratings() == {"c1/0": "good"}
    candidate(store, store.free_ratings())
    assert store.free_ratings() == {}


class Twin:
    """What follows from conversations, ratings and versions, in plain Python."""

    def __init__(self, store, begun):
        self.begun = begun  # version -> answer -> seq of its rating when the version was begun
        self.today = {one.answer.answer_id: one.value for one in store.all()}
        self.seqs = {one.answer.answer_id: one.seq for one in store.all()}
        self.uses = {one.number: store.uses(one.number) for one in store.versions()}
        self.states = {one.number: one.state for one in store.versions()}
        self.trainable = {name for name in self.today if store.find(name[:-2]).tokens}

    def free(self):
        fresh = [number for number, state in self.states.items() if state != "stale"]
        used = {self.begun[number][name] for number in fresh for name in self.uses[number]}
        given = [pair for pair in self.today.items() if pair[1] != TAKEN_BACK and pair[0] in self.trainable]
        return {name: value for name, value in given if self.seqs[name] not in used}

    def changed(self, number):
        return [name for name, value in self.uses[number].items() if self.today[name] != value]

    def withdrawn(self, number):
        out = set()
        for pair in self.uses[number].items():
            states = {self.states[other] for other, uses in self.uses.items() if pair in uses.items()}
            if "rolled_back" in states and states <= {"rolled_back", "rejected", "stale"}:
                out.add(pair)
        return len(out)


def change(store, rng, answers, begun):
    in_training, candidates, active = store.in_training(), store.in_state(CANDIDATE), store.active()
    what = rng.choice(["log", "rate", "rate", "rate", "begin", "end", "end", "back"])
    if what == "log" or not answers:
        no = {} if rng.random() < 0.8 else {"tokens": None, "untrainable": "temperature"}
        answers.append(store.log(conversation(f"c{len(answers)}", **no)).as_answer())
    elif what == "rate":
        store.rate(rng.choice(answers), rng.choice(["good", "bad", "3", "none"]))
    elif what == "begin" and in_training is None and (free := store.free_ratings()):
        number = store.begin(dict(rng.sample(sorted(free.items()), rng.randint(1, len(free)))), {}).number
        begun[number] = {one.answer.answer_id: one.seq for one in store.all()}
    elif what == "end" and in_training is not None:
        if rng.random() < 0.6:
            store.finish(in_training.number, {}, {})
        else:
            store.reject(in_training.number, "worse", None, rng.random() < 0.5)
    elif what == "end" and candidates:
        if candidates[0].parent == (active.number if active else 0) and rng.random() < 0.8:
            store.activate(candidates[0].number)
        else:
            store.reject(candidates[0].number, "stale", None, True)
    elif what == "back" and active is not None:
        assert store.roll_back("rude")["active"] == active.parent


def test_random_histories_agree_with_plain_python(store):
    rng, answers, begun, most = random.Random(0), [], {}, 0
    for _ in range(250):
        change(store, rng, answers, begun)
        twin, rows = Twin(store, begun), store.rows()
        assert list(store.free_ratings().items()) == list(twin.free().items())  # in order, too
        for row in rows:
            number, changed = row["number"], twin.changed(row["number"])
            assert sorted(store.changed(store.uses(number))) == sorted(changed)
            assert row["num_ratings"] == len(twin.uses[number])
            assert row["num_withdrawn_ratings"] == twin.withdrawn(number)
            most = max(most, row["num_withdrawn_ratings"] * len(changed))
    assert most > 0
