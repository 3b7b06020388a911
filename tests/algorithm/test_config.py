"""SRLConfig: errors have lines and come at once, nothing unknown or unused passes, round trips change nothing."""

import ast
import inspect
import pickle
from pathlib import Path
from typing import Literal, get_origin

import pytest
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.tune.registry import TRAINABLE_CLASS, _global_registry

import rllib_srl
from rllib_srl import SRL, SRLConfig
from rllib_srl.algorithm import settings as tables
from rllib_srl.algorithm.resources import engine_threads
from rllib_srl.algorithm.validation import USED, config_errors

PACKAGE = Path(rllib_srl.__file__).parent


def test_the_defaults_are_without_error(config):
    assert config_errors(config) == []
    config.validate()
    assert config.compute_dtype in ("float32", "bfloat16") and config.engine in ("vllm", "transformers")


ERRORS = [
    ("max_turns", 0, "max_turns = 0; expected an integer of at least 1"),
    ("group_size", True, "group_size = True; expected an integer of at least 2"),
    ("temperature", 0.001, "temperature = 0.001; expected a number in [0.01, 100]"),
    ("sync_timeout_s", float("inf"), "sync_timeout_s = inf; expected a number above 0"),
    ("lr", "fast", "lr = 'fast'; expected a number of at least 0, or a schedule"),
    ("seed", -1, "seed = -1; expected an integer of at least 0, or None"),
    ("colocate", "yes", "colocate = 'yes'; expected True or False, or None"),
    ("adam_betas", (0.9, 1.0), "expected two numbers in [0, 1)"),
    ("max_turn_tokens", 1024, "max_turn_tokens = 1024; expected less than max_episode_tokens = 1024"),
    ("replay_capacity", 0, "with capacity = 0; expected 0 without a memory (replay none)"),
    ("replay_domains", "newest", "replay_domains = 'newest'; expected 'all', 'last', 'earlier' or a list of names"),
    ("envs", {"compare": {}}, "env = 'compare' and envs = ['compare']; expected one of the two"),
    ("env", None, "env = None; expected an environment"),
    ("env", "no_such_env", "env: environment 'no_such_env' is unknown; expected one of "),
    ("env", "json:NoSuchClass", "env: environment 'json:NoSuchClass' cannot be imported (json has no 'NoSuchClass';"),
    ("env", len, "expected a name, 'package.module:Class' or a class"),
    ("env_config", [1], "env_config = [1]; expected a mapping"),
    ("mixture", {"lookup": 1}, "mixture = {'lookup': 1}; expected weights of some of ['compare']"),
    ("mixture", {"compare": 0}, "mixture = {'compare': 0}; expected a mapping from the names of environments to"),
    ("_model_config", {"model": "./nowhere"}, "model directory ./nowhere does not exist"),
    ("_model_config", {"model": "tiny/", "lora": 8}, "model_config has ['lora']; expected only 'model'"),
]
OF_KIND = {int: (1.5, "an integer"), bool: ("yes", "True or False"), float: ("long", "a number")}


def test_settings_of_a_plain_kind_are_checked_and_all_errors_come_at_once(config):
    rows = tables.SETTINGS.items()
    wrong = {name: OF_KIND[row.kind] for name, row in rows if row.kind in OF_KIND}
    wrong |= {name: ("no such", "one of") for name, row in rows if get_origin(row.kind) is Literal}
    for name, (value, _) in wrong.items():
        setattr(config, name, value)
    lines = config_errors(config)
    assert len(wrong) > 70
    for name, (value, expected) in wrong.items():
        (line,) = [line for line in lines if line.startswith(f"{name} = {value!r}; ")]
        assert f"expected {expected}" in line and "\n" not in line


@pytest.mark.parametrize(("name", "value", "expected"), ERRORS)
def test_an_error_yields_one_line_with_value_and_mend(config, name, value, expected):
    setattr(config, name, value)
    lines = config_errors(config)
    assert any(expected in line for line in lines), lines
    assert all("\n" not in line for line in lines)


AHEAD = {"max_lag": 1}
OFF = {"replay": "none"}


@pytest.mark.parametrize(("settings", "expected"), [
    ({"num_env_runners": 0, "num_learners": 2}, "num_learners = 2; expected num_learners = 0"),
    ({**AHEAD, "in_flight": 16}, "in_flight = 16; expected an integer above num_prompts_per_batch = 16, or None"),
    ({**AHEAD, "num_env_runners": 0, "num_learners": 0}, "num_env_runners = 0 with max_lag = 1; expected at least"),
    ({**AHEAD, "colocate": True}, "colocate = True with max_lag = 1; expected False"),
    ({**AHEAD, "dynamic_sampling_tries": 2}, "dynamic_sampling_tries = 2 with max_lag = 1; expected 0"),
    ({**AHEAD, "correction": "none"}, "correction = 'none' with max_lag = 1; expected a correction"),
    ({**AHEAD, "kl_coeff": 0.1, "kl_estimator": "k1"}, "kl_coeff = 0.1 with max_lag = 1; expected 0, or a KL"),
    ({"max_lag": 2, **OFF}, "replay_capacity = 0 with max_lag = 2; expected a memory, or late = 'drop'"),
    ({"num_gpus_per_env_runner": 2}, "engine_tensor_parallel_size = 1; expected num_gpus_per_env_runner = 2"),
    (
        {"colocate": True, "num_gpus_per_env_runner": 0.6, "num_gpus_per_learner": 0.6},
        "num_gpus_per_env_runner = 0.6 and num_gpus_per_learner = 0.6; expected fractions that sum to at most 1",
    ),
    ({"optimizer_name": "sgd", "weight_decay": 0.1}, "weight_decay = 0.1 with optimizer_name = 'sgd'; expected 0"),
    ({"optimizer_name": "sgd", "adam_betas": (0.8, 0.9)}, "adam_betas = (0.8, 0.9) with optimizer_name = 'sgd'; exp"),
    ({"env": None, "envs": {"compare": 3}}, "envs = {'compare': 3}; expected a mapping from the names of "),
])  # fmt: skip
def test_settings_that_do_not_fit_each_other(config, settings, expected):
    assert any(expected in line for line in config_errors(config.update_from_dict(settings)))


def test_late_groups_need_no_memory_if_they_are_dropped(config):
    assert config_errors(config.update_from_dict({**AHEAD, **OFF, "late": "drop", "in_flight": 20, "slice_s": 2})) == []


def test_unknown_names_are_refused_however_they_come(config):
    config.max_turn_token = 5
    config._my_note = "anything"
    (error,) = config_errors(config)
    assert error == "max_turn_token = 5; expected no setting of that name; did you mean max_turn_tokens?"
    refusal = r"replay\(\) got unknown settings:\n  spacign; .*; did you mean spacing\?\nexpected"
    with pytest.raises(TypeError, match=refusal):
        SRLConfig().replay(spacign="fsrs")


@pytest.mark.parametrize(("name", "end"), [
    ("_train_batch_size_per_learner", "it; use num_prompts_per_batch and group_size"), ("batch_mode", "it"),
])  # fmt: skip
def test_a_setting_of_rllib_without_effect_here_names_what_to_use(config, name, end):
    setattr(config, name, "changed")
    (line,) = config_errors(config)
    assert line.startswith(f"{name.lstrip('_')} = 'changed'; expected ")
    assert line.endswith(f": SRL does not use {end}")


@pytest.mark.slow
def test_every_public_setting_of_rllib_is_used_or_refused(config):
    """Whoever adds a setting to RLlib, or a use of one to SRL, is told to sort it into one of the two."""
    ours = {"policies", "policies_to_train", "policy_mapping_fn", "policy_map_capacity", "policy_states_are_swappable"}
    for name in sorted(set(vars(AlgorithmConfig())) - USED - ours - {"policy_map_cache"}):
        if not name.startswith(("_", "callbacks_")):
            changed = config.copy(copy_frozen=False)
            setattr(changed, name, "changed")
            assert any(line.startswith(f"{name} = ") for line in config_errors(changed)), name
    assert set(vars(AlgorithmConfig())) >= USED


def test_several_agents_are_refused(config):
    config.multi_agent(policies={"a", "b"}, policy_mapping_fn=lambda *args, **kwargs: "a")
    assert "policies = several; expected one: SRL trains a single policy" in config_errors(config)


def test_a_grouped_method_sets_its_settings():
    methods = ("environment", "env_runners", "training", "evaluation")
    for method, name in ((one, name) for one in methods for name in tables.settings_of(one)):
        config, mark = SRLConfig(), object()
        assert getattr(config, name) == tables.SETTINGS[name].initial
        assert getattr(config, method)(**{name: mark}) is config
        assert getattr(config, name) is mark
    for name in tables.settings_of("replay"):
        assert getattr(SRLConfig().replay(**{name.removeprefix("replay_"): 0.5}), name) == 0.5


def test_help_and_completion_know_the_settings_of_a_method():
    for method, name in (("training", "kl_coeff"), ("replay", "spacing"), ("env_runners", "max_turns")):
        function = getattr(SRLConfig, method)
        row = tables.SETTINGS[f"replay_{name}" if method == "replay" else name]
        assert inspect.signature(function).parameters[name].default == row.initial
        assert f"    {name}: {row.meaning}" in inspect.getdoc(function)


def test_every_setting_is_read_somewhere():
    """By the package, outside of the tables and the checks."""
    read: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        if path.name not in ("validation.py", "loss_validation.py", "checks.py"):  # to check a setting is not to use it
            nodes = ast.walk(ast.parse(path.read_text()))
            read |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    ours = [name for name, row in tables.SETTINGS.items() if not row.is_rllib and not name.startswith("replay_")]
    assert set(ours) <= read


def test_the_engine_gets_its_settings(config):
    config.env_runners(engine="vllm", engine_tensor_parallel_size=2, engine_memory_utilization=0.4)
    config.env_runners(engine_kv_cache_gib=0.5, engine_max_num_seqs=7, engine_num_threads=3, max_episode_tokens=99)
    config.training(compute_dtype="bfloat16").debugging(seed=5)
    from rllib_srl.engine.vllm_engine import VLLMEngine

    settings = config.engine_settings()
    expected = {"kind": "vllm", "dtype": "bfloat16", "seed": 5, "context_length": 99, "max_num_seqs": 7}
    expected |= {"tensor_parallel_size": 2, "memory_utilization": 0.4, "kv_cache_gib": 0.5, "num_threads": 3}
    assert settings == {**expected, "can_sleep": False}
    assert set(settings) - {"kind"} <= set(inspect.signature(VLLMEngine.__init__).parameters)


@pytest.fixture
def changed(config):
    config.environment(None, envs={"compare": {"num_shots": 2}, "lookup": {}}, mixture={"compare": 3, "lookup": 1})
    config.env = None
    config.training(lr=[[0, 1e-3], [100, 1e-4]], group_size=5, adam_betas=(0.8, 0.9)).evaluation(evaluation_pass_k=3)
    return config.debugging(seed=3)


def state_of(config) -> dict:
    return {name: value for name, value in vars(config).items() if name not in ("class", "_is_frozen", "policies")}


@pytest.mark.parametrize(
    "copied",
    [
        lambda config: config.copy(copy_frozen=False),
        lambda config: pickle.loads(pickle.dumps(config)),
        lambda config: SRLConfig().update_from_dict(config.to_dict()),
        lambda config: SRLConfig.from_state(pickle.loads(pickle.dumps(config.get_state()))),
    ],
    ids=["copy", "pickle", "to_dict", "pickled state"],
)
def test_round_trips_change_nothing(changed, copied):
    changed.validate()
    again = copied(changed)
    again.validate()
    differ = [name for name, value in state_of(changed).items() if getattr(again, name) != value]
    assert differ == []
    assert again.mixture_weights() == {"compare": 3.0, "lookup": 1.0}
    assert again.env_configs() == {"compare": {"num_shots": 2}, "lookup": {}}


def test_a_copy_is_apart(changed):
    again = changed.copy(copy_frozen=False)
    again.envs["compare"]["num_shots"] = 0
    assert changed.envs["compare"]["num_shots"] == 2


def test_srl_is_known_to_tune():
    for known in (rllib_srl.register, lambda: rllib_srl.SRLConfig):  # loading the class is enough
        _global_registry.unregister(TRAINABLE_CLASS, "SRL")
        assert not _global_registry.contains(TRAINABLE_CLASS, "SRL")
        known()
        assert _global_registry.get(TRAINABLE_CLASS, "SRL") is SRL


@pytest.mark.parametrize(
    ("given", "num_engines", "expected"), [("3", 1, 3), ("", 1, 6), ("", 2, 3), ("", 4, 1), ("", 9, 1), ("", 0, 6)]
)
def test_engines_share_the_cores_unless_openmp_is_told_otherwise(monkeypatch, given, num_engines, expected):
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert engine_threads(num_engines) == expected


@pytest.mark.parametrize(("name", "error"), [
    ("contrib.tracker:wandb", "did you mean 'contrib.trackers'?"),
    ("contrib.trackers:wand", "has no 'wand'; it has "),
    ("math:sqrt", "expected a subclass of RLlibCallback, got"),
])  # fmt: skip
def test_callbacks_are_named_and_a_wrong_name_is_one_line(name, error):
    found = SRLConfig().callbacks(["contrib.trackers:wandb", RLlibCallback]).callbacks_class
    assert [one.__name__ for one in found] == ["Wandb", "RLlibCallback"]
    with pytest.raises(ValueError, match=r"^callbacks = ") as caught:
        SRLConfig().update_from_dict({"callbacks": name})
    assert error in str(caught.value) and "\n" not in str(caught.value)
