"""Groups in memory and spilled: a dictionary that forgets nothing is the twin."""

from __future__ import annotations

import numpy as np
import pytest

from rllib_srl.replay.journal.codec import encode
from rllib_srl.replay.journal.journal import Commit, Journal, JournalError
from rllib_srl.replay.journal.payloads import Payloads
from tests.replay.stored import GROUP, ITEM, a_group, a_row, assert_same


@pytest.fixture
def journal(tmp_path):
    with Journal(tmp_path / "journal.db", ITEM, GROUP) as journal:
        yield journal


def store(journal, payloads, seq, **fields):
    payload = encode(a_group(seq, **fields))
    journal.commit(Commit(groups={seq: a_row(seq)}, payloads={seq: payload}))
    payloads.put(seq, payload)
    return len(payload)


def test_the_one_used_longest_ago_goes_first_and_comes_back(journal):
    payloads = Payloads(journal, max_bytes=10**6)
    size = store(journal, payloads, 0)
    payloads = Payloads(journal, max_bytes=2 * size)
    assert [store(journal, payloads, seq) for seq in (1, 2)] == [size, size]
    assert (payloads.num_bytes, payloads.num_spilled, payloads.num_read_back) == (2 * size, 0, 0)
    assert_same(payloads.get(1), a_group(1, origin="reuse"))  # so 2 is the oldest
    store(journal, payloads, 3)  # spills 2
    assert (payloads.num_in_memory, payloads.num_spilled) == (2, 1)
    assert_same(payloads.get(1), a_group(1, origin="reuse"))
    assert payloads.num_read_back == 0
    assert_same(payloads.get(2), a_group(2, origin="reuse"))  # read back, spills 3
    assert (payloads.num_bytes, payloads.num_spilled, payloads.num_read_back) == (2 * size, 2, 1)
    assert_same(payloads.get(0), a_group(0, origin="reuse"))  # never put here, stored by an earlier life
    payloads.forget([0, 17])
    assert payloads.num_bytes == size


def test_one_that_is_larger_than_all_room_is_served_from_the_journal(journal):
    payloads = Payloads(journal, max_bytes=0)
    store(journal, payloads, 1)
    assert (payloads.num_in_memory, payloads.num_bytes, payloads.num_spilled) == (0, 0, 1)
    assert_same(payloads.get(1), a_group(1, origin="reuse"))


def test_random_operations_agree_with_a_dictionary(journal):
    generator, twin = np.random.default_rng(0), {}
    payloads = Payloads(journal, max_bytes=4000)
    for seq in range(300):
        store(journal, payloads, seq, num_tokens=int(generator.integers(1, 60)))
        twin[seq] = payloads.read(seq)
        for known in generator.choice(list(twin), 2).tolist():
            assert payloads.read(known) == twin[known] == journal.read_group(known)
        if generator.random() < 0.4:
            gone = int(generator.choice(list(twin)))
            journal.commit(Commit(removed_groups=[gone]))
            payloads.forget([gone])
            del twin[gone]
            with pytest.raises(JournalError, match=f"no group {gone}"):
                payloads.get(gone)
        assert payloads.num_bytes == sum(len(payload) for payload in payloads._kept.values()) <= 4000
    assert payloads.num_spilled > 100 and payloads.num_read_back > 100


def test_damage_in_the_file_is_named(journal):
    store(journal, Payloads(journal, 0), 5)
    journal.db.execute("UPDATE payloads SET payload = CAST(substr(payload, 1, 200) || x'00' AS BLOB)")
    with pytest.raises(ValueError, match="group 5 is damaged"):
        Payloads(journal, 0).get(5)
