"""Streams of domains: weights worked by hand, prompts that follow them, and runs that stop and go on exactly."""

import importlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_srl.algorithm.validation import config_errors
from rllib_srl.common.callbacks import SRLCallback
from rllib_srl.curriculum.prompts import PromptSource
from rllib_srl.curriculum.streams import Progress, make_stream, stream_errors
from rllib_srl.tune_configs.streams import STREAMS, scaled
from rllib_srl.types import Prompt
from tests.envs.table import entry_points
from tests.small_envs import Even, Odd, small_config, watch

EVEN, ODD = "tests.small_envs:Even", "tests.small_envs:Odd"


def is_small(prompt_id: str) -> bool:
    """Keep the lower half of `Even`'s numbers: a filter, as a user would write it."""
    return int(prompt_id.rsplit(" ", 1)[1]) < 40


def is_never(prompt_id: str) -> bool:
    return False


def source(spec, seed: int = 0, **env_configs) -> PromptSource:
    stream = make_stream(spec)
    creators = {env_id: Even if "Even" in env_id else Odd for env_id in stream.entries}
    configs = {env_id: dict(entry.env_config) for env_id, entry in stream.entries.items()}
    return PromptSource(creators, configs, dict.fromkeys(stream.entries, 1.0), seed, stream)


def domains(prompts) -> list[str]:
    return [prompt.domain for prompt in prompts]


def test_stages_follow_one_another_and_the_last_one_stays():
    stream = make_stream([{"env": "a", "iterations": 2}, {"env": "b", "iterations": 3}, {"env": "a"}])
    seen = [stream.weights(Progress(done, 999)) for done in range(7)]
    assert [weights["a"] for weights in seen] == [1, 1, 0, 0, 0, 1, 1]
    assert all(weights["a"] + weights["b"] == 1 for weights in seen)
    assert [stream.stage(Progress(done)) for done in range(7)] == [0, 0, 1, 1, 1, 2, 2]
    assert stream.length == Progress(iterations=6)  # 2 + 3 + 1, what is open counting one


def test_a_stage_may_last_a_number_of_tokens():
    stream = make_stream([{"env": "a", "tokens": 100}, {"env": "b", "tokens": 50}])
    at = [0, 99, 100, 149, 150, 10_000]
    assert [stream.weights(Progress(7, tokens))["b"] for tokens in at] == [0, 0, 1, 1, 1, 1]
    assert stream.length == Progress(tokens=150)


def test_a_schedule_interpolates_between_its_knots():
    entries = [{"env": "a"}, {"env": "b"}, {"env": "c"}]
    stream = make_stream({"domains": entries, "schedule": [[10, {"a": 2}], [20, {"b": 1, "c": 3}]]})
    for done, weights in [
        (0, [1, 0, 0]), (10, [1, 0, 0]), (15, [0.5, 0.125, 0.375]),  # half of (1, 0, 0) and half of (0, 1/4, 3/4)
        (18, [0.2, 0.2, 0.6]), (20, [0, 0.25, 0.75]), (99, [0, 0.25, 0.75]),
    ]:  # fmt: skip
        assert list(stream.weights(Progress(done)).values()) == pytest.approx(weights)
    assert stream.stage(Progress(15)) is None


@given(st.integers(0, 10_000), st.integers(0, 10_000), st.sampled_from(sorted(STREAMS)))
def test_weights_are_a_pure_function_of_progress(iterations, tokens, name):
    one, other = make_stream(STREAMS[name]), make_stream(STREAMS[name])
    other.weights(Progress(3, 3))
    weights = one.weights(Progress(iterations, tokens))
    assert weights == other.weights(Progress(iterations, tokens))
    assert sum(weights.values()) == pytest.approx(1) and min(weights.values()) >= 0


def test_prompts_follow_the_stream():
    stages = source([{"env": EVEN, "iterations": 2}, {"env": ODD, "iterations": 1}, {"env": EVEN}])
    played = []
    for _ in range(4):
        played.append(domains(stages.draw(3)))
        stages.advance(num_tokens=5)
    assert played == [["even"] * 3, ["even"] * 3, ["odd"] * 3, ["even"] * 3]
    assert stages.progress == Progress(4, 20)


def test_one_env_under_two_settings_is_two_domains():
    spec = [
        {"env": EVEN, "domain": "few", "env_config": {"num_prompts": 2}, "iterations": 1},
        {"env": EVEN, "domain": "many", "env_config": {"num_prompts": 50}, "iterations": 1},
    ]
    stages = source(spec)
    few = stages.draw(10)
    stages.advance(0)
    many = stages.draw(50)
    assert set(domains(few)) == {"few"} and set(domains(many)) == {"many"}
    assert len({prompt.prompt_id for prompt in few}) == 2 and len({prompt.prompt_id for prompt in many}) == 50
    assert {prompt.env_id for prompt in few} == {f"{EVEN}#few"}
    assert Counter(domains(stages.heldout(4))) == {"few": 2, "many": 2}


def test_a_filter_makes_a_part_of_an_env_a_domain():
    spec = [{"env": EVEN, "domain": "small", "filter": "tests.curriculum.test_streams:is_small", "iterations": 5}]
    small = source(spec)
    numbers = {int(prompt.prompt_id.split()[1]) for prompt in small.draw(100)}
    assert numbers == set(range(0, 40, 2))
    assert {int(prompt.prompt_id.split()[1]) for prompt in small.heldout(40)} == set(range(1, 40, 2))
    never = {**spec[0], "filter": "tests.curriculum.test_streams:is_never"}
    with pytest.raises(ValueError, match=r"environment 'tests.small_envs:Even#small' has no training prompts"):
        source([never]).draw(1)


def test_shares_of_a_plan_are_exact_in_the_long_run():
    mixed = source({"domains": [{"env": EVEN}, {"env": ODD}], "schedule": [[0, {EVEN: 1, ODD: 1}]]})
    counts = Counter(domain for _ in range(20) for domain in domains(mixed.draw(3, {"even": 0.7, "odd": 0.3})))
    assert counts == {"even": 42, "odd": 18}  # of 60


def test_a_plan_of_domains_that_are_not_drawn_now_is_refused():
    stages = source([{"env": EVEN, "iterations": 9}, {"env": ODD, "iterations": 9}])
    with pytest.raises(ValueError, match=r"shares = \{'odd': 1.0\}; expected one of a domain with fresh prompts"):
        stages.draw(2, {"odd": 1.0})


@pytest.mark.parametrize("num_before", [0, 1, 5, 9])
def test_a_state_goes_on_exactly_in_any_source(num_before):
    few = {"env": EVEN, "env_config": {"num_prompts": 5}}
    spec = {"domains": [few, {"env": ODD}], "schedule": [[0, {EVEN: 1, ODD: 1}]]}

    def steps(one, num):
        rows = []
        for step in range(num):
            rows.append(one.draw(4, {"even": 0.3, "odd": 0.7} if step % 2 else None))
            one.advance(11)
        return rows

    one = source(spec, seed=5)
    steps(one, num_before)
    state = one.get_state()
    want = steps(one, 7)
    other = source(spec, seed=5)
    other.set_state(state)
    assert steps(other, 7) == want and other.progress == Progress(num_before + 7, 11 * (num_before + 7))


def test_probes_are_held_out_fixed_and_apart_from_evaluation():
    stages = source([{"env": EVEN, "iterations": 9}, {"env": ODD, "iterations": 9}])
    probes, evaluated = stages.probes("odd", 6, num_evaluated=8), stages.heldout(8)
    state = stages.get_state()
    assert probes == stages.probes("odd", 6, num_evaluated=8) and stages.get_state() == state
    assert set(domains(probes)) == {"odd"} and len(set(probes)) == 6
    assert not set(probes) & set(evaluated) and all(int(p.prompt_id.split()[1]) % 2 for p in probes)
    with pytest.raises(ValueError, match=r"domain 'odd' has 36 held-out prompts besides the 4 of evaluation; expected"):
        stages.probes("odd", 37, num_evaluated=8)


FLAT = [[0, {"a": 1}]]

BAD = [
    ("cpu", r"stream = 'cpu'; expected a list of stages"),
    ([{"name": "a", "iterations": 1}], r"stream\[0\] = .*; expected \{\"env\""),
    ([{"env": "a", "iteration": 1}], r"stream\[0\] has the keys \['iteration'\]"),
    ([{"env": "a", "iterations": 0}], r"stream\[0\] lasts \{'iterations': 0\}; expected iterations = an integer"),
    ([{"env": "a", "iterations": 1}, {"env": "b", "tokens": 1}], r"stream\[0\] lasts .*; expected tokens"),
    ([{"env": "a", "env_config": 3, "iterations": 1}], r"stream\[0\] env_config = 3; expected a mapping"),
    ([{"env": "a", "filter": "nowhere:f", "iterations": 1}], r"filter = 'nowhere:f'; expected 'module:function'"),
    ([{"env": "a", "filter": "math:pi", "iterations": 1}], r"expected a function, not a float"),
    ([{"env": "a", "iterations": 1}, {"env": "a", "env_config": {"x": 1}, "iterations": 1}],
     r"stream\[1\] has the name 'a' of an earlier entry, with other settings; expected another 'domain'"),
    ({"domains": [{"env": "a"}]}, r"stream schedule = None; expected \[\[progress, "),
    ({"domains": [{"env": "a"}], "schedule": FLAT, "unit": "hours"}, r"stream unit = 'hours'; expected one of iter"),
    ({"domains": [{"env": "a"}], "schedule": [[0, {"b": 1}]]}, r"schedule at 0 = \{'b': 1\}; expected weights"),
    ({"domains": [{"env": "a"}], "schedule": [[0, {"a": 0}]]}, r"not all 0"),
    ({"domains": [{"env": "a"}], "schedule": [[5, {"a": 1}], [2, {"a": 1}]]}, r"expected increasing progress"),
    ({"domains": [{"env": "a", "iterations": 3}], "schedule": FLAT}, r"stream\[0\] has the keys \['iterations'\]"),
]


@pytest.mark.parametrize(("spec", "message"), BAD)
def test_bad_streams_are_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        make_stream(spec)


def test_validate_reports_a_stream(random_llama_dir, tmp_path):
    config = small_config(random_llama_dir, tmp_path).environment(stream=[{"env": "nowhere", "iterations": 2}])
    config.mixture = {"x": 1.0}
    told = "\n".join(config_errors(config))
    assert "env = 'tests.small_envs:Even'; expected it unset with stream" in told
    assert "mixture = {'x': 1.0}; expected it unset with stream" in told
    assert "stream: environment 'nowhere' is unknown" in told
    config.stream = [{"env": "nowhere"}, {"env": "b", "tokens": 0}]
    assert sum("lasts" in line for line in config_errors(config)) == 2
    assert len(stream_errors([{"env": "a", "x": 1}, {"env": 3}, {"env": "b", "env_config": 3}])) == 3


def test_the_envs_of_a_stream_have_thousands_of_questions():
    paths = entry_points()
    for entry in make_stream(STREAMS["cpu"]).entries.values():
        module, _, attribute = paths[entry.env].partition(":")
        env = getattr(importlib.import_module(module), attribute)(dict(entry.env_config))
        ids = {prompt_id for prompt_id, _ in zip(env.prompt_ids("train", 0), range(2000), strict=False)}
        assert len(ids) == 2000 or len(ids) + len(list(env.prompt_ids("heldout", 0))) >= 2000, entry.env


def test_a_stream_is_scaled():
    assert {stage["iterations"] for stage in scaled("cpu", iterations=4)} == {4}
    by_tokens = scaled("cpu", tokens=500)
    assert {stage["tokens"] for stage in by_tokens} == {500} and make_stream(by_tokens).length == Progress(tokens=2500)
    for name, length in (("cpu", {}), ("cpu", {"iterations": 1, "tokens": 1}), ("cpu_blend", {"tokens": 1})):
        with pytest.raises(ValueError, match="expected one of"):
            scaled(name, **length)


class Noted(SRLCallback):
    """Notes what hooks were called with, and adds a prompt where it is told to."""

    calls: list = []
    extra: tuple = ()

    def augment_batch(self, *, prompts, now, **kwargs):
        self.calls.append(("augment", now, len(prompts)))
        return self.extra

    def post_step(self, *, groups, now, **kwargs):
        self.calls.append(("step", now, len(groups)))

    def post_domain(self, *, domain, now, **kwargs):
        self.calls.append(("domain", now, domain))


@pytest.mark.slow
def test_a_run_plays_its_stream_and_calls_its_hooks(random_llama_dir, tmp_path, ray_here, build):
    config = small_config(random_llama_dir, tmp_path)
    config.env, Noted.calls, Noted.extra = None, [], (Prompt(ODD, "odd 2", "odd"),)
    stages = [
        {"env": EVEN, "domain": "few", "env_config": {"num_prompts": 20}, "iterations": 2},
        {"env": EVEN, "domain": "many", "env_config": {"num_prompts": 50}, "iterations": 1},
        {"env": ODD, "iterations": 2},
    ]
    algo = build(config.environment(stream=stages).callbacks(Noted))
    seen = watch(algo)
    for _ in range(4):
        algo.train()
    played = [sorted(g.prompt.domain for g in batch.groups) for batch in seen]
    assert played == [[*["few"] * 4, "odd"], [*["few"] * 4, "odd"], [*["many"] * 4, "odd"], ["odd"] * 5]
    ends = {2: [("domain", 2, "few")], 3: [("domain", 3, "many")]}
    expected = [[("augment", now, 4), ("step", now, 5), *ends.get(now, ())] for now in (1, 2, 3, 4)]
    assert Noted.calls == [call for calls in expected for call in calls]
    assert set(algo.evaluate()["by_domain"]) == {"few", "many", "odd"}
    Noted.extra = ("odd 2",)
    with pytest.raises(TypeError, match=r"Noted.augment_batch returned \('odd 2',\); expected a list of Prompt"):
        algo.train()
