"""Retention on the driver by hand, without a run: what it warns of, and what it lets go."""

from dataclasses import replace

import numpy as np

from rllib_srl.learner.group.retention import LEAST_GROUPS, MARGIN, RATE, UPDATES, Retention, RetentionWatch, means_of
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.types import GroupMeta, Prompt
from tests.small_learner import make_group


def group_of(domain, rewards, origin="fresh", seed=1):
    group = make_group(seed, 4, [2] * len(rewards))
    rewards_G, prompt = np.array(rewards, np.float32), Prompt("env", str(seed), domain)
    group = replace(group, rewards_G=rewards_G, prompt=prompt, origin=origin)
    return GroupMeta.of(group, group)


def settings_of(retain=1.0):
    return ReplaySettings(retain=retain, retain_answers=3, retain_window=2)


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
    for again, name in ((it, "new"), (watch(), "stored groups")):
        again.observe([group_of("old", [1, 0], "revisit")], [])
        assert again.warnings({"older": -0.9})[0].startswith(f"learning '{name}' undoes 'older':")


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
        f"'a' was held for {UPDATES} updates and still passes {rate:.0%} of its revisits, at its best 100%: raise "
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


def test_without_revisits_nothing_is_said_of_a_pass_rate_that_nobody_measures():
    it = watch()
    played(it, [1, 1], LEAST_GROUPS)
    assert not any(played(it, [0, 0], 10))  # well below its best when its stage ends
    for _ in range(2 * UPDATES):
        it.observe([group_of("new", [1, 0])], [group_of("a", [1])])
        assert it.warnings({}) == []
    assert any(played(it, [0, 0], UPDATES))


def test_revisits_are_compared_with_revisits_since_rules_draw_hard_prompts():
    it = watch()
    it.observe([group_of("a", [1, 1])] * 2 * LEAST_GROUPS, [])
    assert not any(played(it, [1, 0], LEAST_GROUPS + 2 * UPDATES)) and it.get_state()["a"]["best"] == 0.5


class Memory:
    def draw_answers(self, num, now, without_domains, without_keys):
        self.asked = num, now, list(without_domains), list(without_keys)
        return []


def test_a_domain_is_let_go_by_its_fresh_prompts_alone():
    settings, memory = settings_of(), Memory()
    term = Retention(settings, memory, None, 1.0)
    old = group_of("a", [1, 0], seed=1)
    term.draw([old], [], 1)
    assert memory.asked == (3, 1, ["a"], [old.prompt.key])
    revisit, new = group_of("a", [1, 0], "revisit", seed=2), group_of("b", [1, 0], seed=3)
    term.draw([revisit], [new], 2)
    assert memory.asked[2] == ["a"] and set(memory.asked[3]) == {revisit.prompt.key, new.prompt.key}
    term.draw([revisit, new], [], 2)
    assert memory.asked[2] == ["a", "b"] and set(memory.asked[3]) == {revisit.prompt.key, new.prompt.key}
    term.draw([revisit, new], [], 3)
    assert memory.asked[2] == ["b"]  # a was fresh two iterations ago; that it is revisited does not count
    again = Retention(settings, memory, None, 1.0)
    again.set_state(term.get_state())
    again.draw([], [], 4)
    assert memory.asked[2] == ["b"]


def test_a_domain_with_a_share_of_the_fresh_prompts_is_not_held_however_rare_it_is():
    memory = Memory()
    term = Retention(settings_of(), memory, None, 1.0)
    term.draw([group_of("rare", [1, 0])], [], 1, {"rare", "common"})
    for now in (2, 3, 4):
        term.draw([group_of("common", [1, 0])], [], now, {"rare", "common"})
        assert memory.asked[2] == ["common", "rare"]
    term.draw([group_of("common", [1, 0])], [], 5, {"common"})
    assert memory.asked[2] == ["common"]


def test_reports_of_shards_are_means_an_answer():
    of_all, by_domain = means_of([{"a": [1, 2.0, 0.5]}, {"a": [3, 2.0, 1.5], "b": [4, 4.0, 0.0]}, {}])
    assert by_domain == {"a": {"nll": 1.0, "delta": 0.5}, "b": {"nll": 1.0, "delta": 0.0}}
    assert of_all == {"nll": 1.0, "delta": 0.25}
    nothing, none = means_of([{}])
    assert none == {} and np.isnan(nothing["nll"])
