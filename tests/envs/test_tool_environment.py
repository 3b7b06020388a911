"""`ToolEnvironment`: tools as plain functions, questions as rows, an answer compared or rewarded by a function."""

import pytest
from gymnasium.utils.env_checker import check_env

from rllib_srl import ToolEnvironment
from rllib_srl.common.environments import resolve
from rllib_srl.envs.rewards.scoring import RewardError


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def fails(text: str) -> str:
    """Fail."""
    raise KeyError(text)


ROWS = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(2, 10) for b in range(2, 10)]


def make(env_config) -> ToolEnvironment:
    return ToolEnvironment(tools=[add, fails], questions=ROWS, **env_config)


def asked(env: ToolEnvironment, question: str = "What is 4 + 5?") -> str:
    prompt_id = next(each for each in env._ids if env.question(each).text == question)
    return env.reset(options={"prompt_id": prompt_id})[0]


def test_an_episode_by_hand() -> None:
    env = make({})
    prompt = asked(env)
    assert "add(a: int, b: int = 1)" in prompt and "Add two numbers." in prompt
    assert prompt.endswith("Question: What is 4 + 5?\n")
    assert env.step("Tool: add(4, b=5)\n")[:3] == ("Result: 9\n", 0.0, False)
    assert env.step("Tool: fails('x')\n")[0] == "Result: Error: KeyError: 'x'\n"
    _, reward, terminated, _, info = env.step("Answer: 9\n")
    assert (reward, terminated, info) == (1.0, True, {"num_calls": 2})
    asked(env)
    assert env.step("Answer: 10\n")[1] == 0.0


def test_a_function_may_reward_the_answer() -> None:
    def half(prompt: str, answer: str, row: dict) -> float:
        return 0.5 if (prompt, row["tag"]) == ("2?", 7) else 1 / 0

    rows = [{"question": "2?", "tag": 7}, {"question": "3?", "tag": 8}]
    env = ToolEnvironment(tools=[add], questions=rows, reward=half)
    asked(env, "2?")
    assert env.step("Answer: whatever\n")[1] == 0.5
    asked(env, "3?")
    with pytest.raises(RewardError, match="reward 'half' raised ZeroDivisionError: division by zero"):
        env.step("Answer: whatever\n")


def test_rows_that_ask_the_same_and_differ_are_prompts_of_one_split_each_with_its_system_message() -> None:
    def within(prompt: str, answer: str, row: dict) -> float:
        return float(int(answer) <= row["limit"])

    asks = {"role": "user", "content": "How many?"}
    rows = [{"messages": [{"role": "system", "content": f"At most {n}."}, asks], "limit": n} for n in (5, 10, 20, 5)]
    env = ToolEnvironment([add], [*rows, {"question": "3?"}], reward=within, system_prompt="Be short.")
    assert env.num_questions == 4 and len({env.split_of(each) for each in env._ids[:3]}) == 1
    seen = []
    for prompt_id in env._ids[:3]:
        env.reset(options={"prompt_id": prompt_id})
        seen.append((env.system_prompt, env.step("Answer: 10\n")[1]))
    assert seen == [("At most 5.", 0.0), ("At most 10.", 1.0), ("At most 20.", 1.0)]
    asked(env, "3?")
    assert env.system_prompt == "Be short."


def test_an_import_path_of_a_function_is_an_environment() -> None:
    env = resolve("tests.envs.test_tool_environment:make")({"max_calls": 3})
    assert (env.settings.max_calls, env.num_questions) == (3, 64)
    splits = [set(env.prompt_ids(split, seed=0)) for split in ("train", "heldout")]
    assert all(splits) and not splits[0] & splits[1]
    check_env(env, skip_render_check=True)


@pytest.mark.parametrize(("given", "error"), [
    ({"tools": []}, "tools = []; expected at least one function"),
    ({"questions": []}, "questions: expected at least one row"),
    ({"questions": [{"question": "2?"}]}, "questions: row 1, field 'answer' is missing"),
    ({"questions": [*ROWS[:2], {**ROWS[0], "answer": "5"}]}, "row 3, field 'answer' differs from that of an earlier"),
])  # fmt: skip
def test_what_cannot_be_used_is_named(given: dict, error: str) -> None:
    with pytest.raises(ValueError) as caught:
        ToolEnvironment(**{"tools": [add], "questions": ROWS, **given})
    assert error in str(caught.value)
