"""scripts/chaos/serving.py: its checks find what is lost; a short form with vLLM, the gateway and the trainer."""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
import sys

import pytest

from rllib_srl.cli.serving.place import Place, Stores
from scripts.chaos.served_state import Cut, Ledger, lineage_faults, lost_of, now_in, whole_of
from tests.cli.killing import ROOT
from tests.cli.served_model import write_served


@pytest.fixture
def place(tmp_path):
    write_served(tmp_path / "served")
    return Place(tmp_path / "served")


@pytest.fixture
def stores(place):
    found = Stores(place)
    yield found
    found.close()


ANSWERS = {"chatcmpl-0001": "A pear.", "chatcmpl-0004": "Red."}


def test_what_is_there_is_not_lost(stores):
    possible = {"chatcmpl-0001": {"good"}, "chatcmpl-0002": {"2", "bad"}, "chatcmpl-0004": {"none", "good"}}
    assert lost_of(stores, Ledger(ANSWERS, possible)) == [] and lineage_faults(stores) == []


@pytest.mark.parametrize(
    ("answers", "possible", "line"),
    [
        ({"chatcmpl-9": "x"}, {}, "answer chatcmpl-9 is lost"),
        ({"chatcmpl-0001": "A plum."}, {}, "answer chatcmpl-0001 is another one"),
        ({}, {"chatcmpl-0001": {"bad"}}, "rating of chatcmpl-0001 is good; expected bad"),
        ({}, {"chatcmpl-0004": {"good"}}, "rating of chatcmpl-0004 is none; expected good"),
    ],
)
def test_what_is_lost_is_found(stores, answers, possible, line):
    assert lost_of(stores, Ledger(answers, possible)) == [line]


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        ("UPDATE versions SET state = 'superseded' WHERE number = 2", ["version 2 is superseded, and its last"]),
        ("UPDATE versions SET parent = 9 WHERE number = 2", ["version 2 has the parent 9, which is missing"]),
        ("UPDATE versions SET parent = 3 WHERE number = 2", ["version 2 is active beside its parent, "]),
        ("DROP INDEX one_active; UPDATE versions SET state = 'active' WHERE number = 1",
         ["2 versions are active", "version 1 is active, and its last", "version 2 is active beside its parent"]),
    ],
)  # fmt: skip
def test_versions_that_contradict_themselves_are_found(place, stores, change, lines):
    assert now_in(place, "active") == [2] and now_in(place, "superseded", "rejected") == [1, 3]
    with sqlite3.connect(place.directory / "versions.db") as database:
        database.executescript(change)
    found = lineage_faults(stores)
    assert len(found) == len(lines) and all(map(str.startswith, found, lines)), found


def test_half_a_stream_is_no_answer():
    def event(text):
        return b"data: " + json.dumps({"id": "a", "choices": [{"delta": {"content": text}}]}).encode() + b"\n\n"

    whole = event("A ") + event("pear.") + b"data: [DONE]\n\n"
    assert whole_of(whole) == ("a", "A pear.")
    for body in (b"", event("A "), event("A ") + b'data: {"error": {}}\n\n' + b"data: [DONE]\n\n"):
        with pytest.raises(Cut):
            whole_of(body)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_kill_of_each_loses_nothing(tmp_path):
    command = [sys.executable, "scripts/chaos/serving.py", "--out", str(tmp_path / "chaos"), "--kills", "1"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=880)
    log = (tmp_path / "chaos" / "serve.log").read_text()
    assert found.returncode == 0, f"{found.stdout}{found.stderr}{log[-2000:]}"
    assert "FOUND" not in found.stdout
    assert re.findall(r"(server|gateway|trainer) +1 +0 ", found.stdout) == ["server", "gateway", "trainer"]
