"""Recall: arbitrary facts in stages, measured as asked and with the options in another order."""

import re
from collections import Counter

import pytest

from rllib_srl.envs.games.recall import Recall
from tests.envs.play import play


def test_a_question_by_its_parts():
    env = Recall()
    (prompt_id, *_) = env.prompt_ids("train", 0)
    observation = env.reset(options={"prompt_id": prompt_id})[0]
    found = re.fullmatch(r"Question: Code of item ([A-Z]-\d\d): (\d\d), (\d\d) or (\d\d)\?\nAnswer:", observation)
    assert found and f"{found[1]}: {found[2]}, {found[3]}, {found[4]}" == prompt_id
    answer = env.question(prompt_id).answer
    assert [sum(play(env, [f" {option}\n"], prompt_id)[1]) for option in found.groups()[1:]] == [
        float(option == answer) for option in found.groups()[1:]
    ]
    assert env.chance == pytest.approx(1 / 3) and env.num_questions == 384


def test_both_splits_are_the_same_facts_with_the_code_at_another_position():
    env = Recall({"num_facts": 40, "num_stages": 2, "num_options": 4})
    asked = {one.split(":")[0]: one for one in env.prompt_ids("train", 1)}
    measured = {one.split(":")[0]: one for one in env.prompt_ids("heldout", 2)}
    assert len(asked) == 80 and asked.keys() == measured.keys()
    for item, prompt_id in asked.items():
        before, after = (one.split(": ")[1].split(", ") for one in (prompt_id, measured[item]))
        answer = env.question(prompt_id).answer
        assert sorted(before) == sorted(after) and env.question(measured[item]).answer == answer
        assert before.index(answer) != after.index(answer)
        assert (env.split_of(prompt_id), env.split_of(measured[item])) == ("train", "heldout")
    places = Counter(one.split(": ")[1].split(", ").index(env.question(one).answer) for one in asked.values())
    assert set(places) == {0, 1, 2, 3} and min(places.values()) >= 8  # the position says nothing


def test_a_stage_is_a_domain_of_its_own_facts():
    whole = Recall({"num_facts": 10, "num_stages": 3})
    stages = [Recall({"num_facts": 10, "num_stages": 3, "stage": stage}) for stage in range(3)]
    by_stage = [sorted(env.prompt_ids("train", 0)) for env in stages]
    of_all = [prompt_id for ids in by_stage for prompt_id in ids]
    assert sorted(of_all) == sorted(whole.prompt_ids("train", 0)) and len(set(of_all)) == 30
    for stage, ids in enumerate(by_stage):
        assert {whole.domain_of(one) for one in ids} == {f"stage_{stage}"} == {stages[stage].domain_of(ids[0])}


def test_the_seed_decides_the_facts_and_shots_are_of_other_items():
    def facts(seed):
        return sorted(Recall({"seed": seed}).prompt_ids("train", 0))

    assert facts(1) == facts(1) != facts(2)
    env = Recall({"num_facts": 8, "num_stages": 1, "num_shots": 3})
    observation = env.reset(seed=0)[0]
    items = re.findall(r"item ([A-Z]-\d\d)", observation)
    assert len(items) == 4 and not set(items[:3]) & {one.split(":")[0] for one in env.prompt_ids("train", 0)}
