"""Each way to use the memory and to fill a batch, by name, on vLLM and the learner: values recomputed from rewards.

The gradient of each update is that of a slow loss, episode by episode, with the advantages that the rewards give.

One engine serves all tests. Each algorithm verifies, before it plays, that the engine has the weights of its learner.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest

from rllib_srl.batch.estimators import group, has_signal
from rllib_srl.cli.shared.settings import apply_settings, expanded
from rllib_srl.engine import pack
from rllib_srl.learner.rl_module import load_causal_lm
from rllib_srl.replay.selection.lottery import lottery
from rllib_srl.rollout import env_runner
from tests.algorithm.test_reuse_today import HALF_LIFE, LEAST, WEIGHT, check_values
from tests.algorithm.test_spo import SPO
from tests.losses import slow_loss
from tests.small_learner import Recording, relative_gap
from tests.small_memory import go, memory_config, weights_of
from tests.small_worlds import with_engine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
NUM_PROMPTS, SLOTS = 10, 4
EVEN, ODD = "tests.small_worlds:Even", "tests.small_worlds:Odd"


@pytest.fixture(scope="module")
def engines():
    """Return the engines that were started, by their settings: one, which is closed at the end."""
    found: dict = {}
    yield found
    for _, close in found.values():
        close()
    assert len(found) == 1


@pytest.fixture
def config(engines, random_llama_dir, tmp_path, ray_here, monkeypatch):
    """Return settings on vLLM with a pool of 10 prompts, 4 a batch."""
    make_engine = env_runner.make_engine

    def shared(kind, model_dir, **settings):
        assert kind == "vllm"
        key = str(model_dir), repr(sorted(settings.items()))
        if key in engines:  # with the weights of another run
            weights = load_causal_lm(model_dir).named_parameters()
            engines[key][0].load_weights(pack(weights, version=0, dtype="float32"))
            return engines[key][0]
        engine = make_engine(kind, model_dir, **settings)
        engines[key] = engine, engine.close
        engine.close = lambda: None
        return engine

    monkeypatch.setattr(env_runner, "make_engine", shared)
    config = memory_config(random_llama_dir, tmp_path / "log", revisit_fraction="auto", reuse_fraction=0.0)
    config.environment(env_config={"num_prompts": NUM_PROMPTS}).training(num_prompts_per_batch=SLOTS, loss="grpo")
    config.learners(learner_class=Recording)
    return with_engine(config, "vllm")


class Draw(NamedTuple):
    """A draw from the pool, as the memory was before it."""

    now: int
    rows: np.ndarray  # of all items
    generator: np.random.Generator  # a copy
    mean: float  # of the domain
    scale: float  # U of `signal`
    keys: set[int]  # of the drawn items


def watch_draws(algo):
    """Return a list that each draw from the pool is added to."""
    draws, buffer = [], algo.memory._actor.buffer
    from_pool = buffer.from_pool

    def watched(*arguments):
        rows = buffer.store.items[buffer.store.slots()].copy()
        generator = copy.deepcopy(buffer.generators["revisit"])
        statistics = buffer.domain_statistics
        answer = from_pool(*arguments)
        keys = {int(prompt.key, 16) for prompt in answer[0]}
        told = (statistics.mean("even"), statistics.unsolved_scale("even"))
        draws.append(Draw(arguments[1], rows, generator, *told, keys))
        return answer

    buffer.from_pool = watched
    return draws


def elapsed(draw):
    return np.where(draw.rows["last_drawn"] == 0, draw.now + 1, draw.now - draw.rows["last_drawn"])


def discounted(draw):
    """Return the history of each item as the newest policy finds it: a half-life of 11 versions."""
    rho = 0.5 ** ((draw.rows["version"].max() - draw.rows["version"]) / 11.0)
    return rho * draw.rows["history_sum"], rho * draw.rows["history_count"]


def check_draws(draws, value, num=SLOTS):
    """Check that each draw took the items of the largest values."""
    for draw in draws:
        value_N = value(draw)
        drawn = [value_N[at] for at, key in enumerate(draw.rows["key"].tolist()) if key in draw.keys]
        assert sorted(drawn, reverse=True) == pytest.approx(sorted(value_N, reverse=True)[:num])


def check_visits(algo, iterations, num=SLOTS):
    """Check the memory's visits and rewards against what was played: each prompt once a batch."""
    visits: Counter = Counter()
    for one in iterations:
        keys = [int(played.prompt.key, 16) for played in one.played]
        assert len(set(keys)) == len(keys) == num
        visits.update(keys)
    buffer = algo.memory._actor.buffer
    rows = buffer.store.items[buffer.store.slots()]
    assert {int(row["key"]): int(row["visits"]) for row in rows if row["visits"]} == visits
    last = {int(played.prompt.key, 16): float(played.rewards_G.mean()) for one in iterations for played in one.played}
    assert {int(row["key"]): float(row["reward"]) for row in rows if row["visits"]} == pytest.approx(last)


def check_group_advantages(iterations):
    """Check that the groups with signal, and no others, reach the learner with GRPO's advantages."""
    for one in iterations:
        trained = {of.group_id: advantage_G for _, of, advantage_G in one.trained}
        assert trained.keys() == {played.group_id for played in one.played if has_signal(played.rewards_G)}
        for played in one.played:
            if played.group_id in trained:
                expected = group(played.rewards_G.astype(float))
                np.testing.assert_allclose(trained[played.group_id], expected, atol=1e-6)


def run(algo, num):
    """Train, and return the draws and the iterations."""
    draws = watch_draws(algo)
    return draws, train(algo, num)


def train(algo, num):
    """Train, and return the iterations; each gradient is that of the slow loss, and the weights have changed."""
    learner, learn, models, gradients = algo.learner_group._learner, algo._learn, [], []

    def watched_learn(shards):
        models.append(copy.deepcopy(learner.model))
        is_updated = learn(shards)
        gradients.append(learner.gradients() if is_updated else None)
        return is_updated

    algo._learn, before = watched_learn, weights_of(algo)
    iterations = go(algo, num)
    del algo._learn
    assert not np.array_equal(weights_of(algo), before)
    assert any(one.trained for one in iterations)
    for one, model, gradient in zip(iterations, models, gradients, strict=True):
        assert (gradient is not None) == bool(one.trained)
        if one.trained:
            assert relative_gap(gradient, slow_gradient(algo.config, model, one.trained)) < 1e-4
    return iterations


def slow_gradient(config, model, groups):
    """Return the gradient of the slow loss of groups with their advantages."""
    settings = config.loss_settings()
    episodes = [
        slow_loss.told(model, None, of, g, float(advantage_G[g]), origin == "reuse")
        for origin, of, advantage_G in groups
        for g in range(of.size)
    ]
    return slow_loss.gradient(model, settings, episodes, config.replay_reuse_coeff)


# --- which prompts ------------------------------------------------------------------------------------------------


def test_signal(config, build):
    """The largest elapsed / (1 + c) L / cost: kappa 0, no domains first (phi 0), no noise."""
    algo = build(config.replay(selection={"name": "signal", "noise": 0.0, "kappa": 0.0, "phi": 0.0}))
    draws, iterations = run(algo, 4)

    def priority(draw):
        cost = draw.rows["cost"].astype(float)
        cost = np.where(cost > 0, cost, cost[cost > 0].mean() if cost.any() else 1.0)
        progress = 1 / (1 + np.maximum(0, draw.rows["num_unsolved"] - 2 * draw.scale) / draw.scale)
        return elapsed(draw) / (1 + draw.rows["num_silent"]) * progress / cost

    check_draws(draws, priority)
    check_visits(algo, iterations)
    check_group_advantages(iterations)


def test_greso(config, build):
    """The most overdue in passes, after c silent groups each is skipped with probability 1 - max(.5^c, .01)."""
    algo = build(config.replay(selection="greso"), group_size=2)  # many groups of two are silent
    draws, iterations = run(algo, 4)

    def late(draw):
        chance = np.maximum(0.5 ** draw.rows["num_silent"].astype(float), 0.01)
        visits = np.where(draw.rows["last_drawn"] == 0, 0, np.maximum(1, draw.rows["visits"])).astype(np.uint64)
        lot = (lottery(draw.rows["seq"] << np.uint64(24) | visits, 0) >> np.uint64(11)) * 2.0**-53 + 2.0**-54
        with np.errstate(divide="ignore"):
            skipped = np.where(chance < 1, np.ceil(np.log(lot) / np.log(1 - chance)) - 1, 0.0)
        return elapsed(draw) / max(1.0, chance.sum() / SLOTS) - 1 - skipped

    assert any(draw.rows["num_silent"].any() for draw in draws)
    check_draws(draws, late)
    check_visits(algo, iterations)
    check_group_advantages(iterations)


def test_mopps(config, build):
    """The pass rates nearest to .5, each drawn from Beta(1 + s, 1 + n - s)."""
    algo = build(config.replay(selection="mopps"))
    draws, iterations = run(algo, 3)

    def nearness(draw):
        total, num = discounted(draw)
        return -np.abs(draw.generator.beta(1 + total, 1 + num - total) - 0.5)

    check_draws(draws, nearness)
    check_visits(algo, iterations)
    check_group_advantages(iterations)


def test_spo(config, build):
    """The arm of the studies, with history by versions: draws by sqrt(v (1 - v)) + .05, (r - v) by batch."""
    settings = {**SPO, "replay_history": {"by": "versions"}, "replay_min_buffer_size": 4}
    config = apply_settings(config, expanded(settings))
    algo = build(config, num_prompts_per_batch=6)
    draws, iterations = run(algo, 3)
    weight = config.loss_settings().prior_weight

    def value_of(draw):
        total, num = discounted(draw)
        return (weight * draw.mean + total) / (weight + num)

    def drawn_by(draw):
        value = value_of(draw)
        return np.log(np.sqrt(value * (1 - value)) + 0.05) + draw.generator.gumbel(size=len(value))

    check_draws(draws, drawn_by, 6)
    check_visits(algo, iterations, 6)
    for draw, one in zip(draws, iterations, strict=True):
        values = dict(zip(draw.rows["key"].tolist(), value_of(draw).tolist(), strict=True))
        # The policy that plays is one update newer than that of the last visit.
        histories = [one.visits[played.group_id].history for played in one.played]
        surprise = np.array([float(played.rewards_G[0]) for played in one.played])
        surprise -= [(weight * h.domain_mean + h.reward_sum) / (weight + h.num_episodes) for h in histories]
        expected = (surprise - surprise.mean()) / max(0.05, surprise.std())
        trained = {of.group_id: advantage_G for _, of, advantage_G in one.trained}
        assert [played.size for played in one.played] == [1] * 6 and len(trained) == 6
        for played, advantage, history in zip(one.played, expected, histories, strict=True):
            np.testing.assert_allclose(trained[played.group_id], [advantage], atol=1e-6)
            if history.num_episodes == 0:
                assert values[int(played.prompt.key, 16)] == pytest.approx(history.domain_mean)


# --- which advantages ---------------------------------------------------------------------------------------------


def test_posterior_and_its_reuse(config, build):
    """Groups of one: every advantage, also of reused groups, from a list of all visits and their rewards."""
    config.replay(revisit_fraction=0.6, reuse_fraction=0.25, min_buffer_size=4, selection="uniform")
    config.replay(history={"by": "versions", "half_life": HALF_LIFE}, reuse_selection="uniform", max_age=4)
    advantage = {"name": "posterior", "prior_weight": WEIGHT, "min_surprise": LEAST}
    algo = build(config, advantage=advantage, group_size=1, num_prompts_per_batch=8)
    iterations = train(algo, 4)
    assert len(check_values(iterations)) >= 4
