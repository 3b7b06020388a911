"""The log of conversations: private, redacted, without the tokens of a secret."""

from __future__ import annotations

import os

import pytest

from rllib_srl.people.lineage.conversations import (
    HAS_SECRET,
    Conversation,
    ConversationsError,
    ConversationStore,
    Tokens,
)

TOKENS = Tokens([1, 2], [3, 4], [-0.5, -0.1])


def conversation(name="chatcmpl-1", question="What is 3 + 4?", answer=" 7", **changes):
    said = [{"role": "user", "content": question}]
    return Conversation(**{
        "id": name, "version": 2, "at": "2026-01-01T00:00:00+00:00", "messages": said, "answer": answer,
        "finish_reason": "stop", "tokens": TOKENS, **changes,
    })


@pytest.fixture
def store(tmp_path):
    with ConversationStore(tmp_path / "conversations.db") as opened:
        yield opened


def test_what_is_logged_is_found(store, tmp_path):
    logged = store.log(conversation())
    assert store.find("chatcmpl-1") == logged == conversation()
    assert store.find("chatcmpl-2") is None and store.num() == 1
    assert os.stat(tmp_path / "conversations.db").st_mode & 0o777 == 0o600


@pytest.mark.parametrize("where", ["question", "answer"])
def test_a_secret_is_not_in_the_file_neither_as_text_nor_as_tokens(store, tmp_path, where):
    key = "AKIAIOSFODNN7EXAMPLE"
    logged = store.log(conversation(**{where: f"my key is {key}"}))
    assert logged.tokens is None and logged.untrainable == HAS_SECRET
    store.close()
    stored = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert key.encode() not in stored and b"[" in stored


def test_only_conversations_with_tokens_are_trained_on(store):
    store.log(conversation("a"))
    store.log(conversation("b", tokens=None, untrainable="temperature 0.2"))
    assert [one.id for one in store.trainable(["b", "a", "c"])] == ["a"]
    assert [store.is_untrainable(name) for name in ("a", "b", "c")] == [False, True, False]


def test_an_id_is_logged_once(store):
    store.log(conversation())
    with pytest.raises(ConversationsError, match="logging chatcmpl-1 failed"):
        store.log(conversation(answer="another"))
    assert store.find("chatcmpl-1").answer == " 7"


@pytest.mark.parametrize(
    ("tokens", "fault"),
    [
        (Tokens([], [1], [0.0]), "0 prompt tokens"),
        (Tokens([1], [1, 2], [0.0]), "1 log-probs"),
        (Tokens([1], [], []), "0 tokens"),
        (Tokens([1], [1], [0.5]), "above 0"),
        (TOKENS, ""),
    ],
)
def test_tokens_that_cannot_be_trained_on(tokens, fault):
    assert fault in tokens.faults() and bool(tokens.faults()) == bool(fault)
