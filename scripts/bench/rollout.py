#!/usr/bin/env python3
"""Benchmark rollout throughput: tokens per second of `LLMEnvRunner.sample` over those of vLLM's own `LLM.generate`.

    python -m scripts.bench.rollout           at the quick-start's lengths, and with 256 forced tokens

    runner   LLMEnvRunner.sample(16 prompts, group_size=8)     environments in threads, tokeniser, episodes
    bare     LLM.generate(the same token ids, n=8)             only vLLM

Both sides use the same engine in turns, with equal sampling parameters (log-probs on), other prompts
in each repeat, and the prefix cache cleared before each run. Rates count the tokens that were really generated.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any
from unittest import mock

if __name__ == "__main__":
    from rllib_srl.cli.shared.cluster import quiet

    quiet(verbose="--verbose" in sys.argv)

import gymnasium

from rllib_srl.cli.shared.cluster import run_cleanly
from rllib_srl.envs.math.compare import Compare
from scripts.bench import common as bench

LEAST_RATIO = 0.90
SEED = 1


@dataclass(frozen=True)
class Workload:
    """The episodes to play. Invariant: a forced turn has exactly `turn_tokens` tokens on both sides."""

    title: str
    num_prompts: int
    group_size: int
    turn_tokens: int
    is_forced: bool


@dataclass
class Side:
    """The runs of one side. Invariant: entry i of each list is of repeat i, which gave both sides the same prompts."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)  # of all threads of this process
    num_tokens: list[int] = field(default_factory=list)
    num_episodes: list[int] = field(default_factory=list)
    num_prompt_tokens: list[int] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        """Return the generated tokens a second of each run."""
        return [tokens / seconds for tokens, seconds in zip(self.num_tokens, self.seconds, strict=True)]


@dataclass(frozen=True)
class Comparison:
    """One workload, measured. Invariant: `ratios` pairs the two sides repeat by repeat."""

    workload: Workload
    runner: Side
    bare: Side

    @property
    def ratios(self) -> list[float]:
        """Return the rate of the runner over that of bare vLLM, one per repeat."""
        return [ours / theirs for ours, theirs in zip(self.runner.rates, self.bare.rates, strict=True)]

    @property
    def cpu_ratios(self) -> list[float]:
        """Return the same by processor time, which other processes on the machine disturb far less."""
        rates = [
            [tokens / seconds for tokens, seconds in zip(side.num_tokens, side.cpu_seconds, strict=True)]
            for side in (self.runner, self.bare)
        ]
        return [ours / theirs for ours, theirs in zip(*rates, strict=True)]


class Endless(gymnasium.Env[str, str]):
    """The quick-start's environment without its stop string, where any turn ends the episode.

    Invariant: `reset` returns the same observation as the quick-start's environment.
    """

    stop_strings: tuple[str, ...] = ()

    def __init__(self, env_config: dict[str, Any] | None = None) -> None:
        self._world = Compare(env_config)
        self.prompt_ids = self._world.prompt_ids

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Ask a question."""
        return self._world.reset(seed=seed, options=options)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """End the episode."""
        return "", 0.0, True, False, {}


def make_runner(workload: Workload, model: str | None, dtype: str) -> Any:
    """Return a runner of the quick-start's configuration, in this process, with an engine of its own."""
    from rllib_srl.rollout.env_runner import LLMEnvRunner

    settings: dict[str, Any] = {"engine": "vllm", "num_env_runners": 0, "compute_dtype": dtype}
    settings |= {"model": model} if model else {}
    if workload.is_forced:
        room = bench.quickstart_config(**settings).max_episode_tokens + workload.turn_tokens
        settings |= {
            "env": "scripts.bench.rollout:Endless",
            "max_turn_tokens": workload.turn_tokens,
            "max_episode_tokens": room,
        }
    return LLMEnvRunner(config=bench.quickstart_config(**settings), worker_index=0)


def bare_llm(runner: Any) -> Any:
    """Return vLLM's `LLM` around the engine of `runner`: the same weights, settings and KV cache."""
    from vllm import LLM
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = runner.engine._llm
    with mock.patch.object(LLMEngine, "from_engine_args", return_value=engine):
        return LLM(model=engine.model_config.model)


def compare(
    workload: Workload, model: str | None, dtype: str, num_repeats: int, say: Callable[[str], None]
) -> Comparison:
    """Measure both sides in turns, after one run of each to warm up."""
    from rllib_srl.curriculum.prompts import PromptSource

    runner = make_runner(workload, model, dtype)
    source = PromptSource(runner.creators, runner.config.world_configs(), runner.config.mixture_weights(), SEED)
    llm, sides = bare_llm(runner), Comparison(workload, Side(), Side())
    runs = {"runner": (run_runner, runner), "bare": (run_bare, llm)}
    for repeat in range(-1, num_repeats):
        prompts = source.draw(workload.num_prompts)
        streams = [tokens_of(runner, prompt) for prompt in prompts]
        for name in sorted(runs, reverse=repeat % 2 == 0):  # A B, B A, ...: drift affects both sides alike
            if not llm.reset_prefix_cache():
                raise RuntimeError("the prefix cache could not be dropped")
            run, subject = runs[name]
            start = time.perf_counter(), time.process_time()
            counts = run(subject, runner, workload, prompts, streams, repeat)
            seconds, cpu_seconds = time.perf_counter() - start[0], time.process_time() - start[1]
            if repeat >= 0:
                keep(getattr(sides, name), seconds, cpu_seconds, *counts)
                say(f"  {name:6s} {counts[0]:6d} tokens in {seconds:6.2f} s, {cpu_seconds:6.2f} s of processor time")
    runner.stop()
    return sides


def tokens_of(runner: Any, prompt: Any) -> list[int]:
    """Return the token ids that begin a prompt, bypassing the runner's cache of them."""
    world = runner.worlds[prompt.env_id]()
    text, _ = world.reset(options={"prompt_id": prompt.prompt_id})
    token_ids: list[int] = runner.tokenizer(text)["input_ids"]
    return token_ids


def run_runner(
    subject: Any, runner: Any, workload: Workload, prompts: Sequence[Any], streams: Sequence[list[int]], seed: int
) -> tuple[int, int, int]:
    """Play; return the numbers of generated tokens, episodes and prompt tokens."""
    runner.engine.reseed(seed + 1)
    overrides = {"runs_to_limit": True} if workload.is_forced else {}
    episodes = subject.sample(prompts=prompts, group_size=workload.group_size, **overrides)
    lost = [episode.custom_data["error"] for episode in episodes if episode.custom_data["error"]]
    if lost:
        raise RuntimeError(f"{len(lost)} episodes were lost: {lost[0]}")
    begun = [len(episode.get_observations()[0]) for episode in episodes]
    return sum(len(turn) for e in episodes for turn in e.get_actions()), len(episodes), sum(begun)


def run_bare(
    subject: Any, runner: Any, workload: Workload, prompts: Sequence[Any], streams: Sequence[list[int]], seed: int
) -> tuple[int, int, int]:
    """Generate; return the same three numbers."""
    import torch

    from rllib_srl.engine import Sampling
    from rllib_srl.engine.vllm_engine import turn_params

    torch.manual_seed(seed + 1)
    stop = () if workload.is_forced else ("\n",)
    params = turn_params(Sampling(workload.turn_tokens, stop=stop, runs_to_limit=workload.is_forced)).clone()
    params.n = workload.group_size
    inputs = [{"prompt_token_ids": stream} for stream in streams]
    answers = subject.generate(inputs, params, use_tqdm=False)
    written = [len(one.token_ids) for answer in answers for one in answer.outputs]
    return sum(written), len(written), workload.group_size * sum(len(answer.prompt_token_ids) for answer in answers)


def keep(
    side: Side, seconds: float, cpu_seconds: float, num_tokens: int, num_episodes: int, num_prompt_tokens: int
) -> None:
    """Add one run to a side."""
    side.seconds.append(seconds)
    side.cpu_seconds.append(cpu_seconds)
    side.num_tokens.append(num_tokens)
    side.num_episodes.append(num_episodes)
    side.num_prompt_tokens.append(num_prompt_tokens)


def lines(result: Comparison, least: float) -> list[str]:
    """Return the lines of both sides, and their comparison."""
    sides = {"runner": result.runner, "bare": result.bare}
    out = [
        f"{name:7s} {bench.spread(side.rates, 1)} tokens/s, "
        f"{median(side.num_tokens):g} tokens of {median(side.num_episodes):g} episodes in {median(side.seconds):.2f} s"
        for name, side in sides.items()
    ]
    is_met = median(result.ratios) >= least
    return [
        *out,
        f"ratio   {bench.spread(result.ratios, 3)} over {len(result.ratios)} repeats; "
        f"at least {least:g}: {bench.verdict(is_met)}",
        f"        {bench.spread(result.cpu_ratios, 3)} by processor time",
    ]


def workloads(arguments: argparse.Namespace) -> list[Workload]:
    """Return the workloads to measure."""
    config = bench.quickstart_config()
    size, short = arguments.group_size or config.group_size, config.max_turn_tokens
    num_prompts = config.num_prompts_per_batch if arguments.num_prompts is None else arguments.num_prompts
    forced = f"{arguments.forced_prompts} prompts x {size}, {arguments.forced_tokens} forced tokens"
    stopped = f"the quick-start's lengths: {num_prompts} prompts x {size}, a line of at most {short} tokens"
    found = [
        Workload(stopped, num_prompts, size, short, False),
        Workload(forced, arguments.forced_prompts, size, arguments.forced_tokens, True),
    ]
    return [one for one in found if one.num_prompts > 0]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return 1 if a ratio is too low."""
    parser = argparse.ArgumentParser(description="Compare the runner's tokens per second with bare vLLM's.")
    parser.add_argument("--model", help="default: the quick-start's, and so on")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--num-prompts", type=int, help="0 skips the short turns")
    parser.add_argument("--group-size", type=int)
    parser.add_argument("--forced-prompts", type=int, default=4, help="0 skips the forced turns")
    parser.add_argument("--forced-tokens", type=int, default=256)
    parser.add_argument("--num-repeats", type=int, default=10, help="of the short turns")
    parser.add_argument("--forced-repeats", type=int, default=3)
    parser.add_argument("--least", type=float, default=LEAST_RATIO, help="exit status 1 below this ratio")
    bench.add_output(parser)
    parser.add_argument("--verbose", action="store_true", help="show the output of vLLM, and tracebacks")
    arguments = parser.parse_args(argv)
    results = []
    for workload in workloads(arguments):
        print(workload.title, flush=True)
        repeats = arguments.forced_repeats if workload.is_forced else arguments.num_repeats
        result = compare(workload, arguments.model, arguments.dtype, repeats, lambda line: print(line, flush=True))
        results.append(result)
        print("\n".join(lines(result, arguments.least)))
        print(bench.conditions(bench.quickstart_config(compute_dtype=arguments.dtype).compute_dtype), flush=True)
    figures = [{**asdict(one), "ratios": one.ratios, "cpu_ratios": one.cpu_ratios} for one in results]
    bench.write(arguments, figures)
    return 0 if all(median(result.ratios) >= arguments.least for result in results) else 1


if __name__ == "__main__":
    sys.exit(run_cleanly(main, debug="--verbose" in sys.argv))
