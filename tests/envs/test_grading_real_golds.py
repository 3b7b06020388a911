"""Cross check over real right answers: each earns 1 against itself, and nothing for one that differs in value."""

from __future__ import annotations

import importlib.util
import random
import re
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from pathlib import Path

import pytest

from rllib_srl.envs.games.lookup import Lookup
from rllib_srl.envs.math.answer_text import plain
from rllib_srl.envs.math.compare import Compare
from rllib_srl.envs.math.final_answers import graded
from rllib_srl.envs.math.marks import final_answer
from rllib_srl.envs.math.reasoning_gym_env import ChainSum, Products

NUM_ROWS, NUM_OTHERS = 8, 10
# Sets whose right answers may differ in text and not in value: calculations of 24, of a target, of a number.
OF_EQUAL_VALUE = {"puzzle24", "countdown", "prime_factorization"}
TRUTHS = {"yes": "true", "no": "false"}


def of_reasoning_gym() -> Iterator[tuple[str, list[str]]]:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    for name in sorted(DATASETS.keys() - OF_EQUAL_VALUE - {"composite"}):
        rows = reasoning_gym.create_dataset(name, seed=1, size=NUM_ROWS)
        answers = [row["answer"].strip() for row in rows if isinstance(row["answer"], str)]
        yield name, [answer for answer in answers if answer]


def of_lm_eval() -> Iterator[tuple[str, list[str]]]:
    found = importlib.util.find_spec("lm_eval")
    if found is None or not found.submodule_search_locations:
        pytest.skip("lm-eval is not installed")
    tasks = Path(found.submodule_search_locations[0]) / "tasks"
    for path in [*sorted(tasks.rglob("*.yaml")), *sorted(tasks.rglob("utils.py"))]:
        of = path.relative_to(tasks)
        if re.search("bbh|gsm8k|math|minerva|mgsm|gpqa|aime|svamp|asdiv", str(of)):
            text = path.read_text(encoding="utf-8").replace("\\\\", "\\").replace("\\n", "\n")
            said = re.findall(r"[Tt]he answer is ([^\n\"'|?*]{1,80}?)\.?(?:\n|\"|'|$)", text)
            boxes = [final_answer(box).answer for box in re.findall(r"\\boxed\{[^\n]{1,80}", text)]
            yield str(of), [answer.strip() for answer in [*said, *boxes] if answer.strip() and "{}" not in answer]


def of_the_project() -> Iterator[tuple[str, list[str]]]:
    for world in (Compare, Lookup, ChainSum, Products):
        env = world({"num_shots": 0})
        ids = [prompt_id for _, prompt_id in zip(range(NUM_ROWS), env.prompt_ids("train", 0))]
        yield world.__name__, [env.question(prompt_id).answer for prompt_id in ids]


def spelling(answer: str) -> str:
    said = " ".join(plain(answer.strip().strip("()")).casefold().split())
    try:
        return str(Decimal(said).normalize())  # 1 and 1.0 are one value
    except InvalidOperation:
        return TRUTHS.get(said, said)


@pytest.mark.slow
@pytest.mark.parametrize("source", [of_reasoning_gym, of_lm_eval, of_the_project])
def test_a_real_answer_is_right_and_others_are_wrong(source):
    sets = {name: list(dict.fromkeys(answers)) for name, answers in source()}
    everything = sorted({answer for answers in sets.values() for answer in answers})
    draw = random.Random(5)
    num_right = num_wrong = 0
    faults = []
    for name, answers in sets.items():
        for gold in answers:
            num_right += 1
            if graded(gold, f"<answer>{gold}</answer>", deadline_s=20.0).grade != 1.0:
                faults.append(f"{name}: {gold!r} by itself")
            others = [*answers, *draw.sample(everything, min(20, len(everything)))]
            for other in [each for each in others if spelling(each) != spelling(gold)][:NUM_OTHERS]:
                num_wrong += 1
                if graded(gold, f"<answer>{other}</answer>", deadline_s=20.0).grade == 1.0:
                    faults.append(f"{name}: {gold!r} by {other!r}")
    print(
        f"\n{source.__name__}: {len(sets)} sets, {num_right} by themselves, {num_wrong} by others, {len(faults)} faults"
    )
    assert faults == []
