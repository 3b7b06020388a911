"""The planner: each formula worked by hand, each setting seen in a plan, and its decisions on the real path."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from rllib_srl import SRL
from rllib_srl.algorithm.validation import faults_of
from rllib_srl.batch.advantage_estimator import AdvantageBatch
from rllib_srl.curriculum import TABLE, Planner, PlannerSettings
from rllib_srl.curriculum.controller import Controller, weighted
from rllib_srl.curriculum.planner import (
    Plasticity,
    Probe,
    Result,
    adapted,
    convergence,
    instability,
    recap_weights,
    scaled_softmax,
)
from rllib_srl.replay.schedule.load import reuse_share
from rllib_srl.replay.selection.shares import (
    averaged,
    bands,
    class_shares,
    floored_softmax,
    lent,
    staleness,
    uncertainty,
)
from rllib_srl.types import GroupMeta, Prompt
from tests.replay.groups import a_group, a_prompt
from tests.small_worlds import small_config, watch

EVEN, ODD = "tests.small_worlds:Even", "tests.small_worlds:Odd"
STEPS = np.abs(np.subtract.outer(np.arange(3), np.arange(3)))


def planner(**settings) -> Planner:
    made = PlannerSettings(**settings)
    assert made.faults() == []
    return Planner(made, seed=3, fractions=(0.25, 0.25))


# --- formulas, by hand ------------------------------------------------------------------------------


def test_bands_begin_at_their_bounds():
    assert bands(np.array([0.0, 0.39, 0.4, 0.8, 0.81, 1.0]), (0.4, 0.8)).tolist() == [0, 0, 1, 1, 2, 2]


def test_an_average_knows_how_much_it_has_seen():
    assert averaged(0.5, 1.0, 1.0, 0.05) == pytest.approx((0.525, 0.905))  # .95 .5 + .05; .95^2 + .05^2
    acc, variance = 0.5, 1.0
    for _ in range(500):
        acc, variance = averaged(acc, variance, 0.0, 0.05)
    assert acc == pytest.approx(0, abs=1e-9)
    assert uncertainty(np.array([1.0, variance])) == pytest.approx([1.0, (0.05 / 1.95) ** 0.5])


def test_staleness_grows_up_to_its_horizon():
    assert staleness(np.array([0, 10, 50, 900]), 50) == pytest.approx([0, 0.2, 1, 1])


def test_a_floor_holds_under_every_share():
    share_K = floored_softmax(np.array([0.0, np.log(3.0), 50.0]), 0.0)
    assert share_K[1] / share_K[0] == pytest.approx(3)
    share_K = floored_softmax(np.array([0.0, 50.0]), 0.02)
    assert share_K == pytest.approx([0.02, 0.98])
    assert floored_softmax(np.array([0.0, 9.0, 4.0]), 0.5) == pytest.approx([1 / 3] * 3)


def test_shares_by_band_are_those_worked_by_hand():
    plans = planner(mode="bands", single_every=0, ema_rate=1.0)
    plans.observe({"weak": [Result(0.2, 0.2)], "strong": [Result(0.9, 0.9)]}, 5)
    fresh = plans.plan(5, {"weak": 0.5, "strong": 0.5}).fresh
    # Both are equally stale, unknown and weighted: sigma(.6 - .1) = .62246, of .96, above a floor of .02.
    assert fresh == pytest.approx({"weak": 0.61756, "strong": 0.38244}, abs=1e-5)
    plans.observe({"weak": [Result(0.2, 0.2)]}, 15)
    fresh = plans.plan(15, {"weak": 0.9, "strong": 0.1}).fresh
    # weak: .6 + .9; strong: .1 + .1 + .1 * 10 / 50: sigma(1.28) = .78245
    assert fresh["weak"] == pytest.approx(0.02 + 0.96 * 0.78245, abs=1e-5)


def test_shares_of_what_is_stored_know_no_mixture():
    plans = planner(mode="bands", single_every=0, ema_rate=1.0)
    plans.observe({"old": [Result(0.2, 0.2)], "new": [Result(0.9, 0.9)]}, 5)
    plan = plans.plan(5, {"old": 0.0, "new": 1.0})
    assert plan.fresh == {"new": 1.0}  # only what the stream offers can be fresh
    assert plan.stored.shares == pytest.approx({"old": 0.61756, "new": 0.38244}, abs=1e-5)
    assert plan.stored.bands == {"old": 0, "new": 2}


def test_the_simple_mode_follows_the_failure_rate():
    plans = planner(mode="softmax", single_every=0, ema_rate=1.0)
    plans.observe({"weak": [Result(0.2, 0.2)], "strong": [Result(0.9, 0.9)]}, 1)
    fresh = plans.plan(1, {"weak": 0.5, "strong": 0.5}).fresh
    assert fresh["weak"] == pytest.approx(0.001 + 0.998 * 0.89090, abs=1e-5)  # sigma(3 (.8 - .1))
    tilted = plans.plan(1, {"weak": 0.25, "strong": 0.75}).fresh  # e^2.1 = 8.1662 to 3
    assert tilted["weak"] == pytest.approx(0.001 + 0.998 * 8.1662 / 11.1662, abs=1e-5)


def test_what_is_forgotten_is_rehearsed_and_what_was_never_learned_is_not():
    plans = planner(mode="softmax", single_every=0, ema_rate=1.0, sharpness=10.0, rehearse="forgotten")
    mixture = {"never": 1.0, "once": 1.0}
    plans.observe({"never": [Result(0.1, 0.1)], "once": [Result(0.8, 0.8)]}, 1)
    assert plans.plan(1, mixture).stored.shares == pytest.approx({"never": 0.5, "once": 0.5})  # nothing is lost yet
    plans.observe({"once": [Result(0.6, 0.6)]}, 2)
    plan = plans.plan(2, mixture)
    assert plan.stored.shares["once"] == pytest.approx(0.001 + 0.998 * 0.88080, abs=1e-5)  # sigma(10 (.8 - .6))
    assert plan.fresh["never"] == pytest.approx(0.001 + 0.998 * 0.99331, abs=1e-5)  # sigma(10 (.9 - .4))


def test_every_nth_batch_is_of_one_domain():
    plans = planner(mode="softmax", single_every=4)
    mixture = {"a": 0.5, "b": 0.5}
    made = [plans.plan(now, mixture) for now in range(1, 401)]
    assert [plan.stored.only is not None for plan in made[:8]] == [False, False, False, True] * 2
    for plan in made[3::4]:
        assert plan.fresh[plan.stored.only] == 1 == plan.stored.shares[plan.stored.only]
    counts = Counter(plan.stored.only for plan in made[3::4])
    assert counts["a"] == pytest.approx(50, abs=20)  # 4 standard deviations of 5


def test_bands_lend_to_their_neighbours_first():
    wide = np.array([99.0, 99.0, 99.0])
    assert lent(np.array([6.0, 3, 1]), np.array([2, 99, 99]), STEPS) == pytest.approx([2, 7, 1])
    assert lent(np.array([6.0, 3, 1]), np.array([2, 4, 99]), STEPS) == pytest.approx([2, 4, 4])
    assert lent(np.array([6.0, 3, 1]), np.array([99, 0, 99]), STEPS) == pytest.approx([6 + 18 / 7, 0, 1 + 3 / 7])
    assert lent(np.array([6.0, 3, 1]), np.array([1, 1, 1]), STEPS) == pytest.approx([1, 1, 1])
    assert lent(np.array([6.0, 3, 1]), wide, STEPS) == pytest.approx([6, 3, 1])
    assert lent(np.array([0.0, 0, 4]), np.array([9, 9, 1]), STEPS) == pytest.approx([0, 3, 1])


@given(st.lists(st.tuples(st.floats(0, 9), st.integers(0, 9), st.integers(0, 2)), min_size=1, max_size=6))
def test_lending_loses_nothing(rows):
    share_K, room_K, band_K = (np.array(column, float) for column in zip(*rows, strict=True))
    taken_K = lent(share_K, room_K, np.abs(np.subtract.outer(band_K, band_K)))
    assert (taken_K <= room_K + 1e-9).all() and (taken_K >= np.minimum(share_K, room_K) - 1e-9).all()
    assert taken_K.sum() == pytest.approx(min(share_K.sum(), room_K.sum()), abs=1e-6)


def test_a_domain_is_divided_into_bands_of_items():
    num_KC = class_shares(np.array([0.5, 0.5]), np.array([0, 2]), (0.6, 0.3, 0.1), [[99, 99, 99], [0, 2, 99]], 20)
    # The second domain has 2 items for the 9 of its low and medium bands: what is left goes to its high one.
    assert num_KC == pytest.approx(np.array([[6, 3, 1], [0, 2, 8]]))
    num_KC = class_shares(np.array([0.5, 0.5]), np.array([0, 2]), (0.6, 0.3, 0.1), [[1, 1, 1], [99, 99, 99]], 20)
    assert num_KC.sum(1) == pytest.approx([3, 17])


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
    assert adapted(0.25, 0.9, **rule, is_settled=False) == 0.1
    assert adapted(0.25, 0.9, **rule, is_stale=True) == pytest.approx(0.21)
    fraction = 0.0
    for _ in range(10):
        fraction = adapted(fraction, 1.0, 0.1, 0.1, (0.0, 0.5))
    assert fraction == pytest.approx(0.5)  # nothing keeps it at 0


def test_plasticity_settles_once_and_for_good():
    signal = Plasticity(every=5, tolerance=0.01)
    assert not signal.look(2.0, 5)  # nothing to compare with
    assert not signal.look(2.0, 6)  # between two looks
    assert not signal.look(1.5, 10)
    assert signal.look(1.505, 15)
    assert signal.look(9.0, 20)
    fresh = Plasticity(5, 0.01)
    fresh.set_state(signal.get_state())
    assert fresh.look(0.0, 25)


def test_probes_come_at_the_published_iterations():
    def probed(recall, num):
        probe, at = Probe.first(1, 1), []
        for now in range(1, num + 1):
            if probe.due <= now:
                at.append(now)
                probe = probe.after(recall, now, first_gap=1, mastery=0.5, growth=1.5)
        return at

    assert probed(1.0, 20) == [1, 3, 5, 8, 13]
    assert probed(0.4, 6) == [1, 2, 3, 4, 5, 6]
    mastered = Probe(1, 1.0).after(0.9, 1, 1, 0.5, 1.5).after(0.9, 3, 1, 0.5, 1.5)
    assert mastered.after(0.1, 5, 1, 0.5, 1.5) == Probe(6, 1.0)  # failure starts afresh


def test_forgetting_is_best_less_now():
    plans = planner(mode="bands", ema_rate=0.5)
    plans.observe({"a": [Result(1, 1)] * 2, "b": [Result(1, 1)]}, 1)  # a: .875, known; b: .75, half of it a guess
    assert plans.forgetting() == 0
    plans.observe({"a": [Result(0, 0)], "b": [Result(0, 0)]}, 2)  # a: .4375; b: .375, its first
    assert plans.forgetting() == pytest.approx((0.4375 + 0) / 2)


def test_forgetting_believes_probes_before_training():
    plans = planner(probe_every=1, adapt="both")
    plans.due_probes(1, {"a": 1.0})
    plans.probed("a", 0.75, 1)
    plans.observe({"a": [Result(1, 1)] * 99}, 1)
    plans.due_probes(2, {"a": 1.0})
    plans.probed("a", 0.25, 2)
    assert plans.forgetting() == 0.5


# --- every setting acts -----------------------------------------------------------------------------


def trace(**settings) -> list:
    """Return what 60 iterations with three domains plan, under results that depend on nothing but the iteration."""
    plans, generator, made = planner(**settings), np.random.default_rng(1), []
    mixture = {"a": 0.6, "b": 0.4, "c": 0.0}
    for now in range(1, 61):
        if now == 20:
            mixture = {"a": 0.0, "b": 0.3, "c": 0.7}
        due = plans.due_probes(now, mixture)
        for name in due:
            plans.probed(name, {"a": 0.9 - now / 100, "b": 0.5, "c": 0.2}[name], now)
        made.append((due, plans.plan(now, mixture)))
        played = [name for name in SPANS if mixture[name] or now % 5 == 0]
        earned = {name: float(generator.uniform(*SPANS[name])) for name in played}
        plans.observe({name: [Result(value, value, value)] for name, value in earned.items()}, now)
        plans.adapt(now, ess=0.3, signal=1.0 / now)
    return made


SPANS = {"a": (0.3, 0.9), "b": (0.0, 0.5), "c": (0.8, 1.0)}
BANDS, SOFT, SEC = {"mode": "bands"}, {"mode": "softmax"}, {"mode": "sec"}
RECAP = {"objective": "recap", "recap_window": 4}
ADAPT = {"adapt": "both", "forgetting_threshold": 0.01, "ema_rate": 0.5}
CHANGES = {
    "mode": [({}, "bands"), (BANDS, "softmax"), ({}, "sec")],
    "sec_rate": [(SEC, 0.9)],
    "acc_init": [(BANDS, 0.9)],
    "probe_first": [(BANDS, True), (ADAPT, True)],
    "ema_rate": [(BANDS, 0.5), (SOFT, 0.5)],
    "band_bounds": [(BANDS, (0.2, 0.5))],
    "band_weights": [(BANDS, (0.1, 0.3, 0.6))],
    "item_bands": [(SOFT, None), (SOFT, (0.2, 0.6, 0.2))],
    "staleness_coeff": [(BANDS, 0.5)],
    "staleness_horizon": [(BANDS, 5)],
    "uncertainty_coeff": [(BANDS, 0.9)],
    "temperature": [(BANDS, 0.2), (SEC, 0.2)],
    "sharpness": [(SOFT, 6.0)],
    "rehearse": [(SOFT, "forgotten")],
    "floor": [(BANDS, 0.1), (SOFT, 0.1), (SEC, 0.1)],
    "single_every": [(BANDS, 3), (SOFT, 0)],
    "objective": [({}, "recap")],
    "recap_window": [(RECAP, 8)],
    "recap_temperature": [(RECAP, 0.5)],
    "recap_mix": [(RECAP, 1.0)],
    "adapt": [({}, "revisit"), ({}, "reuse"), (ADAPT, "revisit")],
    "fraction_bounds": [(ADAPT, (0.2, 0.3))],
    "forgetting_threshold": [(ADAPT, 0.5)],
    "adapt_rate": [(ADAPT, 0.3)],
    "min_ess": [(ADAPT, 0.5)],
    "plasticity_signal": [(ADAPT, "entropy")],
    "plasticity_every": [({**ADAPT, "plasticity_signal": "entropy", "plasticity_tolerance": 0.01}, 3)],
    "plasticity_tolerance": [({**ADAPT, "plasticity_signal": "entropy"}, 0.1)],
    "probe_every": [({}, 4), (ADAPT, 4)],
    "probe_mastery": [({"probe_every": 2}, 0.1)],
    "probe_growth": [({"probe_every": 2}, 3.0)],
}
SEEN_ON_THE_REAL_PATH = {"probe_prompts"}


def test_every_setting_has_a_case():
    assert set(CHANGES) | SEEN_ON_THE_REAL_PATH == set(TABLE)


@pytest.mark.parametrize(
    ("name", "base", "value"), [(name, base, value) for name, cases in CHANGES.items() for base, value in cases]
)
def test_every_setting_acts(name, base, value):
    assert trace(**base) == trace(**base)
    assert trace(**base) != trace(**{**base, name: value})


@pytest.mark.parametrize(
    "settings",
    [BANDS, SEC, {**SOFT, "single_every": 3}, {**RECAP, **ADAPT, "plasticity_signal": "x", "probe_every": 2}],
)
def test_a_state_goes_on_exactly(settings):
    one, mixture = planner(**settings), {"a": 0.5, "b": 0.5}

    def steps(plans, first, num):
        made, generator = [], np.random.default_rng(first)
        for now in range(first, first + num):
            for name in (due := plans.due_probes(now, mixture)):
                plans.probed(name, float(generator.uniform()), now)
            made.append((due, plans.plan(now, mixture)))
            plans.observe({name: [Result(float(generator.uniform()), 0.5, now % 3)] for name in mixture}, now)
            plans.adapt(now, signal=1 / now)
        return made

    steps(one, 1, 17)
    state = json.loads(json.dumps(one.get_state()))
    want = steps(one, 18, 20)
    other = planner(**settings)
    other.set_state(state)
    assert steps(other, 18, 20) == want


# --- bad input --------------------------------------------------------------------------------------


def test_defaults_have_no_faults_and_plan_nothing():
    settings = PlannerSettings()
    assert settings.faults() == [] and not settings.is_on
    plan = Planner(settings, 0).plan(1, {"a": 1.0})
    assert (plan.fresh, plan.stored, plan.revisit_fraction, plan.reuse_fraction, plan.weights) == (*[None] * 4, {})


def test_all_faults_are_told_at_once():
    bad = PlannerSettings(
        mode="band", ema_rate=0, band_bounds=(0.9, 0.1), item_bands=(0, 0, 0), recap_mix=2, fraction_bounds=(0.5, 1.0)
    )
    told = bad.faults(prefix="planner_")
    assert [line.split(" = ")[0] for line in told] == [
        "planner_ema_rate",
        "planner_recap_mix",
        "planner_mode",
        "planner_item_bands",
        "planner_band_bounds",
        "planner_fraction_bounds",
    ]
    assert "planner_mode = 'band'; expected one of 'off', 'bands', 'softmax', 'sec'" in told


@pytest.mark.parametrize("name", sorted(set(TABLE) - {"mode", "objective", "adapt", "probe_every"}))
@pytest.mark.parametrize("value", ["x", -1, float("nan"), [1]])
def test_no_value_slips_through(name, value):
    if name == "plasticity_signal" and value == "x":
        return
    assert PlannerSettings(**{name: value}).faults()


def test_a_setting_that_would_do_nothing_is_refused():
    (line,) = PlannerSettings(sharpness=5.0, mode="bands").faults("planner_")
    assert line == "planner_sharpness = 5.0; expected 3.0 without planner_mode = 'softmax'"
    for name, cases in CHANGES.items():
        base, value = cases[0]
        assert PlannerSettings(**{**base, name: value}).faults() == []


def test_validate_reports_the_planner(random_llama_dir, tmp_path):
    config = small_config(random_llama_dir, tmp_path).planner(mode="bands", temperature=0, adapt="revisit")
    told = "\n".join(faults_of(config))
    assert "planner_temperature = 0; expected a number of at least 0.001" in told
    assert "planner_adapt = 'revisit' with replay_capacity = 0; expected 'none' without a memory" in told
    config = small_config(random_llama_dir, tmp_path).planner(adapt="both", fraction_bounds=(0.1, 0.6))
    for revisit, reuse, wrong in [(0.0, 0.3, ["revisit"]), (0.1, 0.6, []), (0.7, 0.05, ["revisit", "reuse"])]:
        config.replay(revisit_fraction=revisit, reuse_fraction=reuse)
        told = [line for line in faults_of(config) if "planner_fraction_bounds" in line]
        assert [line.partition("_fraction = ")[0] for line in told] == [f"replay_{name}" for name in wrong]
    assert told[0] == (
        "replay_revisit_fraction = 0.7; expected 0.1 to 0.6, the planner_fraction_bounds within which planner_adapt = "
        "'both' moves it"
    )
    config = small_config(random_llama_dir, tmp_path).planner(mode="softmax").replay(domain_quotas="equal")
    assert any(line.startswith("replay_domain_quotas = 'equal'; expected None") for line in faults_of(config))
    with pytest.raises(TypeError, match=r"planner\(\) got .*\n  modus; .*did you mean mode\?"):
        config.planner(modus="bands")


def test_a_bandit_gives_shares_by_the_mean_absolute_advantage():
    """Q' = Q + .5 (r - Q): a: 0, .4, .6, b: 0, 0, .1; shares softmax(Q / .2)."""
    plans = planner(mode="sec", temperature=0.2)
    mixture = {"a": 0.5, "b": 0.5}
    assert plans.plan(1, mixture).fresh == {"a": 0.5, "b": 0.5}
    plans.observe({"a": [Result(0.5, 0.5, 0.9), Result(0.5, 0.5, 0.7)], "b": [Result(1, 1, 0.0)]}, 1)
    plan = plans.plan(2, mixture)
    assert plan.stored is None and plan.fresh["a"] == pytest.approx(1 / (1 + np.exp(-0.4 / 0.2)))
    plans.observe({"a": [Result(0.5, 0.5, 0.8)], "b": [Result(1, 1, 0.2)]}, 2)
    assert plans.gauges()["bandit_value/a"] == pytest.approx(0.6)
    assert plans.plan(3, mixture).fresh["b"] == pytest.approx(1 / (1 + np.exp(0.5 / 0.2)))
    # a domain that was not played keeps its value; weights of a mixture multiply the shares
    plans.observe({"a": [Result(0.5, 0.5, 0.6)]}, 3)
    shares = plans.plan(4, {"a": 0.25, "b": 0.75}).fresh
    assert shares["b"] / shares["a"] == pytest.approx(3 * np.exp(-0.5 / 0.2))


# --- the real path ----------------------------------------------------------------------------------


@pytest.fixture
def config(random_llama_dir, tmp_path, ray_here):
    config = small_config(random_llama_dir, tmp_path)
    config.env = None
    return config.environment(worlds={EVEN: {}, ODD: {"pay": 0.0}}).training(num_prompts_per_batch=8)


def remembering(config, **settings):
    """Switch a memory on that has something to give from the third iteration on."""
    return config.replay(
        capacity=500, min_buffer_size=4, spacing="none", load_control="none", degenerate_share=None, **settings
    )


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
def test_shares_reach_the_prompts(config):
    # Odd is paid for everything: it is soon known, and gets what the floor leaves it.
    config.planner(mode="softmax", ema_rate=1.0, sharpness=50.0, floor=0.125, single_every=0)
    rows, results = train(config, 4)
    assert [fresh["odd"] for fresh, _ in rows[1:]] == [1, 1, 1]  # an eighth of 8
    told = results[-1]["planner"]
    assert told["share_realised"] == {"even": 0.875, "odd": 0.125} and told["acc_ema"]["odd"] == 1.0
    assert told["share_intended"]["odd"] == pytest.approx(0.125, abs=1e-6)


@pytest.mark.slow
def test_a_bandit_moves_fresh_prompts_to_the_domain_with_advantages(config):
    # Odd is paid for everything: no advantage; Even has some in every iteration.
    config.planner(mode={"name": "sec", "temperature": 0.05, "rate": 1.0})
    rows, results = train(config, 4)
    assert all(fresh == {"even": 8} for fresh, _ in rows[1:])
    assert results[-1]["planner"]["bandit_value"]["odd"] == 0.0 < 0.3 < results[-1]["planner"]["bandit_value"]["even"]


@pytest.mark.slow
def test_a_single_domain_batch_is_one_with_its_revisits(config):
    remembering(config, revisit_fraction=0.5, reuse_fraction=0.0).planner(mode="bands", single_every=2)
    rows, _ = train(config, 6)
    kinds = [len(fresh + revisits) for fresh, revisits in rows]
    assert kinds[1::2] == [1, 1, 1] and max(kinds[::2]) == 2
    assert any(revisits for _, revisits in rows[1::2])


@pytest.mark.slow
def test_stored_shares_reach_the_revisits(config):
    remembering(config, revisit_fraction=0.5, reuse_fraction=0.0)
    config.planner(mode="softmax", ema_rate=1.0, sharpness=50.0, floor=0.0, single_every=0, item_bands=None)
    rows, _ = train(config, 6)
    # Even can fail and odd cannot: all revisits are of even once both are known, while there are enough of them.
    assert sum((revisits for _, revisits in rows[2:]), Counter())["odd"] == 0
    assert sum((revisits for _, revisits in rows[2:]), Counter())["even"] == 16


@pytest.mark.slow
def test_items_of_a_band_are_drawn_by_its_share(config):
    remembering(config, revisit_fraction=0.25, reuse_fraction=0.0).training(lr=0.0).environment(worlds={EVEN: {}})
    config.planner(mode="softmax", item_bands=(0.0, 1.0, 0.0), band_bounds=(0.4, 0.9), single_every=0)
    algo = config.build_algo()
    seen, drawn = watch(algo), []
    rates: dict[str, float] = {}
    for _ in range(8):
        seen.clear()
        algo.train()
        groups = [group for batch in seen for group in batch.groups]
        drawn += [rates[group.prompt.key] for group in groups if group.origin == "revisit"]
        rates |= {group.prompt.key: float(np.mean(group.rewards_G >= 0.9)) for group in groups}
    algo.stop()
    # Half or three quarters right: 10 of 16 items of a policy that is right half the time; all that are drawn.
    assert len(drawn) == 14 and all(0.4 <= rate <= 0.9 for rate in drawn)
    assert np.mean([0.4 <= rate <= 0.9 for rate in rates.values()]) < 0.9


@pytest.mark.slow
def test_recap_weights_reach_the_advantages(config, monkeypatch):
    config.planner(objective="recap", recap_window=2, recap_temperature=0.05)
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
def test_a_fraction_that_adapts_reaches_the_memory(config):
    remembering(config, revisit_fraction=0.5, reuse_fraction=0.4)
    config.planner(adapt="both", fraction_bounds=(0.0, 0.5), forgetting_threshold=1.0, adapt_rate=0.2)
    rows, results = train(config, 6)
    # Nothing is ever forgotten by 1: down by a tenth of 1/2 * 2 each iteration, from .5: .5 .4 .3 .2 .1 0
    played = [sum(revisits.values()) for _, revisits in rows]
    assert played == [0, 3, 2, 2, 1, 0]  # 3.2 2.4 1.6 .8 0 of 8, the rest carried
    told = [result["replay"]["revisit_share_intended"] for result in results]
    assert told == pytest.approx([0.5, 0.4, 0.3, 0.2, 0.1, 0.0])
    assert results[-1]["planner"]["reuse_fraction"] == 0.0


@pytest.mark.slow
def test_a_signal_of_the_learner_is_heard(config):
    remembering(config, revisit_fraction=0.5, reuse_fraction=0.4)
    config.planner(adapt="revisit", fraction_bounds=(0.1, 0.5), forgetting_threshold=0.0, plasticity_signal="entropy")
    algo = config.planner(plasticity_every=1, plasticity_tolerance=1e9).build_algo()
    entropies, told = [], []
    for _ in range(3):
        entropies.append(algo.train()["learners"][DEFAULT_MODULE_ID]["entropy"])
        told.append(algo.controller.planner.get_state()["plasticity"])
    algo.stop()
    assert [state["is_settled"] for state in told] == [False, True, True]
    assert [state["last"] for state in told] == pytest.approx([entropies[0], entropies[1], entropies[1]])


@pytest.mark.slow
def test_a_metric_that_no_learner_reports_is_refused(config):
    remembering(config).replay(revisit_fraction=0.25).planner(adapt="revisit", plasticity_signal="entropie")
    algo = config.build_algo()
    with pytest.raises(ValueError, match=r"planner_plasticity_signal = 'entropie'; expected a metric of the learner"):
        algo.train()
    algo.stop()


def recorded(algo, num_iterations: int) -> tuple[list[dict], Counter]:
    """Train, and return what each iteration trained on and left behind, and how many prompts each stream played."""
    play, record, counts = algo.play, [], Counter()

    def watched(prompts, stream="train", **arguments):
        counts[stream] += len(prompts)
        for batch in play(prompts, stream, **arguments):
            record.extend(batch.groups if stream == "train" else [])
            yield batch

    algo.play = watched
    rows = []
    for _ in range(num_iterations):
        record.clear()
        result = algo.train()
        groups = [meta.ref for meta in record]
        weights = algo.learner_group.get_weights()[DEFAULT_MODULE_ID]
        rows.append(
            {
                "iteration": algo.iteration,
                "prompts": [group.prompt for group in groups],
                "tokens": np.concatenate([group.token_ids_N for group in groups]),
                "weights": np.concatenate([weights[name].ravel() for name in sorted(weights)]),
                "planner": result.get("planner", {}),
            }
        )
    algo.play = play
    return rows, counts


def assert_trained_alike(one: list[dict], other: list[dict]) -> None:
    """Check that prompts and tokens are equal, and weights up to what the order of arrival rounds (1e-3 a step)."""
    for a, b in zip(one, other, strict=True):
        assert (a["iteration"], a["prompts"]) == (b["iteration"], b["prompts"])
        assert np.array_equal(a["tokens"], b["tokens"])
        assert np.abs(a["weights"] - b["weights"]).max() < 3e-4


@pytest.mark.slow
def test_probes_change_nothing_that_is_trained(config):
    plain = config.copy(copy_frozen=False).build_algo()
    want, counts = recorded(plain, 3)
    plain.stop()
    assert counts == {"train": 24}
    algo = config.planner(probe_every=1, probe_prompts=5, probe_mastery=0.0).build_algo()
    rows, counts = recorded(algo, 3)
    algo.stop()
    told = rows[-1]["planner"]
    assert_trained_alike(rows, want)
    assert counts == {"train": 24, "probe": 20}  # 5 of each domain in the first iteration, and in the third
    assert told["num_probe_prompts"] == 20 and 20 <= told["num_probe_tokens"] <= 60  # 1 to 3 tokens an answer
    assert told["recall"]["odd"] == 1.0


@pytest.mark.parametrize(("mark", "recall"), [(2 / 3, 0.75), (None, 0.25)])
def test_a_probe_goes_by_the_pass_reward_of_the_environment(mark, recall):
    """Grades 4, 3, 3 and 2 of 4: three are a pass of a rubric, one is full marks."""
    extra = {} if mark is None else {"pass_reward": mark}
    rewards = np.float32([1, 2 / 3, 2 / 3, 1 / 3])
    played = [GroupMeta.of(a_group(a_prompt(i, "a"), rewards=[r], extra=extra), None) for i, r in enumerate(rewards)]
    source = SimpleNamespace(domain_weights=lambda: {"a": 1.0}, probes=lambda *_: [g.prompt for g in played])
    settings = PlannerSettings(probe_every=1, probe_first=True, probe_prompts=4)
    controller = Controller(settings, 0, (0.0, 0.0), source, MetricsLogger(root=True))
    controller.begin(1, 4, lambda prompts: played)
    assert controller.planner.domains["a"].recall == recall


@pytest.mark.slow
def test_a_start_may_be_measured(config):
    algo = config.planner(mode="bands", probe_first=True, probe_prompts=4, single_every=0).build_algo()
    algo.train()
    domains = algo.controller.planner.domains
    algo.stop()
    assert domains["odd"].recall == 1.0 and domains["odd"].acc > 0.99 and domains["even"].recall is not None


@pytest.mark.slow
def test_a_planned_run_goes_on_exactly(config, tmp_path):
    remembering(config, revisit_fraction=0.25, reuse_fraction=0.25)
    config.planner(mode="bands", single_every=3, adapt="both", objective="recap", recap_window=2, probe_every=2)
    algo = config.planner(probe_prompts=3).build_algo()
    recorded(algo, 3)
    algo.save_to_path(tmp_path / "three")
    want, counts = recorded(algo, 4)
    algo.stop()
    again = SRL.from_checkpoint(tmp_path / "three")
    rows, counts_again = recorded(again, 4)
    assert_trained_alike(rows, want)
    assert counts == counts_again and counts["probe"]
    again.stop()


def test_a_share_that_changes_keeps_what_it_carries():
    share = reuse_share(0.4)
    assert share.owed(8) == 5  # 5.33
    assert share.carried_into(reuse_share(0.25)).owed(8) == 3  # .33 + 2.67
