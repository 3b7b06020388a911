"""The tables of items and groups, and the pools that are drawn from them: by hand, samples, and what is broken."""

import numpy as np
import pytest

from rllib_srl.replay.items import GROUP, Tables
from rllib_srl.replay.schedule.recall import Recall
from rllib_srl.replay.selection.sampler import Draws, sample
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.types import Prompt

DOMAINS = ("sums", "products", "proofs")


def prompt(number):
    return Prompt("env", str(number), DOMAINS[number % 3], ("earlier turn ü\udc80",) * (number % 2))


def add(tables, number, now=0, **fields):
    return tables.add_item(number, prompt(number), DOMAINS[number % 3], now, **fields)


def add_group(tables, slot, max_groups=2, **fields):
    return tables.add_group(slot, f"g{tables.next_group_seq}", max_groups, **fields)


def draws_of(tables, **settings):
    """Return draws by a rule to which due dates matter, unless another is named."""
    chosen = ReplaySettings(**{"selection": "fifo", **settings})
    return Draws(chosen, tables, Recall(chosen, tables))


def test_the_pool_is_the_earliest_due_and_then_a_sample_of_the_rested():
    tables, rng = Tables(), np.random.default_rng(0)
    due = add(tables, 0, due=4, last_review=1)
    overdue = add(tables, 1, due=2, last_review=1)
    rested = add(tables, 2, due=9, last_review=3)
    add(tables, 3, due=9, last_review=4)  # reviewed this iteration: not rested

    def pool(num, **settings):
        return draws_of(tables, **settings).item_pool(4, num, rng).tolist()

    assert pool(10) == [overdue, due, rested] and pool(2) == [overdue, due] and pool(0) == []
    assert pool(10, min_recall_interval=2) == [overdue, due]
    assert pool(10, domains=["products"]) == [overdue]
    assert tables.num_due(4) == 2
    add_group(tables, due, born=2, size=8)  # people may still rate its answers: another visit would replace them
    assert pool(10, max_age=2) == [overdue, rested] and pool(10, max_age=1) == [overdue, due, rested]
    add_group(tables, rested, born=3, size=8, num_rewarded=1)
    assert pool(10, max_age=2) == [overdue, rested]
    assert {pool(1, max_age=2, selection="uniform")[0] for _ in range(50)} == {overdue, rested}
    tables.remove_item(due)
    due = add(tables, 0, due=4, last_review=1)
    tables.remove_item(overdue)
    assert pool(10) == [due, rested] and tables.slots().tolist() == [0, 2, 3]


def test_the_group_pool_holds_what_may_be_trained_on_again():
    tables, rng = Tables(), np.random.default_rng(0)
    slot = add(tables, 0)
    good, _ = add_group(tables, slot, 5, born=5, variance=0.2, size=8, num_rewarded=8)
    add_group(tables, slot, 5, born=7, variance=0.2, size=8)  # written in this iteration
    add_group(tables, slot, 5, born=3, variance=0.2, size=8)  # too old
    add_group(tables, slot, 5, born=5, variance=0.0, size=8, num_rewarded=1)  # no signal
    add_group(tables, slot, 5, born=5, variance=0.0, size=8)  # nobody has rated it
    used, _ = add_group(tables, slot, 9, born=6, variance=0.1, size=8, uses=2, num_rewarded=8)

    def pool(must_vary=True, **settings):
        draws = draws_of(tables, **{"max_age": 3, "max_uses": 3, **settings})
        return sorted(draws.group_pool(7, 9, rng, must_vary).tolist())

    assert pool() == [good, used] and len(pool(must_vary=False)) == 3
    assert pool(max_uses=2) == [good] and pool(max_age=1) == [used] and pool(domains=["proofs"]) == []
    tables.groups.update([good], uses=3)
    assert pool() == [used]


@pytest.mark.parametrize("selection", ["fifo", "uniform"])
def test_every_item_that_may_come_is_sampled_equally_often(selection):
    tables, rng = Tables(), np.random.default_rng(0)
    for number in range(12):
        add(tables, number, due=1 if number < 3 else 99, last_review=0)
    add(tables, 12, due=3, last_review=2)  # reviewed in this iteration
    draws = draws_of(tables, selection=selection)
    pools = [draws.item_pool(2, 6, rng).tolist() for _ in range(900)]
    counts = np.bincount(np.concatenate(pools), minlength=13)
    if selection == "fifo":  # three are due, three of the other nine are sampled: 300 each, sqrt(900 * 2/9) = 14
        assert counts[:3].tolist() == [900] * 3 and np.abs(counts[3:12] - 300).max() < 4 * 14
    else:  # 900 * 6 / 12 each, deviation sqrt(900 / 4) = 15
        assert np.abs(counts[:12] - 450).max() < 4 * 15 and len(draws.item_pool(2, 12, rng)) == 12
    assert counts[12] == 0


def test_a_sample_is_drawn_as_ranks_of_a_sort():
    for seqs in ("even", "too wide for 64 bits"):
        rng = np.random.default_rng(3)
        part_N, time_N = rng.integers(0, 3, 300), rng.integers(-7, 900, 300).astype(np.int32)
        seq_N = rng.permutation(300).astype(np.uint64)
        if seqs != "even":
            seq_N[0] = (1 << 64) - 1
        one, other = np.random.default_rng(5), np.random.default_rng(5)
        want = np.lexsort((seq_N, time_N, part_N))[other.choice(300, 40, replace=False)]
        assert sample(40, one, part_N, time_N, seq_N).tolist() == want.tolist()
        state = one.bit_generator.state  # nothing to draw leaves the generator alone
        assert sample(3, one, np.empty(0, np.int64)).tolist() == sample(0, one, np.arange(3)).tolist() == []
        assert one.bit_generator.state == state


def test_a_slot_is_the_smallest_free_row_and_a_number_is_given_once():
    tables = Tables()
    assert [add(tables, number) for number in range(70)] == list(range(70))  # beyond the first 64 rows
    for slot in (40, 7, 69):
        tables.remove_item(slot)
    assert [add(tables, number) for number in (100, 101, 102)] == [7, 40, 69]
    assert tables.items["seq"][[7, 40, 69]].tolist() == [70, 71, 72]


def test_a_key_or_a_group_that_cannot_be_is_refused():
    tables = Tables()
    add(tables, 0)
    with pytest.raises(ValueError, match="expected one that no item has"):
        add(tables, 0)
    with pytest.raises(ValueError, match="no item is at slot 0; expected"):
        Tables(groups_N=np.zeros(1, GROUP), group_ids=["g"])
