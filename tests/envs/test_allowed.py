"""The list of endpoints that a user allows: addresses and keys by hand, and entries that are wrong."""

import pytest

from rllib_srl.envs.allowed import VARIABLE, error_of

LOCAL = ["http://localhost:8000/v1", "http://127.0.0.1:8000/v1", "http://[::1]:8000/v1"]
A, TWO = "https://a.example.com/v1", "https://a.example.com/v1=A,\n https://b.example.com/v1 = B ,"
# what the user allows: (address, variable of the key) that are right, and wrong
ALLOWED = {
    "": ([(url, "") for url in LOCAL], [
        (LOCAL[1], "KEY"), ("http://127.0.0.1.example.com/v1", ""), ("http://localhost.example.com/v1", ""),
        ("http://0.0.0.0:8000/v1", ""), ("http://169.254.169.254/v1", ""), (A, ""),
    ]),
    "https://A.example.com:443/v1": ([(A, ""), (f"{A}/", "")], [(A, "KEY")]),
    f"{A}=KEY": ([(A, "KEY"), (A, "")], [
        (A, "KEYS"), (A, "key"), ("http://a.example.com/v1", "KEY"), ("https://a.example.com:8443/v1", "KEY"),
        (f"{A}/other", "KEY"),
    ]),
    TWO: ([("https://b.example.com/v1", "B")], [("https://b.example.com/v1", "A")]),
}  # fmt: skip


@pytest.mark.parametrize("allowed", ALLOWED)
def test_what_is_allowed_by_hand(allowed, monkeypatch):
    monkeypatch.setenv(VARIABLE, allowed)
    for is_wrong, asked in enumerate(ALLOWED[allowed]):
        assert [bool(error_of("judge", url, key)) for url, key in asked] == [bool(is_wrong)] * len(asked)


@pytest.mark.parametrize(("url", "error"), [
    ("https:///v1", "expected a URL with a host"), ("ftp://h/v1", "expected a URL with a host"),
    ("https://h:port/v1", "is not a URL"), ("https://user:pass@h:port/v1", "is not a URL"),
    ("https://[h/v1", "is not a URL"),
    ("https://a b/v1", "expected a URL with a host"), ("https://user:pass@h/v1", "expected a URL without a user"),
    ("https://h/v1?key=1", "without a user, a query"), ("https://h/v1#x", "without a user, a query or a fragment"),
])  # fmt: skip
def test_other_texts_than_addresses_are_refused_without_a_password_in_the_message(url, error):
    said = error_of("judge", url)
    assert said.startswith("judge = ") and error in said and "pass" not in said


def test_a_wrong_entry_is_named_and_a_key_is_not_printed(monkeypatch):
    monkeypatch.setenv(VARIABLE, "h/v1=KEY, https://h/v1=sk-s3cret, https://g/v1=")
    said = error_of("judge", "https://h/v1")
    assert said.startswith("judge = RLLIB_SRL_JUDGES names 'h/v1'; expected a URL ") and "s3cret" not in said
    assert "after the = of 'https://h/v1'" in said and "after the = of 'https://g/v1'" in said
