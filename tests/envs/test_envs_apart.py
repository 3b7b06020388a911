"""What each text world does beyond the contract of tests/envs/test_envs.py: texts, counts, splits, graders."""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from itertools import pairwise, permutations

import pytest

from rllib_srl.envs import text
from rllib_srl.envs.games.lookup import Lookup
from rllib_srl.envs.math.compare import Compare, ordered_choice
from rllib_srl.envs.math.reasoning_gym_env import COMPARED_AS_TEXT, READ_AS_ALGEBRA, READ_AS_ARITHMETIC, ReasoningGym
from rllib_srl.envs.question import integer_in
from rllib_srl.envs.text import shuffled, split_of
from tests.envs.world_play import first_ids


def test_every_question_is_numbered_once():
    assert sorted(ordered_choice(number, "abcd", 3) for number in range(24)) == sorted(
        list(choice) for choice in permutations("abcd", 3)
    )


@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 64, 1000, 4097])
def test_shuffled_is_a_permutation(size):
    assert sorted(shuffled(size, "a seed")) == list(range(size))


def test_shuffled_leaves_no_order():
    # The mean of |x_i - x_(i+1)| over random orders of n numbers is (n + 1) / 3, and each place is uniform.
    size = 3000
    order = list(shuffled(size, 0))
    jumps = sum(abs(a - b) for a, b in pairwise(order)) / (size - 1)
    assert abs(jumps - (size + 1) / 3) < 50
    firsts = Counter(next(shuffled(10, seed)) for seed in range(2000))
    assert len(firsts) == 10 and max(firsts.values()) < 300  # 200 expected each


def test_a_fixed_share_is_held_out_and_case_and_space_do_not_matter():
    held_out = sum(split_of(f"question {number}") == "heldout" for number in range(20_000))
    assert abs(held_out / 20_000 - 0.15) < 0.01
    for number in range(50):
        assert split_of(f"question  {number}\n") == split_of(f"Question {number}")


def test_the_order_of_the_numbers_does_not_leak_held_out_questions():
    world = Compare()
    for numbers in ([17, 93, 40], [55, 54, 12]):
        ids = [", ".join(map(str, order)) for order in permutations(numbers)]
        assert len({text.split_of(world.question(prompt_id).canonical) for prompt_id in ids}) == 1


def test_texts_by_hand():
    compare, two = Compare({"num_shots": 0}), Compare({"num_shots": 0, "num_numbers": 2})
    assert compare.reset(options={"prompt_id": "17, 93, 40"})[0] == "Question: Which is largest: 17, 93 or 40?\nAnswer:"
    assert two.reset(options={"prompt_id": "17, 93"})[0] == "Question: Which is larger: 17 or 93?\nAnswer:"
    assert compare.gold_turns("17, 93, 40") == [" 93\n"]
    smallest, smaller = (Compare({"num_shots": 0, "num_numbers": n, "ask": "smallest"}) for n in (3, 2))
    asked, _ = smallest.reset(options={"prompt_id": "93, 17, 40"})
    assert asked == "Question: Which is smallest: 93, 17 or 40?\nAnswer:"
    assert smaller.reset(options={"prompt_id": "17, 93"})[0] == "Question: Which is smaller: 17 or 93?\nAnswer:"
    for answer, grade in (("17", 1.0), ("93", 0.0), ("40", 0.0), ("smallest", None)):
        assert smallest.grade("93, 17, 40", answer) == grade
    # Each one's shown mistake is what the other one wants, and both keep the same questions out of training.
    for world, other in ((compare, smallest), (smallest, compare)):
        question, opposite = world.question("93, 17, 40"), other.question("93, 17, 40")
        assert (question.wrong, question.canonical) == (opposite.answer, opposite.canonical)
    lookup = Lookup({"num_shots": 0})
    assert lookup.reset(options={"prompt_id": "a=12, b=40. b?"})[0] == "Question: a=12, b=40. b?\nAnswer:"
    assert lookup.gold_turns("a=12, b=40. b?") == [" 40\n"]
    assert (compare.chance, two.chance, lookup.chance) == (1 / 3, 1 / 2, 1 / 2)


@pytest.mark.parametrize(
    ("answer", "value"),
    [("7", 7), ("-7", -7), ("07", 7), ("7.", 7), ("7.0", None), ("+7", None), ("7..", None), ("", None), (".", None),
     ("7 8", None), ("٣", None), ("1" * 31, None)],
)  # fmt: skip
def test_integer_in(answer, value):
    assert integer_in(answer) == value


@pytest.mark.parametrize(("env_config", "message"), [
    ({"lowest": 50, "highest": 50}, "lowest = 50, highest = 50; expected 0 <= lowest < highest"),
    ({"lowest": 10, "highest": 12}, "lowest to highest are 3 numbers; too few"),
])  # fmt: skip
def test_compare_refuses_impossible_settings(env_config, message):
    with pytest.raises(ValueError, match=message):
        Compare(env_config)


@pytest.mark.parametrize(("env_config", "message"), [
    ({}, "dataset is not set"),
    ({"dataset": "chainsum"}, "dataset = 'chainsum'; expected one of reasoning-gym's .*chain_sum"),
    ({"dataset": "chain_sum", "config": {"terms": 2}}, "dataset 'chain_sum' has no 'terms'; expected .*max_terms"),
    ({"dataset": "chain_sum", "config": {"min_terms": 9}}, "is refused: max_terms must be >= min_terms"),
    ({"dataset": "chain_sum", "config": {"seed": 1, "size": 3}}, "config has seed; .*config has size"),
    ({"dataset": "chain_sum", "level": 99}, r"level = 99; expected 0 to \d+ for dataset 'chain_sum'"),
    ({"dataset": "composite"}, "refused: its settings are not JSON"),
    ({"dataset": "rush_hour"}, "has no reference answers"),
    ({"dataset": "sudoku"}, "answers of several lines; set multiline = True"),
])  # fmt: skip
def test_reasoning_gym_refuses_bad_settings(env_config, message):
    with pytest.raises(ValueError, match=message):
        ReasoningGym(env_config)


def test_partial_credit_counts_only_on_request():
    # reasoning-gym: an answer that contains the right one earns their ratio of lengths.
    prompt_id = json.dumps({"dataset": "spell_backward", "index": 3})
    plain, graded = (ReasoningGym({"dataset": "spell_backward", "graded": graded}) for graded in (False, True))
    answer = plain.question(prompt_id).answer
    assert plain.grade(prompt_id, answer) == graded.grade(prompt_id, answer) == 1.0
    near = answer[:-1] + ("x" if answer[-1] != "x" else "y")
    assert plain.grade(prompt_id, near) == 0.0
    partial = graded.grade(prompt_id, near)
    assert 0 < partial < 1
    graded.reset(options={"prompt_id": prompt_id})
    assert graded.step(f" {near}\n")[1] == partial


def test_answers_of_several_lines_end_with_a_blank_one():
    world = ReasoningGym({"dataset": "sudoku", "multiline": True, "num_shots": 1, "pool_size": 20})
    assert world.stop_strings == ("\n\n",)
    prompt_id = first_ids(world, count=1)[0]
    (gold,) = world.gold_turns(prompt_id)
    assert gold.count("\n") == 10
    world.reset(options={"prompt_id": prompt_id})
    assert world.step(gold)[1:3] == (1.0, True)


def test_no_answer_is_ever_run_as_code(tmp_path):
    target = tmp_path / "written"
    for name in sorted(COMPARED_AS_TEXT | READ_AS_ARITHMETIC | READ_AS_ALGEBRA):
        world = ReasoningGym({"dataset": name, "num_shots": 0, "pool_size": 1, "multiline": True})
        prompt_id = world._id(0)
        for code in (f"open({str(target)!r}, 'w')", f"__import__('pathlib').Path({str(target)!r}).touch()", "9**9**9"):
            assert world.grade(prompt_id, code) in (None, 0.0)
        assert world.grade(prompt_id, world.question(prompt_id).answer) == 1.0
    assert not target.exists()


def test_every_grader_that_evaluates_is_known():
    """Fails when a release of reasoning-gym adds a grader that may run an answer as code."""
    from reasoning_gym.factory import DATASETS

    harmless = {
        "basic_arithmetic": "evaluates its own question",
        "bitwise_arithmetic": "evaluates its own question, reads the answer with int()",
        "gsm_symbolic": "evaluates its own templates",
        "number_sorting": "evaluates the right answer",
        "propositional_logic": "a parser of its own",
        "codeio": "runs its own programs",
    }
    evaluating = set()
    for name, (dataset_class, _) in DATASETS.items():
        source = inspect.getsource(inspect.getmodule(dataset_class))
        if re.search(r"(?<![\w.])(eval|exec)\(|parse_expr\(|sympify\(", source):
            evaluating.add(name)
    assert evaluating - set(harmless) == COMPARED_AS_TEXT | READ_AS_ARITHMETIC | READ_AS_ALGEBRA
