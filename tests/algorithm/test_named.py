"""Named algorithms and memories: what they set, what wins over them, and every way to name them."""

import pytest

from rllib_srl import SRLConfig
from rllib_srl.algorithm.named import ALGORITHMS, MEMORIES
from rllib_srl.algorithm.validation import config_errors, warnings_of
from rllib_srl.batch.advantages import OVERLONG_SHARE
from rllib_srl.cli import train
from rllib_srl.cli.shared.settings import build_config, given_settings

BY_NAME = [("training", name) for name in ALGORITHMS] + [("replay", name) for name in MEMORIES]


def config() -> SRLConfig:
    return SRLConfig().environment("compare").rl_module(model_config={"model": "tiny"})


def values_of(config: SRLConfig) -> dict:
    return {name: value for name, value in vars(config).items() if not name.startswith("_")}


@pytest.mark.parametrize(("method", "name"), BY_NAME)
def test_a_name_is_valid_and_the_same_in_python_in_tune_and_as_a_flag(method, name):
    made = getattr(config(), method)(name)
    assert config_errors(made) == [] and warnings_of(made) == []
    key = "replay" if method == "replay" else "algorithm"
    assert values_of(config().update_from_dict({key: name})) == values_of(made)
    flags = given_settings(train.main.parse(["--env", "compare", "--model", "tiny", f"--{key}", name]))
    assert key not in flags and values_of(build_config(flags)) == values_of(made)


def test_methods_are_those_of_the_papers():
    grpo, dapo = (config().training(name).loss_settings() for name in ("grpo", "dapo"))
    assert (grpo.clip_rule, grpo.aggregation, grpo.kl_coeff) == ("symmetric", "sequence_mean", 0.0)
    assert (dapo.clip_rule, dapo.dynamic_sampling_tries, dapo.kl_coeff) == ("higher", 10, 0.0)
    assert OVERLONG_SHARE == 4096 / 20480  # verl: the buffer of the longest answer
    spo = config().training("spo")
    loss = spo.loss_settings()
    assert (loss.advantage, loss.surprise_scale, loss.min_surprise, spo.group_size) == ("posterior", "centred", 0.0, 1)
    assert spo.replay_settings().selection == "contrib.spo"
    assert config().training("grpo").replay_settings().is_on is False
    srl = config().training("srl").replay_settings()
    assert (srl.spacing, srl.selection, srl.diversity_coeff, srl.embedding_used) == ("fsrs", "srl", 0.5, "ngram")
    assert (srl.retain, config().replay("uniform").replay_settings().retain) == (1.0, 0.0)


def test_an_explicit_setting_wins_whatever_the_order():
    for made in (
        config().training("spo", group_size=2),
        config().training(group_size=2).training("spo"),
        config().update_from_dict({"group_size": 2, "algorithm": "spo"}),
        build_config({"env": "compare", "model": "tiny", "group_size": 2, "algorithm": "spo"}),
    ):
        assert (made.group_size, made.num_prompts_per_batch) == (2, 128)
    made = config().replay("srl", revisit_fraction=0.5)
    assert (made.replay_revisit_fraction, made.replay_spacing) == (0.5, "fsrs")
    made = config().replay("srl", capacity=65_536, retain=1.0).training("dapo").replay("none")  # values that others set
    assert (made.replay_capacity, made.replay_retain, made.replay_spacing) == (65_536, 1.0, "none")


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_memory_replaces_that_of_the_algorithm_and_a_later_name_an_earlier_one(algorithm, memory):
    names = {"algorithm": algorithm, "replay": memory}
    made = config().training(algorithm).replay(memory)
    same = [
        config().replay(memory).training(algorithm),
        config().training("srl").replay("srl").training("spo").training(algorithm).replay("none").replay(memory),
        config().update_from_dict(names),
        config().update_from_dict({"replay": memory}).training(algorithm),
        build_config({"env": "compare", "model": "tiny", **names}),
    ]
    assert all(values_of(one) == values_of(made) for one in same)
    loss = {"grpo": "grpo", "dapo": "dapo"}.get(algorithm)
    retain, capacity, share = {"none": (0.0, 0, 0.0), "srl": (1.0, 65_536, 0.1)}.get(memory, (0.0, 65_536, 0.25))
    found = (made.loss, made.replay_retain, made.replay_capacity, made.replay_revisit_fraction)
    assert found == (loss, retain, capacity, share)
    needs = "advantage = 'posterior' with replay_capacity = 0; expected a memory, which keeps the history"
    assert config_errors(made) == ([needs] if names == {"algorithm": "spo", "replay": "none"} else [])


@pytest.mark.parametrize("name", ["uniform", "balanced", "srl"])
def test_a_memory_by_name_keeps_the_capacity_of_the_run_that_it_resumes(name):
    flags = given_settings(train.main.parse(["--env", "compare", "--model", "tiny", "--replay", name]))
    assert "replay_capacity" not in flags and flags.keys() >= MEMORIES["none"].keys() - {"replay_capacity"}


def test_an_unknown_name_is_one_line():
    with pytest.raises(ValueError, match="^algorithm = 'dappo'; expected one of 'grpo', .*; did you mean 'dapo'\\?$"):
        SRLConfig().training("dappo")
    with pytest.raises(ValueError, match="^replay = 7; expected one of 'none', 'uniform', 'balanced', 'srl'$"):
        SRLConfig().update_from_dict({"replay": 7})


def test_settings_of_a_config_object_are_taken_as_they_are():
    """RLlib passes configs themselves, which have methods of these names."""
    config = SRLConfig().environment("compare").training(group_size=5)
    assert SRLConfig().update_from_dict(config).group_size == 5
    assert SRLConfig().update_from_dict({"model": "tiny"}).model_config["model"] == "tiny"  # of Tune's param_space
