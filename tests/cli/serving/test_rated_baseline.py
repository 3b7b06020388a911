"""The baseline of rated answers, by hand and against laws."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rllib_srl.batch.posterior import baseline
from rllib_srl.cli.serving.trainer.rated_baseline import Rated, histories_of, prompt_name


def baselines(ratings, prior_weight=2.0, neutral=0.5):
    found = histories_of(list(ratings), ratings, prior_weight, neutral)
    return {
        name: float(baseline(np.array([ratings[name].reward]), one, prior_weight)[0])
        for name, one in zip(ratings, found, strict=True)
    }


def test_by_hand():
    # Without a: m = (.5 + 0 + 1) / 3 = .5; ann (2 * .5 + 0) / 3 = 1/3; bob (2 * .5 + 1) / 3 = 2/3.
    # Its prompt has c alone, by bob: 1/3 + (1 - 2/3) / (2 + 1) = 4/9.
    ratings = {
        "a": Rated("easy", "ann", 1.0, 1),
        "b": Rated("hard", "ann", 0.0, 1),
        "c": Rated("easy", "bob", 1.0, 1),
    }
    found = baselines(ratings)
    assert found["a"] == pytest.approx(4 / 9)
    # Without b: m = (.5 + 2) / 3; ann (2 m + 1) / 3; nobody else has rated its prompt.
    assert found["b"] == pytest.approx((5 / 3 + 1) / 3)


def test_a_single_rating_is_judged_by_the_neutral_one():
    assert baselines({"a": Rated("p", "ann", 1.0, 1)}) == {"a": 0.5}
    assert baselines({"a": Rated("p", "ann", 1.0, 1)}, prior_weight=1e-9, neutral=0.0) == {"a": 0.0}


def random_ratings(num=30):
    rng = np.random.default_rng(0)
    return {
        f"a{i}": Rated(f"p{rng.integers(5)}", f"r{rng.integers(3)}", float(rng.integers(2)), 1) for i in range(num)
    }


def test_no_reward_is_part_of_its_own_baseline():
    ratings = random_ratings()
    for name, one in list(ratings.items())[:8]:
        changed = baselines({**ratings, name: replace(one, reward=7.0)})
        assert changed[name] == pytest.approx(baselines(ratings)[name])


def test_a_strict_rater_and_a_hard_prompt_have_lower_baselines():
    ratings = {f"{p}{q}{i}": Rated(p, q, 1.0 - (p == "hard") * 0.5 - (q == "strict") * 0.4, 1)
               for p in ("easy", "hard") for q in ("kind", "strict") for i in range(20)}  # fmt: skip
    found = baselines(ratings)
    of = {pair: found[f"{pair[0]}{pair[1]}0"] for pair in
          [("easy", "kind"), ("easy", "strict"), ("hard", "kind"), ("hard", "strict")]}  # fmt: skip
    for (prompt, rater), value in of.items():
        assert value == pytest.approx(ratings[f"{prompt}{rater}0"].reward, abs=0.06)


def test_a_prompt_is_its_tokens():
    assert prompt_name([1, 2]) == prompt_name((1, 2)) != prompt_name([1, 3])
