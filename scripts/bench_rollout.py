#!/usr/bin/env python3
"""Tokens per second of `LLMEnvRunner.sample` over those of vLLM's own `LLM.generate`.

    python scripts/bench_rollout.py           at the quick-start's lengths, and with 256 forced tokens

    runner   LLMEnvRunner.sample(16 prompts, group_size=8)     environments in threads, tokeniser, episodes
    bare     LLM.generate(the same token ids, n=8)             nothing but vLLM

Both sides drive one and the same engine, in turns, with equal sampling parameters (log-probs on), other prompts
in each repeat, and the prefix cache dropped before each run. A side is rated by the tokens it really generated.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gymnasium

from scripts import bench
from scripts.cluster import quiet

LEAST_RATIO = 0.90


@dataclass(frozen=True)
class Workload:
    """What is played. Invariant: a forced turn has exactly `turn_tokens` tokens on both sides."""

    title: str
    num_prompts: int
    group_size: int
    turn_tokens: int
    is_forced: bool


@dataclass
class Side:
    """The runs of one side. Invariant: entry i of each list is of repeat i, which gave both sides the same prompts."""

    seconds: list[float] = field(default_factory=list)
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
        """Return runner over bare, one a repeat."""
        return [ours / theirs for ours, theirs in zip(self.runner.rates, self.bare.rates, strict=True)]


def endless_world(env_config: dict[str, Any]) -> gymnasium.Env:
    """Return the quick-start's world without its stop string, so that a turn runs to its limit; any turn is fine."""
    from envs.compare import Compare

    class Endless(gymnasium.Env):
        stop_strings = ()

        def __init__(self) -> None:
            self._world = Compare(env_config)
            self.prompt_ids = self._world.prompt_ids

        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict]:
            return self._world.reset(seed=seed, options=options)

        def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
            return "", 0.0, True, False, {}

    return Endless()


def make_runner(workload: Workload, model: str, dtype: str) -> Any:
    """Return a runner with an engine of its own, in this process."""
    from rllib_srl.env_runner import LLMEnvRunner

    room = 2 * workload.turn_tokens if workload.is_forced else 0
    settings = {"max_turn_tokens": workload.turn_tokens, "max_episode_tokens": bench.EPISODE_TOKENS + room}
    config = bench.quickstart_config(model, dtype, engine="vllm", num_env_runners=0, **settings)
    if workload.is_forced:
        config.environment(endless_world)
    config.validate()
    return LLMEnvRunner(config=config, worker_index=0)


def bare_llm(runner: Any) -> Any:
    """Return vLLM's `LLM` around the engine of `runner`: the same weights, settings and KV cache."""
    from vllm import LLM
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = runner.engine._llm
    with mock.patch.object(LLMEngine, "from_engine_args", return_value=engine):
        return LLM(model=engine.model_config.model)


def compare(workload: Workload, model: str, dtype: str, num_repeats: int, say: Callable[[str], None]) -> Comparison:
    """Measure both sides in turns, after one run of each to warm up."""
    from rllib_srl.prompts import PromptSource

    runner = make_runner(workload, model, dtype)
    source = PromptSource(runner.creators, runner.config.world_configs(), runner.config.mixture_weights(), bench.SEED)
    llm, sides = bare_llm(runner), Comparison(workload, Side(), Side())
    runs = {"runner": (run_runner, runner), "bare": (run_bare, llm)}
    for repeat in range(-1, num_repeats):
        prompts = source.draw(workload.num_prompts)
        streams = [tokens_of(runner, prompt) for prompt in prompts]
        for name in sorted(runs, reverse=repeat % 2 == 0):  # A B, B A, ...: what drifts strikes both alike
            if not llm.reset_prefix_cache():
                raise RuntimeError("the prefix cache could not be dropped")
            run, subject = runs[name]
            start = time.perf_counter()
            counts = run(subject, runner, workload, prompts, streams, repeat)
            seconds = time.perf_counter() - start
            if repeat >= 0:
                keep(getattr(sides, name), seconds, *counts)
                say(f"  {name:6s} {counts[0]:6d} tokens in {seconds:6.2f} s")
    runner.stop()
    return sides


def tokens_of(runner: Any, prompt: Any) -> list[int]:
    """Return the token ids a prompt begins with, past the runner's own cache of them."""
    world = runner.worlds[prompt.env_id]()
    text, _ = world.reset(options={"prompt_id": prompt.prompt_id})
    return runner.tokenizer(text)["input_ids"]


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
    from rllib_srl.engine.vllm_start import turn_params

    torch.manual_seed(seed + 1)
    stop = () if workload.is_forced else ("\n",)
    params = turn_params(Sampling(workload.turn_tokens, stop=stop, runs_to_limit=workload.is_forced)).clone()
    params.n = workload.group_size
    inputs = [{"prompt_token_ids": stream} for stream in streams]
    answers = subject.generate(inputs, params, use_tqdm=False)
    written = [len(one.token_ids) for answer in answers for one in answer.outputs]
    return sum(written), len(written), workload.group_size * sum(len(answer.prompt_token_ids) for answer in answers)


def keep(side: Side, seconds: float, num_tokens: int, num_episodes: int, num_prompt_tokens: int) -> None:
    """Add one run to a side."""
    side.seconds.append(seconds)
    side.num_tokens.append(num_tokens)
    side.num_episodes.append(num_episodes)
    side.num_prompt_tokens.append(num_prompt_tokens)


def lines(result: Comparison, least: float) -> list[str]:
    """Return both sides, and how they compare."""
    sides = {"runner": result.runner, "bare": result.bare}
    out = [
        f"{name:7s} {bench.spread(side.rates, 1)} tokens/s, "
        f"{median(side.num_tokens):g} tokens of {median(side.num_episodes):g} episodes in {median(side.seconds):.2f} s"
        for name, side in sides.items()
    ]
    ratio = median(result.ratios)
    verdict = "met" if ratio >= least else "MISSED"
    return [*out, f"ratio   {bench.spread(result.ratios, 3)} over {len(result.ratios)} repeats; at least {least:g}: {verdict}"]


def workloads(arguments: argparse.Namespace) -> list[Workload]:
    """Return what is to be measured."""
    size, short = arguments.group_size, bench.TURN_TOKENS
    forced = f"{arguments.forced_prompts} prompts x {size}, {arguments.forced_tokens} forced tokens"
    stopped = f"the quick-start's lengths: {arguments.num_prompts} prompts x {size}, a line of at most {short} tokens"
    found = [
        Workload(stopped, arguments.num_prompts, size, short, False),
        Workload(forced, arguments.forced_prompts, size, arguments.forced_tokens, True),
    ]
    return [one for one in found if one.num_prompts > 0]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return 1 if a ratio is too low."""
    parser = argparse.ArgumentParser(description="Compare the runner's tokens per second with bare vLLM's.")
    parser.add_argument("--model", default=bench.MODEL)
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--num-prompts", type=int, default=bench.NUM_PROMPTS, help="0 leaves the short turns out")
    parser.add_argument("--group-size", type=int, default=bench.GROUP_SIZE)
    parser.add_argument("--forced-prompts", type=int, default=4, help="0 leaves the forced turns out")
    parser.add_argument("--forced-tokens", type=int, default=256)
    parser.add_argument("--num-repeats", type=int, default=10, help="of the short turns")
    parser.add_argument("--forced-repeats", type=int, default=3)
    parser.add_argument("--least", type=float, default=LEAST_RATIO, help="exit status 1 below this ratio")
    parser.add_argument("--json", type=Path, help="also write every figure here")
    arguments = parser.parse_args(argv)
    quiet(verbose=False)
    results = []
    for workload in workloads(arguments):
        print(workload.title, flush=True)
        repeats = arguments.forced_repeats if workload.is_forced else arguments.num_repeats
        result = compare(workload, arguments.model, arguments.dtype, repeats, lambda line: print(line, flush=True))
        results.append(result)
        print("\n".join(lines(result, arguments.least)))
        print(bench.conditions(arguments.dtype), flush=True)
    if arguments.json:
        figures = [{**asdict(result), "ratios": result.ratios} for result in results]
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0 if all(median(result.ratios) >= arguments.least for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
