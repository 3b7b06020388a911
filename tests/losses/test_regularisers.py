"""Terms against forgetting, worked by hand."""

import math
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from rllib_srl import SRLConfig
from rllib_srl.algorithm.validation import config_errors
from rllib_srl.learner.regularisers.regularisers import REGULARISERS, made
from rllib_srl.learner.regularisers.stage_policy import LwF
from rllib_srl.learner.regularisers.weights import EWC, L2
from rllib_srl.losses.regularisers import decayed, pull

STAGES = [{"env": "compare", "iterations": 2}, {"env": "lookup", "iterations": 2}]


def test_l2_pulls_by_the_distance_and_ewc_by_importance_too():
    gradient, penalty = pull(torch.tensor([3.0, -1.0]), torch.tensor([1.0, 1.0]))
    assert gradient.tolist() == [2.0, -2.0] and float(penalty) == 4.0  # (4 + 4) / 2
    value = torch.tensor([[3.0], [-1.0]], requires_grad=True)
    gradient, penalty = pull(value, torch.tensor([[1.0], [1.0]]), torch.tensor([[0.5], [0.0]]))
    assert gradient.tolist() == [[1.0], [0.0]] and float(penalty) == 1.0  # .5 * 4 / 2
    by_torch = 0.5 * (torch.tensor([[0.5], [0.0]]) * (value - 1).square()).sum()
    assert torch.equal(torch.autograd.grad(by_torch, value)[0], gradient)


def test_importance_is_fisher_information_that_decays():
    squares = torch.tensor([8.0, 0.0])
    first = decayed(None, squares, 4, 0.5)
    assert first.tolist() == [2.0, 0.0]
    assert decayed(first, torch.tensor([0.0, 6.0]), 2, 0.5).tolist() == [1.0, 3.0]
    assert decayed(first, torch.tensor([0.0, 6.0]), 2, 0.0).tolist() == [0.0, 3.0]  # the last stage alone
    # pi(heads) = sigmoid(theta) = p: squared gradients (1 - p)^2 and p^2, whose mean under pi is p (1 - p).
    theta = torch.tensor([math.log(3.0)], requires_grad=True)  # p = 3 / 4
    squares = torch.zeros(1)
    for is_heads in (True, True, True, False):  # a sample in exact proportion
        logp = torch.nn.functional.logsigmoid(theta if is_heads else -theta)
        squares += torch.autograd.grad(logp.sum(), theta)[0] ** 2
    assert decayed(None, squares, 4, 1.0).item() == pytest.approx(3 / 16)


@pytest.fixture
def config(random_llama_dir):
    config = SRLConfig().environment(stream=STAGES).rl_module(model_config={"model": str(random_llama_dir)})
    return config.replay(revisit_fraction=0.25)


def test_names_and_numbers_stand_for_parameters():
    found = made({"ewc": {"coeff": 10, "decay": 0.9}, "l2": 0.5, "lwf": {}})
    assert found == {"l2": L2(0.5), "ewc": EWC(10, 0.9, 64), "lwf": LwF(0.1, "k3_k2")}
    assert list(found) == ["l2", "ewc", "lwf"]  # whatever the order in which they are given
    assert made(None) == made({"l2": 0, "ewc": {"coeff": 0.0}}) == {}


@pytest.mark.parametrize(("value", "error"), [
    ("ewc", "regularisers = 'ewc'; expected a mapping from some of distill, ewc, l2, lwf"),
    ({"si": 1}, "regularisers.si = 1; expected one of 'distill', 'ewc'"),
    ({"rllib_srl.types:Group": 1}, "regularisers.rllib_srl.types:Group = 1; expected a subclass of Regulariser"),
    ({"l2": {"decay": 1}}, "regularisers.l2.decay = 1; expected some of coeff"),
    ({"ewc": {"episodes": 0}}, "regularisers.ewc.episodes = 0; expected an integer of at least 1"),
    ({"lwf": {"estimator": "k1"}}, "regularisers.lwf.estimator = 'k1'; expected one of 'k2', 'k3', 'k3_k2'"),
])  # fmt: skip
def test_a_wrong_value_is_named(config, value, error):
    (line,) = config_errors(config.training(regularisers=value))
    assert line.startswith(error)


@pytest.mark.parametrize("name", ["ewc", "lwf"])
def test_stages_are_needed_and_shards_refused(config, name):
    config.training(regularisers={name: 1.0})
    assert config_errors(config) == []
    one = config.copy(copy_frozen=False).environment(stream=STAGES[:1])
    flat = {"domains": [{"env": "compare"}, {"env": "lookup"}], "schedule": [[0, {"compare": 1}]]}
    for wrong in (one, config.copy(copy_frozen=False).environment(stream=flat)):
        (line,) = config_errors(wrong)
        assert line.startswith(f"regularisers.{name} with stream") and "at least two stages" in line
    none = SRLConfig().environment("compare").training(regularisers={name: 1.0}).replay(revisit_fraction=0.25)
    assert [line.split(";")[0] for line in config_errors(none)] == [f"regularisers.{name} with stream = None"]
    sharded = config.training(fsdp=True).learners(num_learners=2)
    assert [line.split(";")[0] for line in config_errors(sharded)] == [f"regularisers.{name} with fsdp = True"]
    sharded.training(regularisers={name: 0.0, "l2": 1.0})  # L2 works, and a coefficient of 0 needs nothing
    assert config_errors(sharded) == []


def test_the_document_of_losses_names_every_parameter():
    text = (Path(__file__).parents[2] / "docs" / "losses.md").read_text(encoding="utf-8")
    section = text.partition("## Regularisers")[2].partition("\n## ")[0]
    rows = {line.split("|")[1].strip(" `"): line for line in section.splitlines() if line.startswith("| `")}
    assert set(rows) >= set(REGULARISERS)
    for one in REGULARISERS.values():
        for field in fields(one):
            shown = f"`{field.default}`" if isinstance(field.default, str) else f"{field.default:g}"
            assert f"`{field.name}` ({shown})" in section


def test_ewc_needs_episodes_of_the_last_update_and_lwf_revisits(config):
    ahead = config.copy(copy_frozen=False).env_runners(max_lag=2, num_env_runners=1)
    errors = config_errors(ahead.training(regularisers={"ewc": 1.0}))
    (line,) = [error for error in errors if error.startswith("regularisers")]
    assert line.startswith("regularisers.ewc with max_lag = 2; expected max_lag = 0: it measures importance on")
    others = config_errors(ahead.training(regularisers={"l2": 1.0, "lwf": 1.0}))
    assert not any(one.startswith("regularisers") for one in others)
    (line,) = config_errors(config.replay(revisit_fraction=0.0).training(regularisers={"lwf": 1.0}))
    assert line.startswith("regularisers.lwf with replay_revisit_fraction = 0; expected above 0")
