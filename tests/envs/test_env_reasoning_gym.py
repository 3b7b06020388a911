"""reasoning-gym: all verifiable data sets, their graders and curricula, and that no answer is run as code."""

import inspect
import json
import re
import time

import pytest

from rllib_srl.envs import text
from rllib_srl.envs.math.reasoning_gym_data import REFUSED, make_dataset
from rllib_srl.envs.math.reasoning_gym_env import COMPARED_AS_TEXT, READ_AS_ALGEBRA, READ_AS_ARITHMETIC, ReasoningGym
from tests.envs.play import first_ids, play

NUM_PLAYED = 3  # entries of each dataset

HOSTILE = (
    "\ud800", "1e999999999", "(" * 5000, "9**9**9**9", "__import__('os').getcwd()", "[" * 9000, "7" * 20_000, "\x00",
)  # fmt: skip


def play_dataset(name):
    env = ReasoningGym({"dataset": name, "pool_size": NUM_PLAYED, "num_shots": 0, "multiline": True})
    ids = [prompt_id for split in text.SPLITS for prompt_id in env.prompt_ids(split, 0)]
    assert ids and env.domain == name
    for prompt_id in ids:
        _, rewards, terminated, info = play(env, env.gold_turns(prompt_id), prompt_id)
        assert (rewards, terminated, info) == ([1.0], True, {}), (prompt_id, env.question(prompt_id))
        for empty in ("", "\n\n", "  \n\nx"):
            assert play(env, [empty], prompt_id)[1:] == ([0.0], True, {"stop_reason": "unparsable"}), prompt_id
        for answer in ("hello", "a wrong answer", "unknown", "x"):
            assert play(env, [answer], prompt_id)[1] == [0.0], (prompt_id, answer)
    for answer in HOSTILE:
        start, work = time.monotonic(), time.process_time()
        assert play(env, [answer], ids[0])[1] == [0.0], (name, answer[:9])
        assert time.process_time() - work < 10 and time.monotonic() - start < 60


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_verifiable_dataset_pays_its_answers_and_nothing_else():
    from reasoning_gym.factory import DATASETS

    names = sorted(set(DATASETS) - set(REFUSED))
    assert len(names) >= 103
    errors = []
    for name in names:
        try:
            play_dataset(name)
        except (AssertionError, ValueError) as error:
            errors.append(f"{name}: {error}"[:500])
    assert not errors, "\n".join(errors)


def test_entries_without_an_answer_are_left_out():
    dataset = make_dataset("ab", {}, None)
    unanswered = [index for index in range(400) if not dataset[index]["answer"]]
    assert unanswered  # a program may end in nothing
    env = ReasoningGym({"dataset": "ab", "pool_size": 400, "num_shots": 0})
    asked = {json.loads(i)["index"] for split in text.SPLITS for i in env.prompt_ids(split, 0)}
    assert not asked & set(unanswered)
    with pytest.raises(ValueError, match="expected an entry that has an answer"):
        env.question(json.dumps({"dataset": "ab", "index": unanswered[0]}))
    zero = ReasoningGym({"dataset": "base_conversion", "pool_size": 2000, "num_shots": 0})  # 1514 writes 0 as nothing
    assert zero.num_questions == len([i for split in text.SPLITS for i in zero.prompt_ids(split, 0)])


@pytest.mark.slow
def test_graders_that_pay_for_what_is_wrong_are_replaced_and_formulas_may_be_rearranged():
    env = ReasoningGym({"dataset": "game_of_life_halting", "pool_size": 40, "num_shots": 0})
    ids = [i for split in text.SPLITS for i in env.prompt_ids(split, 0)]
    right = {env.question(prompt_id).answer for prompt_id in ids}
    assert right == {"True", "False"}
    for prompt_id in ids[:10]:
        grades = {answer: env.grade(prompt_id, answer) for answer in ("True", "False", "hello")}
        assert grades == {**dict.fromkeys(grades, 0.0), env.question(prompt_id).answer: 1.0}
    env = ReasoningGym({"dataset": "coin_flip", "pool_size": 9, "num_shots": 0})
    prompt_id = next(i for i in map(env._id, range(9)) if env.question(i).answer == "0.3125")
    tiny = json.dumps({"dataset": "coin_flip", "index": 6})
    assert env.question(tiny).answer == "3.051757812e-05"
    for answer, expected in [("3.05e-5", 1), ("0.0000305", 1), ("1/32768", 1), ("0", 0), ("0.0001", 0)]:
        assert env.grade(tiny, answer) == expected, answer
    for answer, expected in [("0.3125", 1), ("5/16", 1), ("0.31255", 1), ("0", 0), ("0.3", 0), ("1e999999999", None)]:
        assert env.grade(prompt_id, answer) == expected, answer
    env = ReasoningGym({"dataset": "simple_integration", "pool_size": 5, "num_shots": 0})
    prompt_id = next(i for split in text.SPLITS for i in env.prompt_ids(split, 0))
    answer = env.question(prompt_id).answer
    assert answer.endswith(" + C")
    terms = answer.removesuffix(" + C")
    for turn, reward in [(terms, 1.0), (f"{terms} + c", 1.0), (f"0 + {terms}", 1.0), (f"{terms} + 1*x", 0.0)]:
        assert play(env, [turn], prompt_id)[1] == [reward], turn


def test_levels_of_the_curriculum_make_questions_harder():
    def lengths(**config):
        env = ReasoningGym({"dataset": "chain_sum", "num_shots": 0, "pool_size": 60, **config})
        ids = [i for split in text.SPLITS for i in env.prompt_ids(split, 0)]
        terms = [len(re.findall(r"\d+", env.question(i).text)) for i in ids]
        digits = [max(map(len, re.findall(r"\d+", env.question(i).text))) for i in ids]
        return max(terms), max(digits)

    assert lengths(levels={"num_terms": 3, "num_digits": 0}) > lengths(levels={"num_terms": 0, "num_digits": 0})
    assert lengths(level=0, levels={"num_digits": 3})[1] > lengths(level=0)[1]
    env = ReasoningGym({"dataset": "chain_sum", "levels": {"num_terms": 1}, "num_shots": 0, "pool_size": 9})
    prompt_id = first_ids(env, count=1)[0]
    other = ReasoningGym({"dataset": "chain_sum", "num_shots": 0})
    assert other.question(prompt_id) == env.question(prompt_id)  # an id brings its levels along
    with pytest.raises(ValueError, match="expected for dataset 'chain_sum': num_terms 0 to .*, num_digits 0 to"):
        ReasoningGym({"dataset": "chain_sum", "levels": {"terms": 1}})
    with pytest.raises(ValueError, match="no curriculum"):
        ReasoningGym({"dataset": "gsm_symbolic", "levels": {"difficulty": 1}})


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


def test_no_answer_is_ever_run_as_code(tmp_path):
    target = tmp_path / "written"
    for name in sorted(COMPARED_AS_TEXT | READ_AS_ARITHMETIC | READ_AS_ALGEBRA):
        env = ReasoningGym({"dataset": name, "num_shots": 0, "pool_size": 1, "multiline": True})
        prompt_id = env._id(0)
        for code in (f"open({str(target)!r}, 'w')", f"__import__('pathlib').Path({str(target)!r}).touch()", "9**9**9"):
            assert env.grade(prompt_id, code) in (None, 0.0)
        assert env.grade(prompt_id, env.question(prompt_id).answer) == 1.0
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
