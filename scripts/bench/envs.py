#!/usr/bin/env python3
"""Measure the latency of the environments: a turn in each, a call of the sandbox, and 256 concurrent episodes.

python -m scripts.bench.envs                              all installed environments, the sandbox, 256 episodes
python -m scripts.bench.envs --worlds compare grid --no-sandbox

turns      gold and wrong turns of drawn prompts, each played `--num-repeats` times from a reset; the fastest
           counts, as the environment's own time. Environments without sandbox, symbolic grading or an external
           program must take at most 2 ms in the 99th percentile; of the others both percentiles are printed.
sandbox    `Sandbox.run("pass")`, from the call until the code runs, against a new Python process
grading    answers that would compute for hours, one after the other, against their deadline; and ordinary
           formulas, alone and beside half of `--num-workers` threads that send formulas which no size check detects
episodes   `rllib_srl.rollout.player` with an engine that writes gold turns, a byte at a time: 256 episodes at once
           against one after the other. Lag is the time in which the engine stands still while turns are written.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

if __name__ == "__main__":
    from rllib_srl.cli.shared.cluster import quiet

    quiet(verbose="--verbose" in sys.argv)

import numpy as np

from rllib_srl.cli.shared.cluster import run_cleanly
from rllib_srl.cli.shared.display import table
from rllib_srl.common.environments import known_worlds, resolve
from rllib_srl.engine.protocol import Sampling
from rllib_srl.envs.people.rating import RatingQueue
from scripts.bench import common as bench
from scripts.bench.scripted_engine import Bytes, GoldEngine

MOST_TURN_MS, MOST_START_MS, MOST_LAG_MS = 2.0, 50.0, 100.0
WRONG = ("", "nothing that anybody would understand\n")
PRAISE = RatingQueue(lambda request: {"stars": 5, "up": True})
COMPARED = {"world": "rllib_srl.envs.math.compare:Compare"}
NEEDED: dict[str, dict[str, Any]] = {  # settings without which an environment cannot be made
    "rating": {**COMPARED, "source": "scripts.bench.envs:PRAISE"},
    "reasoning_gym": {"dataset": "spell_backward", "pool_size": 300},
    "reasoning_gym_mixture": {"datasets": {"chain_sum": 1.0, "gcd": 1.0}, "shared": {"pool_size": 200}},
    "self_iteration": COMPARED,
    "self_label": COMPARED,
    "textarena": {"game": "Mastermind-v0"},
}
UNBOUND = {  # environments without a time bound: the reason
    "code_task": "sandbox",
    "python_tool": "sandbox",
    "question_file": "symbolic grading",
    "textworld": "an interpreter",
}


DEADLINE_S = 2.0  # of a formula, as in envs/math/grading.py
HOSTILE = (
    "10000000!", "9**9**9", r"\binom{10^9}{10^8}", "(1+x)^{99999999}", "(" * 450 + "x" + ")" * 450, "7" * 1_000_000,
    r"\frac{" * 160, r"\int_0^1 e^{x^x} dx", "1e999999999", "(10^7 + 1)!", "9^{(1 + 8)^9}",
)  # fmt: skip
ENDLESS = HOSTILE[-2:]  # whose sizes are not visible in the text
HONEST = (("2x+3", "3+2x"), ("x^2-1", "(x-1)(x+1)"), (r"\frac{\pi}{2}", r"\pi/2"), (r"\sqrt{8}", r"2\sqrt{2}"))


@dataclass
class Grading:
    """Times of gradings. Invariant: milliseconds, one entry per call."""

    hostile_ms: list[float] = field(default_factory=list)
    alone_ms: list[float] = field(default_factory=list)
    beside_ms: list[float] = field(default_factory=list)  # ordinary ones while hostile ones are computed
    num_late: int = 0
    num_workers_lost: int = 0
    num_wrong: int = 0

    @property
    def is_met(self) -> bool:
        """Return whether hostile answers end by their deadline, without costing a worker or a grade."""
        is_in_time = percentile(self.hostile_ms, 99) <= DEADLINE_S * 1e3
        return is_in_time and not self.num_wrong and self.num_workers_lost <= len(self.hostile_ms)

    def lines(self) -> list[str]:
        """Return the lines to print."""
        sides = (("hostile", self.hostile_ms), ("ordinary, alone", self.alone_ms), ("beside", self.beside_ms))
        figures = "; ".join(
            f"{name} p50 {percentile(ms, 50):.1f} ms, p99 {percentile(ms, 99):.1f} ms ({len(ms)})" for name, ms in sides
        )
        return [
            f"grading           {figures}",
            f"                  {self.num_late} late, {self.num_workers_lost} workers lost, {self.num_wrong} wrong; "
            f"hostile p99 at most {DEADLINE_S:g} s: {bench.verdict(self.is_met)}",
        ]


@dataclass
class Times:
    """Times of the turns of one environment. Invariant: milliseconds, one entry per turn."""

    world: str
    turns_ms: list[float]
    resets_ms: list[float]
    unbound: str  # why it is not held to the bound; empty if it is

    @property
    def is_met(self) -> bool:
        """Return whether the 99th percentile is within the bound."""
        return bool(self.unbound) or percentile(self.turns_ms, 99) < MOST_TURN_MS

    def row(self) -> list[str]:
        """Return a line of the table."""
        p50, p99 = (percentile(self.turns_ms, q) for q in (50, 99))
        verdict = f"({self.unbound})" if self.unbound else bench.verdict(self.is_met)
        figures = [p50, p99, median(self.resets_ms)]
        return [self.world, *(f"{value:.3f}" for value in figures), str(len(self.turns_ms)), verdict]


@dataclass
class Crowd:
    """Concurrent episodes, and the times in which their loop stood still."""

    num_episodes: int
    seconds: float
    lags_ms: list[float]
    num_wrong: int = 0  # episodes that did not earn 1
    worlds: list[str] = field(default_factory=list)


def percentile(values: Sequence[float], q: float) -> float:
    """Return the q-th percentile, q in 0 to 100."""
    return float(np.percentile(np.asarray(values, np.float64), q))


def measure_turns(name: str, env_config: Mapping[str, Any], unbound: str, num_prompts: int, num_repeats: int) -> Times:
    """Time every turn of gold and of wrong episodes."""
    env: Any = resolve(name)(env_config)
    times = Times(name, [], [], unbound)
    for prompt_id in islice(env.prompt_ids("train", 1), num_prompts):
        for turns in (env.gold_turns(prompt_id), *([wrong] * 3 for wrong in WRONG)):
            played = [_timed_episode(env, prompt_id, turns) for _ in range(num_repeats)]
            times.resets_ms.append(min(reset for reset, _ in played))
            times.turns_ms += [min(column) for column in zip(*(steps for _, steps in played), strict=True)]
    env.close()
    return times


def _timed_episode(env: Any, prompt_id: str, turns: Sequence[str]) -> tuple[float, list[float]]:
    start = time.perf_counter()
    env.reset(options={"prompt_id": prompt_id})
    reset_ms, steps_ms = (time.perf_counter() - start) * 1e3, []
    for turn in turns:
        start = time.perf_counter()
        _, _, terminated, truncated, _ = env.step(turn)
        steps_ms.append((time.perf_counter() - start) * 1e3)
        if terminated or truncated:
            break
    return reset_ms, steps_ms


def measure_sandbox(num_calls: int) -> tuple[list[float], list[float]]:
    """Return the milliseconds until code runs: in the sandbox, and in a new Python process."""
    from rllib_srl.envs.sandbox import Sandbox

    sandbox = Sandbox()
    sandbox.run("pass")  # starts the pool
    ours = [sandbox.run("pass").start_s * 1e3 for _ in range(num_calls)]
    theirs = []
    for _ in range(min(num_calls, 10)):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", "pass"], check=True, timeout=60)
        theirs.append((time.perf_counter() - start) * 1e3)
    return ours, theirs


def measure_grading(num_threads: int, num_rounds: int) -> Grading:
    """Send hostile answers and ordinary ones, in turn and side by side."""
    from rllib_srl.envs.math.grading import grade
    from rllib_srl.envs.math.pool import symbolic_pool

    found, pool = Grading(), symbolic_pool()

    def timed(into: list[float], gold: str, answer: str, right: tuple[float | None, ...]) -> None:
        start = time.perf_counter()
        found.num_wrong += grade(gold, answer, deadline_s=DEADLINE_S) not in right
        into.append((time.perf_counter() - start) * 1e3)

    with ThreadPoolExecutor(num_threads) as threads:
        wait([threads.submit(grade, "42", ENDLESS[0]) for _ in range(num_threads)])  # every worker has started
        num_late, num_lost = pool.num_late, pool.num_killed
        for _ in range(10 * num_rounds):
            for gold, answer in HONEST:
                timed(found.alone_ms, gold, answer, (1.0,))
        for text in HOSTILE * num_rounds:
            timed(found.hostile_ms, "42", text, (0.0, None))
        beside: list[float] = []  # not evaluated: these gradings compete for the machine
        for _ in range(num_rounds):
            sent = [threads.submit(timed, beside, "42", ENDLESS[0], (None,)) for _ in range(num_threads // 2)]
            while not all(thread.done() for thread in sent):
                for gold, answer in HONEST:
                    timed(found.beside_ms, gold, answer, (1.0,))
    found.num_late, found.num_workers_lost = pool.num_late - num_late, pool.num_killed - num_lost
    return found


def measure_crowd(names: Sequence[str], num_episodes: int, at_once: int, num_workers: int) -> Crowd:
    """Play gold episodes of several environments, `at_once` at a time, on one loop."""
    from rllib_srl.rollout import EnvCalls, Limits, LiveEpisode, RawTranscript
    from rllib_srl.rollout.player import play
    from rllib_srl.types import Prompt

    def creator_of(name: str) -> Callable[[], Any]:
        return lambda: resolve(name)(NEEDED.get(name, {}))

    creators = {name: creator_of(name) for name in names}
    prompts = []
    gold: dict[str, list[str]] = {}
    for name, creator in creators.items():
        env: Any = creator()
        for prompt_id in islice(env.prompt_ids("train", 2), -(-num_episodes // len(names))):
            gold[f"{name}/{prompt_id}"] = env.gold_turns(prompt_id)
            prompts.append(Prompt(name, prompt_id))
        env.close()
    live = [LiveEpisode(prompt, f"{prompt.env_id}/{prompt.prompt_id}", 0) for prompt in prompts[:num_episodes]]
    tokens = Bytes()
    engine = GoldEngine(tokens, gold)
    calls = EnvCalls(num_workers, 30.0)
    start = time.perf_counter()
    episodes = list(
        play(
            live, engine=engine, worlds=creators, transcript=RawTranscript(tokens), sampling=Sampling(max_tokens=1),
            limits=Limits(max_turns=300, max_turn_tokens=4096, max_episode_tokens=1 << 20, max_concurrent=at_once),
            calls=calls, deadline_s=300.0,
        )
    )  # fmt: skip
    seconds = time.perf_counter() - start
    calls.close()
    wrong = sum(abs(episode.get_return() - 1.0) > 1e-6 for episode in episodes)
    return Crowd(len(episodes), seconds, [lag * 1e3 for lag in engine.lags_s], wrong, list(names))


def crowd_lines(crowd: Crowd, single: Crowd) -> list[str]:
    """Return both sides, and how the lag compares with its bound."""
    worst = max(crowd.lags_ms)
    rates = [one.num_episodes / one.seconds for one in (crowd, single)]
    return [
        f"episodes at once  {crowd.num_episodes} of {', '.join(crowd.worlds)}: {crowd.seconds:.2f} s, {rates[0]:.0f} a "
        f"second; one at a time {rates[1]:.0f} a second ({single.num_episodes} episodes)",
        f"                  rewarded 1: {crowd.num_episodes - crowd.num_wrong} of {crowd.num_episodes}",
        f"event-loop lag    p50 {percentile(crowd.lags_ms, 50):.2f} ms, p99 {percentile(crowd.lags_ms, 99):.2f} ms, "
        f"worst {worst:.2f} ms (one after the other: worst {max(single.lags_ms):.2f} ms); at most {MOST_LAG_MS:g} ms: "
        f"{bench.verdict(worst <= MOST_LAG_MS and not crowd.num_wrong)}",
    ]


def formulas(path: Path) -> dict[str, Any]:
    """Write a file of questions with formulas as answers, and return the settings that read it."""
    rows = [{"question": f"Expand (x + {n})^2.", "answer": f"x^2 + {2 * n}x + {n * n}"} for n in range(1, 400)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {"path": str(path)}


def run_turns(arguments: argparse.Namespace, say: Callable[[str], None]) -> list[Times]:
    """Measure the turns of every environment, and print the table."""
    with TemporaryDirectory() as folder:
        needed = {**NEEDED, "question_file": formulas(Path(folder) / "formulas.jsonl")}
        return _run_turns(arguments, needed, say)


def _run_turns(
    arguments: argparse.Namespace, needed: Mapping[str, Mapping[str, Any]], say: Callable[[str], None]
) -> list[Times]:
    found = []
    for name in arguments.worlds or known_worlds():
        config, unbound = needed.get(name, {}), UNBOUND.get(name, "")
        try:
            found.append(measure_turns(name, config, unbound, arguments.num_prompts, arguments.num_repeats))
        except (ImportError, ValueError) as error:  # an extra that is not installed, a file that must be given
            say(f"{name} skipped: {error}")
    say(f"milliseconds per turn; p99 below {MOST_TURN_MS:g} ms unless noted")
    say(table([["world", "p50", "p99", "reset p50", "turns", ""], *(times.row() for times in found)], indent=""))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description="Time turns, the sandbox and many episodes at once.")
    parser.add_argument("--worlds", nargs="+", metavar="NAME", help="default: all that are installed")
    parser.add_argument("--num-prompts", type=int, default=50, help="of each environment")
    parser.add_argument("--num-repeats", type=int, default=3, help="of each episode")
    parser.add_argument("--num-episodes", type=int, default=256, help="episodes in parallel; 0 skips this part")
    parser.add_argument("--num-workers", type=int, default=8, help="threads that environments run in")
    parser.add_argument("--sandbox", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--grading", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--num-calls", type=int, default=50, help="of the sandbox")
    bench.add_output(parser)
    parser.add_argument("--verbose", action="store_true", help="show the output of libraries, and tracebacks")
    arguments = parser.parse_args(argv)

    def say(line: str) -> None:
        print(line, flush=True)

    worlds = run_turns(arguments, say)
    is_met = all(times.is_met for times in worlds)
    figures: dict[str, Any] = {"worlds": [asdict(times) for times in worlds]}
    if arguments.sandbox:
        ours, theirs = measure_sandbox(arguments.num_calls)
        is_met &= median(ours) < MOST_START_MS
        figures["sandbox_start_ms"], figures["python_start_ms"] = ours, theirs
        say(
            f"sandbox start     p50 {percentile(ours, 50):.1f} ms, p99 {percentile(ours, 99):.1f} ms; a new Python "
            f"process {bench.spread(theirs, 1)} ms; p50 below {MOST_START_MS:g} ms: "
            f"{bench.verdict(median(ours) < MOST_START_MS)}"
        )
    if arguments.grading:
        grading = measure_grading(arguments.num_workers, arguments.num_repeats)
        is_met &= grading.is_met
        figures["grading"] = asdict(grading)
        say("\n".join(grading.lines()))
    plain = [times.world for times in worlds if not times.unbound]
    if arguments.num_episodes and plain:
        crowd, single = (
            measure_crowd(plain, num, at_once, arguments.num_workers)
            for num, at_once in ((arguments.num_episodes, arguments.num_episodes), (32, 1))
        )
        is_met &= max(crowd.lags_ms) <= MOST_LAG_MS and not crowd.num_wrong
        figures |= {"crowd": asdict(crowd), "single": asdict(single)}
        say("\n".join(crowd_lines(crowd, single)))
    say(bench.conditions("no model"))
    bench.write(arguments, figures)
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(run_cleanly(main, debug="--verbose" in sys.argv))
