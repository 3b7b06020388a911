"""A run that is saved and restored goes on as if it had never stopped: same prompts, tokens, rewards and weights."""


import numpy as np
import pytest
import torch
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_srl import SRL
from tests.engine.small_llama import save_random_llama
from tests.small_envs import small_config, watch

pytestmark = pytest.mark.slow


def config_of(model_dir, directory):
    # Momentum, a schedule and several epochs, so that everything that could be forgotten would show.
    config = small_config(model_dir, directory, num_prompts=7)  # the third iteration begins a second pass
    return config.training(lr=[[0, 1e-3], [64, 1e-4]], num_epochs=2, num_prompts_per_batch=3)


def go_on(algo, num_iterations: int) -> list[dict]:
    """Train, and return what each iteration played and left behind, as plain arrays."""
    play, record = algo.rollouts.play, watch(algo)
    iterations = []
    for _ in range(num_iterations):
        record.clear()
        result = algo.train()
        groups = [meta.ref for batch in record for meta in batch.groups if meta.ref is not None]
        weights = algo.learner_group.get_weights()[DEFAULT_MODULE_ID]
        iterations.append(
            {
                "iteration": result["training_iteration"],
                "version": algo.version,
                "prompts": [group.prompt for group in groups],
                "tokens": np.concatenate([group.token_ids_N for group in groups]),
                "logps": np.concatenate([group.behaviour_logp_N for group in groups]),
                "rewards": np.concatenate([group.rewards_G for group in groups]),
                "weights": np.concatenate([weights[name].ravel() for name in sorted(weights)]),
                "turns": result["env_runners"]["num_env_steps_sampled_lifetime"],
                "planner": result.get("planner", {}),
            }
        )
    algo.rollouts.play = play
    return iterations


def assert_same(one: list[dict], other: list[dict]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        differ = [name for name in a if not np.array_equal(a[name], b[name])]
        assert differ == [], f"iteration {a['iteration']}"


@pytest.fixture(scope="module")
def straight(random_llama_dir, tmp_path_factory, ray_here):
    """Return a run of 4 iterations without a break, what it did, and the checkpoint after its second."""
    directory = tmp_path_factory.mktemp("straight")
    algo = config_of(random_llama_dir, directory / "log").build_algo()
    first = go_on(algo, 2)
    algo.save_to_path(directory / "two")
    yield algo, first + go_on(algo, 2), directory / "two"
    algo.stop()


def test_a_new_algorithm_goes_on_exactly(straight):
    _, whole, path = straight
    again = SRL.from_checkpoint(path)
    assert (again.iteration, again.version) == (2, 2)
    optimizer = again.learner_group._learner.get_optimizers_for_module(DEFAULT_MODULE_ID)[0][1]
    assert {int(state["step"]) for state in optimizer.state.values()} == {4}
    assert_same(go_on(again, 2), whole[2:])
    assert whole[1]["prompts"] != whole[2]["prompts"] and not np.array_equal(whole[2]["weights"], whole[3]["weights"])
    again.stop()


def test_a_part_of_a_checkpoint_restores_alone(straight):
    """RLlib's way to take over weights without the rest: the engine follows, prompts and iteration stay."""
    algo, whole, path = straight
    prompts = algo.source.get_state()
    part = f"learner_group/learner/rl_module/{DEFAULT_MODULE_ID}"
    algo.restore_from_path(path / part, component=part)
    weights = algo.learner_group.get_weights()[DEFAULT_MODULE_ID]
    assert np.array_equal(np.concatenate([weights[name].ravel() for name in sorted(weights)]), whole[1]["weights"])
    engine = {f"model.{name}": p.numpy() for name, p in algo.env_runner.engine._model.named_parameters()}
    assert all(np.array_equal(engine[name], weights[name]) for name in weights)
    assert (algo.iteration, algo.source.get_state()) == (4, prompts)


@pytest.mark.parametrize(("env", "is_tied", "message"), [
    ("Odd", True, r"the checkpoint's environments are \[.*Even'\]; expected \[.*Odd'\]"),
    ("Even", False, r"the state does not fit model '.*model': model.lm_head.weight: missing$"),
])  # fmt: skip
def test_a_checkpoint_of_other_envs_or_another_model_is_refused_and_nothing_changes(
    straight, build, tmp_path, env, is_tied, message
):
    _, _, path = straight
    other = build(small_config(save_random_llama(tmp_path / "model", tied=is_tied), tmp_path, env))
    before = {n: p.clone() for n, p in other.learner_group._learner.model.named_parameters()}
    with pytest.raises(ValueError, match=message):
        other.restore_from_path(path)
    after = dict(other.learner_group._learner.model.named_parameters())
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (other.version, other.iteration) == (0, 0)
