"""The planner: each formula worked by hand, each setting seen in a plan, and its decisions on the real path."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from rllib_srl import SRL
from rllib_srl.algorithm.validation import faults_of
from rllib_srl.batch.advantages import AdvantageBatch
from rllib_srl.curriculum.curriculum import weighted
from rllib_srl.curriculum.planner import (
    Planner,
    Result,
    adapted,
    convergence,
    instability,
    recap_weights,
    scaled_softmax,
)
from rllib_srl.curriculum.settings import PlannerSettings
from rllib_srl.types import Prompt
from tests.algorithm.test_resume import go_on
from tests.small_worlds import small_config, watch

EVEN, ODD = "tests.small_worlds:Even", "tests.small_worlds:Odd"


def planner(**settings) -> Planner:
    return Planner(PlannerSettings(**settings).checked(), fractions=(0.25, 0.25))


def test_recap_weights_are_the_published_ones():
    score_K = 0.5 * np.array([1 + 0.1, 0.8 + 0.3, 0.5 + 0.05])
    assert scaled_softmax(score_K, 5) == pytest.approx([1.018, 1.018, 0.964], abs=5e-4)
    assert scaled_softmax(score_K, 1) == pytest.approx([1.087, 1.087, 0.826], abs=5e-4)
    assert scaled_softmax(score_K, 0.1) == pytest.approx([1.453, 1.453, 0.093], abs=1e-3)


def test_recap_looks_at_two_windows():
    falling, flat = [0.8, 0.8, 0.4, 0.4], [0.5, 0.5, 0.5, 0.5]
    assert convergence(falling) == pytest.approx(0.5, abs=1e-5) and convergence(flat) == 1.0
    assert instability(falling) == pytest.approx(0.2 / 1.2, abs=1e-5) and instability(flat) == 0.0
    assert convergence([0.0] * 4) == 1.0 and instability([0.0] * 4) == 0.0
    weights = recap_weights({"falling": falling, "flat": flat, "new": [0.9, 0.1, 0.9]}, 2, 0.5, 1.0)
    # alpha = 1: scores .5 and 1, apart by .5 / .5 = 1: 2 sigma(1) = 1.46212
    assert weights == pytest.approx({"falling": 0.53788, "flat": 1.46212, "new": 1.0}, abs=1e-4)
    assert recap_weights({"a": flat, "b": flat}, 2, 5, 0.5) == {"a": 1.0, "b": 1.0}
    assert recap_weights({"a": [9.0, *falling], "b": flat}, 2, 0.5, 1.0)["a"] == weights["falling"]
    shaky = recap_weights({"shaky": [0.9, 0.1, 0.9, 0.1], "flat": flat}, 2, 1.0, 0.5)
    assert shaky["shaky"] > 1 and recap_weights({"s": [0.9, 0.1, 0.9, 0.1], "f": flat}, 2, 1.0, 1.0)["s"] == 1.0


def test_a_fraction_follows_forgetting_within_its_bounds():
    rule = {"threshold": 0.1, "rate": 0.1, "bounds": (0.1, 0.5)}
    assert adapted(0.25, 0.2, **rule) == pytest.approx(0.29)  # a tenth of the range
    assert adapted(0.25, 0.1, **rule) == pytest.approx(0.21)
    assert adapted(0.49, 0.9, **rule) == 0.5 and adapted(0.11, 0.0, **rule) == 0.1
    fraction = 0.0
    for _ in range(10):
        fraction = adapted(fraction, 1.0, 0.1, 0.1, (0.0, 0.5))
    assert fraction == pytest.approx(0.5)  # nothing keeps it at 0


def test_forgetting_is_best_less_now(monkeypatch):
    monkeypatch.setattr("rllib_srl.curriculum.planner.EMA_RATE", 0.5)
    plans = planner(adapt="both")
    plans.observe({"a": [Result(1, 1)] * 2, "b": [Result(1, 1)]}, 1)  # a: .875, known; b: .75, half of it a guess
    assert plans.forgetting() == 0
    plans.observe({"a": [Result(0, 0)], "b": [Result(0, 0)]}, 2)  # a: .4375; b: .375, its first
    assert plans.forgetting() == pytest.approx((0.4375 + 0) / 2)


def test_forgetting_uses_measured_recall_before_training():
    plans = planner(adapt="both")
    plans.observe({"a": [Result(1, 1)] * 99}, 1)
    plans.recalled("a", 0.75)
    plans.observe({"a": [Result(1, 1)] * 99}, 2)
    plans.recalled("a", 0.25)
    assert plans.forgetting() == 0.5


def trace(**settings) -> list:
    """Return what 60 iterations with three domains plan, under results that depend on nothing but the iteration."""
    plans, generator, made = planner(**settings), np.random.default_rng(1), []
    mixture = {"a": 0.6, "b": 0.4, "c": 0.0}
    for now in range(1, 61):
        if now == 20:
            mixture = {"a": 0.0, "b": 0.3, "c": 0.7}
        made.append(plans.plan(now, mixture))
        played = [name for name in SPANS if mixture[name] or now % 5 == 0]
        earned = {name: float(generator.uniform(*SPANS[name])) for name in played}
        plans.observe({name: [Result(value, value)] for name, value in earned.items()}, now)
        plans.adapt()
    return made


SPANS = {"a": (0.3, 0.9), "b": (0.0, 0.5), "c": (0.8, 1.0)}
RECAP = {"objective": "recap", "recap_window": 4}
ADAPT = {"adapt": "both", "forgetting_threshold": 0.01}
CHANGES = {
    "objective": [({}, "recap")],
    "recap_window": [(RECAP, 8)],
    "adapt": [({}, "revisit"), ({}, "reuse"), (ADAPT, "revisit")],
    "fraction_bounds": [(ADAPT, (0.2, 0.3))],
    "forgetting_threshold": [(ADAPT, 0.5)],
}


def test_every_setting_has_a_case():
    assert set(CHANGES) == set(PlannerSettings.model_fields)


@pytest.mark.parametrize(
    ("name", "base", "value"), [(name, base, value) for name, cases in CHANGES.items() for base, value in cases]
)
def test_every_setting_acts(name, base, value):
    assert trace(**base) == trace(**base)
    assert trace(**base) != trace(**{**base, name: value})


@pytest.mark.parametrize("settings", [RECAP, ADAPT, {**RECAP, **ADAPT}])
def test_a_state_goes_on_exactly(settings):
    one, mixture = planner(**settings), {"a": 0.5, "b": 0.5}

    def steps(plans, first, num):
        made, generator = [], np.random.default_rng(first)
        for now in range(first, first + num):
            made.append(plans.plan(now, mixture))
            plans.observe({name: [Result(float(generator.uniform()), now % 3 / 2)] for name in mixture}, now)
            if now % 4 == 0:
                plans.recalled("a", float(generator.uniform()))
            plans.adapt()
        return made

    steps(one, 1, 17)
    state = json.loads(json.dumps(one.get_state()))
    want = steps(one, 18, 20)
    other = planner(**settings)
    other.set_state(state)
    assert steps(other, 18, 20) == want


def test_defaults_have_no_faults_and_plan_nothing():
    settings = PlannerSettings().checked()
    assert not settings.is_on
    plan = Planner(settings).plan(1, {"a": 1.0})
    assert (plan.fresh, plan.revisit_fraction, plan.reuse_fraction, plan.weights) == (None, None, None, {})


def test_all_faults_are_told_at_once():
    bad = {"objective": "recapped", "recap_window": 1.5, "fraction_bounds": (0.5, 1.0)}
    found = PlannerSettings.faults(bad, "planner_")
    assert [line.split(" = ")[0] for line in found] == [
        "planner_objective",
        "planner_recap_window",
        "planner_fraction_bounds",
    ]
    assert "planner_objective = 'recapped'; expected one of 'uniform', 'recap'" in found


@pytest.mark.parametrize("name", sorted(set(PlannerSettings.model_fields) - {"objective", "adapt"}))
@pytest.mark.parametrize("value", ["x", -1, float("nan"), [1]])
def test_no_value_slips_through(name, value):
    assert PlannerSettings.faults({name: value})


def test_validate_reports_the_planner(random_llama_dir, tmp_path):
    config = small_config(random_llama_dir, tmp_path).planner(adapt="revisit")
    told = "\n".join(faults_of(config))
    assert "planner_adapt = 'revisit' with replay_capacity = 0; expected 'none' without a memory" in told
    config = small_config(random_llama_dir, tmp_path).planner(adapt={"name": "both", "bounds": (0.1, 0.6)})
    for revisit, reuse, wrong in [(0.0, 0.3, ["revisit"]), (0.1, 0.6, []), (0.7, 0.05, ["revisit", "reuse"])]:
        config.replay(revisit_fraction=revisit, reuse_fraction=reuse)
        told = [line for line in faults_of(config) if "planner_adapt.bounds" in line]
        assert [line.partition("_fraction = ")[0] for line in told] == [f"replay_{name}" for name in wrong]
    assert told[0] == (
        "replay_revisit_fraction = 0.7 with planner_adapt = 'both'; expected 0.1 to 0.6, the planner_adapt.bounds"
    )
    with pytest.raises(TypeError, match=r"planner\(\) got .*\n  adopt; .*did you mean adapt\?"):
        config.planner(adopt="both")


@pytest.fixture
def config(random_llama_dir, tmp_path, ray_here):
    config = small_config(random_llama_dir, tmp_path)
    config.env = None
    return config.environment(worlds={EVEN: {}, ODD: {"pay": 0.0}}).training(num_prompts_per_batch=8)


def remembering(config, **settings):
    """Switch a memory on that has something to give from the third iteration on."""
    return config.replay(capacity=500, min_buffer_size=4, spacing="none", degenerate_share=None, **settings)


def train(config, num_iterations):
    """Return the domains of fresh and revisited prompts of each iteration, and the results."""
    algo = config.build_algo()
    seen, results = watch(algo), []
    rows = []
    for _ in range(num_iterations):
        seen.clear()
        results.append(algo.train())
        groups = [g for batch in seen for g in batch.groups if g.rewards_G.size == 4]
        origins = {"fresh": Counter(), "revisit": Counter()}
        for group in groups:
            origins[group.origin][group.prompt.domain] += 1
        rows.append((origins["fresh"], origins["revisit"]))
    algo.stop()
    return rows, results


@pytest.mark.slow
def test_recap_weights_reach_the_advantages(config, monkeypatch):
    config.planner(objective={"name": "recap", "window": 2})
    seen = []
    monkeypatch.setattr("rllib_srl.algorithm.srl.weighted", lambda compared, weights: seen.append(weights) or compared)
    _, results = train(config, 5)
    assert seen[0] == {"even": 1.0, "odd": 1.0} or not seen[0]
    assert seen[4] != {"even": 1.0, "odd": 1.0} and sum(seen[4].values()) == pytest.approx(2)
    assert results[-1]["planner"]["loss_weight"].keys() == {"even", "odd"}


def test_weights_multiply_the_advantages_of_their_domain():
    groups = [SimpleNamespace(prompt=Prompt("world", "1", domain)) for domain in "abc"]
    compared = AdvantageBatch(groups, [np.array([1.0, -1.0])] * 3, [], {})
    made = weighted(compared, {"a": 2.0, "b": 0.5}).advantages
    assert [a.tolist() for a in made] == [[2.0, -2.0], [0.5, -0.5], [1.0, -1.0]]
    assert weighted(compared, {}) is compared


@pytest.mark.slow
def test_a_fraction_that_adapts_reaches_the_memory(config, monkeypatch):
    monkeypatch.setattr("rllib_srl.curriculum.planner.ADAPT_RATE", 0.2)
    remembering(config, revisit_fraction=0.5, reuse_fraction=0.4)
    config.planner(adapt={"name": "both", "bounds": (0.0, 0.5), "forgetting_threshold": 1.0})
    rows, results = train(config, 6)
    # Nothing is ever forgotten by 1: down by a tenth of 1/2 * 2 each iteration, from .5: .5 .4 .3 .2 .1 0
    played = [sum(revisits.values()) for _, revisits in rows]
    assert played == [0, 3, 2, 2, 1, 0]  # 3.2 2.4 1.6 .8 0 of 8, the rest carried
    told = [result["replay"]["revisit_share_intended"] for result in results]
    assert told == pytest.approx([0.5, 0.4, 0.3, 0.2, 0.1, 0.0])
    assert results[-1]["planner"]["reuse_fraction"] == 0.0


def recorded(algo, num_iterations: int) -> tuple[list[dict], Counter]:
    """Train, and return what each iteration trained on and left behind, and how many prompts each stream played."""
    play, counts = algo.rollouts.play, Counter()

    def counting(prompts, iteration, stream="train", *arguments, **options):
        counts[stream] += len(prompts)
        return play(prompts, iteration, stream, *arguments, **options)

    algo.rollouts.play = counting
    rows = go_on(algo, num_iterations)
    algo.rollouts.play = play
    return rows, counts


def assert_trained_alike(one: list[dict], other: list[dict]) -> None:
    """Check that prompts and tokens are equal, and weights up to what the order of arrival rounds (1e-3 a step)."""
    for a, b in zip(one, other, strict=True):
        assert (a["iteration"], a["prompts"]) == (b["iteration"], b["prompts"])
        assert np.array_equal(a["tokens"], b["tokens"])
        assert np.abs(a["weights"] - b["weights"]).max() < 3e-4


@pytest.mark.slow
def test_a_planned_run_goes_on_exactly(config, tmp_path):
    remembering(config, revisit_fraction=0.25, reuse_fraction=0.25)
    config.planner(adapt="both", objective={"name": "recap", "window": 2})
    config.callbacks(["contrib.probe", "contrib.sec"])
    algo = config.build_algo()
    recorded(algo, 3)
    algo.save_to_path(tmp_path / "three")
    want, counts = recorded(algo, 4)
    algo.stop()
    again = SRL.from_checkpoint(tmp_path / "three")
    rows, counts_again = recorded(again, 4)
    assert_trained_alike(rows, want)
    assert counts == counts_again and counts["probe"]
    again.stop()
