"""Train an agent that calls a tool: an environment of several turns, written from scratch.

    python docs/examples/tool_agent.py                  about a minute on a CPU

    Question: Mia buys 4 bags of 12 pencils. How many pencils does Mia buy?
    Tool: 4 * 12                                    the policy's first turn
    Result: 48                                      the environment's reply; masked from the loss
    Answer: 48                                      the policy's second turn: reward 1

An environment is an ordinary gymnasium.Env whose observations and actions are text. This file uses no code of the
package for it; `word_problem_tool` is the same with more kinds of questions and calls.
"""

from __future__ import annotations

import argparse
import random
import re
import tempfile
from collections.abc import Iterator
from typing import Any

import gymnasium

from rllib_srl import SRLConfig

CALL = re.compile(r"\s*Tool: *(\d{1,6}) *([-+*]) *(\d{1,6})\s*", re.ASCII)
ANSWER = re.compile(r"\s*Answer: *(-?\d{1,9})\s*", re.ASCII)
HEADER = (
    "Tools:\ncalculator(expression: str) - Compute with numbers, + - * / // % ** and brackets.\n"
    "To call a tool, write a line such as 'Tool: name(value, key=value)'. A line 'Result:' follows. "
    "To finish, write a line 'Answer:' with the answer.\n\n"
)


def calculator(a: int, operator: str, b: int) -> int:
    """Compute a operator b. What the policy wrote is parsed, never evaluated as code."""
    return {"+": a + b, "-": a - b, "*": a * b}[operator]


class Errands(gymnasium.Env):
    """Word problems with a calculator at hand. A prompt id is "* 4 12 Mia pencils"."""

    domain = "errands"  # the kind of task; metrics are kept for each
    stop_strings = ("\n",)  # a turn ends here
    observation_space = action_space = gymnasium.spaces.Text(1000)

    def prompt_ids(self, split: str, seed: int) -> Iterator[str]:
        """Yield prompts without end; the sum of the numbers decides the split, so the splits share no question."""
        rng = random.Random(f"{split} {seed}")
        while True:
            operator, a, b = rng.choice("+*"), rng.randint(2, 20), rng.randint(2, 20)
            name, thing = rng.choice(["Ana", "Ben", "Mia", "Leo"]), rng.choice(["apples", "cards", "pencils"])
            if ((a + b) % 5 == 0) == (split == "heldout") and (operator == "+" or a * b < 100):
                yield f"{operator} {a} {b} {name} {thing}"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict]:
        """Ask the question of `options["prompt_id"]`."""
        operator, a, b, name, thing = options["prompt_id"].split()
        self.right, self.num_calls = calculator(int(a), operator, int(b)), 0
        if operator == "+":
            text = f"{name} has {a} {thing} and finds {b} more. How many {thing} does {name} have?"
        else:
            text = f"{name} buys {a} bags of {b} {thing}. How many {thing} does {name} buy?"
        return f"{HEADER}Question: {text}\n", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Run a call, or grade an answer; anything else ends the episode."""
        if call := CALL.fullmatch(action):
            self.num_calls += 1
            result = calculator(int(call[1]), call[2], int(call[3]))
            return f"Result: {result}\n", 0.0, False, False, {"num_calls": self.num_calls}
        if answer := ANSWER.fullmatch(action):
            return "", float(int(answer[1]) == self.right), True, False, {"num_calls": self.num_calls}
        return "", 0.0, True, False, {"stop_reason": "unparsable"}


def main(argv: list[str] | None = None) -> None:
    """Train, and print rewards, turns and an episode."""
    parser = argparse.ArgumentParser(description="Train a tool agent.")
    parser.add_argument("--iterations", type=int, default=10)
    arguments = parser.parse_args(argv)
    directory = tempfile.mkdtemp(prefix="tool_agent_")
    config = (
        SRLConfig()
        .environment(Errands)  # or by its import path: "my_module:Errands"
        .rl_module(model_config={"model": "tiny"})
        .env_runners(engine="transformers", num_env_runners=0)
        .env_runners(max_turns=3, max_turn_tokens=16, max_episode_tokens=192)
        .training(lr=3e-4, num_prompts_per_batch=16, group_size=8, compute_dtype="float32")
        .training(log_directory=directory, checkpoint_every=0)
        .evaluation(evaluation_duration=128)
        .debugging(seed=1)
    )
    algo = config.build_algo()
    try:
        before = algo.evaluate()
        for iteration in range(1, arguments.iterations + 1):
            played = algo.train()["env_runners"]
            reward = played["episode_return_mean"]
            turns = played["num_env_steps_sampled"] / played["num_episodes"]  # 2: a call, then the answer
            print(f"iteration {iteration}  reward {reward:.3f}  turns {turns:.2f}", flush=True)
        after = algo.evaluate()
    finally:
        algo.stop()
    print(f"held-out accuracy, greedy: {before['accuracy']:.3f} before, {after['accuracy']:.3f} after")


if __name__ == "__main__":
    main()
