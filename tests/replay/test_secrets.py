"""Secrets: what is one and what only looks like one, which tokens it takes out of the loss, and how long that takes."""

import time

import pytest

from rllib_srl.replay.admission import Span, detect, detect_credentials, redact, redact_turns, secret_episodes, turns_of
from tests.replay.groups import group_of
from tests.rollout.fakes import make_tokenizer

# Built from pieces, so that no scanner takes this file for a leak.
AWS = "AKIA" + "IOSFODNN7EXAMPLE"
GITHUB = "ghp_" + "a1B2" * 9
SLACK = "xoxb" + "-123456789012-abcDEF"
OPENAI = "sk-" + "proj-Ab1" + "c" * 30
JWT = "eyJ" + "hbGciOiJIUzI1NiJ9" + ".eyJ" + "zdWIiOiIxMjM0In0" + ".dozjgNryP4J3jVmN"
CUT_PEM = "-----BEGIN RSA PRIVATE KEY-----\n" + "MIIEow+/9" * 7 + "\\n" + "AAAA" * 8
PEM = CUT_PEM + "\nA=\n-----END RSA PRIVATE KEY-----"
CARD = "4111 1111 1111 1111"  # the industry's test number


@pytest.mark.parametrize(("turns", "redacted"), [
    ([], []),
    (["", "a", ""], ["", "a", ""]),
    ([f"id {AWS}. ", "seen"], ["id [aws_key]. ", "seen"]),
    ([f"id {AWS[:7]}", AWS[7:] + " seen"], ["id [aws_key]", " seen"]),  # one turn begins it, the next ends it
    ([f"id {AWS[:7]}", AWS[7:11], AWS[11:]], ["id [aws_key]", "", ""]),
    (["word", AWS], ["word", "[aws_key]"]),  # laid end to end no word begins there
    ([f"{AWS} and {AWS}", "."], ["[aws_key] and [aws_key]", "."]),
])  # fmt: skip
def test_turns_are_redacted_as_one_text_and_each_by_itself(turns: list[str], redacted: list[str]) -> None:
    assert redact_turns(turns) == redacted


@pytest.mark.parametrize(("text", "kind", "secret"), [
    (f"id {AWS}.", "aws_key", AWS),
    (f"token: {GITHUB}\n", "github_token", GITHUB),
    ("github_pat_" + "1aB" * 10, "github_token", "github_pat_" + "1aB" * 10),
    (f"({SLACK})", "slack_token", SLACK),
    ("https://hooks.slack.com/services/T00/B00/" + "x" * 24, "slack_token", None),
    (f"key={OPENAI};", "api_key", OPENAI),
    ("AIza" + "Sy1" * 12, "api_key", None),
    (f"Authorization: Bearer {JWT}", "jwt", JWT),
    (f"a\n{PEM}\nb", "private_key", PEM),
    (PEM.replace("RSA ", "") + ".", "private_key", PEM.replace("RSA ", "")),
    (f"x {CUT_PEM} is it", "private_key", CUT_PEM),
    ("password=hunter2 and", "password", "hunter2"),
    ("password=correcthorse&x=1", "password", "correcthorse"),
    ('"passwd": "it is long"', "password", "it is long"),
    ("DB_PASSWORD = 'pa ss'", "password", "pa ss"),
    ("aws_secret_access_key=wJalrXUtnFEMI/K7MDENG", "password", "wJalrXUtnFEMI/K7MDENG"),
    ("password: hunter22", "password", "hunter22"),
    ("Mail ann.lee+x@mail.example.org, please", "email", "ann.lee+x@mail.example.org"),
    ("call +49 151 2345 6789 now", "phone", "+49 151 2345 6789"),
    ("call +491512345678", "phone", "+491512345678"),
    ("call (212) 555-0123", "phone", "(212) 555-0123"),
    ("call 212-555-0123.", "phone", "212-555-0123"),
    (f"pay {CARD} today", "credit_card", CARD),
    ("pay 4111111111111111", "credit_card", "4111111111111111"),
    ("pay 3782 822463 10005", "credit_card", "3782 822463 10005"),
])  # fmt: skip
def test_what_is_a_secret(text, kind, secret):
    (span,) = detect(text)
    assert span.kind == kind
    assert text[span.start : span.end] == (secret or text)
    assert detect_credentials(text) == ([] if kind in ("email", "phone", "credit_card") else [span])


@pytest.mark.parametrize("text", [
    "Question: Which is largest: 17, 93 or 40?\nAnswer: 93\n",
    "555-123-4567-8 = 12, 3.14159265358979323846, 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16",
    "x +1234 or 212-555 or 100-200-3000 or 2125550123",
    "4111 1111 1111 1112 is no card, nor 4111 1111 1111 1111 1, nor 9999999999999995",
    "4111111111111111.5 or 0.4111111111111111 or a4111111111111111",
    "password=None, password=os.environ['P'], password=$P, password = get(), password == 'abcd'",
    "The password: please enter it. secret: the answer",
    "AKIAIOSFODNN7EXAMPL and xAKIAIOSFODNN7EXAMPLE and akiaiosfodnn7example",
    "risk-assessment-of-a-1-very-Long-name and sk-learn-is-a-lowercase-name-9 and ghp_short",
    "a @ b.c and @decorator.name and me@localhost",
    "eyJhbGciOi.only.two and the words PRIVATE KEY",
    "-----BEGIN PUBLIC KEY-----\nMIIB\n-----END PUBLIC KEY-----",
])  # fmt: skip
def test_what_only_looks_like_one(text):
    assert [text[span.start : span.end] for span in detect(text)] == []


def test_redacting_by_hand():
    text = f"{AWS} of ann@b.org: password='x y z w' {PEM} {PEM}"
    assert redact(text) == "[aws_key] of [email]: password='[password]' [private_key] [private_key]"
    assert redact(text, detect_credentials).startswith("[aws_key] of ann@b.org: ")
    assert redact("nothing here") == "nothing here"
    # Spans of a user's own detector may overlap and come in any order.
    assert redact("0123456789", lambda text: [Span(4, 6, "b"), Span(1, 5, "a")]) == "0[a]6789"


@pytest.mark.slow
@pytest.mark.parametrize("piece", ["1-", "a@a.", "sk-aA", "-----BEGIN A ", "-----BEGIN PRIVATE KEY-----\n-----END"])
def test_a_megabyte_takes_seconds_whatever_it_is(piece):
    text, start = piece * (1_000_000 // len(piece)), time.thread_time()
    detect(text)
    assert time.thread_time() - start < 20  # quadratic time would be hours


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(merges=[("a", "b"), ("=", "h"), ("1", "1")])


@pytest.fixture(scope="module")
def decode(tokenizer):
    return lambda ids: tokenizer.decode(ids)


def test_turns_by_hand(tokenizer, decode):
    group = group_of((ids_of(tokenizer, "use é: "), ids_of(tokenizer, "ab")))
    assert turns_of(group, 0, decode) == [(False, 0, 7, "use é: "), (True, 7, 9, "ab")]
    # The first token of the policy ends a character that the environment began: it belongs to the first turn.
    fox = ids_of(tokenizer, "x🦊")
    assert [turn[-1] for turn in turns_of(group_of((fox[:3], fox[3:])), 0, decode)] == ["x🦊", ""]


def test_a_decoder_that_drops_a_leading_space_is_asked_about_none():
    words = ["▁the", "▁pass", "word", "▁is"]

    def decode(ids):
        return "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" ")

    assert turns_of(group_of(([0], [1, 2, 3])), 0, decode) == [(False, 0, 3, "the"), (True, 3, 15, " password is")]


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_episodes_with_a_secret_of_the_policy_by_hand(tokenizer, decode):
    prompt = ids_of(tokenizer, "log in: ")
    leak, fine = ids_of(tokenizer, "password=hunter11 ok"), ids_of(tokenizer, "no")
    assert secret_episodes(group_of((prompt, fine), (prompt, leak), (prompt, fine), (prompt, leak)), decode) == (1, 3)
    assert secret_episodes(group_of((prompt, fine)), decode) == ()


def test_a_secret_of_the_env_counts_only_where_the_policy_goes_on_with_it(tokenizer, decode):
    told = group_of((ids_of(tokenizer, f"use {AWS}: "), ids_of(tokenizer, "fine")))
    assert secret_episodes(told, decode) == ()
    begun = group_of((ids_of(tokenizer, f"use {AWS[:10]}"), ids_of(tokenizer, f"{AWS[10:]} fine")))
    assert secret_episodes(begun, decode) == (0,)
