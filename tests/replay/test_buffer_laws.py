"""Laws of a buffer in the long run: how often what is drawn, are shares what they say, is the load borne."""

from __future__ import annotations

import itertools
import zlib
from collections import Counter
from functools import cache

import numpy as np
import pytest

from rllib_srl.replay.schedule.load import Share, reuse_share
from rllib_srl.replay.schedule.spacing import SPACINGS
from rllib_srl.replay.store.records import LEECH, SCHEDULED, key_of
from tests.replay.frequencies import fits
from tests.replay.groups import a_buffer, a_group, a_prompt

# --- frequencies ----------------------------------------------------------------------------------


def filled(num, **given):
    """Return a buffer of `num` items in the schedule, of different pass rates and scores, all due."""
    buffer = a_buffer(embedding="policy", diversity_parts=("variance",), load_control="none", **given)
    groups = [a_group(a_prompt(i, "ab"[i % 2]), 1, i, [1.0] * (i + 1) + [0.0] * (8 - i)) for i in range(num)]
    buffer.add(groups, 1)
    buffer.due(0, 2)
    assert buffer.store.num_items(SCHEDULED) == num
    return buffer


WEIGHTS = {
    "uniform": lambda p_N: np.ones(len(p_N)),
    "learnability": lambda p_N: p_N * (1 - p_N),
    "exit": lambda p_N: np.exp(10 * p_N * (1 - p_N)),  # score: the variance of 0 and 1; kappa 10
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["items", "groups"])
@pytest.mark.parametrize("rule", WEIGHTS)
def test_draws_are_as_frequent_as_they_should_be(rule, kind):
    # Without replacement, in order: P(i, j, ...) = w_i/W w_j/(W - w_i) ...; 25,000 draws of items, as many of groups.
    num, size, times = 5, 4, 6_250
    buffer = filled(num, selection=rule, reuse_selection=rule)
    draw, table = getattr(buffer.draws, kind), buffer.store.items if kind == "items" else buffer.store.groups
    p_N = np.array([(i + 1) / 9 for i in range(num)])
    assert [float(rate) for rate in buffer.store.items["pass_rate"][:num]] == pytest.approx(p_N.tolist())
    weight_N = WEIGHTS[rule](p_N)
    probabilities = {}
    for order in itertools.permutations(range(num), size):
        left, chance = weight_N.sum(), 1.0
        for i in order:
            chance *= weight_N[i] / left
            left -= weight_N[i]
        probabilities[order] = chance
    generator, counts = np.random.default_rng(5), Counter()
    for _ in range(times):
        drawn = draw(size, 30, generator)
        counts[tuple(table["seq"][drawn if kind == "items" else drawn.groups_N].tolist())] += 1
    assert counts.total() == times and set(counts) <= set(probabilities)
    assert fits(np.array([counts[order] for order in probabilities]), np.array(list(probabilities.values())))


def test_the_same_counts_do_not_fit_another_rule():
    # The bar of the test above tells rules apart with far fewer draws.
    buffer = filled(5, selection="learnability")
    drawn = [int(buffer.draws.items(1, 30, np.random.default_rng(i))[0]) for i in range(1000)]
    assert not fits(np.bincount(drawn, minlength=5), np.full(5, 0.2))


@pytest.mark.slow
def test_leeches_have_at_most_their_share_in_the_long_run():
    # 18 items, 10 of them leeches that are due: 4 slots at a share of 0.15 are 3 slots in 5 draws.
    buffer = filled(8, leech_share=0.15, leech_failures=2, selection="hardest")
    for now in (2, 3):
        buffer.add([a_group(100 + i, now, i, (0.0,) * 4) for i in range(10)], now)
    leeches = set(np.flatnonzero(buffer.store.items["status"] == LEECH).tolist())
    generator, num_leeches = np.random.default_rng(0), []
    for _ in range(1000):
        drawn = buffer.draws.items(4, 60, generator).tolist()
        assert len(set(drawn)) == 4
        num_leeches.append(len(leeches & set(drawn)))
    assert len(leeches) == 10 and max(num_leeches) == 1
    assert sum(num_leeches) == 600  # the rule would take no others; fractions are carried
    # Where there is nobody else, they fill; a draw that takes all there is settles nothing for the next.
    carried = buffer.draws.get_state()
    assert len(buffer.draws.items(40, 60, generator)) == 18 and buffer.draws.get_state() == carried
    assert len(leeches & set(buffer.draws.items(12, 60, generator).tolist())) == 4


def test_eight_unlearnable_items_of_forty_do_not_take_the_slots():
    # The source system's took all of them, and 32 items were never played again.
    buffer = a_buffer(embedding="policy", diversity_parts=("variance",))
    buffer.add([a_group(i, 1, i, (0.0,) * 4 if i < 8 else (1.0, 0.0, 1.0, 0.0)) for i in range(40)], 1)
    played = Counter()
    for now in range(2, 102):
        prompts = buffer.due(4, now)
        assert len(prompts) == 4
        played.update(int(prompt.prompt_id[1:]) for prompt in prompts)
        rewards = [(0.0,) * 4 if int(p.prompt_id[1:]) < 8 else (1.0, 1.0, 1.0, 0.0) for p in prompts]
        buffer.add([a_group(p, now, at, r) for at, (p, r) in enumerate(zip(prompts, rewards, strict=True))], now)
    assert set(range(8, 40)) <= set(played)
    num_stuck = sum(played[i] for i in range(8))
    # Eight failures each make them leeches, which are tested every 32 iterations from then on.
    assert num_stuck <= 8 * (8 + 100 / 32) and num_stuck / played.total() < 0.2
    assert buffer.stats(102)["num_leeches"] > 0


@pytest.mark.parametrize("quotas, share", [({"a": 3.0, "b": 1.0}, 0.75), ("equal", 0.5), ({"b": 1.0}, 0.0)])
def test_domains_have_exactly_their_quota_in_the_long_run(quotas, share):
    buffer = filled(8, domain_quotas=quotas, capacity=64)
    generator, num_a = np.random.default_rng(0), 0
    for _ in range(300):
        drawn = buffer.draws.items(3, 60, generator)
        num_a += int((buffer.store.items["domain"][drawn] == 0).sum())
    assert abs(num_a - 300 * 3 * share) <= 1  # what rounding owes is carried, so the total is exact


@pytest.mark.slow
def test_a_share_of_a_fifth_of_four_is_a_fifth_in_the_long_run():
    # int(4 * 0.2) = 0: the source never replayed at all.
    buffer = filled(8, max_uses=10_000, max_age=10_000, capacity=64)
    revisits, reuses, num_due, num_reused, num_played = Share(0.2), reuse_share(0.2), 0, 0, 0
    for now in range(3, 403):
        prompts = buffer.due(revisits.owed(4), now, slots=0.8)
        num_due += len(prompts)
        num_played += 4
        if prompts:
            buffer.add([a_group(p, now, i, (1.0, 0.0)) for i, p in enumerate(prompts)], now)
        num_reused += len(buffer.sample(reuses.owed(4), now)) if now % 5 == 0 else reuses.owed(4)
    assert num_due / num_played == pytest.approx(0.2, rel=0.01)
    assert num_reused / (num_played + num_reused) == pytest.approx(0.2, rel=0.01)


# --- load -----------------------------------------------------------------------------------------


class Forgetting:
    """A policy that recalls a prompt with probability exp(-iterations since it was played / strength).

    Each play makes a prompt's strength 1.7 times as large; the first finds a coin's chance.
    """

    def __init__(self):
        self.strength, self.last = {}, {}

    def rewards(self, prompt, now, size=4):
        name, seed = prompt.prompt_id, zlib.crc32(prompt.prompt_id.encode())
        chance = 0.5
        if name in self.strength:
            chance = 0.05 + 0.93 * np.exp(-(now - self.last[name]) / self.strength[name])
            self.strength[name] *= 1.7
        else:
            self.strength[name] = np.random.default_rng(seed).uniform(2, 12)
        self.last[name] = now
        return (np.random.default_rng([seed, now]).random(size) < chance).astype(float)


@cache
def simulated(spacing, num_iterations):
    """Play 12 new prompts and 4 revisits an iteration; return the revisits, the stats and the timings."""
    buffer = a_buffer(capacity=1000, spacing=spacing, embedding="policy", diversity_parts=("variance",))
    policy, drawn, stats, timings = Forgetting(), [], [], Counter()
    for now in range(1, num_iterations + 1):
        prompts = buffer.due(4, now) if now > 2 else []
        drawn.append([prompt.prompt_id for prompt in prompts])
        prompts += [a_prompt(100 * now + i) for i in range(16 - len(prompts))]
        groups = [a_group(prompt, now, i, policy.rewards(prompt, now)) for i, prompt in enumerate(prompts)]
        timings.update(visit.timing for visit in buffer.add(groups, now))
        if now % 10 == 0:
            stats.append(buffer.stats(now))
    buffer.check_valid()
    return drawn, stats, timings


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_500_iterations_have_a_bounded_backlog_and_bear_their_load():
    drawn, stats, timings = simulated("fsrs", 500)
    assert all(len(batch) == 4 and len(set(batch)) == 4 for batch in drawn[2:])
    assert max(one["backlog"] for one in stats) <= 4 and max(one["load_ratio"] for one in stats) <= 1.1
    assert min(one["load_ratio"] for one in stats[5:]) > 0.5  # and the slots are used
    # Everything that was played was graded, and fell somewhere.
    assert timings.total() == 500 * 16
    assert timings["new"] == 500 * 16 - 4 * 498
    assert timings["early"] + timings["on_time"] + timings["late"] == 4 * 498 == stats[-1]["num_revisits"]
    assert timings["late"] < 0.05 * 4 * 498
    # The memory is full after 83 iterations; what is remembered then is kept, and grows.
    num_scheduled = [one["num_scheduled"] for one in stats]
    assert stats[-1]["num_items"] == 1000 and num_scheduled[-1] > num_scheduled[8] > 40
    revisited = Counter(itertools.chain(*drawn))
    assert np.mean(list(revisited.values())) > 3
    # A quarter of the newest 4096 reviews were revisits.
    assert stats[-1]["num_predicted_reviews"] == 1024 and stats[-1]["observed_recall_mean"] > 0.7


@pytest.mark.slow
def test_every_rule_draws_in_an_order_of_its_own():
    found = {spacing: simulated(spacing, 32) for spacing in SPACINGS}
    for one, other in itertools.combinations(SPACINGS, 2):
        pairs = list(zip(found[one][0][8:], found[other][0][8:], strict=True))
        same = sum(len(set(a) & set(b)) for a, b in pairs) / sum(len(a) for a, _ in pairs)
        assert same < 0.75, (one, other)
    for spacing, (_, stats, _) in found.items():
        assert max(one["backlog"] for one in stats) <= 8 and stats[-1]["load_ratio"] <= 1.25, spacing


@pytest.mark.slow
@pytest.mark.parametrize("load_control", ["stretch", "none"])
def test_without_intake_control_intervals_stretch_or_the_backlog_grows(load_control):
    buffer = a_buffer(capacity=1000, load_control=load_control, embedding="policy", diversity_parts=("variance",))
    policy = Forgetting()
    for now in range(1, 41):
        prompts = buffer.due(4, now) if now > 2 else []
        prompts += [a_prompt(100 * now + i) for i in range(16 - len(prompts))]
        buffer.add([a_group(p, now, i, policy.rewards(p, now)) for i, p in enumerate(prompts)], now)
    stats = buffer.stats(40)
    assert stats["num_waiting"] <= 12  # only what came in the last iteration
    assert stats["load_ratio"] > 5
    stretched = stats["stretch_factor"]
    assert stretched == pytest.approx(stats["load_ratio"]) if load_control == "stretch" else stretched == 1
    assert (stats["backlog"] > 200) == (load_control == "none")


def test_leeches_and_the_load_are_of_the_schedule():
    buffer = filled(8)
    slot = buffer.store.slot_of(key_of(a_prompt(0, "a")))
    load = buffer.recall.load.load
    for now in range(3, 11):
        buffer.add([a_group(a_prompt(0, "a"), now, 0, (0.0,) * 4)], now)
    assert buffer.store.items[slot]["status"] == LEECH
    assert buffer.recall.load.load < load and buffer.recall.load.num_items == 7
