"""Lessons of the tiny model: episodes played in the environments themselves, right ones and plausible wrong ones.

    Question: Registers p, c. What is in p?\nAction:      text of the environment
     get p\n                                              a turn, which is learnt; in a wrong episode " get c\n"
    p = 17\nAction:                                       the environment's reply
     answer 17\n                                          a turn

Episodes come from `reset` and `step`, so the model is trained on the same tokens that SRL plays. A wrong episode is
wrong in one decision only and continues consistently, so this decision is what reinforcement learning changes.

Some lessons are pairs: prompts of one form in which one word makes the opposite answer right. There the mistake is the
answer to the other question, so in the end the model nearly ignores the word, and reinforcing one of the two answers
reinforces it for both questions. This makes the skills of a stream interfere with each other.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rllib_srl.envs.games.copy_words import CopyWords
from rllib_srl.envs.games.lookup import Lookup
from rllib_srl.envs.games.registers import Registers
from rllib_srl.envs.math.compare import Compare
from rllib_srl.envs.math.reasoning_gym_env import ChainSum
from rllib_srl.envs.text import WRONG, reply
from rllib_srl.envs.tools.calculator import evaluate, shown
from rllib_srl.envs.tools.word_problem import WordProblem

SEED = 7
FEEDBACK_PERIOD = 10  # each tenth question was answered wrong before, so that feedback turns are in distribution
_OTHER_END = {"larger": min, "smaller": max}
_OTHER_OPERATOR = {"+": "*", "*": "+", "-": "+", "/": "-"}


@dataclass(frozen=True)
class Episode:
    """One episode as text. Invariant: `said[i]` stands right before `turns[i]`, and both are equally many."""

    said: tuple[str, ...]
    turns: tuple[str, ...]


@dataclass(frozen=True)
class Lesson:
    """An environment to be half mastered. Invariant: `wrong` returns turns that earn less than the gold ones."""

    world: type
    settings: Mapping[str, Any]
    wrong: Callable[[Any, str], list[str]]
    noise: float = 0.4  # share of wrong episodes in the last steps

    def make(self) -> Any:
        """Return the environment, without shots."""
        return self.world({"num_shots": 0, **self.settings})


# --- plausible mistakes ---------------------------------------------------------------------------


def first_other_number(world: Any, prompt_id: str) -> list[str]:
    """Return the first number of the question that is not the answer."""
    right = world.question(prompt_id).answer
    return [f" {next(number for number in re.findall(r'[0-9]+', prompt_id) if number != right)}\n"]


def opposite(world: Any, prompt_id: str) -> list[str]:
    """Return the question's `wrong` answer: for a question with an opposite, the right answer of the opposite."""
    return [f" {world.question(prompt_id).wrong}\n"]


def other_operator(world: Any, prompt_id: str) -> list[str]:
    """Return a call with another operator, and its result as the answer."""
    right, _ = world.gold_turns(prompt_id)
    call = re.sub(r" ([-+*/]) ", lambda found: f" {_OTHER_OPERATOR[found[1]]} ", right, count=1)
    return [call, f"Answer: {shown(evaluate(call.partition(':')[2]))}\n"]


def other_register(world: Any, prompt_id: str) -> list[str]:
    """Return turns that read a register that was not asked for, or answer the smaller of two for the larger."""
    listed, _, asked = prompt_id.partition(". ")
    held = dict(pair.split("=") for pair in listed.split(", "))
    task, *of = asked.split()
    if task in _OTHER_END:
        return [*(f" get {name}\n" for name in of), f" answer {_OTHER_END[task](held[name] for name in of)}\n"]
    needed = [*of, held[of[0]]] if task == "follow" else of
    other = next(name for name in held if name not in needed)
    return [f" get {other}\n", f" answer {held[other]}\n"]


# --- the lessons ----------------------------------------------------------------------------------

LESSONS: Mapping[str, Lesson] = {
    "compare": Lesson(Compare, {}, opposite),
    "compare_smallest": Lesson(Compare, {"ask": "smallest"}, opposite),
    "compare_four": Lesson(Compare, {"num_numbers": 4}, opposite),
    "compare_four_smallest": Lesson(Compare, {"num_numbers": 4, "ask": "smallest"}, opposite),
    "copy_two": Lesson(CopyWords, {"num_words": 2}, opposite),
    "copy_two_backwards": Lesson(CopyWords, {"num_words": 2, "order": "backwards"}, opposite),
    "copy_words": Lesson(CopyWords, {"num_words": 3}, opposite),
    "copy_backwards": Lesson(CopyWords, {"num_words": 3, "order": "backwards"}, opposite),
    "registers_larger": Lesson(Registers, {"task": "larger"}, other_register),
    "registers_smaller": Lesson(Registers, {"task": "smaller"}, other_register),
    "registers_four_larger": Lesson(Registers, {"task": "larger", "num_registers": 4}, other_register),
    "registers_four_smaller": Lesson(Registers, {"task": "smaller", "num_registers": 4}, other_register),
    "registers": Lesson(Registers, {}, other_register),
    "word_problem_tool": Lesson(WordProblem, {"num_steps": 1}, other_operator),
    "lookup": Lesson(Lookup, {}, first_other_number, noise=0.0),  # hard enough as it is, and so is the next
    "chain_sum": Lesson(ChainSum, {}, opposite, noise=0.0),
}


def episodes(shares: Mapping[str, int], is_noisy: bool) -> Iterator[Episode]:
    """Yield training episodes without end, in a fixed order.

    Args:
        shares: lesson -> number of its episodes in each round; rounds are shuffled
        is_noisy: whether to include the lessons' shares of wrong episodes
    """
    worlds = {name: LESSONS[name].make() for name in shares}
    streams = {name: _endless(world) for name, world in worlds.items()}
    generator, number = random.Random(SEED), 0
    order = [name for name in shares for _ in range(shares[name])]
    while True:
        generator.shuffle(order)
        for name in order:
            number += 1
            world, lesson, prompt_id = worlds[name], LESSONS[name], next(streams[name])
            is_wrong = is_noisy and generator.random() < lesson.noise
            turns = lesson.wrong(world, prompt_id) if is_wrong else world.gold_turns(prompt_id)
            episode, _ = played(world, prompt_id, turns)
            if number % FEEDBACK_PERIOD == 0 and len(turns) == 1 and lesson.world is not CopyWords:
                tried = lesson.wrong(world, prompt_id)[0]
                episode = Episode((episode.said[0] + tried + reply(tried, WRONG),), episode.turns)
            yield episode


def played(world: Any, prompt_id: str, turns: list[str]) -> tuple[Episode, float]:
    """Play turns in an environment; return the episode and its reward."""
    said, total = [world.reset(options={"prompt_id": prompt_id})[0]], 0.0
    for turn in turns:
        observation, reward, *_ = world.step(turn)
        said.append(observation)
        total += reward
    return Episode(tuple(said[:-1]), tuple(turns)), total


def _endless(world: Any) -> Iterator[str]:
    while True:
        yield from world.prompt_ids("train", SEED)
