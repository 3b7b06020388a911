"""The law of the stub by hand, its answers, and its engine."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest

from rllib_srl import SRLConfig
from rllib_srl.algorithm.validation import faults_of
from rllib_srl.common.environments import resolve
from rllib_srl.engine import EngineError, Sampling
from rllib_srl.engine.models import TINY_DIR
from rllib_srl.engine.stub.answers import MALFORMED, Answers, NoGoldTurnsError
from rllib_srl.engine.stub.engine import StubEngine
from rllib_srl.engine.stub.law import NUM_SLOTS, Gains, Law, canary_logps, drawn, slot_of
from rllib_srl.types import Group, Prompt, StopReason
from tests.small_worlds import Even

PROMPT = Prompt("compare", "1", "compare")
ZEROS = np.zeros(NUM_SLOTS, np.float32)


def group(domain: str, num_tokens: int = 2) -> Group:
    """Return two episodes of one prompt token and `num_tokens` of the policy."""
    mask_T = np.array([False] + [True] * num_tokens)
    size = len(mask_T)
    return Group(
        "1.0", Prompt("e", "1", domain), np.ones(2 * size, np.int32), np.tile(mask_T, 2),
        np.zeros(2 * size, np.float32), np.array([0, size, 2 * size]), np.array([1, 0], np.float32),
        np.zeros((2, 2), np.int64), (StopReason.TERMINATED,) * 2,
    )  # fmt: skip


def test_chances_by_hand():
    chances = np.exp(Law(chance=0.2, malformed=0.1, spread=0).logps(PROMPT, ZEROS))
    np.testing.assert_allclose(chances, [0.9 * 0.2, 0.9 * 0.8, 0.1], rtol=1e-9)
    skilled = ZEROS.copy()
    skilled[slot_of("compare")] = math.log(4) * 2  # odds 1/4 times 16
    np.testing.assert_allclose(np.exp(Law(0.2, 0.1, spread=0).logps(PROMPT, skilled))[0], 0.9 * 0.8, rtol=1e-6)
    by_domain = Law({"compare": 0.5}, 0.0, spread=0)
    np.testing.assert_allclose(np.exp(by_domain.logps(PROMPT, ZEROS)), [0.5, 0.5, 0], atol=1e-12)
    other = Prompt("compare", "1", "others")
    assert math.isclose(math.exp(by_domain.logps(other, ZEROS)[0]), 0.2)


def test_difficulty_spreads_chances_around_the_middle():
    law = Law(chance=0.5, malformed=0, spread=1)
    logits = [float(np.subtract(*law.logps(Prompt("e", str(i)), ZEROS)[:2])) for i in range(2000)]
    assert abs(np.mean(logits)) < 0.1 and abs(np.std(logits) - 1) < 0.05


def test_one_update_by_hand():
    gains = Gains()
    gains.add(group("a"), np.array([1.0, -1.0]), 0.1)  # 2 tokens at 0.1, advantage 1: 0.2
    gains.add(group("b"), np.array([0.5, 2.0]), np.array([0.25, 0.05]))  # 0.5 * 0.5 + 0.1 * 2 = 0.45
    a, b, c = (slot_of(name) for name in "abc")
    assert gains.gains_S[[a, b, c]].tolist() == pytest.approx([0.2, 0.45, 0])
    skills = np.zeros(NUM_SLOTS)
    skills[[a, b, c]] = 1.0, 2.0, 3.0
    moved = Law(learns=2.0, forgets=0.5).moved(skills, gains.gains_S)
    expected = [math.exp(-0.225) + 0.4, 2 * math.exp(-0.1) + 0.9, 3 * math.exp(-0.325)]
    assert moved[[a, b, c]].tolist() == pytest.approx(expected)
    gains.clear()
    assert np.array_equal(Law().moved(skills, gains.gains_S), skills)


def test_domains_of_one_slot_are_refused():
    gains = Gains({slot_of("a"): "another"})
    with pytest.raises(ValueError, match="'another' and 'a' have the same slot"):
        gains.add(group("a"), np.zeros(2), 1.0)


def test_outcomes_are_drawn_by_their_chances():
    logps = np.log([0.25, 0.5, 0.25])
    assert [drawn(logps, 1.0, point) for point in (0.0, 0.24, 0.26, 0.74, 0.76, 0.999)] == [0, 0, 1, 1, 2, 2]
    assert drawn(logps, 0, 0.99) == 1
    assert [drawn(logps, 0.5, point) for point in (0.16, 0.17, 0.84)] == [0, 1, 2]  # squares: 1/6, 4/6, 1/6
    assert drawn(np.array([0.0, -50.0, -1e30]), 1.0, 1 - 1e-16) in (0, 1)


def test_the_canary_depends_on_every_skill():
    (before,) = canary_logps(ZEROS, [[5, 6, 7]])
    assert before.tolist() == pytest.approx([-math.log(2)] * 2)
    moved = ZEROS.copy()
    moved[12345] = 1.0
    assert np.all(canary_logps(moved, [[5, 6, 7]])[0] != before)


def answers(**env_configs) -> Answers:
    return Answers({name: partial(resolve(name), config) for name, config in env_configs.items()})


def played(env, prompt_id: str, turns) -> float:
    env.reset(options={"prompt_id": prompt_id, "history": []})
    total = 0.0
    for turn in turns:
        _, reward, terminated, truncated, _ = env.step(turn)
        total += reward
        if terminated or truncated:
            break
    return total


@pytest.mark.parametrize("name", ["compare", "chain_sum", "registers", "copy_words"])
def test_right_answers_earn_one_and_wrong_and_malformed_ones_nothing(name):
    env, of = resolve(name)({}), answers(**{name: {}})
    for prompt_id in [str(one) for one, _ in zip(env.prompt_ids("train", 3), range(5), strict=False)]:
        prompt = Prompt(name, prompt_id)
        assert played(env, prompt_id, of.turns(prompt, True, True)) == 1
        assert played(env, prompt_id, of.turns(prompt, False, False)) < 0.999
        assert played(env, prompt_id, [MALFORMED] * 8) == 0
    of.close()


def test_a_rubric_gives_the_grades_one_to_four():
    env, of = resolve("rubric")({}), answers(rubric={})
    prompt_id = next(env.prompt_ids("train", 0))
    rewards = [
        played(env, prompt_id, of.turns(Prompt("rubric", prompt_id), is_right, is_best))
        for is_right in (False, True) for is_best in (False, True)
    ]  # fmt: skip
    assert rewards == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert [reward >= env.pass_reward for reward in rewards] == [False, False, True, True]


def test_an_environment_without_gold_turns_is_refused():
    with pytest.raises(NoGoldTurnsError, match="'even' has no gold_turns"):
        Answers({"even": Even}).turns(Prompt("even", "even 0"), True, True)


@pytest.fixture
def engine():
    law = Law(chance=0.5, malformed=0.1, spread=0)
    one = StubEngine(TINY_DIR, law=law, answers=answers(compare={}), seed=3, context_length=256)
    prompt_id = next(resolve("compare")({}).prompt_ids("train", 0))
    one.expect({"1.0": Prompt("compare", prompt_id, "compare")})
    yield one
    one.close()


def turns_of(engine, num: int, temperature: float = 1.0):
    sampling = Sampling(max_tokens=32, temperature=temperature, stop=("\n",))
    for index in range(num):
        engine.submit(f"1.0/{index}/0", [1, 2, 3], sampling)
    return engine.step()


def test_counts_of_requests_do_not_grow_with_the_groups_played(engine):
    turns_of(engine, 20)
    first = engine._prompts["1.0"]
    engine.expect({"1.0": first, "2.0": first})
    again = [turn.text for turn in turns_of(engine, 20)]  # the second use
    engine.expect({"2.0": first})
    engine.expect({"1.0": first})
    texts = [turn.text for turn in turns_of(engine, 20)]
    assert texts != again and dict(engine._num_uses) == {f"1.0/{index}/0": 1 for index in range(20)}


def test_the_engine_answers_by_the_chances_and_repeats_itself(engine):
    turns = turns_of(engine, 2000)
    chances = {round(float(np.exp(turn.logp[0])), 6) for turn in turns}
    assert chances == {0.45, 0.1}  # right and wrong have 0.45 each
    texts = [turn.text for turn in turns]
    shares = sorted(texts.count(text) / 2000 for text in set(texts))
    assert shares == pytest.approx([0.1, 0.45, 0.45], abs=0.04)
    assert all(not turn.logp[1:].any() for turn in turns)
    assert [turn.text for turn in turns_of(engine, 20)] != texts[:20]  # the second use of the same requests
    engine.reseed(3)
    assert [turn.text for turn in turns_of(engine, 20)] == texts[:20]
    engine.reseed(4)
    assert [turn.text for turn in turns_of(engine, 20)] != texts[:20]


def test_greedy_answers_are_the_most_likely_ones(engine):
    engine.skills_S[slot_of("compare")] = 0.5
    texts = {turn.text for turn in turns_of(engine, 50, temperature=0)}
    gold = engine.answers.turns(engine._prompts["1.0"], True, True)[0]
    assert texts == {gold}
    engine.skills_S[slot_of("compare")] = -0.5
    assert gold not in {turn.text for turn in turns_of(engine, 50, temperature=0)}


def test_what_needs_a_model_is_refused(engine):
    with pytest.raises(EngineError, match="has no model"):
        engine.generate([[1, 2]], Sampling(max_tokens=2))
    with pytest.raises(EngineError, match="only answers prompts of a run's environments"):
        engine.submit("2.0/0/0", [1], Sampling(max_tokens=2))
    with pytest.raises(EngineError, match="top_k"):
        engine.submit("1.0/0/0", [1], Sampling(max_tokens=2, top_k=5))


@pytest.mark.parametrize(
    ("engine_settings", "others", "fault"),
    [
        ({"chance": 1.5}, {}, "engine.chance = 1.5; expected a number between 0 and 1"),
        ({"malformed": -1}, {}, "engine.malformed = -1; expected a number from 0 to 0.99"),
        ({}, {"kl_coeff": 0.1}, "with engine = 'stub'; expected 0: the stub has no model"),
        ({}, {"lora_rank": 8}, "with engine = 'stub'; expected 0: the stub has no model"),
        ({}, {"compute_dtype": "bfloat16"}, "compute_dtype = 'bfloat16' with engine = 'stub'; expected 'float32'"),
        ({}, {"replay_embedding": "policy"}, "replay_embedding = 'policy' with engine = 'stub'; expected 'ngram'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(engine_settings, others, fault):
    config = SRLConfig().environment("compare")
    config.engine = {"name": "stub", **engine_settings}
    for name, value in others.items():
        setattr(config, name, value)
    assert [line for line in faults_of(config) if fault in line], faults_of(config)


def test_the_parameters_of_the_law_need_the_stub():
    config = SRLConfig().environment("compare")
    config.engine = {"name": "transformers", "chance": 0.5}
    assert "engine.chance = 0.5; expected it only with engine = 'stub', not 'transformers'" in faults_of(config)


def test_an_environment_without_gold_turns_is_refused_before_a_run():
    config = SRLConfig().environment("tests.small_worlds:Even").rl_module(model_config={"model": "tiny"})
    config.engine = "stub"
    with pytest.raises(ValueError, match="has no gold_turns for prompt .* expected them with engine = 'stub'"):
        config.validate()
