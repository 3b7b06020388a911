"""The memory on the real path, all in one process: what is revisited and reused is what is said, stored and trained."""

import json
from collections import Counter

import numpy as np
import pytest

from rllib_srl.batch.advantages import has_variance
from rllib_srl.replay.payloads import decode
from rllib_srl.replay.reading import reading
from scripts.memory_laws import content
from tests.replay.groups import SCHEDULED
from tests.small_envs import watch
from tests.small_memory import go, memory_config, weights_of

pytestmark = pytest.mark.slow


@pytest.fixture
def config(random_llama_dir, tmp_path, ray_here):
    return memory_config(random_llama_dir, tmp_path / "log", **SCHEDULED)


@pytest.fixture
def build(build):
    """Return a function that builds an algorithm with settings of the memory."""
    return lambda config, **replay: build(config.copy(copy_frozen=False).replay(**replay))


def buffer_of(algo):
    return algo.memory.process.actor


@pytest.mark.smoke
def test_shares_are_those_of_what_was_played_and_trained(config, build):
    """4 prompts at .2: after 26 iterations with a memory .2 within 1 %, of prompts and of groups in the batch."""
    algo = build(config.training(lr=1e-4), revisit_fraction=0.2, reuse_fraction=0.2, max_age=8, max_uses=50)
    iterations = go(algo, 29)
    assert all({*one.replay} == {*iterations[0].replay} for one in iterations)
    with_memory = iterations[3:]  # 4 items after the first; the next two must find groups with variance
    num = Counter(group.origin for one in with_memory for group in one.played)
    num_reused = sum(len(one.reused) for one in with_memory)
    assert num.total() == 104 and abs(num["revisit"] / 104 - 0.2) < 0.01
    assert num_reused == len(with_memory) and num_reused / (num_reused + 4 * len(with_memory)) == 0.2
    # What the learner was given, against what is reported of each iteration and of all.
    total: Counter = Counter()
    for one in iterations:
        groups = [("reuse", meta.ref) for meta in one.reused] + [(group.origin, group) for group in one.played]
        found: Counter = Counter()
        for origin, group in groups:
            found[f"num_groups_{origin}"] += 1
            found[f"num_generated_{origin}"] += int(group.loss_mask_N.sum())
        for origin, group, _ in one.trained:
            name = origin if origin == "reuse" else group.origin
            found[f"num_trained_{name}"] += 1
            found[f"num_tokens_{name}"] += int(group.loss_mask_N.sum())
            assert has_variance(group.rewards_G)
        names = [name for name in one.replay if name.rsplit("_", 1)[-1] in ("fresh", "revisit", "reuse")]
        assert len(names) == 12 and {name: one.replay[name] for name in names} == {name: found[name] for name in names}
        learnt = one.result["learners"]["default_policy"]
        assert learnt["reuse/num_tokens"] == found["num_tokens_reuse"]
        assert learnt["num_tokens"] == found["num_tokens_fresh"] + found["num_tokens_revisit"]
        total += found
    last = iterations[-1].replay
    for what, num_drawn in (("revisits", total["num_groups_revisit"]), ("reuses", total["num_groups_reuse"])):
        assert last[f"num_{what}"] == last[f"num_{what}_owed"] - last[f"num_{what}_short"] == num_drawn
    for what, name in (("groups", "prompts"), ("trained", "trained"), ("tokens", "tokens")):
        fresh, revisit, reuse = (total[f"num_{what}_{origin}"] for origin in ("fresh", "revisit", "reuse"))
        assert last[f"revisit_share_{name}"] == pytest.approx(revisit / (fresh + revisit))
        assert last[f"reuse_share_{name}"] == pytest.approx(reuse / (fresh + revisit + reuse))


def test_a_reused_group_is_the_stored_one_to_the_last_bit(config, build):
    algo = build(config.training(lr=3e-5), groups_per_item=9)
    iterations, played, ages = go(algo, 8), {}, set()
    for now, one in enumerate(iterations, 1):
        for meta in one.reused:
            stored, born = played[meta.group_id]
            ages.add(now - born)
            assert meta.origin == meta.ref.origin == "reuse" and meta.prompt == stored.prompt
            for name in ("token_ids_N", "loss_mask_N", "behaviour_logp_N", "rewards_G", "offsets", "versions_G2"):
                assert np.array_equal(getattr(meta.ref, name), getattr(stored, name)), name
            given = next(group for origin, group, _ in one.trained if group.group_id == meta.group_id)
            assert np.array_equal(given.behaviour_logp_N, stored.behaviour_logp_N)
        if one.reused:
            learnt = one.result["learners"]["default_policy"]
            assert learnt["reuse/drift"] > 1e-4  # so the stored log-probs are not the learner's of today
            assert learnt["reuse/gradient_norm"] > 1e-3
        played |= {group.group_id: (group, now) for group in one.played}
        ids = [group.group_id for _, group, _ in one.trained]
        assert len(ids) == len(set(ids))
    assert len(ages) > 2 and min(ages) == 1
    rows = buffer_of(algo).tables.groups
    uses = Counter(meta.group_id for one in iterations for meta in one.reused)
    assert rows["uses"][rows["size"] > 0].sum() == sum(uses.values())


def test_with_both_fractions_zero_it_is_plain_grpo(config, build):
    none, idle = (build(config, revisit_fraction=0.0, reuse_fraction=0.0, capacity=capacity) for capacity in (0, 1000))
    seen = [watch(none), watch(idle)]
    for _ in range(3):
        results = [none.train(), idle.train()]
        prompts, tokens = (
            [[read(meta) for meta in batches[-1].groups] for batches in seen]
            for read in (lambda meta: meta.prompt, lambda meta: meta.ref.token_ids_N.tolist())
        )
        assert prompts[0] == prompts[1] and tokens[0] == tokens[1]
        assert np.array_equal(weights_of(none), weights_of(idle))
    assert "replay" not in results[0] and results[1]["replay"]["num_items"] == 12
    assert results[1]["replay"]["num_stored_groups"] == 12 and results[1]["replay"]["num_revisits_owed"] == 0


def test_groups_that_the_policy_has_left_behind_leave_the_memory(config, build):
    """After an update no log-prob is to this precision what it was, so that all reused groups leave."""
    algo = build(config.training(lr=3e-4), max_logp_gap=1e-9, reuse_fraction=0.5, groups_per_item=9)
    gone = [meta.group_id for one in go(algo, 5) for meta in one.reused]
    assert len(set(gone)) == len(gone) >= 4 and buffer_of(algo).counts["num_dropped_drifted"] == len(gone)
    rows = buffer_of(algo).tables.groups
    stored = {decode(buffer_of(algo).store.payload(int(seq))).group_id for seq in rows["seq"][rows["size"] > 0]}
    assert stored and not stored & set(gone)


def test_an_iteration_that_failed_is_tried_again_with_requests_of_its_own(config, build, tmp_path):
    """What the failed one stored and drew is no answer to the next; no name of a group comes twice."""
    algo = build(config.training(num_prompts_per_batch=8))
    go(algo, 2)
    learn, failed = algo._learn, []

    def fail(shards):
        failed.append(shards)
        raise RuntimeError("out of memory")

    algo._learn = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        algo.train()
    algo._learn = learn
    (one,) = go(algo, 1)
    assert algo.iteration == 3 and [visit.key for visit in one.visits.values()] == [m.prompt.key for m in one.metas]
    assert [visit.is_new for visit in one.visits.values()] == [meta.origin == "fresh" for meta in one.metas]
    assert one.replay["num_items"] == 8 + 6 + 6 + 6 and one.replay["num_reuses"] == one.replay["num_reuses_owed"]
    assert sorted(meta.group_id for meta in one.metas) == sorted(f"3.{slot}" for slot in range(8, 16))
    algo.memory.snapshot(tmp_path / "copy")
    with reading(tmp_path / "copy/snapshot.db") as memory:
        names = [memory.store.group(seq).group_id for seq in content(memory.tables)["groups"]]
    assert {f"3.{slot}" for slot in range(8)} & {*names} and len(names) == len({*names})
    (later,) = go(algo, 1)
    assert sorted(meta.group_id for meta in later.metas) == sorted(f"4.{slot}" for slot in range(8))


def test_an_item_of_one_env_is_never_played_or_graded_in_the_other(config, build):
    """`Odd` pays for exactly what `Even` does not: a revisit in the wrong environment would earn the wrong rewards."""
    config.env, even, odd = None, "tests.small_envs:Even", "tests.small_envs:Odd"
    config.environment(envs={even: {"num_prompts": 90}, odd: {"num_prompts": 90}}, mixture={even: 1, odd: 1})
    algo = build(config.training(num_prompts_per_batch=12, group_size=3), revisit_fraction=0.5)
    iterations, num_revisits = go(algo, 6), Counter()
    tokenizer, home = algo.env_runner.tokenizer, {}
    for one in iterations:
        for group in one.played + [meta.ref for meta in one.reused]:
            prompt = group.prompt
            assert home.setdefault(prompt.prompt_id, prompt.env_id) == prompt.env_id
            assert prompt.domain == prompt.prompt_id.split()[0] == prompt.env_id.split(":")[1].lower()
            for g in range(group.size):
                mask = group.loss_mask_N[group.offsets[g] : group.offsets[g + 1]]
                text = tokenizer.decode(group.stream(g)[mask], skip_special_tokens=True)
                is_even = bool(text) and ord(text[0]) % 2 == 0
                assert group.rewards_G[g] == (is_even if prompt.env_id == even else not is_even)
            num_revisits[prompt.domain] += group.origin == "revisit"
    assert min(num_revisits["even"], num_revisits["odd"]) > 3, num_revisits


def test_the_pass_rate_of_a_visit_is_that_of_its_transcripts(config, build, tmp_path):
    config.env_runners(num_transcripts=99)
    algo = build(config, revisit_fraction=0.5)
    iterations = go(algo, 12)
    lines = [json.loads(line) for line in (tmp_path / "log0/transcripts.jsonl").read_text("utf-8").splitlines()]
    rewards, origins = {}, {}
    for line in lines:
        rewards.setdefault(line["group_id"], []).append(line["reward"])
        origins[line["group_id"]] = line["origin"]
    known, num_visits, num_lapses = set(), 0, 0
    for one in iterations:
        for at, meta in enumerate(one.metas):
            visit, key = one.visits[meta.group_id], meta.prompt.key
            passed = sum(reward >= 0.9 for reward in rewards[meta.group_id])
            assert visit.is_new == (key not in known) == (meta.origin == "fresh")
            assert (meta.origin, origins[meta.group_id]) == (("revisit" if at < len(one.revisits) else "fresh"),) * 2
            assert (visit.pass_rate, visit.key) == (passed / 4, key)
            known.add(key)
            num_visits += 1
            num_lapses += visit.is_lapse
        assert [meta.prompt for meta in one.metas[: len(one.revisits)]] == one.revisits
    store = buffer_of(algo).tables
    assert store.items["lapses"].sum() == num_lapses == sum(one.replay["num_lapses"] for one in iterations)
    assert num_visits == 48 and len(known) < 32
