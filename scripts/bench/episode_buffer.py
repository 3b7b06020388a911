"""Train RLlib's DQN with its uniform and prioritised buffers and with `SRLEpisodeReplayBuffer`, and time their draws.

    python -m scripts.bench.episode_buffer                the tables of docs/episode-buffer.md, about ten minutes
    python -m scripts.bench.episode_buffer --short        one seed and few steps, about a minute
    python -m scripts.bench.episode_buffer --speed        the table of speed only

Learning: CartPole, and FrozenLake 4x4 without slipping, where only the goal has a reward (a random policy reaches it in
1 to 2 % of its episodes). Arms share seeds, settings and steps; only the buffer differs. `during` is RLlib's mean
return of training episodes, averaged over iterations of 500 steps: speed of learning. `final` is that of 20 greedy
episodes after the last step: one policy of many that differ from update to update, therefore a noisy figure.

Speed: a full buffer; one step is added, a batch of 32 is drawn and its TD errors are returned, in turn, as in training.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import mean, median
from typing import Any

import gymnasium
import numpy as np

from rllib_srl.studies.seeds import bootstrap_interval, paired_test
from scripts.bench.common import add_output, conditions, write

BUFFERS: dict[str, dict[str, Any]] = {
    "uniform": {"type": "EpisodeReplayBuffer"},
    "prioritised": {"type": "PrioritizedEpisodeReplayBuffer", "alpha": 0.6, "beta": 0.4},
    "srl, signal": {"type": "rllib_srl.replay.SRLEpisodeReplayBuffer"},
    "srl, due dates": {"type": "rllib_srl.replay.SRLEpisodeReplayBuffer", "selection": "srl"},
}
CAPACITY, BATCH, GREEDY_EPISODES, GREEDY_STEPS = 2_000, 32, 20, 500
PER_ITERATION = 500  # environment steps
# Steps of each task: DQN takes 6 ms of processor time a step, most of it outside the buffer.
STEPS = {"cartpole": 2_500, "frozen_lake": 2_500}


def environment_of(task: str) -> gymnasium.Env[Any, Any]:
    """Create the environment of a task."""
    if task == "cartpole":
        return gymnasium.make("CartPole-v1")
    flat: Any = gymnasium.wrappers.FlattenObservation(gymnasium.make("FrozenLake-v1", is_slippery=False))
    space = gymnasium.spaces.Box(0, 1, flat.observation_space.shape, np.float32)
    return gymnasium.wrappers.TransformObservation(flat, lambda one: one.astype(np.float32), space)


def config_of(task: str, buffer: Mapping[str, Any], seed: int, steps: int) -> Any:
    """Return the DQN configuration of a trial; everything runs in this process."""
    from ray.rllib.algorithms.dqn import DQNConfig
    from ray.tune.registry import register_env

    register_env(task, lambda _: environment_of(task))
    seeded = {"seed": seed} if "." in buffer["type"] else {}
    return (
        DQNConfig()
        .environment(task)
        .env_runners(num_env_runners=0, rollout_fragment_length=4)
        .learners(num_learners=0)
        .debugging(seed=seed, log_level="ERROR")
        .training(
            replay_buffer_config={**buffer, **seeded, "capacity": CAPACITY},
            train_batch_size=BATCH,
            lr=1e-3,
            num_steps_sampled_before_learning_starts=200,
            target_network_update_freq=200,
            epsilon=[[0, 1.0], [steps // 2, 0.05]],
            dueling=False,
        )
        .rl_module(model_config={"fcnet_hiddens": [64, 64]})
        .reporting(min_sample_timesteps_per_iteration=PER_ITERATION, min_time_s_per_iteration=0)
    )


def greedy_return(algorithm: Any, task: str) -> float:
    """Return the mean return of greedy episodes with fixed starts."""
    import torch

    module, environment, returns = algorithm.get_module(), environment_of(task), []
    for episode in range(GREEDY_EPISODES):
        observation, _ = environment.reset(seed=10_000 + episode)
        total, is_over, num = 0.0, False, 0
        while not is_over and num < GREEDY_STEPS:
            batch = {"obs": torch.as_tensor(np.asarray(observation, np.float32))[None]}
            with torch.no_grad():
                action = int(module.forward_inference(batch)["actions"][0])
            observation, reward, terminated, truncated, _ = environment.step(action)
            total, is_over, num = total + float(reward), terminated or truncated, num + 1
        returns.append(total)
    return mean(returns)


def train(task: str, buffer: Mapping[str, Any], seed: int, steps: int) -> dict[str, float]:
    """Run one trial; return `final`, `during` and its seconds of processor time."""
    begin = time.process_time()
    algorithm = config_of(task, buffer, seed, steps).build_algo()
    try:
        if "." not in buffer["type"]:  # RLlib's own buffers take no seed
            algorithm.local_replay_buffer.rng = np.random.default_rng(seed)
        during = []
        while (result := algorithm.train()["env_runners"])["num_env_steps_sampled_lifetime"] < steps:
            during.append(float(result["episode_return_mean"]))
        during.append(float(result["episode_return_mean"]))
        final = greedy_return(algorithm, task)
    finally:
        algorithm.stop()
    return {"final": final, "during": mean(during), "seconds": time.process_time() - begin}


def learning(tasks: Mapping[str, int], num_seeds: int, show: Callable[[str], None]) -> dict[str, Any]:
    """Run every task, seed and arm; return task -> arm -> figure -> one value a seed."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True)
    figures: dict[str, Any] = {task: {arm: {} for arm in BUFFERS} for task in tasks}
    for task, steps in tasks.items():
        for seed in range(1, num_seeds + 1):
            for arm, buffer in BUFFERS.items():
                found = train(task, buffer, seed, steps)
                for name, value in found.items():
                    figures[task][arm].setdefault(name, []).append(value)
                show(f"{task}, seed {seed}, {arm}: " + ", ".join(f"{name} {v:.3g}" for name, v in found.items()))
    return figures


def learning_table(figures: Mapping[str, Any]) -> str:
    """Return the results as a table, with paired differences from the prioritised buffer and their 95 % interval."""
    lines = ["| task | buffer | during | minus prioritised | p | final | minus prioritised | p | processor s |"]
    lines.append("|---" * 9 + "|")
    for task, arms in figures.items():
        for arm, one in arms.items():
            cells = [task, arm]
            for name in ("during", "final"):
                cells += [f"{mean(one[name]):.3g}", *_against(one[name], arms["prioritised"][name], arm)]
            lines.append(f"| {' | '.join(cells)} | {mean(one['seconds']):.0f} |")
    return "\n".join(lines)


def _against(values: Sequence[float], base: Sequence[float], arm: str) -> tuple[str, str]:
    if arm == "prioritised":
        return "", ""
    gap_E = np.array(values) - np.array(base)
    low, high = bootstrap_interval(gap_E)
    return f"{gap_E.mean():+.3g} ({low:.3g}, {high:.3g})", f"{paired_test(gap_E).p:.3g}"


def speed(num_steps: int, num_draws: int) -> dict[str, dict[str, float]]:
    """Return the median milliseconds of a draw, an update and the addition of a step, for each full buffer."""
    from ray.rllib.utils.from_config import from_config
    from ray.rllib.utils.replay_buffers import ReplayBuffer

    found: dict[str, dict[str, float]] = {}
    for arm, config in BUFFERS.items():
        given = {name: value for name, value in config.items() if name not in ("type", "beta")}
        kind = config["type"] if "." in config["type"] else f"ray.rllib.utils.replay_buffers.{config['type']}"
        buffer = from_config(ReplayBuffer, {"type": kind, "capacity": num_steps, **given})
        found[arm] = _timed(buffer, num_steps, num_draws, config.get("beta"))
    return found


def _timed(buffer: Any, num_steps: int, num_draws: int, beta: float | None) -> dict[str, float]:
    generator = np.random.default_rng(0)
    for _ in range(num_steps // 50 + 1):
        buffer.add(_episode(generator, 50))
    took, whole = {name: list[float]() for name in ("draw", "update", "add")}, _episode(generator, 50)
    arguments = {"num_items": BATCH, "n_step": 1, "gamma": 0.99, "sample_episodes": True}
    arguments |= {} if beta is None else {"beta": beta}
    for at in range(num_draws + 2):  # two to warm up
        whole = whole if at % 50 else _episode(generator, 50)
        step = whole.slice(slice(at % 50, at % 50 + 1), len_lookback_buffer=0)
        times = {"add": _milliseconds(partial(buffer.add, step))}
        times["draw"] = _milliseconds(partial(buffer.sample, **arguments))
        if hasattr(buffer, "update_priorities"):
            errors = generator.exponential(size=BATCH)
            times["update"] = _milliseconds(partial(buffer.update_priorities, errors))
        for name, value in times.items() if at >= 2 else ():
            took[name].append(value)
    return {name: median(values) if values else 0.0 for name, values in took.items()} | {
        "mean add": mean(took["add"])  # evictions are rare and long
    }


def _milliseconds(call: Callable[[], Any]) -> float:
    begin = time.thread_time()
    call()
    return 1e3 * (time.thread_time() - begin)


def _episode(generator: np.random.Generator, length: int) -> Any:
    from ray.rllib.env.single_agent_episode import SingleAgentEpisode

    return SingleAgentEpisode(
        observations=list(generator.standard_normal((length + 1, 4), np.float32)),
        infos=[{} for _ in range(length + 1)],
        actions=list(generator.integers(2, size=length)),
        rewards=[1.0] * length,
        terminated=True,
        len_lookback_buffer=0,
    )


def speed_table(figures: Mapping[int, Mapping[str, Mapping[str, float]]]) -> str:
    """Return the times as a table."""
    lines = [f"| steps stored | buffer | draw of {BATCH}, ms | update, ms | add a step, ms (mean) | all, ms |"]
    lines.append("|---" * 6 + "|")
    for num_steps, arms in figures.items():
        for arm, one in arms.items():
            total = one["draw"] + one["update"] + one["mean add"]
            row = f"{one['draw']:.2f} | {one['update']:.2f} | {one['mean add']:.2f} | {total:.2f}"
            lines.append(f"| {num_steps:,} | {arm} | {row} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--short", action="store_true", help="one seed, 1,000 steps a task")
    parser.add_argument("--speed", action="store_true", help="leave out learning")
    add_output(parser)
    arguments = parser.parse_args(argv)
    if arguments.seeds < 1:
        parser.error(f"--seeds = {arguments.seeds}; expected at least 1")
    print(conditions("fp32"))
    sizes, num_draws = ((1_000,), 20) if arguments.short else ((CAPACITY, 50_000), 200)
    times = {size: speed(size, num_draws) for size in sizes}
    print(speed_table(times), flush=True)
    figures: dict[str, Any] = {"speed": {str(size): one for size, one in times.items()}}
    if not arguments.speed:
        tasks = dict.fromkeys(STEPS, 1_000) if arguments.short else STEPS
        seeds = 1 if arguments.short else arguments.seeds
        figures["learning"] = learning(tasks, seeds, lambda line: print(line, flush=True))
        print(learning_table(figures["learning"]))
    write(arguments, "episode_buffer", figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
