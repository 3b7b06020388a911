"""MemoryStore against a plain dictionary, under random operations, failed commits and restarts."""

from __future__ import annotations

import time

import numpy as np
import pytest

from rllib_srl.replay.store import due_queue, tables
from rllib_srl.replay.store import due_queue as slot_order
from rllib_srl.replay.store.items import MemoryStore
from rllib_srl.replay.store.records import GROUP, ITEM, LEECH, SCHEDULED, WAITING, Header, key_of
from rllib_srl.replay.store.tables import IndexedSet, KeyMap, Table
from rllib_srl.types import Prompt

DOMAINS = ("sums", "products", "proofs")


def prompt(number):
    return Prompt("env", str(number), DOMAINS[number % 3], ("earlier turn ü\udc80",) * (number % 2))


def add(store, number, now=0, **fields):
    return store.add_item(number, prompt(number), DOMAINS[number % 3], now, **fields)


def reload(store, **sizes):
    """Return a store built from what the journal would hold of `store`."""
    slots, groups = store.slots().tolist(), np.flatnonzero(store.groups["size"]).tolist()
    return MemoryStore.load(
        sizes.get("capacity", store.capacity),
        sizes.get("groups_per_item", store.groups_per_item),
        Header.from_json(store.header.to_json()),
        {slot: store.item_row(slot) for slot in slots[::-1]},
        {group: store.group_row(group) for group in groups[::-1]},
    )


def content(store):
    """Return everything a store holds, as plain values."""
    slots, groups = store.slots().tolist(), np.flatnonzero(store.groups["size"]).tolist()
    rows = {slot: (store.item_row(slot), store.groups_of(slot)) for slot in slots}
    counts = [store.num_items(status, domain) for status in range(4) for domain in range(len(store.domains))]
    sizes = (len(store), store.num_groups, store.num_bytes, counts)
    return rows, {group: store.group_row(group) for group in groups}, store.header, sizes


# Worked by hand


def test_the_pool_is_the_earliest_due_and_then_a_sample_of_the_rested():
    store = MemoryStore(10, 2)
    rng = np.random.default_rng(0)
    due = add(store, 0, status=SCHEDULED, due=4, last_review=1)
    overdue = add(store, 1, status=SCHEDULED, due=2, last_review=1)
    rested = add(store, 2, status=SCHEDULED, due=9, last_review=3)
    add(store, 3, status=SCHEDULED, due=9, last_review=4)  # reviewed this iteration: not rested
    add(store, 4, due=0)  # waiting
    leech = add(store, 5, status=LEECH, due=3)
    add(store, 6, status=LEECH, due=8)  # a leech that is not due
    assert store.pool(4, 10, rng).tolist() == [overdue, leech, due, rested]
    assert store.pool(4, 3, rng).tolist() == [overdue, leech, due]
    assert store.pool(4, 10, rng, min_recall_interval=2).tolist() == [overdue, leech, due]
    assert store.pool(4, 10, rng, domains=[store.domain_id("products")]).tolist() == [overdue]
    assert store.pool(4, 0, rng).tolist() == []
    assert store.num_due(4) == 3
    store.update(due, status=WAITING)
    assert store.pool(4, 10, rng).tolist() == [overdue, leech, rested]
    assert store.waiting(10).tolist() == [due, 4] and store.waiting(1).tolist() == [due]


def test_the_group_pool_holds_what_may_be_trained_on_again():
    store = MemoryStore(4, 5)
    slot, rng = add(store, 0), np.random.default_rng(0)
    good, _ = store.add_group(slot, born=5, variance=0.2, size=8)
    store.add_group(slot, born=7, variance=0.2, size=8)  # written in this iteration
    store.add_group(slot, born=3, variance=0.2, size=8)  # too old
    store.add_group(slot, born=5, variance=0.0, size=8)  # no signal
    used, _ = store.add_group(slot, born=6, variance=0.1, size=8, uses=2)

    def pool(store=store, max_age=3, max_uses=3, **more):
        return sorted(store.group_pool(7, 9, rng, max_age, max_uses, **more).tolist())

    assert pool() == [good, used]
    assert pool(max_uses=2) == [good] and pool(max_age=1) == [used] and pool(domains=[9]) == []
    assert pool(orphans=True) == []
    store.update_groups([good], uses=3)
    assert pool() == [used]
    store.update_groups([good], uses=0, is_orphan=True, born=9)  # an orphan of an iteration that comes again
    assert pool() == [used] and pool(orphans=True) == [good] and pool(orphans=True, max_age=1) == []


def test_the_oldest_groups_go_and_orphans_before_them():
    store = MemoryStore(4, 2)
    slot = add(store, 0)
    groups = [store.add_group(slot, born=0, size=2)[0] for _ in range(2)]
    assert store.groups_of(slot) == groups
    newest, evicted = store.add_group(slot, born=1, size=2)
    assert evicted == [0] and store.groups_of(slot) == [groups[1], newest] and newest == groups[0]
    with pytest.raises(ValueError, match="slot = 0"):
        store.add_group(slot, born=1, size=2, is_orphan=True)
    assert store.remove_group(groups[1]) == 1
    evicted = store.add_group(slot, born=1, size=2, is_orphan=True)[1]
    assert evicted == [] and store.items["num_groups"][slot] == 2
    assert store.add_group(slot, born=2, size=2)[1] == [3], "the orphan, though group 2 is older"
    assert store.remove_item(slot) == [2, 4] and store.num_groups == 0
    store.check_valid()


def test_a_slot_is_the_smallest_free_row_and_a_number_is_given_once():
    store = MemoryStore(100, 1)
    assert [add(store, number) for number in range(70)] == list(range(70))  # beyond the first 64 rows
    for slot in (40, 7, 69):
        store.remove_item(slot)
    assert [add(store, number) for number in (100, 101, 102)] == [7, 40, 69]
    assert store.items["seq"][[7, 40, 69]].tolist() == [70, 71, 72]


def test_rows_are_small():
    for dtype, size in ((ITEM, 152), (GROUP, 72)):
        assert dtype.itemsize == size == sum(dtype[name].itemsize for name in dtype.names), "no gaps"


# A dictionary for a twin


class Twin:
    """What the store should hold, without any index."""

    def __init__(self, capacity, groups_per_item):
        self.capacity, self.groups_per_item = capacity, groups_per_item
        self.items, self.groups = {}, {}
        self.next_seq = self.next_group_seq = 0

    def copy(self):
        twin = Twin(self.capacity, self.groups_per_item)
        twin.items = {slot: dict(item) for slot, item in self.items.items()}
        twin.groups = {slot: dict(group) for slot, group in self.groups.items()}
        twin.next_seq, twin.next_group_seq = self.next_seq, self.next_group_seq
        return twin

    def add(self, number, now, fields):
        slot = min(set(range(len(self.items) + 1)) - set(self.items))
        item = {"key": number, "seq": self.next_seq, "domain": DOMAINS[number % 3], "status": WAITING}
        self.items[slot] = item | {"created": now, "last_review": now, "due": now} | fields
        self.next_seq += 1
        return slot

    def groups_of(self, slot):
        mine = [group for group, row in self.groups.items() if row["slot"] == slot]
        return sorted(mine, key=lambda group: self.groups[group]["seq"])

    def add_group(self, slot, fields):
        mine = self.groups_of(slot)
        going = sorted(mine, key=lambda group: (not self.groups[group]["is_orphan"], self.groups[group]["seq"]))
        going = going[: max(0, len(mine) + 1 - self.groups_per_item)]
        evicted = sorted(self.groups.pop(group)["seq"] for group in going)
        group = min(set(range(len(self.groups) + 1)) - set(self.groups))
        self.groups[group] = fields | {"slot": slot, "seq": self.next_group_seq}
        self.next_group_seq += 1
        return group, evicted

    def remove(self, slot):
        del self.items[slot]
        return [self.groups.pop(group)["seq"] for group in self.groups_of(slot)]

    def by(self, *names, **where):
        chosen = [s for s, item in self.items.items() if all(item[name] in values for name, values in where.items())]
        return sorted(chosen, key=lambda slot: [self.items[slot][name] for name in names])

    def check_rows(self, store):
        assert store.slots().tolist() == sorted(self.items)
        for slot, item in self.items.items():
            for name, value in item.items():
                assert store.items[name][slot] == (store.domain_id(value) if name == "domain" else value), name
            assert store.prompt_of(slot) == prompt(item["key"])
            assert store.slot_of(item["key"]) == slot
            assert store.groups_of(slot) == self.groups_of(slot)
            assert store.items["num_groups"][slot] == len(self.groups_of(slot))
        assert store.num_groups == len(self.groups)
        assert store.num_bytes == sum(group["num_bytes"] for group in self.groups.values())
        for group, row in self.groups.items():
            for name, value in row.items():
                assert store.groups[name][group] == value, name  # eighths are exact in float32
        for status in (None, WAITING, SCHEDULED, LEECH):
            want = [item for item in self.items.values() if status in (None, item["status"])]
            assert store.num_items(status) == len(want)
            for domain in store.domains:
                of_domain = [item for item in want if item["domain"] == domain]
                assert store.num_items(status, store.domain_id(domain)) == len(of_domain)

    def check_draws(self, store, rng, now):
        most, rest = int(rng.integers(0, 30)), int(rng.integers(0, 4))
        names = list(DOMAINS) if rng.random() < 0.5 else ["sums", "proofs"]
        domains = None if len(names) == 3 else [d for d in map(store.domain_id, names) if d is not None]
        due = self.by("due", "seq", status=[SCHEDULED, LEECH], domain=names)
        due = [slot for slot in due if self.items[slot]["due"] <= now]
        rested = self.by("seq", status=[SCHEDULED], domain=names)
        rested = {s for s in rested if self.items[s]["last_review"] + rest <= now} - set(due)
        drawn = store.pool(now, most, rng, domains, rest).tolist()
        assert drawn[: len(due)] == due[:most]
        others = drawn[len(due) :]
        assert set(others) <= rested and len(set(others)) == len(others)
        assert len(drawn) == min(most, len(due) + len(rested))
        assert store.num_due(now, domains) == len(due)
        assert store.waiting(most, domains).tolist() == self.by("created", "seq", status=[WAITING], domain=names)[:most]
        assert store.oldest(most, domains).tolist() == self.by("created", "seq", domain=names)[:most]
        for orphans in (False, True):
            able = {
                group
                for group, row in self.groups.items()
                if row["variance"] > 0 and row["uses"] < 2 and row["is_orphan"] == orphans
                if abs(now - row["born"]) <= 4 and (orphans or row["born"] < now)
                if self.items[row["slot"]]["domain"] in names
            }
            drawn = store.group_pool(now, most, rng, 4, 2, domains, orphans).tolist()
            assert set(drawn) <= able and len(set(drawn)) == len(drawn) == min(most, len(able))


def random_fields(rng, now):
    last_review = now - int(rng.integers(0, 6))
    status = int(rng.choice([WAITING, SCHEDULED, SCHEDULED, SCHEDULED, LEECH]))
    return {"status": status, "last_review": last_review, "due": float(last_review + rng.integers(0, 12))}


def random_group(rng, now, has_room):
    signal, orphan = float(rng.integers(0, 3)) / 8, bool(has_room and rng.random() < 0.3)
    born = now + (int(rng.integers(-6, 6)) if orphan else 0)
    return {
        "born": born, "variance": signal, "is_orphan": orphan, "uses": int(rng.integers(0, 3)),
        "size": 8, "num_bytes": int(rng.integers(1, 99)),
    }  # fmt: skip


def random_change(store, twin, rng, now):
    """Change the store and its twin alike; compare what they answer."""
    slots = sorted(twin.items)
    slot = int(rng.choice(slots)) if slots else -1
    act = rng.choice(["add", "add", "update", "many", "domain", "remove", "group", "group", "uses", "ungroup"])
    if act == "add" and len(twin.items) < twin.capacity:
        number = int(rng.integers(300))
        if store.slot_of(number) is None:
            fields = random_fields(rng, now) if rng.random() < 0.7 else {}
            assert add(store, number, now, **fields) == twin.add(number, now, fields)
    elif act == "update" and slots:
        fields = random_fields(rng, now) if rng.random() < 0.7 else {"reps": int(rng.integers(5)), "lapses": 0}
        store.update(slot, **fields)
        twin.items[slot] |= fields
    elif act == "many" and slots:
        some = rng.choice(slots, int(rng.integers(1, len(slots) + 1)), replace=False)
        fields = [random_fields(rng, now) for _ in some]
        store.update_many(some, **{name: [row[name] for row in fields] for name in fields[0]})
        for one, row in zip(some.tolist(), fields):
            twin.items[one] |= row
    elif act == "domain" and slots:
        name = str(rng.choice(store.domains))
        store.update(slot, domain=store.domain_id(name))
        twin.items[slot]["domain"] = name
    elif act == "remove" and slots and rng.random() < 0.6:
        assert store.remove_item(slot) == twin.remove(slot)
    elif act == "group" and slots:
        fields = random_group(rng, now, len(twin.groups_of(slot)) < twin.groups_per_item)
        assert store.add_group(slot, **fields) == twin.add_group(slot, fields)
    elif act == "uses" and twin.groups:
        some = rng.choice(sorted(twin.groups), min(3, len(twin.groups)), replace=False)
        store.update_groups(some, uses=rng.integers(0, 3, len(some)))
        for group in some.tolist():
            twin.groups[group]["uses"] = int(store.groups["uses"][group])
    elif act == "ungroup" and twin.groups:
        group = int(rng.choice(sorted(twin.groups)))
        assert store.remove_group(group) == twin.groups.pop(group)["seq"]


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(slot_order, "BLOCK", 4)
    monkeypatch.setattr(due_queue, "BLOCK", 4)


@pytest.mark.slow
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("seed", range(5))
def test_random_operations_match_a_dictionary(seed):
    """Transactions of one to five changes; a third of them fail and are undone, and now and then the store restarts."""
    rng = np.random.default_rng(seed)
    store, twin, now = MemoryStore(40, 2), Twin(40, 2), 0
    for _ in range(70):
        before, committed = twin.copy(), content(store)
        for _ in range(int(rng.integers(1, 6))):
            random_change(store, twin, rng, now)
        store.check_valid()
        twin.check_rows(store)
        now += int(rng.random() < 0.5)
        fate = rng.choice(["commit", "commit", "fail", "restart"])
        if fate == "fail":
            store.rollback()
            twin = before
            assert content(store) == committed
        else:
            store.commit()
        if fate == "restart":
            store = reload(store)
        store.check_valid()
        twin.check_rows(store)
        twin.check_draws(store, rng, now)
        assert store.changed().items == store.changed().groups == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_restarted_store_goes_on_draw_for_draw(seed):
    """After hundreds of adds and removes, one store lives on and one is rebuilt; then both live the same life."""
    rng = np.random.default_rng(seed)
    lived, twin = MemoryStore(400, 2), Twin(400, 2)
    for now in range(900):
        random_change(lived, twin, rng, now // 10)
        if now == 600:
            for slot in lived.slots()[::3].tolist():  # so that the tables were once much fuller
                lived.remove_item(slot)
                twin.remove(slot)
    lived.commit()
    rebuilt, now = reload(lived), 90
    for step in range(100):
        one, other = np.random.default_rng(step), np.random.default_rng(step)
        for most in (3, 1000):
            assert lived.pool(now, most, one).tolist() == rebuilt.pool(now, most, other).tolist()
            drawn = lived.group_pool(now, most, one, 30, 3).tolist()
            assert drawn == rebuilt.group_pool(now, most, other, 30, 3).tolist()
            assert lived.any_items(most, one).tolist() == rebuilt.any_items(most, other).tolist()
        assert one.bit_generator.state == other.bit_generator.state
        random_change(lived, twin.copy(), np.random.default_rng(step), now)
        random_change(rebuilt, twin, np.random.default_rng(step), now)
        assert content(lived) == content(rebuilt)
        now += step % 2


def test_what_was_undone_changes_no_later_draw():
    """A store that failed a commit draws what one draws that never tried."""
    stores = [MemoryStore(200, 2) for _ in range(2)]
    for store in stores:
        for number in range(150):
            slot = add(store, number, status=SCHEDULED, due=50 + number % 7, last_review=0)
            store.add_group(slot, born=0, variance=0.1, size=2)
        store.commit()
    tried, never = stores
    for slot in range(0, 150, 2):
        tried.remove_item(slot)
    for number in range(1000, 1060):
        tried.add_item(number, prompt(number), "another domain", 1, status=SCHEDULED)
    tried.update_many(tried.slots(), due=60.0)
    tried.rollback()
    for store in stores:
        add(store, 500, status=SCHEDULED)
    assert content(tried) == content(never) and tried.domains == DOMAINS
    one, other = np.random.default_rng(0), np.random.default_rng(0)
    for now in (10, 53, 90):
        assert tried.pool(now, 20, one).tolist() == never.pool(now, 20, other).tolist()
        assert tried.group_pool(1, 20, one, 5, 1).tolist() == never.group_pool(1, 20, other, 5, 1).tolist()


def test_orphans_change_no_draw_of_the_others():
    stores = [MemoryStore(50, 2) for _ in range(2)]
    rng = np.random.default_rng(0)
    for store in stores:
        for number in range(40):
            store.add_group(add(store, number), born=number % 5, variance=0.1, size=2)
    for slot in rng.choice(40, 20, replace=False).tolist():
        stores[0].add_group(slot, born=9, variance=0.2, size=2, is_orphan=True)
    for now in range(5, 12):
        for store in stores:
            store.add_group(now, born=now, variance=0.1, size=2)
            store.add_group(now, born=now, variance=0.1, size=2)
        seqs = []
        for store in stores:
            drawn = store.group_pool(now, 9, np.random.default_rng(now), 8, 1)
            seqs.append([(store.groups["slot"][group], store.groups["born"][group]) for group in drawn.tolist()])
        assert seqs[0] == seqs[1] and seqs[0]


def test_every_rested_item_is_sampled_equally_often():
    store, rng = MemoryStore(20, 1), np.random.default_rng(0)
    for number in range(12):
        add(store, number, status=SCHEDULED, due=1 if number < 3 else 99, last_review=0)
    drawn = np.concatenate([store.pool(2, 6, rng)[3:] for _ in range(900)])
    # Three are due, three of the other nine are sampled: each 300 of 900 times, deviation sqrt(900 * 2/9) = 14.
    counts = np.bincount(drawn, minlength=12)
    assert counts[:3].tolist() == [0, 0, 0] and np.abs(counts[3:] - 300).max() < 4 * 14


# Misuse


def test_every_fault_of_an_item_is_named_and_nothing_changes():
    store = MemoryStore(1, 1)
    add(store, 0)
    store.commit()
    before = content(store)
    with pytest.raises(ValueError) as error:
        store.add_item(0, prompt(0), "sums", 0, seq=3, colour=1)
    for fault in ("num_items = 1", "key = 0x0", "seq = 3", "colour = 1"):
        assert fault in str(error.value)
    for slot, fields in [
        (0, {"key": 5}), (0, {"due": np.nan}), (0, {"status": 0}), (0, {"status": 4}), (0, {"domain": 1}),
        (0, {"reps": 2**40}), (0, {"reps": "many"}), (7, {"reps": 1}), (-1, {"reps": 1}), (0, {"reps": 1, "x": 1}),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match="expected"):
            store.update(slot, **fields)
    with pytest.raises(ValueError, match="distinct"):
        store.update_many([0, 0], reps=1)
    for call in (store.remove_item, store.groups_of, store.prompt_of, store.remove_group, store.add_group):
        with pytest.raises(ValueError, match="slots = "):
            call(3)
    assert content(store) == before and store.changed().items == []
    with pytest.raises(ValueError, match="read-only"):
        store.items["due"][0] = 3


def test_rows_that_do_not_fit_are_not_loaded():
    store = MemoryStore(8, 2)
    slot = add(store, 0)
    add(store, 1)
    for _ in range(2):
        store.add_group(slot, born=0, size=2)
    assert content(reload(store, capacity=100, groups_per_item=7))[:3] == content(store)[:3]
    with pytest.raises(ValueError, match="num_items = 2"):
        reload(store, capacity=1)
    with pytest.raises(ValueError, match="groups_per_item = 1"):
        reload(store, groups_per_item=1)
    with pytest.raises(ValueError, match="layout"):
        Header.from_json(store.header.to_json().replace("stability", "strength"))
    with pytest.raises(ValueError, match="belongs to an item"):
        MemoryStore.load(8, 2, store.header, {}, {0: store.group_row(0)})
    with pytest.raises(ValueError, match="capacity = 0; .*groups_per_item = -1"):
        MemoryStore(0, -1)


BREAKS = {
    "a seq of its own": lambda store: store._items.columns["seq"].__setitem__(1, 0),
    "key leads to its item": lambda store: store._items.columns["key"].__setitem__(1, 77),
    "one key an item": lambda store: setattr(store._index.keys, "_num", 2),
    "free row is zero": lambda store: store._items.columns["reps"].__setitem__(20, 1),
    "no object": lambda store: store._items._objects.extend([None] * 9 + [prompt(1)]),
    "every item has a prompt": lambda store: store._items._objects.__setitem__(0, None),
    "alpha is above 0": lambda store: store._items.columns["alpha"].__setitem__(0, 0),
    "diversity is in": lambda store: store._items.columns["diversity"].__setitem__(0, 1.5),
    "pass_rate is in": lambda store: store._items.columns["pass_rate"].__setitem__(0, -0.1),
    "stability is finite": lambda store: store._items.columns["stability"].__setitem__(0, np.inf),
    "interval is at least 0": lambda store: store._items.columns["interval"].__setitem__(0, -1),
    "due is not before": lambda store: store.update(0, due=-1),
    "at most reps": lambda store: store.update(0, lapses=2),
    "at most group_size": lambda store: store.update(0, num_success=2),
    "waiting, scheduled or a leech": lambda store: store._items.columns["status"].__setitem__(0, 9),
    "one of the 3 that came": lambda store: store._items.columns["domain"].__setitem__(0, 3),
    "ascending order of (due": lambda store: store._items.columns["due"].__setitem__(0, 9),
    "queue by due": lambda store: store._index.by_due.remove(0, 0),
    "queue by last review": lambda store: store._index.by_review.remove(0, 0),
    "queue waiting": lambda store: store._index.waiting.insert(0, 0),
    "queue by age": lambda store: store._index.by_age.remove(0, 0),
    "queue by born": lambda store: store._index.by_born.remove(0, (0, 0, False)),
    "counted by domain": lambda store: store._index._counts[0].__setitem__(1, 5),
    "num_bytes sums": lambda store: setattr(store._index, "num_bytes", 1),
    "knows its groups": lambda store: store._index._group_slots.__setitem__((0, 0), 5),
    "number of an item's groups": lambda store: store._items.columns["num_groups"].__setitem__(0, 2),
    "belongs to an item": lambda store: store._groups.columns["slot"].__setitem__(0, 9),
    "success of a group": lambda store: store.update_groups([0], num_success=9),
    "loss tokens are tokens": lambda store: store.update_groups([0], num_loss_tokens=9),
    "at most capacity": lambda store: setattr(store, "capacity", 2),
    "counts its members": lambda store: store._items.live._tree_W.__setitem__(1, 1),
}


@pytest.mark.parametrize("fault", BREAKS)
def test_a_broken_invariant_is_named(fault):
    store = MemoryStore(30, 2)
    for number in (0, 3, 6, 1, 2):
        add(store, number, status=SCHEDULED)
    store.add_group(0, born=0, variance=0.1, size=2)
    store.check_valid()
    BREAKS[fault](store)
    with pytest.raises(ValueError) as error:
        store.check_valid()
    assert fault in str(error.value)


# Tables and keys


def test_the_key_map_is_a_dictionary():
    """Keys that collide: few homes, runs that wrap around, removals in the middle of runs."""
    rng = np.random.default_rng(0)
    table = Table(np.dtype([("seq", "u8"), ("key", "u8")]), 5000)
    keys, twin = KeyMap(table), {}
    universe = np.concatenate(
        [rng.integers(0, 2**64, 300, np.uint64), np.arange(300, dtype=np.uint64) << np.uint64(58)]
    )
    universe = np.unique(universe).tolist()
    for step in range(6000):
        key = int(universe[rng.integers(len(universe))])
        assert keys.find(key) == twin.get(key)
        if key in twin:
            keys.remove(twin[key])
            table.free(twin.pop(key))
        else:
            twin[key] = table.free_slot()
            table.write(twin[key], np.array((step, key), table.rows.dtype))
            keys.add(twin[key])
        assert len(keys) == len(twin)
    for each in (keys, KeyMap(table)):
        assert {key: each.find(key) for key in universe if each.find(key) is not None} == twin
    free = table.free_slot()
    table.columns["key"][free] = next(key for key in universe if key not in twin)
    with pytest.raises(ValueError, match="slot = "):
        keys.remove(free)


def test_keys_that_crowd_at_the_end_of_the_map_go_on_at_its_front():
    table = Table(np.dtype([("seq", "u8"), ("key", "u8")]), 20)
    inverse = pow(tables._GOLDEN, -1, 2**64)
    wanted = [(2**64 - 1 - number) * inverse % 2**64 for number in range(8)]  # all hash to the last place
    table.load({slot: np.array((slot, key), table.rows.dtype).tobytes() for slot, key in enumerate(wanted)})
    keys = KeyMap(table)
    assert [keys.find(key) for key in wanted] == list(range(8)) and keys.find(1) is None
    for slot in (0, 5, 7):
        keys.remove(slot)
    assert [keys.find(key) for key in wanted] == [None, 1, 2, 3, 4, None, 6, None]


def test_a_prompt_comes_back_from_its_row():
    store = MemoryStore(2, 1)
    odd = Prompt("env", "\ud800 \x00 ü", "d", ("a", "\udfff"))
    slot = store.add_item(key_of(odd), odd, "d", 3)
    loaded = reload(store)
    assert loaded.prompt_of(slot) == odd and loaded.slot_of(key_of(odd)) == slot
    assert loaded.items[slot].tobytes() == store.items[slot].tobytes()


def test_the_tables_take_no_more_than_256_bytes_an_item():
    store, num = MemoryStore(10_000, 2), 10_000
    for number in range(num):
        add(store, number, status=SCHEDULED, due=number * 7919 % 5003)
    assert store.nbytes - 8 * num <= 256 * num  # 8 bytes are the reference to the prompt


@pytest.mark.slow
def test_cost_does_not_grow_with_the_store():
    """A guard against a scan, not a benchmark: a scan would cost 10 times as much."""

    def cost(num):
        store, rng = MemoryStore(num + 400, 1), np.random.default_rng(0)
        for number in range(num):
            add(store, number, status=SCHEDULED, due=number % 97)
        store.commit()
        start = time.process_time()
        for number in range(200):
            add(store, num + number, now=3, status=SCHEDULED, due=9)
            store.update(number, due=50 + number)
            store.remove_item(number + 300)
            store.pool(40, 64, rng)
        return time.process_time() - start

    assert min(cost(12_000) for _ in range(2)) < 3 * min(cost(1200) for _ in range(2)) + 0.01


def test_an_item_table_knows_its_free_rows():
    table = Table(np.dtype([("seq", "u8")]), 3)
    table.load({2: np.uint64(7).tobytes(), 0: np.uint64(8).tobytes()})
    assert table.free_slot() == 1 and isinstance(table.live, IndexedSet) and len(table) == 2
    with pytest.raises(ValueError, match="empty table; .*at least 0; .*bytes"):
        table.load({-1: b"12"})
