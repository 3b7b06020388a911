"""A finite pool and adaptive shares on the real path: visits by value, exact resumes, and settings that do not fit."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from rllib_srl.types import Prompt
from tests.small_memory import go, memory_config, watched
from tests.small_worlds import ON_BOTH_ENGINES, small_config, with_engine

EVEN, ODD = "tests.small_worlds:Even", "tests.small_worlds:Odd"


@pytest.fixture
def config(random_llama_dir, tmp_path, ray_here):
    """Return settings with a pool of 10 prompts, 4 a batch."""
    config = memory_config(random_llama_dir, tmp_path / "log", revisit_fraction="auto", reuse_fraction=0.0)
    return config.environment(env_config={"num_prompts": 10}).replay(selection={"name": "signal", "noise": 0.0})


def played(iterations) -> list[list[str]]:
    return [[group.prompt.prompt_id for group in one.played] for one in iterations]


@pytest.mark.slow
def test_a_pool_is_played_once_before_any_prompt_is_played_twice(config, build):
    """All answers are paid the same, so every group is silent and all values are equal: 10 prompts, 4 a batch."""
    config.environment(env_config={"num_prompts": 10, "pay": 1.0})
    algo = build(config)
    iterations = go(algo, 10)
    batches = played(iterations)
    counts: Counter = Counter({f"even {n}": 0 for n in range(0, 20, 2)})
    for batch, one in zip(batches, iterations, strict=True):
        assert len(set(batch)) == 4
        origins = {group.prompt.prompt_id: group.origin for group in one.played}
        assert origins == {name: "revisit" if counts[name] else "fresh" for name in batch}
        counts.update(batch)
        assert max(counts.values()) - min(counts.values()) <= 1
    assert set(counts.values()) == {4} and len(counts) == 10
    assert iterations[-1].replay["num_enrolled"] == iterations[-1].replay["num_items"] == 10
    other = build(config.copy(copy_frozen=False).debugging(seed=2))
    assert played(go(other, 3)) != batches[:3]


@pytest.mark.slow
@ON_BOTH_ENGINES
def test_silent_prompts_are_visited_less_often(config, build, engine):
    """Paid prompts of `Odd` are silent after one visit; `Even` has signal: kappa 0, no domains (phi 0), 24 batches."""
    with_engine(config, engine)
    config.env = None
    worlds = {EVEN: {"num_prompts": 6}, ODD: {"num_prompts": 6, "pay": 0.0}}
    config.environment(worlds=worlds, env_config={}).training(lr=0.0)
    config.replay(selection={"name": "signal", "noise": 0.0, "kappa": 0.0, "phi": 0.0})
    algo = build(config)
    iterations = go(algo, 24)
    visits = Counter(group.prompt.prompt_id for one in iterations for group in one.played)
    silent = [visits[f"odd {n}"] for n in range(0, 12, 2)]
    mixed = [visits[f"even {n}"] for n in range(0, 12, 2)]
    assert sum(silent) + sum(mixed) == 96 and max(silent) < min(mixed)
    # The memory's own numbers give the next batch: the largest elapsed * S * L / cost, worked out here again.
    buffer = algo.memory._actor.buffer
    rows, now = buffer.store.items[buffer.store.slots()], algo.iteration + 1

    def priority(row) -> float:
        scale = buffer.domain_statistics.unsolved_scale("even" if row["domain"] == names.index("even") else "odd")
        progress = 1 / (1 + max(0.0, row["num_unsolved"] - 2 * scale) / scale)
        return float((now - row["last_drawn"]) / (1 + row["num_silent"]) * progress / row["cost"])

    names = list(buffer.store.domains)
    best = sorted((priority(row) for row in rows), reverse=True)[:4]
    (one,) = go(algo, 1)
    keys = {int(group.prompt.key, 16) for group in one.played}
    assert sorted((priority(row) for row in rows if int(row["key"]) in keys), reverse=True) == pytest.approx(best)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["greso", "mopps", "spo"])
def test_published_rules_draw_from_the_pool(config, build, rule):
    """A third batch of greso ends the first pass; the others draw again by the history that the buffer keeps."""
    algo = build(config.replay(selection=rule).environment(env_config={"num_prompts": 10, "pay": 1.0}))
    batches = played(go(algo, 3))
    assert all(len(set(batch)) == 4 for batch in batches)
    buffer = algo.memory._actor.buffer
    candidates = buffer.draws.all_candidates(buffer.store.slots(), 4)
    visits = Counter(name for batch in batches for name in batch)
    if rule == "greso":
        assert len(visits) == 10
    names = [buffer.store.prompt_of(slot).prompt_id for slot in buffer.store.slots().tolist()]
    assert candidates.num_silent.tolist() == [visits[name] for name in names]  # every group is paid the same
    is_right = candidates.history_sum == candidates.history_count
    assert is_right.all() and (rule == "greso" or (candidates.history_count > 0).sum() == len(visits))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3])
@ON_BOTH_ENGINES
def test_with_the_posterior_baseline_the_chance_is_the_expected_squared_advantage(config, build, size, engine):
    """4 m (1 - m) N0 / (N0 + 1) (N0 + n) / (N0 + n - 1) of the rows' histories, for every draw of an iteration."""
    with_engine(config, engine)
    config.training(advantage={"name": "posterior", "prior_weight": 3.0}, group_size=size)
    config.replay(grade={"min_episodes": 1}, history={"by": "versions", "half_life": 1e9})
    algo = build(config)
    go(algo, 5)
    buffer = algo.memory._actor.buffer
    rows = {int(row["key"]): row.copy() for row in buffer.store.items[buffer.store.slots()]}
    mean = buffer.domain_statistics.expected_reward("even")
    go(algo, 1)
    assert len(buffer.draws.reasons) == 4
    for slot, told in buffer.draws.reasons.items():
        row = rows[int(buffer.store.items["key"][slot])]
        weight = 3.0 + row["history_count"]
        m = (3.0 * mean + row["history_sum"]) / weight
        want = 4 * m * (1 - m) * weight / (weight + 1) * (weight + size) / (weight + size - 1)
        assert told["chance"] == pytest.approx(want)


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [1000, 8])  # 8: less than the pool, so the share adapts
def test_a_run_goes_on_exactly_from_a_checkpoint(config, build, tmp_path, capacity):
    config.replay(selection="signal", reuse_fraction=0.25, capacity=capacity)
    whole = build(config)
    go(whole, 4)
    path = whole.save_to_path(str(tmp_path / "saved"))
    want = played(go(whole, 5))
    other = build(config)
    go(other, 1)
    other.restore_from_path(path)
    assert played(go(other, 5)) == want


@pytest.mark.slow
def test_in_an_endless_stream_the_share_follows_what_revisits_teach(random_llama_dir, tmp_path, ray_here, build):
    """More prompts than the memory holds; revisits are as good as fresh prompts, then all are silent."""
    config = memory_config(random_llama_dir, tmp_path / "log", revisit_fraction="auto", reuse_fraction=0.0, capacity=40)
    algo = build(config.training(num_prompts_per_batch=8, lr=0.0))
    with watched(algo) as iterations:
        for _ in range(12):
            algo.train()
    balance = algo.filler._balance
    assert balance is not None and 0.05 <= balance.fraction <= 0.5
    intended = [one.replay["revisit_share_intended"] for one in iterations]
    assert intended[0] == 0.25 and len(set(intended)) > 1  # it has moved
    # The same steps, from the groups that were played and trained on.
    from rllib_srl.curriculum.filling import LiveBalance

    twin = LiveBalance()
    for one in iterations:
        assert one.replay["revisit_share_intended"] == twin.fraction
        twin.observe(one.metas, {group.group_id for _, group, _ in one.trained})
    assert twin.get_state() == balance.get_state()


FAULTS = [
    ({"selection": "srl"}, {}, "replay_selection = 'srl'; expected a rule for prompts never played too: signal"),
    ({}, {"num_prompts": 3}, r"a pool of 3 prompts; expected at least num_prompts_per_batch \* replay_min_recall"),
    ({}, {"num_prompts": 1}, "a pool of 1 prompts; expected at least"),
    ({"min_recall_interval": 3}, {}, "replay_min_recall_interval = 12, because each prompt is in play once"),
    ({"domains": ["even"]}, {}, r"replay_domains = \['even'\]; expected 'all'"),
    ({"on_group": "contrib.growth"}, {}, "replay_on_group = 'contrib.growth'; expected None"),
]


@pytest.mark.parametrize(
    ("max_lag", "in_flight", "named"),
    [(0, None, "num_prompts_per_batch"), (2, None, "(max_lag + 1) * num_prompts_per_batch"), (2, 40, "in_flight")],
)
def test_a_pool_that_is_too_small_is_refused_in_the_names_of_what_was_set(max_lag, in_flight, named):
    from rllib_srl.algorithm.srl import SRL
    from rllib_srl.curriculum.filling import _faults_of_pool
    from rllib_srl.replay.settings import ReplaySettings

    algo = SRL.__new__(SRL)
    algo.config = SimpleNamespace(max_lag=max_lag, in_flight=in_flight, num_prompts_per_batch=8)
    num = {"num_prompts_per_batch": 8, "in_flight": 40}.get(named, 24)
    assert (algo._num_in_flight, algo._in_flight_named) == (num, named)
    settings, pool = ReplaySettings(min_recall_interval=2, selection="signal"), [Prompt("e", "1")]
    (fault,) = _faults_of_pool(settings, pool, num, {"e": 1.0}, named)
    assert fault.startswith(f"a pool of 1 prompts; expected at least {named} * replay_min_recall_interval = {2 * num},")


@pytest.mark.slow
@pytest.mark.parametrize(("replay", "env_config", "message"), FAULTS)
def test_settings_that_do_not_fit_a_pool_are_refused(config, replay, env_config, message):
    config.environment(env_config={"num_prompts": 10, **env_config}).replay(**replay)
    with pytest.raises(ValueError, match=message):
        config.build_algo()


def test_settings_that_do_not_fit_auto_are_refused(random_llama_dir, tmp_path):
    config = small_config(random_llama_dir, tmp_path).replay(capacity=100, revisit_fraction="auto")
    config.planner(adapt="revisit").environment(prompt_order="epochs")
    with pytest.raises(ValueError) as caught:
        config.validate()
    told = str(caught.value)
    assert "replay_revisit_fraction = 'auto' with planner_adapt = 'revisit'; expected a number" in told
    assert "prompt_order = 'epochs' with replay_revisit_fraction = 'auto'; expected one of them" in told


@pytest.mark.slow
def test_epochs_on_the_real_path(random_llama_dir, tmp_path, ray_here):
    config = small_config(random_llama_dir, tmp_path)
    config.env = None
    config.environment(worlds={EVEN: {"num_prompts": 5}, ODD: {"num_prompts": 3}}, prompt_order="epochs")
    algo = config.build_algo()
    drawn = []
    draw = algo.source.draw
    algo.source.draw = lambda *args: drawn.append(draw(*args)) or drawn[-1]
    for _ in range(4):
        algo.train()
    algo.stop()
    ids = [prompt.prompt_id for batch in drawn for prompt in batch]
    assert len(set(ids[:8])) == 8 and set(ids[:8]) == set(ids[8:]) and ids[:8] != ids[8:]
