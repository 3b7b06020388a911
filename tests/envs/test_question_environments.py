"""What environments of one question do beyond the contract of test_envs.py: texts, splits, shots, feedback, counts."""

from collections import Counter
from itertools import pairwise, permutations

import pytest

from rllib_srl.envs import text
from rllib_srl.envs.games.copy_words import CopyWords
from rllib_srl.envs.games.lookup import Lookup
from rllib_srl.envs.math.compare import Compare
from rllib_srl.envs.math.reasoning_gym_env import Products, ReasoningGym
from rllib_srl.envs.text import shuffled, split_of
from rllib_srl.envs.tools.word_problem import WordProblem
from tests.envs.play import play

PROMPT_ID = "17, 93, 40"
WRONG, GOLD = " 17\n", " 93\n"


def test_shuffled_is_a_permutation_without_order():
    for size in (0, 1, 2, 3, 7, 64, 1000, 4097):
        assert sorted(shuffled(size, "a seed")) == list(range(size))
    # The mean of |x_i - x_(i+1)| over random orders of n numbers is (n + 1) / 3, and each place is uniform.
    size = 3000
    jumps = sum(abs(a - b) for a, b in pairwise(shuffled(size, 0))) / (size - 1)
    assert abs(jumps - (size + 1) / 3) < 50
    firsts = Counter(next(shuffled(10, seed)) for seed in range(2000))
    assert len(firsts) == 10 and max(firsts.values()) < 300  # 200 expected each


def test_a_fixed_share_is_held_out_whatever_case_space_and_order():
    held_out = sum(split_of(f"question {number}") == "heldout" for number in range(20_000))
    assert abs(held_out / 20_000 - 0.15) < 0.01
    for number in range(50):
        assert split_of(f"question  {number}\n") == split_of(f"Question {number}")
    env = Compare()
    for numbers in ([17, 93, 40], [55, 54, 12]):
        ids = [", ".join(map(str, order)) for order in permutations(numbers)]
        assert len({text.split_of(env.question(prompt_id).canonical) for prompt_id in ids}) == 1


@pytest.mark.parametrize(("env", "num_questions"), [
    (Compare({"num_numbers": 2, "lowest": 0, "highest": 9}), 90 - 4),
    (Products({"num_shots": 0}), 100),
    (WordProblem({"num_steps": 1, "lowest": 2, "highest": 4, "num_shots": 3}), None),
    (ReasoningGym({"dataset": "chain_sum", "config": {"max_terms": 2, "max_digits": 1}, "num_shots": 0}), 200),
])  # fmt: skip
def test_num_questions_is_what_the_splits_hold(env, num_questions):
    ids = [prompt_id for split in text.SPLITS for prompt_id in env.prompt_ids(split, 0)]
    assert len({env.question(prompt_id).text for prompt_id in ids}) == len(ids) == env.num_questions
    assert num_questions in (None, len(ids))


def test_texts_by_hand():
    compare, two = Compare({"num_shots": 0}), Compare({"num_shots": 0, "num_numbers": 2})
    assert compare.reset(options={"prompt_id": PROMPT_ID})[0] == "Question: Which is largest: 17, 93 or 40?\nAnswer:"
    assert two.reset(options={"prompt_id": "17, 93"})[0] == "Question: Which is larger: 17 or 93?\nAnswer:"
    assert compare.gold_turns(PROMPT_ID) == [GOLD]
    smallest, smaller = (Compare({"num_shots": 0, "num_numbers": n, "ask": "smallest"}) for n in (3, 2))
    asked, _ = smallest.reset(options={"prompt_id": "93, 17, 40"})
    assert asked == "Question: Which is smallest: 93, 17 or 40?\nAnswer:"
    assert smaller.reset(options={"prompt_id": "17, 93"})[0] == "Question: Which is smaller: 17 or 93?\nAnswer:"
    for answer, grade in (("17", 1.0), ("93", 0.0), ("40", 0.0), ("smallest", None)):
        assert smallest.grade("93, 17, 40", answer) == grade
    # Each one's shown mistake is what the other one wants, and both keep the same questions out of training.
    for env, other in ((compare, smallest), (smallest, compare)):
        question, opposite = env.question("93, 17, 40"), other.question("93, 17, 40")
        assert (question.wrong, question.canonical) == (opposite.answer, opposite.canonical)
    lookup = Lookup({"num_shots": 0})
    assert lookup.reset(options={"prompt_id": "a=12, b=40. b?"})[0] == "Question: a=12, b=40. b?\nAnswer:"
    assert lookup.gold_turns("a=12, b=40. b?") == [" 40\n"]
    assert (compare.chance, two.chance, lookup.chance) == (1 / 3, 1 / 2, 1 / 2)


def test_the_first_line_counts():
    env = Compare({"num_shots": 0})
    for turn, reward in [(GOLD + "Question: more", 1.0), (GOLD.strip(), 1.0), (" 93.", 1.0), (WRONG + GOLD, 0.0)]:
        assert play(env, [turn], PROMPT_ID)[1:] == ([reward], True, {}), turn
    for turn in ("", " ", "\n", "\n\n 93", "   \n93\n", "93.0", "+93", "9 3", "٩٣", "9" * 31):
        assert play(env, [turn], PROMPT_ID)[1:] == ([0.0], True, {"stop_reason": "unparsable"}), turn


def test_feedback_gives_further_tries_for_part_of_the_reward():
    env = Compare({"num_shots": 0, "feedback_turns": 2, "retry_reward": 0.25})
    again = "Wrong. Try again.\nAnswer:"
    assert play(env, [GOLD], PROMPT_ID)[1] == [1.0]
    assert play(env, [WRONG], PROMPT_ID)[0] == again
    assert play(env, [WRONG, WRONG, GOLD], PROMPT_ID) == ("", [0.0, 0.0, 0.25], True, {})
    assert play(env, [WRONG, "", WRONG], PROMPT_ID)[1:] == ([0.0, 0.0, 0.0], True, {})
    assert play(env, [WRONG, WRONG, ""], PROMPT_ID)[3] == {"stop_reason": "unparsable"}
    assert play(env, ["17"], PROMPT_ID)[0] == "\n" + again  # feedback starts on its own line
    for turn, reward in ((GOLD, 0.25), (WRONG, 0.0)):  # replayed tries count
        env.reset(options={"prompt_id": PROMPT_ID, "history": [WRONG, "x"]})
        assert env.step(turn)[1:3] == (reward, True)


def test_copied_words_forwards_and_backwards_by_hand():
    env, prompt_id = CopyWords({"num_shots": 0}), "lamp, river, cloud, nest"
    observation, _ = env.reset(options={"prompt_id": prompt_id})
    assert observation == "Question: Copy these words: lamp, river, cloud, nest\nAnswer:"
    for answer, grade in [
        (" lamp, river, cloud, nest\n", 1.0), (" lamp river cloud nest.\n", 1.0), (" Lamp,  RIVER, cloud, nest\n", 1.0),
        (" river, lamp, cloud, nest\n", 0.0), (" lamp, river, cloud\n", 0.0),
        (" lamp, river, cloud, nest, nest\n", 0.0), (" lamp, river, cloud, n\u0435st\n", 0.0),  # a cyrillic e
    ]:  # fmt: skip
        assert play(env, [answer], prompt_id)[1:] == ([grade], True, {}), answer
    for answer in ("", "\n", " 7 7 7", " , .", "lamp " * 300):
        assert play(env, [answer], prompt_id)[3] == {"stop_reason": "unparsable"}, answer[:9]
    env, prompt_id = CopyWords({"num_shots": 0, "order": "backwards"}), "lamp, river, cloud"
    observation, _ = env.reset(options={"prompt_id": prompt_id})
    assert observation == "Question: Copy these words backwards: lamp, river, cloud\nAnswer:"
    assert env.gold_turns(prompt_id) == [" cloud, river, lamp\n"]
    for answer, grade in [("cloud river lamp", 1.0), (prompt_id, 0.0), ("cloud, lamp, river", 0.0)]:
        assert play(env, [f" {answer}\n"], prompt_id)[1] == [grade], answer
    graded, forwards = CopyWords({"order": "backwards", "graded": True}), CopyWords()
    assert graded.grade(prompt_id, prompt_id) == pytest.approx(1 / 3)  # the middle one stands in its place
    question, opposite = env.question(prompt_id), forwards.question(prompt_id)
    assert (question.wrong, question.canonical) == (opposite.answer, opposite.canonical)
