"""What retention warns of, and when: by hand, without a run."""

from dataclasses import replace

import numpy as np

from rllib_srl.learner.group.retention import LEAST_GROUPS, MARGIN, RATE, UPDATES, RetentionWatch
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.types import GroupMeta, Prompt
from tests.small_learner import make_group


def group_of(domain, rewards, origin="fresh"):
    group = make_group(1, 4, [2] * len(rewards))
    group = replace(group, rewards_G=np.array(rewards, np.float32), prompt=Prompt("world", "1", domain), origin=origin)
    return GroupMeta.of(group, group)


def watch():
    return RetentionWatch(ReplaySettings(retain=1.0))


def test_domains_in_conflict_are_named_once():
    it = watch()
    batch = [group_of("new", [1, 0]), group_of("new", [1, 0]), group_of("other", [1, 0])]
    it.observe([*batch, group_of("old", [1, 0], "revisit")], [group_of("old", [1])])
    assert it.warnings({}) == it.warnings({"old": -0.3, "far": 0.9}) == []
    (line,) = it.warnings({"old": -0.42})
    assert line.startswith("learning 'new' undoes 'old': the cosine of their gradients is -0.42.")
    assert it.warnings({"old": -0.9}) == [] and len(it.warnings({"far": -0.9, "old": -0.9})) == 1


def played(it, rewards, num, held=("a",)):
    """Play a group of domain a in each of `num` updates that hold some domains; return the warnings of each."""
    found = []
    for _ in range(num):
        it.observe([group_of("a", rewards, "revisit")], [group_of(domain, [1]) for domain in held])
        found.append(it.warnings({}))
    return found


def test_a_held_domain_below_its_best_is_named_once():
    it = watch()
    assert played(it, [1, 1], LEAST_GROUPS) == [[]] * LEAST_GROUPS  # its best is 1
    num_within = int(np.log(1 - MARGIN) / np.log(1 - RATE))  # groups after which 0.95^n is still at least 0.9
    found = played(it, [0, 0], num_within + UPDATES + 5)
    first = num_within + UPDATES - 1
    assert [bool(lines) for lines in found] == [i == first for i in range(len(found))]
    rate = (1 - RATE) ** (num_within + UPDATES)
    assert found[first] == [
        f"'a' was held for {UPDATES} updates and still passes {rate:.0%} of its answers, at its best 100%: raise "
        "replay_retain (1), replay_retain_answers or replay_revisit_fraction"
    ]


def test_only_updates_in_turn_count_that_hold_the_domain():
    it = watch()
    played(it, [1, 1], LEAST_GROUPS)
    assert not any(played(it, [0, 0], 50, held=("b",)))
    assert not any(played(it, [0, 0], UPDATES - 1))
    played(it, [1, 1], 60, held=("b",))  # back near its best
    assert not any(played(it, [0, 0], UPDATES))
    again = watch()
    again.set_state(it.get_state())
    assert again.get_state() == it.get_state() and again.get_state()["a"]["num_below"] > 0
    lines = played(again, [0, 0], UPDATES)
    assert lines == played(it, [0, 0], UPDATES) and len([each for each in lines if each]) == 1
