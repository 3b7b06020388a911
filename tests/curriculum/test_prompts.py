"""The prompt source: endless, seeded, restorable, and true to its mixture."""

from collections import Counter

import gymnasium as gym
import pytest

from rllib_srl.curriculum.prompts import PromptSource
from tests.small_envs import Even, Odd


def source(seed=0, mixture=None, order="mixture", **env_configs):
    mixture = mixture or {"even": 1.0}
    creators = {"even": Even, "odd": Odd, "seeds": Seeds, "twice": Twice}
    return PromptSource(creators, env_configs, mixture, seed, order=order)


class Seeds(gym.Env):
    """An environment without prompt ids, where the seed of reset is the prompt."""

    def __init__(self, env_config):
        pass


class Twice(Even):
    def prompt_ids(self, split, seed):
        return [*super().prompt_ids(split, seed), *super().prompt_ids(split, seed)]


def ids(prompts):
    return [prompt.prompt_id for prompt in prompts]


def test_a_pass_plays_each_prompt_once_and_the_next_in_another_order():
    passes = source(even={"num_prompts": 6})
    first, second = ids(passes.draw(6)), ids(passes.draw(6))
    assert sorted(first) == sorted(second) == sorted(f"even {number}" for number in range(0, 12, 2))
    assert first != second


def test_the_order_is_the_seeds_whatever_the_size_of_a_draw():
    whole = ids(source(seed=3).draw(30))
    pieces = source(seed=3)
    assert [one for size in (1, 7, 22) for one in ids(pieces.draw(size))] == whole
    assert ids(source(seed=4).draw(30)) != whole


def test_shares_follow_the_mixture():
    prompts = source(mixture={"even": 3, "odd": 1}).draw(4000)
    share = Counter(prompt.env_id for prompt in prompts)["even"] / 4000
    assert share == pytest.approx(0.75, abs=0.03)  # 4 standard deviations of .0068
    assert {(p.env_id, p.domain, p.prompt_id.split()[0]) for p in prompts} == {("even",) * 3, ("odd",) * 3}


def test_heldout_prompts_are_fixed_apart_from_training_and_shared_equally():
    envs = source(mixture={"even": 5, "odd": 1})
    heldout = envs.heldout(9)
    assert Counter(prompt.env_id for prompt in heldout) == {"even": 5, "odd": 4}
    envs.draw(13)
    assert envs.heldout(9) == heldout
    assert not set(heldout) & set(envs.draw(200))
    assert len(source(even={"num_prompts": 4}).heldout(9)) == 4


def test_an_env_without_what_is_needed_says_so():
    with pytest.raises(ValueError, match="prompt_order = 'epochs'; expected environments with a finite list"):
        source(mixture={"even": 1, "seeds": 1}, order="epochs")
    with pytest.raises(ValueError, match=r"environment 'even' has no training prompts"):
        source(even={"num_prompts": 0}).draw(1)


ENVS = {"mixture": {"even": 1, "odd": 1}, "even": {"num_prompts": 5}, "odd": {"num_prompts": 2}}


def test_an_epoch_plays_each_prompt_of_all_envs_once_and_the_next_in_another_order():
    epochs = source(3, order="epochs", **ENVS)
    first, second = ids(epochs.draw(7)), ids(epochs.draw(7))
    every = {f"even {n}" for n in range(0, 10, 2)} | {"odd 0", "odd 2"}
    assert len(set(first)) == 7 and set(first) == set(second) == every and first != second
    assert ids(source(4, order="epochs", **ENVS).draw(7)) != first
    pieces = source(3, order="epochs", **ENVS)
    assert [one for size in (3, 1, 10) for one in ids(pieces.draw(size))] == first + second


SEVERAL = {"mixture": {"even": 2, "odd": 1, "seeds": 1}, "even": {"num_prompts": 5}, "odd": {"num_prompts": 3}}


@pytest.mark.parametrize("num_before", [0, 3, 7, 40])
@pytest.mark.parametrize("given", [SEVERAL, {**ENVS, "order": "epochs"}], ids=["mixture", "epochs"])
def test_a_state_goes_on_exactly_in_any_source(given, num_before):
    one = source(7, **given)
    one.draw(num_before)
    state, want = one.get_state(), one.draw(25)
    for other in (source(7, **given), source(99, **given), one):
        other.set_state(state)
        assert other.draw(25) == want
    assert source(7, **given).draw(25) == want or num_before
    with pytest.raises(ValueError, match=r"environments are \['even', .*\]; expected \['odd'\]"):
        source(mixture={"odd": 1}).set_state(state)


@pytest.mark.parametrize(("order", "num_drawn", "num_left"), [
    ("mixture", 5, 3), ("mixture", 5, 4), ("epochs", 5, 3), ("epochs", 5, 5)])  # fmt: skip
def test_a_state_of_more_prompts_than_there_are_now_is_refused(order, num_drawn, num_left):
    one = source(even={"num_prompts": 6}, order=order)
    one.draw(num_drawn)
    fewer = source(even={"num_prompts": num_left}, order=order)
    with pytest.raises(ValueError, match=rf"environment 'even' has {num_left} training prompts.* drawn {num_drawn} of"):
        fewer.set_state(one.get_state())
