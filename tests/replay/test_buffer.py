"""SRLReplayBuffer: its calls, that each happens once or not at all, and that every setting acts.

The source system's six defects (a diversity that has no bound and is flat, intervals that compound, successes that
shorten, leeches that take all, batches that are short, numbers that are never refreshed and state that is lost) are
each shown impossible: below where "the source" is named, in test_variety, test_recall and test_buffer_laws.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace

import numpy as np
import pytest

from rllib_srl.replay.buffer import SRLReplayBuffer
from rllib_srl.replay.journal import JournalError
from rllib_srl.replay.records import key_of
from rllib_srl.replay.settings import TABLE, ReplaySettings
from tests.replay.groups import (
    a_buffer,
    a_group,
    a_prompt,
    counted,
    everything,
    hidden_of,
    journalled,
    rewards_of,
)
from tests.replay.stored import assert_same


def row_of(buffer, prompt):
    return buffer.store.items[buffer.store.slot_of(key_of(prompt))]


def ids(prompts):
    return [prompt.prompt_id for prompt in prompts]


# --- the source's defects -------------------------------------------------------------------------


def test_a_success_never_shortens_an_interval_not_even_after_many_failures():
    # The source: with an easiness of 1.3 a success made the interval 1.5 * 0.3 = 0.45 times as long.
    buffer = a_buffer(spacing="srl1", leech_failures=0)
    for now in range(1, 9):
        buffer.add([a_group(0, now, rewards=(0.0,) * 4)], now)
    assert row_of(buffer, a_prompt(0))["difficulty"] == pytest.approx(1.3)
    intervals = [float(row_of(buffer, a_prompt(0))["interval"])]
    for now in range(9, 15):
        buffer.add([a_group(0, now, rewards=(1.0,) * 4)], now)
        intervals.append(float(row_of(buffer, a_prompt(0))["interval"]))
    assert intervals == sorted(intervals) and intervals[-1] > intervals[0] == 1.0


def test_a_batch_is_full_though_nothing_is_due_and_it_is_not_always_the_same():
    # The source drew due items only, the hardest first: a batch could be short or empty, and knew no chance.
    def drawn(seed, now=3):
        buffer = a_buffer(seed=seed, spacing="fixed", spacing_config={"interval": 500.0})
        buffer.add([a_group(i, 1, i, (1.0, 0.0)) for i in range(20)], 1)
        prompts = buffer.due(8, now)
        assert buffer.stats(now)["num_due"] == 0
        return ids(prompts)

    assert len(set(drawn(0))) == 8 and drawn(0) != drawn(1)
    buffer = a_buffer()
    buffer.add([a_group(i, 1, i) for i in range(3)], 1)
    assert len(buffer.due(8, 2)) == 3 and buffer.due(8, 1) == []  # no more than there is, nothing played twice at once


def test_what_is_hard_and_rare_outlives_what_is_mastered_and_common():
    # The source evicted the first inserted.
    buffer = a_buffer(capacity=8)
    buffer.add([a_group(i, 1, i, (1.0, 0.0, 1.0, 0.0)) for i in range(4)], 1)
    buffer.add([a_group(i, 2, i, (1.0,) * 4) for i in range(10, 14)], 2)
    buffer.add([a_group(i, 3, i, (1.0, 0.0, 0.0, 0.0)) for i in range(20, 24)], 3)
    assert sorted(ids(map(buffer.store.prompt_of, buffer.store.slots()))) == sorted(
        f"p{i}" for i in [*range(4), *range(20, 24)]
    )


def test_a_stored_group_comes_back_with_ids_log_probs_and_versions():
    # The source kept neither.
    buffer = a_buffer()
    group = a_group(a_prompt(0, history=("a", "b")), 7, 3, versions_G2=np.array([[5, 6]] * 4))
    buffer.add([group], 7)
    (drawn,) = buffer.sample(1, 8)
    assert_same(replace(drawn, origin="fresh"), group)
    assert drawn.origin == "reuse" and row_of(buffer, group.prompt)["version"] == 5


# --- once or not at all ---------------------------------------------------------------------------

KEYS = {i: a_prompt(i).key for i in range(12)}
CALLS = {
    "add": lambda buffer, name: buffer.add(played(range(8, 20), 5), 5, name),
    "due": lambda buffer, name: buffer.due(3, 5, name),
    "sample": lambda buffer, name: buffer.sample(3, 5, name),
    "rate": lambda buffer, name: buffer.rate({KEYS[0]: 0.2, KEYS[1]: 1.0, "0" * 16: 0.5}, 5, name),
    "rehearse": lambda buffer, name: buffer.rehearse({KEYS[2]: -1.0, KEYS[3]: 0.0, KEYS[4]: float("nan")}, 5, name),
    "drop": lambda buffer, name: buffer.drop([*buffer.drawn, "unknown"][1:], name),
    "embed": lambda buffer, name: buffer.embed(dict.fromkeys((KEYS[0], "0" * 16), hidden_of(a_group(0))), 5, name),
}


def played(indices, now, **group):
    return [a_group(i, now, i, rewards_of(a_prompt(i), now), **group) for i in indices]


TIGHT = {"capacity": 30, "diversity_parts": ("variance", "novelty", "rarity"), "task_growth": True}


def begun(directory=None, call="add", **given):
    """Return a buffer with a past: items, some in the schedule, groups drawn."""
    embedding = {"embedding": "policy"} if call == "embed" else {}
    buffer = a_buffer(directory, run="a", **{**TIGHT, **embedding, **given})
    buffer.add(played(range(12), 1, num_turns=2), 1)
    buffer.due(4, 2)
    buffer.sample(4, 3)
    return buffer


def plain(answer):
    if isinstance(answer, list):
        return [plain(one) for one in answer]
    if hasattr(answer, "as_dict"):
        return answer.as_dict()
    return vars(answer) | {"arrays": None} if hasattr(answer, "prompt_id") else getattr(answer, "group_id", answer)


@pytest.mark.parametrize("call", CALLS)
def test_a_repeated_request_is_answered_the_same_and_changes_nothing(call, tmp_path):
    buffer = begun(tmp_path, call)
    answer = plain(CALLS[call](buffer, f"5.{call}"))
    assert answer
    state, stored = everything(buffer), journalled(buffer)
    assert plain(CALLS[call](buffer, f"5.{call}")) == answer
    assert (everything(buffer), journalled(buffer)) == (state, stored)
    buffer.close()
    buffer = a_buffer(tmp_path, run="a", **{**TIGHT, **({"embedding": "policy"} if call == "embed" else {})})
    assert plain(CALLS[call](buffer, f"5.{call}")) == answer
    assert (everything(buffer), journalled(buffer)) == (state, stored)
    CALLS[call](buffer, f"6.{call}")  # another one is done
    assert journalled(buffer)["position"] == stored["position"] + 1
    assert everything(buffer) != state or call == "drop"  # there is nothing left to drop
    buffer.check_valid()


@pytest.mark.parametrize("how", ["full_disk", "refused_commit"])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_whose_commit_fails_changes_nothing_and_then_succeeds(call, how, tmp_path, monkeypatch):
    buffer, lucky = begun(tmp_path, call), begun(None, call)
    state, stored = everything(buffer), journalled(buffer)
    stats = counted(buffer, 5)
    for _ in range(2):
        with monkeypatch.context() as patch:
            if how == "full_disk":
                fill(buffer, patch)
            else:
                patch.setattr(buffer.ledger.journal, "commit", raiser(JournalError("disk full")))
            with pytest.raises(JournalError, match="full"):
                CALLS[call](buffer, f"5.{call}")
        make_room(buffer)
        assert everything(buffer) == state and counted(buffer, 5) == stats
        assert journalled(buffer) == stored
        buffer.check_valid()
    assert plain(CALLS[call](buffer, f"5.{call}")) == plain(CALLS[call](lucky, f"5.{call}"))
    assert everything(buffer) == everything(lucky)
    for now in (6, 7, 8):
        assert ids(buffer.due(3, now)) == ids(lucky.due(3, now))
        assert plain(buffer.sample(2, now)) == plain(lucky.sample(2, now))


def raiser(error):
    def failing(*args, **kwargs):
        raise error

    return failing


def fill(buffer, patch):
    """Leave the journal's file no page more than it has; a large value in the state needs some."""
    db = buffer.ledger.journal.db
    db.execute(f"PRAGMA max_page_count = {db.execute('PRAGMA page_count').fetchone()[0]}")
    state = buffer._state
    patch.setattr(buffer, "_state", lambda: {**state(), "padding": "x" * 3_000_000})


def make_room(buffer):
    buffer.ledger.journal.db.execute("PRAGMA max_page_count = 1000000000")


def test_names_of_requests_are_of_one_call_each():
    buffer = begun()
    assert buffer.due(2, 5, "a") and buffer.due(2, 5, "a") == buffer.due(2, 6, "a")
    assert len(buffer.due(2, 5)) == 2  # without a name, a call is a new one every time
    assert buffer.counts["num_revisits"] == 4 + 2 + 2


# --- what people and learners say -----------------------------------------------------------------


@pytest.mark.parametrize(
    "scale, ratings, grades",
    [
        ("ordinal", (1, 2, 3, 4, 5), (1, 1, 2, 3, 4)),
        ("binary", (0, 1), (1, 3)),
        ("normalised", (0.0, 0.35, 0.65, 0.9), (1, 2, 3, 4)),
    ],
)
def test_ratings_grade_items(scale, ratings, grades):
    buffer = a_buffer(rating_scale=scale)
    buffer.add([a_group(i, 1, i) for i in range(len(ratings))], 1)
    rated = {a_prompt(i).key: rating for i, rating in enumerate(ratings)}
    assert buffer.rate({**rated, "f" * 16: ratings[0]}, 4) == len(ratings)
    assert buffer.reviews.rows["grade"][-len(ratings) :].tolist() == list(grades)
    rows = buffer.store.items[: len(ratings)]
    assert (rows["last_review"] == 4).all() and (rows["reps"] == 2).all() and (rows["visits"] == 1).all()
    last = buffer.reviews.rows[-1]
    assert (last["n"], last["num_success"], last["trained"], last["elapsed"]) == (1, int(grades[-1] > 1), False, 3)
    stats = buffer.stats(4)
    assert (stats["num_rated"], stats["num_reviews_of_nothing"]) == (len(ratings), 1)
    buffer.check_valid()


@pytest.mark.parametrize("scale, bad", [("ordinal", 0), ("ordinal", 6), ("binary", 0.5), ("normalised", 1.5)])
def test_a_rating_outside_its_scale_is_refused_whole(scale, bad):
    buffer = a_buffer(rating_scale=scale)
    buffer.add([a_group(i, 1, i) for i in range(2)], 1)
    state, position = everything(buffer), buffer.ledger.journal.position
    with pytest.raises(ValueError, match=f"rating = .*{scale}"):
        buffer.rate({a_prompt(0).key: 1, a_prompt(1).key: bad}, 2)
    assert (everything(buffer), buffer.ledger.journal.position) == (state, position)


def test_reused_groups_grade_their_items_by_the_likelihood_of_their_successes():
    buffer = a_buffer()
    buffer.add([a_group(i, 1, i, (1.0,) * 4) for i in range(4)], 1)
    intervals = buffer.store.items["interval"][:4].copy()
    changes = {a_prompt(0).key: -0.7, a_prompt(1).key: -0.05, a_prompt(2).key: 0.3, a_prompt(3).key: float("nan")}
    assert buffer.rehearse(changes, 9) == 3
    assert buffer.reviews.rows["grade"][-3:].tolist() == [1, 3, 4]
    rows = buffer.store.items[:4]
    assert rows["interval"][0] < intervals[0] and rows["interval"][2] > rows["interval"][1] > intervals[1]
    assert rows["lapses"].tolist() == [1, 0, 0, 0] and rows["last_review"].tolist() == [9, 9, 9, 1]
    stats = buffer.stats(9)
    assert (stats["num_rehearsed"], stats["num_reviews_of_nothing"]) == (3, 1)


def test_dropped_groups_are_gone_and_only_those_of_the_last_draw():
    buffer = a_buffer()
    buffer.add([a_group(i, 1, i) for i in range(4)], 1)
    first = [group.group_id for group in buffer.sample(2, 2)]
    second = [group.group_id for group in buffer.sample(2, 2, without=first)]
    assert len({*first, *second}) == 4
    assert buffer.drop([first[0], second[0], "none"]) == 2  # `without` belongs to the same batch
    assert buffer.store.num_groups == 2 and buffer.stats(2)["num_dropped_drifted"] == 2
    assert buffer.drop([first[0], second[0]]) == 0
    last = [group.group_id for group in buffer.sample(4, 3)]
    assert sorted(last) == sorted([first[1], second[1]])
    # A group that has been replaced since was not dropped.
    buffer.add([a_group(int(i.split(".")[1]), 4, salt=s) for s in (1, 2) for i in last], 4)
    assert buffer.drop(last) == 0 and buffer.stats(4)["num_dropped_drifted"] == 2
    buffer.check_valid()


def test_a_batch_is_drawn_in_parts_without_what_it_has():
    buffer = a_buffer()
    buffer.add([a_group(i, 1, i) for i in range(6)], 1)
    first = buffer.due(4, 3)
    more = buffer.due(4, 3, without=[prompt.key for prompt in first])
    assert len(more) == 2 and set(ids(first)) | set(ids(more)) == {f"p{i}" for i in range(6)}


# --- settings -------------------------------------------------------------------------------------

OF_THE_DRIVER = {"revisit_fraction", "reuse_fraction", "min_buffer_size", "grade_reuse", "num_shards", "timeout_s"}
OF_THE_DRIVER |= {"reuse_coeff", "reuse_correction", "mask_window", "max_drift"}


def is_of_words(domain):
    """Say whether a domain is that of words: a predicate that settings can name."""
    return domain == "words"


def words(token_ids):
    return " ".join("AKIAQWERTYUIOPASDFGH" if token == 7 else f"w{token}" for token in token_ids)


def trace(**given):
    """Play nine iterations in which everything happens that a setting could mind; return what was to be seen."""
    buffer = a_buffer(decode=words, **{"capacity": 40, "on_secret": "refuse", **given})
    domains, seen = ("sums", "words", "maps"), []
    for now in range(1, 10):
        asked = buffer.due(4, now)
        fresh = [a_prompt(100 * now + i, domains[min(now // 5, 2)]) for i in range(4)]
        history = [a_prompt("deep", history=("one", "two", "three")), a_prompt("step", history=("x",), step="improve")]
        again = [a_prompt("failing"), *(history if now < 3 else [])]
        prompts = list({prompt.key: prompt for prompt in [*asked, *fresh, *again]}.values())
        groups = [a_group(p, now, i, rewards_of(p, now), num_turns=2) for i, p in enumerate(prompts)]
        groups += [replace(odd, group_id=f"{now}.{90 + i}") for i, odd in enumerate(odd_groups(now))]
        visits = buffer.add(groups, now)
        rated = {a_prompt(f"half{i}").key: 1.0 for i in range(9)} if now == 8 else {}
        reused = buffer.sample(5, now)
        seen.append(
            (
                [vars(prompt) for prompt in asked],
                [visit.as_dict() for visit in visits],
                [(group.prompt.key, group.token_ids_N.tobytes(), group.loss_mask_N.tobytes()) for group in reused],
                buffer.rate(rated, now) if rated else 0,
                {k: None if np.isnan(v) else v for k, v in buffer.stats(now).items()},
            )
        )
    return [*seen, buffer.reviews.rows.tobytes()]


def odd_groups(now):
    """Return groups that one check or another would not take, and some of halves."""
    base = a_group("odd", 1, num_turns=8)
    failing = a_group("failing", now, rewards=(0.0,) * 4)
    loop = np.where(base.loss_mask_N, 5, base.token_ids_N).astype(np.int32)
    secret = base.token_ids_N.copy()
    secret[np.flatnonzero(base.loss_mask_N)[3]] = 7
    always = [failing, a_group(f"half{now}", now, rewards=(0.7, 0.3, 0.7, 1.0))]
    if now % 3 != 2:
        return always
    return [
        *always,
        replace(base, prompt=a_prompt(f"loop{now}"), token_ids_N=loop),
        replace(base, prompt=a_prompt(f"secret{now}"), token_ids_N=secret),
        replace(base, prompt=a_prompt(f"near{now}")),
        a_group(f"few{now}", now, rewards=(1.0, 0.0)),
    ]


# Field: a value in place of the default (or of the first, of two), and what else has to be set for it to matter.
ACTS = {
    "capacity": ({"capacity": 25}, {}),
    "groups_per_item": ({"groups_per_item": 1}, {}),
    "max_bytes": ({"max_bytes": 3000}, {}),
    "spacing": ({"spacing": "sm2"}, {}),
    "spacing_config": ({"spacing_config": {"interval": 9.0}}, {"spacing": "fixed"}),
    "desired_retention": ({"desired_retention": 0.5}, {}),
    "iterations_per_day": ({"iterations_per_day": 0.25}, {}),
    "min_recall_interval": ({"min_recall_interval": 4}, {}),
    "load_control": ({"load_control": "stretch"}, {}),
    "grade": ({"grade": "reward"}, {}),
    "rating_scale": ({"rating_scale": "binary"}, {}),
    "pass_reward": ({"pass_reward": 0.6}, {}),
    "min_graded": ({"min_graded": 3}, {}),
    "selection": ({"selection": "recent"}, {}),
    "reuse_selection": ({"reuse_selection": "recent"}, {}),
    "selection_config": ({"selection_config": {"temperature": 0.0}}, {}),
    "candidate_pool": ({"candidate_pool": 5}, {}),
    "domains": ({"domains": ["words"]}, {}),
    "domain_quotas": ({"domain_quotas": "equal"}, {}),
    "leech_failures": ({"leech_failures": 2}, {}),
    "leech_share": ({"leech_share": 0.0}, {"leech_failures": 1, "leech_interval": 1, "selection": "hardest"}),
    "leech_interval": ({"leech_interval": 2}, {"leech_failures": 1, "selection": "hardest", "leech_share": 1.0}),
    "max_age": ({"max_age": 1}, {}),
    "max_uses": ({"max_uses": 1}, {}),
    "diversity_coeff": ({"diversity_coeff": 5.0}, {}),
    "diversity_parts": ({"diversity_parts": ("variance", "episodic")}, {}),
    "diversity_on": ({"diversity_on": ("draw",)}, {}),
    "diversity_bonus": ({"diversity_bonus": "mean1"}, {}),
    "neighbours": ({"neighbours": 1}, {}),
    "embedding": ({"embedding": "policy"}, {}),
    "eviction": ({"eviction": "fifo"}, {"capacity": 20}),
    "max_episode_tokens": ({"max_episode_tokens": 30}, {}),
    "near_duplicate": ({"near_duplicate": 0.9}, {}),
    "degenerate_share": ({"degenerate_share": None}, {}),
    "on_secret": ({"on_secret": "mask"}, {}),
    "task_growth": ({"task_growth": True}, {}),
    "growth_depth": ({"growth_depth": 1}, {"task_growth": True}),
    "p_div": ({"p_div": 1.0}, {"task_growth": True, "capacity": 400, "load_control": "none"}),
}


def test_every_setting_is_the_buffers_or_the_drivers():
    assert (
        set(ACTS) | OF_THE_DRIVER | {"exact_neighbours", "index_device"}
        == set(TABLE)
        == {f.name for f in fields(ReplaySettings)}
    )


@pytest.mark.parametrize("name", ACTS)
def test_every_setting_acts(name):
    change, beside = ACTS[name]
    assert trace(**{**beside, **change}) != cached_trace(tuple(beside.items()))


def test_a_gpu_is_asked_for_and_not_ignored():
    with pytest.raises(ValueError, match="GPU"):
        trace(index_device="gpu")


traces: dict = {}


def cached_trace(beside):
    if beside not in traces:
        traces[beside] = trace(**dict(beside))
    return traces[beside]


def test_a_trace_is_the_same_twice():
    assert trace() == cached_trace(())


def test_domains_by_all_their_names():
    def drawn(domains):
        buffer = a_buffer(domains=domains, load_control="none")
        names = ("sums", "words", "maps")
        buffer.add([a_group(a_prompt(i, names[i // 4]), 1, i) for i in range(12)], 1)
        found = {p.domain for now in range(2, 6) for p in buffer.due(4, now)}
        return found, {group.prompt.domain for now in range(2, 5) for group in buffer.sample(4, now)}

    everywhere = {"sums", "words", "maps"}
    assert drawn("all") == (everywhere, everywhere)
    assert drawn("last") == ({"words"}, {"words"})  # the one before the newest
    assert drawn(["maps", "sums"]) == ({"maps", "sums"},) * 2
    assert drawn(f"{__name__}:is_of_words") == ({"words"}, {"words"})
    assert drawn(["none"]) == (set(), set())


BAD = {
    "revisit_fraction": (-0.1, 1.1, "a", None, True),
    "reuse_fraction": (1.0, -0.1, float("nan")),
    "capacity": (-1, 1.5, None),
    "groups_per_item": (0, True),
    "max_bytes": (0,),
    "min_buffer_size": (-1,),
    "spacing": ("never", None),
    "spacing_config": ({"unknown": 1}, {"desired_retention": 2.0}, None),
    "desired_retention": (0.0, 1.0),
    "iterations_per_day": (0.0, float("inf")),
    "min_recall_interval": (0, 0.5),
    "load_control": ("much",),
    "grade": ("likelihood", "mood"),
    "grade_reuse": ("yes", 1),
    "rating_scale": ("stars",),
    "pass_reward": ("high", None),
    "min_graded": (1,),
    "selection": ("best",),
    "reuse_selection": ("best",),
    "selection_config": ({"temperature": -1.0}, {"kappa": 1.0}, None),
    "candidate_pool": (0,),
    "domains": ("some", [], "no.such.module:thing", 3),
    "domain_quotas": ({"a": 0.0}, {}, "fair", {"a": "b"}),
    "leech_failures": (-1,),
    "leech_share": (1.5,),
    "leech_interval": (0,),
    "max_age": (0,),
    "max_uses": (0,),
    "reuse_coeff": (-1.0,),
    "reuse_correction": ("cut",),
    "mask_window": ((0.5,), (1.5, 2.0), (0.5, 0.9), 1.0),
    "max_drift": (0.0,),
    "diversity_coeff": (-0.5,),
    "diversity_parts": (("surprise",), ("variance", "variance"), "variance"),
    "diversity_on": (("due",),),
    "diversity_bonus": ("max",),
    "neighbours": (0,),
    "exact_neighbours": (255,),
    "index_device": ("tpu",),
    "embedding": ("bert",),
    "eviction": ("random",),
    "max_episode_tokens": (0, 1.5),
    "near_duplicate": (0.0, 1.1),
    "degenerate_share": (0.0, 2.0),
    "on_secret": ("burn",),
    "task_growth": (1,),
    "growth_depth": (0,),
    "p_div": (-0.1, 2.0),
    "num_shards": (0,),
    "timeout_s": (0.0,),
}


def test_every_setting_has_bad_values_and_the_defaults_are_none():
    assert set(BAD) == set(TABLE) and ReplaySettings().faults() == []


@pytest.mark.parametrize("name, value", [(name, value) for name, values in BAD.items() for value in values], ids=str)
def test_a_bad_value_is_named(name, value):
    faults = ReplaySettings(**{name: value}).faults()
    assert len(faults) == 1, faults
    assert faults[0].startswith(f"{name} = ") or name in faults[0]
    assert "expected" in faults[0]
    assert ReplaySettings(**{name: value}).faults("replay_")[0].startswith("replay_")


def test_all_faults_are_named_at_once_before_anything_is_opened(tmp_path):
    with pytest.raises(ValueError) as caught:
        SRLReplayBuffer(directory=tmp_path / "new", capacity=-5, spacing="never", max_uses=0)
    assert all(name in str(caught.value) for name in ("capacity = -5", "spacing = 'never'", "max_uses = 0"))
    assert not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match="capacity = 0; expected at least 1"):
        SRLReplayBuffer(capacity=0, revisit_fraction=0.0, reuse_fraction=0.0)


def test_many_items_are_searched_by_lists_from_exact_neighbours_on():
    def is_exact(exact_neighbours):
        given = {"exact_neighbours": exact_neighbours, "embedding": "policy", "diversity_parts": ("novelty",)}
        buffer = a_buffer(capacity=400, **given)
        groups = [a_group(i, 1, i, (1.0, 0.0)) for i in range(300)]
        buffer.add(groups, 1)
        buffer.embed({group.prompt.key: hidden_of(group, 16) for group in groups}, 1)
        return buffer.variety._neighbours.is_exact

    assert is_exact(20_000) and not is_exact(256)


# --- on disk --------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_bytes", [1, 3_000])
def test_groups_that_do_not_fit_in_memory_are_read_back_whole(max_bytes, tmp_path):
    roomy, tight = a_buffer(), a_buffer(tmp_path, run="a", max_bytes=max_bytes)
    groups = [a_group(i, 1, i, num_turns=3) for i in range(12)]
    for buffer in (roomy, tight):
        buffer.add(groups, 1)
    stats = tight.stats(1)
    assert stats["num_bytes_in_memory"] <= max_bytes < stats["num_bytes_stored"] == roomy.stats(1)["num_bytes_stored"]
    assert stats["num_spilled"] >= 12 - max_bytes // 700 and stats["num_read_back"] == 0
    mine, theirs = (sorted(buffer.sample(12, 2), key=lambda group: group.group_id) for buffer in (tight, roomy))
    for one, other, group in zip(mine, theirs, sorted(groups, key=lambda group: group.group_id), strict=True):
        assert_same(one, other)
        assert_same(replace(one, origin="fresh"), group)
    assert tight.stats(2)["num_read_back"] > 0 and roomy.stats(2)["num_read_back"] == 0
    tight.check_valid()


def test_stats_name_every_count_from_the_beginning():
    empty, later = a_buffer().stats(0), begun().stats(5)
    assert set(empty) == set(later) and all(isinstance(value, int | float) for value in later.values())
    zeros = Counter(name for name, value in empty.items() if value == 0)
    assert {"num_items", "num_refused", "num_evicted", "num_revisits", "num_reuses"} <= set(zeros)
    assert later["num_items"] == 12 + later["num_grown"] and later["num_reuses"] == 4


def test_len_and_describe_and_snapshot_say_what_there_is(tmp_path):
    buffer = begun(tmp_path / "a")
    told = buffer.snapshot(tmp_path / "copy")
    about = buffer.describe()
    assert len(buffer) == told["num_items"] and told["num_groups"] == buffer.store.num_groups
    assert about["position"] == told["position"] == 3 and about["path"] == str(tmp_path / "a" / "journal.db")
