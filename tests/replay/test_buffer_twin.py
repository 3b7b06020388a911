"""A buffer under random operations, errors and restarts, beside two witnesses.

the buffer      on disk; its calls fail in random places, are repeated, and it is closed and opened in between
a shadow        another buffer that nothing ever happens to: every answer and the state in the end are the same
a dictionary    what must be there, and which draws are allowed
"""

import copy
import tempfile
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rllib_srl.replay.payloads import decode
from rllib_srl.replay.ratings import RatedAnswer, RatedGroup, fingerprint
from rllib_srl.replay.store import StoreError
from scripts.memory_laws import check_valid
from tests.replay.groups import a_buffer, a_group, a_prompt, everything, journalled

REWARDS = {"none": (0, 0, 0, 0), "some": (1, 0, 0.5, 0), "all": (1, 1, 1, 1), "few": (1, 0)}
ENVS = {
    "small": {"capacity": 6, "groups_per_item": 2, "eviction": "fifo"},
    "tight": {"capacity": 4, "groups_per_item": 1, "max_uses": 1, "max_age": 3},
    "rests": {
        "capacity": 9,
        "eviction": "mastered_first",
        "min_recall_interval": 3,
        "min_graded": 3,
    },
    "full": {"capacity": 8, "eviction": "largest_domain"},
    "grows": {"capacity": 7, "on_group": "tests.replay.test_intake:continued"},
}
FAULTS = {
    "commit": ("store", "write"),
    "group": ("tables", "add_group"),
    "removal": ("tables", "remove_item"),
    "measure": ("embedder", "embed"),
    "review": ("recall", "review"),
    "draw": ("draws", "_drawn"),
    "payload": ("store", "payload"),
}


class Injected(Exception):
    """An error in the middle of a call."""


@contextmanager
def error(buffer, where, after):
    """Let one method fail at its call number `after`, counted from 0."""
    path, name = FAULTS[where]
    owner = buffer
    for part in path.split("."):
        owner = getattr(owner, part)
    method, left = getattr(owner, name), [after]

    def failing(*args, **kwargs):
        left[0] -= 1
        if left[0] == -1:
            raise StoreError("disk full") if where == "commit" else Injected(where)
        return method(*args, **kwargs)

    with mock.patch.object(owner, name, failing):
        yield


def plain(answer):
    """Return an answer in a form that `==` compares."""
    if isinstance(answer, list):
        return [plain(one) for one in answer]
    if hasattr(answer, "refused"):
        return vars(answer)
    return (answer.group_id, answer.token_ids_N.tobytes()) if hasattr(answer, "token_ids_N") else answer


class BufferMachine(RuleBasedStateMachine):
    env = "small"

    @initialize(seed=st.integers(0, 5))
    def begin(self, seed):
        self.given = {"seed": seed, **ENVS[self.env]}
        self.place = tempfile.TemporaryDirectory()
        self.buffer, self.shadow = a_buffer(Path(self.place.name) / "a", run="r", **self.given), a_buffer(**self.given)
        self.turns = 2 if self.env == "grows" else 1
        self.now, self.num_calls, self.num_copies = 1, 0, 0
        self.items: dict[str, dict] = {}  # key -> visits, groups (tokens -> uses, born, variance), newest last
        self.copied = None
        self.drawn: list = []
        self.error = None

    # --- calls -----------------------------------------------------------------------------------

    def call(self, name, *args):
        """Make a call of both buffers, once with an error if one was asked for, and once more than needed."""
        request = f"{self.num_calls}.{name}"
        self.num_calls += 1
        if self.error is not None:
            where, after, self.error = *self.error, None
            before, stored = everything(self.buffer), journalled(self.buffer)
            try:
                with error(self.buffer, where, after):
                    getattr(self.buffer, name)(*args, request=request)
            except (Injected, StoreError):
                assert everything(self.buffer) == before, where
                assert journalled(self.buffer) == stored, where
                check_valid(self.buffer)
        answer = getattr(self.buffer, name)(*args, request=request)
        state, position = everything(self.buffer), self.buffer.store.position
        assert plain(getattr(self.buffer, name)(*args, request=request)) == plain(answer)
        assert (everything(self.buffer), self.buffer.store.position) == (state, position)
        assert plain(getattr(self.shadow, name)(*args, request=request)) == plain(answer)
        return answer

    @rule(
        groups=st.lists(st.tuples(st.integers(0, 20), st.sampled_from(sorted(REWARDS))), min_size=1, max_size=6),
        salt=st.integers(0, 1),
    )
    def add(self, groups, salt):
        self.play([(a_prompt(i, "ab"[i % 2]), kind) for i, kind in groups], salt)

    def play(self, prompts, salt):
        """Play prompts, each with rewards of a kind, and check what became of them."""
        self.now += 1
        played = [
            a_group(prompt, self.now, at, REWARDS[kind], self.turns, salt + at)
            for at, (prompt, kind) in enumerate(prompts)
        ]
        evicted = self.buffer.counts["num_evicted"]
        num_before, allowed = len(self.items), set(self.items)
        visits = self.call("add", played, self.now)
        num_new = 0
        for group, visit in zip(played, visits, strict=True):
            num_new += visit.is_new + visit.num_grown
            if visit.is_new:
                self.items[visit.key] = {"visits": 0, "groups": {}, "last": self.now}
            if (visit.is_new or not visit.refused or visit.grade) and visit.key in self.items:
                self.visit(group, visit)
        held = self.keys()
        assert len(held) == num_before + num_new - (self.buffer.counts["num_evicted"] - evicted)
        assert len(held) <= self.given["capacity"]
        if num_before + num_new <= self.given["capacity"]:
            assert held >= allowed
        if self.turns == 1:
            assert held <= set(self.items)
        self.items = {key: self.items.get(key, {"visits": 0, "groups": {}, "last": self.now}) for key in held}

    def visit(self, group, visit):
        item = self.items[visit.key]
        item["visits"] += 1
        item["last"] = self.now if visit.grade else item["last"]
        if not visit.refused:
            tokens = group.token_ids_N.tobytes()
            item["groups"][tokens] = {"born": self.now, "uses": 0, "has_variance": np.ptp(group.rewards_G) > 0}
            while len(item["groups"]) > self.given.get("groups_per_item", 2):
                del item["groups"][next(iter(item["groups"]))]

    @rule(num=st.integers(1, 6))
    def due(self, num):
        self.asked(num)

    def asked(self, num):
        """Draw prompts, and check that they may be played."""
        self.now += 1
        rest = self.given.get("min_recall_interval", 1)
        rows = {f"{int(row['key']):016x}": row for row in self.buffer.tables.items[self.buffer.tables.slots()]}
        back = {key: self.items[key]["last"] + rest for key in rows}
        free = [key for key, now in back.items() if now <= self.now]
        prompts = self.call("draw_prompts", num, self.now)
        assert len(prompts) == min(num, len(free))
        if self.turns == 1:
            keys = [prompt.key for prompt in prompts]
            assert len(set(keys)) == len(keys) and set(keys) <= set(free)
        return prompts

    @rule(num=st.integers(1, 4), fresh=st.integers(0, 20))
    def iterate(self, num, fresh):
        """Play what is due, and one prompt more."""
        prompts = [*self.asked(num), a_prompt(fresh, "ab"[fresh % 2])]
        self.play([(prompt, "all" if prompt.prompt_id[-1] in "036" else "some") for prompt in prompts], 0)
        self.sample(num)

    @rule(num=st.integers(1, 6))
    def sample(self, num):
        self.now += 1
        free = {
            tokens: group
            for item in self.items.values()
            for tokens, group in item["groups"].items()
            if group["has_variance"]
            and 0 < self.now - group["born"] <= self.given.get("max_age", 32)
            and group["uses"] < self.given.get("max_uses", 4)
        }
        self.drawn = self.call("draw_groups", num, self.now)
        assert len(self.drawn) == min(num, len(free))
        assert len({group.group_id for group in self.drawn}) == len(self.drawn)
        assert all(group.origin == "reuse" for group in self.drawn)
        for group in self.drawn:
            free.pop(group.token_ids_N.tobytes())["uses"] += 1

    @rule(data=st.data())
    def drop(self, data):
        ids = data.draw(st.lists(st.sampled_from([g.group_id for g in self.drawn] or ["none"]), unique=True))
        dropped = [g for g in self.drawn if g.group_id in ids]
        self.call("drop", ids)
        for group in dropped:
            for item in self.items.values():
                item["groups"].pop(group.token_ids_N.tobytes(), None)
        self.drawn = [g for g in self.drawn if g.group_id not in ids]

    @rule(data=st.data(), value=st.sampled_from([0.0, 0.5, 1.0]))
    def opinion(self, data, value):
        """Rate the first answer of a stored group."""
        self.now += 1
        slots = self.buffer.tables.groups.slots().tolist()
        if not slots or self.turns > 1:
            return
        seq = int(self.buffer.tables.groups["seq"][data.draw(st.sampled_from(slots))])
        group = decode(self.buffer.store.payload(seq))
        one = RatedGroup(group.group_id, group.prompt.key, (RatedAnswer(0, fingerprint(group, 0), value),))
        counts = self.call("rate_answers", [one], "file", self.now, self.now)
        if counts["num_applied"] or counts["num_changed"]:
            item, tokens = self.items[group.prompt.key], group.token_ids_N.tobytes()
            rewards_G = np.array([value, *group.rewards_G[1:]])
            item["groups"][tokens]["has_variance"] = np.ptp(rewards_G) > 0
            item["last"] = self.now

    # --- what happens ----------------------------------------------------------------------------

    @rule(where=st.sampled_from(sorted(FAULTS)), after=st.integers(0, 3))
    def arm(self, where, after):
        self.error = (where, after)

    @rule(num=st.integers(1, 8))
    def pass_time(self, num):
        self.now += num

    @rule()
    def reopen(self):
        state = everything(self.buffer)
        self.buffer.close()
        self.buffer = a_buffer(Path(self.place.name) / "a", run="r", **self.given)
        assert everything(self.buffer) == state

    @rule()
    def copy(self):
        self.num_copies += 1
        self.copied = Path(self.place.name) / f"copy{self.num_copies}", copy.deepcopy(self.items)
        self.buffer.snapshot(self.copied[0])
        self.shadow.snapshot(Path(f"{self.copied[0]}.shadow"))

    @precondition(lambda self: self.copied is not None)
    @rule()
    def restore(self):
        path, items = self.copied
        assert self.buffer.restore(path) == self.shadow.restore(Path(f"{path}.shadow"))
        self.items, self.drawn = copy.deepcopy(items), []

    # --- what holds ------------------------------------------------------------------------------

    def keys(self):
        rows = self.buffer.tables.items[self.buffer.tables.slots()]
        return {f"{int(key):016x}" for key in rows["key"]}

    @invariant()
    def all_is_valid(self):
        if hasattr(self, "buffer"):
            check_valid(self.buffer)

    @invariant()
    def the_dictionary_agrees(self):
        if not hasattr(self, "buffer"):
            return
        store = self.buffer.tables
        assert self.keys() == set(self.items)
        for key, item in self.items.items():
            slot = store.slot_of(int(key, 16))
            assert store.items[slot]["visits"] == item["visits"] and store.items[slot]["last_review"] == item["last"]
            groups = [store.groups[at] for at in store.groups_of(slot)]
            seqs = {decode(self.buffer.store.payload(int(row["seq"]))).token_ids_N.tobytes(): row for row in groups}
            held = {tokens: int(row["uses"]) for tokens, row in seqs.items()}
            assert held == {tokens: group["uses"] for tokens, group in item["groups"].items()}

    def teardown(self):
        if hasattr(self, "buffer"):
            assert everything(self.shadow) == everything(self.buffer)
            self.buffer.close()
            self.shadow.close()
            self.place.cleanup()


@pytest.mark.slow
@pytest.mark.parametrize("env", ENVS)
@pytest.mark.timeout(600)
def test_a_buffer_agrees_with_its_witnesses_whatever_happens(env):
    machine = type(f"In{env}", (BufferMachine,), {"env": env})
    few = settings(
        max_examples=8,
        stateful_step_count=25,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
    )
    run_state_machine_as_test(machine, settings=few)
