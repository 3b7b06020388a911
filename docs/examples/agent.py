"""Train an agent that calls the policy through the `openai` package, as it would call any server.

    python docs/examples/agent.py                       about two minutes on a CPU

`run` is the whole agent: it gets a client and a task, talks to the policy, and returns a reward. Here it asks two
questions, each in a conversation of its own. Every token of both is recorded as it was sampled.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from typing import Any

from rllib_srl import SRLConfig

QUESTION = "Question: Which is largest: {}, {} or {}?\nAnswer:"
SHOTS = f"{QUESTION.format(17, 40, 93)} 93\n\n{QUESTION.format(71, 50, 12)} 71\n\n"


def ask(client: Any, numbers: list[int]) -> str:
    """Return the policy's answer to one question."""
    messages = [{"role": "user", "content": SHOTS + QUESTION.format(*numbers)}]
    response = client.chat.completions.create(model="policy", messages=messages, stop=["\n"], max_tokens=8)
    return str(response.choices[0].message.content).strip()


def run(client: Any, task: dict[str, Any]) -> float:
    """Return the share of right answers to two questions; each is a conversation of its own."""
    rng = random.Random(task["seed"])
    questions = [rng.sample(range(10, 100), 3) for _ in range(2)]
    return sum(ask(client, numbers) == str(max(numbers)) for numbers in questions) / len(questions)


def main(argv: list[str] | None = None) -> None:
    """Train the agent, and print its held-out reward before and after."""
    parser = argparse.ArgumentParser(description="Train an agent.")
    parser.add_argument("--iterations", type=int, default=10)
    arguments = parser.parse_args(argv)
    config = (
        SRLConfig()
        .environment(agent=run)  # or "my_module:run"; agent_command=["python", "agent.py"] for any other program
        .rl_module(model_config={"model": "tiny"})
        .env_runners(engine="transformers", num_env_runners=0, max_turn_tokens=8, max_episode_tokens=128)
        .training(lr=3e-4, num_prompts_per_batch=16, group_size=8, compute_dtype="float32")
        .training(log_directory=tempfile.mkdtemp(prefix="agent_"), checkpoint_every=0)
        .evaluation(evaluation_duration=128)
        .debugging(seed=1)
    )
    algo = config.build_algo()
    try:
        before = algo.evaluate()["env_runners"]["episode_return_mean"]
        for iteration in range(1, arguments.iterations + 1):
            played = algo.train()["env_runners"]
            calls = played["agent/num_calls"]
            print(f"iteration {iteration}  reward {played['episode_return_mean']:.3f}  calls {calls:.2f}", flush=True)
        after = algo.evaluate()["env_runners"]["episode_return_mean"]
    finally:
        algo.stop()
    print(f"held-out reward: {before:.3f} before, {after:.3f} after")


if __name__ == "__main__":
    main()
