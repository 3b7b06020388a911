"""A pool of prompts in the buffer: all are items from the start, and rules that read every item's history draw them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from rllib_srl.replay.buffer import SRLReplayBuffer
from rllib_srl.replay.domain_statistics import DomainStatistics
from rllib_srl.replay.journal.reader import reading
from rllib_srl.replay.selection import rules
from rllib_srl.replay.selection.pool import SlotClock, Surprise, context_of, discounted, pool_candidates
from rllib_srl.replay.selection.signal import factors
from rllib_srl.replay.tools.explain import facts_in_words, find, why
from rllib_srl.types import Prompt
from tests.small_buffer import a_group

MIXED, RIGHT, WRONG = (1.0, 0.0, 1.0, 0.0), (1.0,) * 4, (0.0,) * 4


def pool(num: int, domain: str = "sums", first: int = 0) -> list[Prompt]:
    return [Prompt("world", f"p{number}", domain=domain) for number in range(first, first + num)]


def a_buffer(directory=None, selection="signal", seed=0, **settings) -> SRLReplayBuffer:
    config = settings.pop("selection_config", {"noise": 0.0} if selection == "signal" else {})
    given = {"capacity": 500, "admit": None, "degenerate_share": None, "diversity_coeff": 0.0, **settings}
    return SRLReplayBuffer(
        directory=directory, seed=seed, selection=selection, selection_config=config, embedding="ngram", **given
    )


def number_of(prompt: Prompt) -> int:
    return int(prompt.prompt_id[1:])


def play(buffer, num, now, rewards=lambda number, now: MIXED):
    """Draw `num` prompts of the pool, play them, and return their numbers and how many were visited before."""
    prompts, num_revisits = buffer.from_pool(num, now)
    numbers = [number_of(prompt) for prompt in prompts]
    buffer.add([a_group(number, rewards(number, now), now) for number in numbers], now)
    return numbers, num_revisits


@pytest.mark.parametrize("selection", ["signal", "greso"])
def test_no_prompt_is_played_twice_before_every_one_was_played_once(tmp_path, selection):
    buffer = a_buffer(tmp_path, selection)
    assert buffer.enrol(pool(23), 0) == 23
    counts, played = Counter(dict.fromkeys(range(23), 0)), []
    for now in range(1, 24):
        numbers, num_revisits = play(buffer, 4, now)
        unseen = [number for number in numbers if counts[number] == 0]
        assert len(set(numbers)) == 4 and num_revisits == 4 - len(unseen) and numbers[num_revisits:] == unseen
        counts.update(numbers)
        played += numbers
        assert max(counts.values()) - min(counts.values()) <= 1
    assert set(counts.values()) == {4} and played[:23] != sorted(played[:23])
    buffer.check_valid()
    buffer.close()


@pytest.mark.parametrize("phi, is_even", [(0.0, True), (0.5, False)])
def test_domains_of_different_sizes_are_played_evenly_without_a_choice_of_domains(phi, is_even):
    """With phi = .5 the small domain has more than its share of the slots; see docs/memory.md.

    With kappa = 0 the values of all items are equal, whatever is known of their domains.
    """
    buffer = a_buffer(selection_config={"noise": 0.0, "kappa": 0.0, "phi": phi})
    prompts = pool(19) + pool(4, "words", 19)
    assert buffer.enrol(prompts, 0) == 23
    counts, spread = Counter(dict.fromkeys(range(23), 0)), 0
    for now in range(1, 24):
        drawn, _ = buffer.from_pool(4, now)
        counts.update(map(number_of, drawn))
        buffer.add([replace(a_group(number_of(one), MIXED, now), prompt=one) for one in drawn], now)
        spread = max(spread, max(counts.values()) - min(counts.values()))
    assert (spread == 1) == is_even and sum(counts.values()) == 92
    assert (sum(counts[number] for number in range(19, 23)) == 16) == is_even
    buffer.close()


def test_the_order_is_the_seeds(tmp_path):
    orders = []
    for at, seed in enumerate((0, 0, 1)):
        buffer = a_buffer(tmp_path / str(at), seed=seed)
        buffer.enrol(pool(23), 0)
        orders.append([number for now in range(1, 8) for number in play(buffer, 4, now)[0]])
        buffer.close()
    assert orders[0] == orders[1] != orders[2]


def test_a_restart_goes_on_exactly(tmp_path):
    whole = a_buffer(tmp_path / "whole", selection_config={}, diversity_coeff=0.5)
    parts = a_buffer(tmp_path / "parts", selection_config={}, diversity_coeff=0.5)
    prompts = pool(20) + pool(9, "words", 20)
    drawn = {"whole": [], "parts": []}

    def rewards(number, now):
        return (MIXED, RIGHT, WRONG)[(number + now // 3) % 3]

    for buffer in (whole, parts):
        buffer.enrol(prompts, 0)
    for now in range(1, 15):
        drawn["whole"].append(play(whole, 4, now, rewards))
        if now == 8:
            parts.close()
            parts = a_buffer(tmp_path / "parts", selection_config={}, diversity_coeff=0.5)
            assert parts.enrol(prompts, 0) == 0
        drawn["parts"].append(play(parts, 4, now, rewards))
    assert drawn["whole"] == drawn["parts"]
    for buffer in (whole, parts):
        buffer.check_valid()
        buffer.close()


def test_what_gives_no_signal_waits_and_comes_back_after_one_that_does():
    """kappa 0, one domain, all solved once: an item that is always silent waits 1, 2, 3, ... passes of the others."""
    buffer = a_buffer(selection_config={"noise": 0.0, "kappa": 0.0})
    buffer.enrol(pool(12), 0)
    visits = {number: [] for number in range(12)}
    for now in range(1, 121):
        for number in play(buffer, 3, now, lambda number, now: RIGHT if number < 6 or now <= 4 else MIXED)[0]:
            visits[number].append(now)
    mixed = np.mean([len(visits[number]) for number in range(6, 12)])
    silent = np.mean([len(visits[number]) for number in range(6)])
    assert silent < mixed / 3
    gaps = np.diff(visits[0])
    assert (np.diff(gaps) >= -1).all() and gaps[-1] > 2 * gaps[0]
    buffer.close()


@pytest.mark.parametrize("prior_weight", [0.0, 2.0])
@pytest.mark.parametrize("first", [WRONG, RIGHT])
def test_with_surprise_a_domain_comes_back_whose_first_answers_all_agree(first, prior_weight):
    """The group that opens each domain but one is silent; the others of that domain would be mixed."""
    buffer = a_buffer(surprise=Surprise(4, prior_weight))
    domains = [pool(6, domain, first) for first, domain in ((0, "a"), (6, "b"), (12, "c"))]
    buffer.enrol([prompt for domain in domains for prompt in domain], 0)
    opened, visits = {}, Counter()
    for now in range(1, 31):
        drawn, _ = buffer.from_pool(2, now)
        rewards = [first if opened.setdefault(p.domain, p.key) == p.key and p.domain != "c" else MIXED for p in drawn]
        visits.update(prompt.key for prompt in drawn)
        played = [replace(a_group(number_of(p), r, now), prompt=p) for p, r in zip(drawn, rewards, strict=True)]
        buffer.add(played, now)
    others = [prompt.key for domain in domains for prompt in domain if prompt.key != opened[prompt.domain]]
    assert min(visits[key] for key in others) >= 2
    buffer.close()


def test_the_candidates_of_a_pool_by_hand():
    buffer = a_buffer(selection_config={"noise": 0.0, "weights": {"sums": 3.0}})
    buffer.enrol(pool(4), 0)
    play(buffer, 2, 1, lambda number, now: MIXED if number == 1 else RIGHT)
    slots = buffer.store.slots()
    candidates = buffer.draws.all_candidates(slots, 5)
    visited = buffer.store.items["visits"][slots] > 0
    assert candidates.elapsed[visited].tolist() == [4, 4] and candidates.elapsed[~visited].tolist() == [6, 6]
    assert candidates.weight.tolist() == [3.0] * 4
    assert candidates.cost.tolist() == [4.0] * 4  # four tokens a group; the others have their domain's mean
    silent = {int(slot): float(value) for slot, value in zip(slots, candidates.num_silent, strict=True)}
    for slot in slots[visited]:
        number = number_of(buffer.store.prompt_of(int(slot)))
        assert silent[int(slot)] == (0.0 if number == 1 else 1.0)
    live = candidates.context.live_D[0]
    num_mixed = sum(number_of(buffer.store.prompt_of(int(slot))) == 1 for slot in slots[visited])
    assert live == pytest.approx((num_mixed * (0.985 if num_mixed else 1) + 1) / (1.985 + 2), abs=0.01)
    found = factors(candidates, 1.0, buffer.draws._rule_settings["items"].signal)
    np.testing.assert_allclose(found.chance, (live + 1) / (2 + candidates.num_silent))
    buffer.close()


def test_a_draw_is_explained_in_its_factors():
    buffer = a_buffer()
    buffer.enrol(pool(4), 0)
    buffer.from_pool(2, 3, "3.due")
    (first, _) = buffer._answered("3.due")
    assert first["why"]["signal"] == {
        "weight": 1.0, "cost": 1.0, "elapsed": 4.0, "chance": 0.75, "progress": 1.0, "priority": 3.0
    }  # fmt: skip
    buffer.close()


def facts_of_draw(buffer, num, now) -> dict[str, dict]:
    """Draw, and return the recorded facts of each drawn prompt by its id."""
    buffer.from_pool(num, now, f"{now}.due")
    return {drawn["prompt"]["prompt_id"]: drawn["why"] for drawn in buffer._answered(f"{now}.due")}


def test_a_draw_records_how_the_domains_came_by_their_slots():
    """9^.5 * .5 = 1.5 and 4^.5 * .5 = 1: slots by 1.5 > 1, 2 > 1.5, 3 > 1; then waits of 1 and 2 slots."""
    buffer = a_buffer()
    buffer.enrol(pool(9) + pool(4, "words", 9), 0)
    shared = {"num_domains": 2, "num_drawn": 3}
    want = {
        "sums": {"base": 1.5, "wait": 1, "rank": 1, "num_slots": 2, **shared},
        "words": {"base": 1.0, "wait": 1, "rank": 2, "num_slots": 1, **shared},
    }
    found = facts_of_draw(buffer, 3, 1)
    assert sorted(found) != sorted(f"p{n}" for n in range(3)) and len(found) == 3
    domains = {name: "sums" if int(name[1:]) < 9 else "words" for name in found}
    assert all(facts["signal_domain"] == want[domains[name]] for name, facts in found.items())
    for facts in facts_of_draw(buffer, 1, 2).values():  # nothing was added: only the waits differ, 1.5 * 1 < 1 * 2
        assert facts["signal_domain"] == {
            "base": 1.0, "wait": 2, "rank": 1, "num_slots": 1, "num_domains": 2, "num_drawn": 1
        }  # fmt: skip
    buffer.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"selection_config": {"noise": 0.0, "phi": 0.0}},
        {"domain_quotas": "equal"},
        {"domain_quotas": {"sums": 3.0, "words": 1.0}},
    ],
)
def test_a_draw_that_chooses_no_domain_first_records_the_items_alone(tmp_path, settings):
    buffer = a_buffer(tmp_path, **settings)
    buffer.enrol(pool(9) + pool(4, "words", 9), 0)
    play(buffer, 6, 1, lambda number, now: MIXED if number % 2 else RIGHT)
    slots_N = buffer.store.rested(2)
    candidates = buffer.draws.all_candidates(slots_N, 2)
    told = factors(candidates, 1.0, buffer.draws._rule_settings["items"].signal)
    chance = {
        buffer.store.prompt_of(int(slot)).prompt_id: value
        for slot, value in zip(slots_N, told.chance.tolist(), strict=True)
    }
    assert len({round(value, 6) for value in chance.values()}) > 1
    coming = explained(buffer, "p3")[-1]
    found = facts_of_draw(buffer, 6, 2)
    assert len(found) == 6 and not any("signal_domain" in facts for facts in found.values())
    assert {name: facts["signal"]["chance"] for name, facts in found.items()} == {
        name: pytest.approx(chance[name], abs=1e-6) for name in found
    }
    assert "may be drawn" in coming and "its domain, number" not in coming
    buffer.close()


def test_a_users_rule_of_the_same_name_has_no_reasons_of_signal(monkeypatch):
    monkeypatch.setitem(rules.SELECTIONS, "signal", lambda candidates, num, generator, settings: np.arange(num))
    buffer = a_buffer()
    buffer.enrol(pool(3) + pool(3, "words", 3), 0)
    found = facts_of_draw(buffer, 2, 1)
    assert set(found) == {"p0", "p1"} and not any("signal" in facts for facts in found.values())
    buffer.close()


def test_a_prompt_whose_play_failed_waits_for_its_turn():
    buffer = a_buffer()
    buffer.enrol(pool(6), 0)
    failed, _ = buffer.from_pool(2, 1)  # nothing is added: infrastructure lost both groups
    drawn = [play(buffer, 2, now)[0] for now in (2, 3)]
    assert not {number_of(prompt) for prompt in failed} & {number for numbers in drawn for number in numbers}
    assert set(play(buffer, 2, 4)[0]) == {number_of(prompt) for prompt in failed}
    buffer.close()


def test_a_second_draw_in_an_iteration_is_of_other_prompts_and_a_repeated_one_the_same():
    buffer = a_buffer()
    buffer.enrol(pool(5), 0)
    first, second = buffer.from_pool(3, 1, "1.due"), buffer.from_pool(3, 1, "1.due.2")
    assert buffer.from_pool(3, 1, "1.due") == first
    assert len(second[0]) == 2 and not {p.key for p in first[0]} & {p.key for p in second[0]}
    buffer.close()


@pytest.mark.parametrize("selection", ["signal", "greso", "mopps", "spo"])
def test_rules_of_the_whole_pool_draw_revisits_whatever_the_schedule(selection):
    """In a stream they draw among all stored items, waiting or not, due or not."""
    buffer = a_buffer(selection=selection)
    buffer.add([a_group(number, MIXED, 1) for number in range(8)], 1)
    keys = {prompt.key for prompt in buffer.due(8, 2)}
    assert len(keys) == 8 and buffer.due(8, 2) == []  # drawn now: at rest until the next iteration
    assert len(buffer.due(8, 3)) == 8
    buffer.check_valid()
    buffer.close()


def test_mopps_and_spo_read_the_discounted_history():
    buffer = a_buffer(selection="mopps", history_by="visits", history_half_life=1.0)
    buffer.add([a_group(0, RIGHT, 1)], 1)
    buffer.add([a_group(0, MIXED, 2)], 2)
    candidates = buffer.draws.all_candidates(buffer.store.slots(), 3)
    assert (candidates.history_sum[0], candidates.history_count[0]) == (0.5 * (0.5 * 4 + 2), 0.5 * (0.5 * 4 + 4))
    buffer.close()


@pytest.mark.parametrize("by", ["versions", "visits", "kl"])
@pytest.mark.parametrize("num_versions", [3, 1000])
def test_histories_are_discounted_to_the_newest_policy(by, num_versions):
    generator = np.random.default_rng(0)
    columns = {"version": generator.integers(1, num_versions, 50), "history_clock": generator.random(50)}
    columns |= {"history_sum": generator.random(50), "history_count": 1 + generator.random(50)}
    age = {"versions": columns["version"].max() - columns["version"], "visits": 1}.get(
        by, columns["history_clock"].max() - columns["history_clock"]
    )
    found = discounted(columns, by, 2.0)
    for name in ("history_sum", "history_count"):
        np.testing.assert_allclose(found[name], 0.5 ** (age / 2.0) * columns[name])


def test_a_pool_larger_than_the_memory_is_refused():
    buffer = a_buffer(capacity=3)
    with pytest.raises(ValueError, match="replay_capacity = 3 with 0 stored prompts and 4 new ones of the pool"):
        buffer.enrol(pool(4), 0)
    assert len(buffer) == 0 and buffer.enrol([*pool(2), *pool(2)], 0) == 2
    buffer.close()


def test_a_clock_counts_slots_by_domain():
    clock = SlotClock()
    assert clock.waits(2).tolist() == [1, 1] and clock.first_wait == 1
    clock.advance([1, 0, 1])
    assert clock.waits(3).tolist() == [2, 1, 4] and clock.first_wait == 4
    other = SlotClock()
    other.set_state(clock.get_state())
    assert other.waits(3).tolist() == [2, 1, 4]


def test_costs_that_are_unknown_are_those_of_the_domain_or_of_all():
    columns = {name: np.zeros(4, int) for name in ("last_drawn", "last_review", "visits", "num_silent", "num_unsolved")}
    columns |= {"seq": np.arange(4), "domain": np.array([0, 0, 1, 0]), "cost": np.array([4.0, 8.0, 0.0, 0.0])}
    context = context_of(DomainStatistics(), ["a", "b"], SlotClock(), None)
    assert pool_candidates(columns, 1, context, ["a", "b"], {}).cost.tolist() == [4, 8, 6, 6]


# --- why ------------------------------------------------------------------------------------------


def explained(buffer, name: str) -> list[str]:
    with reading(buffer.ledger.journal.path) as read:
        return why(find(read, name), 9)


def test_why_explains_draws_and_the_next_one_in_the_terms_of_the_rule(tmp_path):
    buffer = a_buffer(tmp_path)
    buffer.enrol(pool(4), 0)
    prompts, _ = buffer.from_pool(2, 1, "1.due")
    first, second = (number_of(prompt) for prompt in prompts)
    buffer.add([a_group(first, MIXED, 1), a_group(second, RIGHT, 1)], 1, "1.add")
    # pi = (.985 or 1 + 1) / (1.985 + 2); a silent group after one with signal: M = .985
    live = (0.985 + 1) / (1.985 + 2)
    drawn, coming = explained(buffer, f"p{second}")
    assert drawn == (
        "drawn for iteration 1: never played before, priority 1.5 = weight 1 / cost 1 * 2 iterations * chance of "
        "signal 0.75 * chance of progress 1.00, rule signal"
    )
    value, mixed = (live + 1) / 3 / 4, (live + 1) / 2 / 4
    unseen = 3 * mixed
    assert coming == (
        f"may be drawn for iteration 2: priority {value:.3g} = weight 1 / cost 4 * 1 iteration * chance of signal "
        f"{value * 4:.2f} * chance of progress 1.00; number 4 of 4 items and 4 of 4 of its domain; 2 slots an "
        "iteration, rule signal"
    )
    other = next(number for number in range(4) if number not in (first, second))
    (line,) = explained(buffer, f"p{other}")
    assert line.startswith(f"may be drawn for iteration 2: never played, priority {unseen:.3g} = ")
    assert "number 1 of 4 items" in line
    buffer.close()


def test_why_tells_how_the_domain_came_by_its_slots_in_past_and_next_draws(tmp_path):
    buffer = a_buffer(tmp_path)
    buffer.enrol(pool(9) + pool(4, "words", 9), 0)
    facts = facts_of_draw(buffer, 3, 1)
    name = next(name for name in facts if int(name[1:]) < 9)
    drawn, coming = explained(buffer, name)
    assert drawn == (
        "drawn for iteration 1: never played before, priority 3.25 = weight 1 / cost 1 * 4.3 iterations * chance of "
        "signal 0.75 * chance of progress 1.00; its domain, number 1 of 2 with value 1.5 = base 1.5 * 1 slot waited, "
        "got 2 of 3 slots, rule signal"
    )
    # waits of 1 and 2 slots: 1.5 < 2, then 3 > 1, then 2 > 1.5
    assert coming.endswith(
        "; its domain, number 2 of 2 with value 1.5 = base 1.5 * 1 slot waited, would get 1 of 3 slots; 3 slots an "
        "iteration, rule signal"
    )
    before, _, rest = facts_in_words(facts[name]).partition("; its domain, ")
    older = {key: value for key, value in facts[name].items() if key != "signal_domain"}  # of an earlier version
    assert rest and facts_in_words(older) == before
    buffer.close()


@pytest.mark.parametrize("min_recall_interval", [1, 3])
def test_what_why_says_of_the_next_draw_is_what_that_draw_records(tmp_path, min_recall_interval):
    """Value, wait, rank and slots of the domains, over draws whose results and numbers of candidates differ."""
    buffer = a_buffer(tmp_path, min_recall_interval=min_recall_interval)
    buffer.enrol(pool(12) + pool(5, "words", 12) + pool(3, "codes", 17), 0)
    ranks, num_left_out = set(), 0
    for now in range(1, 9):
        with reading(buffer.ledger.journal.path) as read:
            said = {f"p{number}": why(find(read, f"p{number}"), 0)[-1] for number in range(20)}
        for name, facts in facts_of_draw(buffer, 4, now).items():
            told = facts_in_words(facts).partition("; its domain, ")[2]
            assert now == 1 or f"; its domain, {told.replace(', got ', ', would get ')}; 4 slots" in said[name]
            ranks.add(facts["signal_domain"]["rank"])
        num_left_out += sum("rests until" in line for line in said.values())
        drawn = [number_of(prompt) for prompt in buffer.from_pool(4, now, f"{now}.due")[0]]
        buffer.add([a_group(n, (MIXED, RIGHT, WRONG)[n % 3], now) for n in drawn], now, f"{now}.add")
    assert ranks == {1, 2, 3} and (num_left_out > 0) == (min_recall_interval > 1)
    buffer.close()


def test_why_explains_the_published_rules_by_the_history(tmp_path):
    buffer = a_buffer(tmp_path, "greso", min_recall_interval=3)
    buffer.enrol(pool(4), 0)
    play(buffer, 2, 1, lambda number, now: RIGHT)
    slot = int(np.flatnonzero(buffer.store.items["visits"])[0])
    assert explained(buffer, buffer.store.prompt_of(slot).prompt_id)[-1] == (
        "not drawn for iteration 2: rests until iteration 4 (min_recall_interval)"
    )
    play(buffer, 2, 2, lambda number, now: RIGHT)
    buffer.enrol(pool(1, first=9), 3)
    assert explained(buffer, "p9")[-1] == (
        "may be drawn for iteration 4: never drawn, 0 silent groups in a row, rewards 0 of 0 in its history; 2 slots "
        "an iteration, rule greso"
    )
    buffer.close()
