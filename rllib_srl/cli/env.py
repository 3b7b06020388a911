"""List the environments, or play one in a terminal: you write the turns and see observations, rewards and the end.

    srl env                                              the installed names
    srl env registers                                    a training prompt, then the next, until Ctrl-D
    srl env registers --env-config num_registers=4 --split heldout --seed 7
    srl env compare --prompt-id "17, 93, 40"             this one prompt
    srl env compare --gold                               play the gold turns
    printf ' 93\\n' | srl env compare --prompt-id "17, 93, 40"

ENV is an installed name, "package.module:Class" or another value of `SRLConfig.environment`. A line you type is one
turn; the environment's first stop string is appended, as in an engine's turn. "\\n" in a line stands for a line break.
The end of input (Ctrl-D) ends the program.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, TextIO

from rllib_srl.cli.shared.display import printable, printable_lines
from rllib_srl.cli.shared.flags import Program
from rllib_srl.cli.shared.settings import read_values
from rllib_srl.common.environments import EnvError, check_environment, known_envs, resolve
from rllib_srl.curriculum.prompts import SPLITS, prompts_of
from rllib_srl.rollout.replies import reset, step
from rllib_srl.types import Prompt

TURN_MARK = "> "


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("env", nargs="?", metavar="ENV", help="environment; without it, the installed names are listed")
    text = "its settings: name=value pairs, or one JSON object"
    parser.add_argument("--env-config", "--env_config", nargs="+", default={}, metavar="NAME=VALUE", help=text)
    parser.add_argument("--split", choices=SPLITS, default="train")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the order of prompts (default: 0)")
    parser.add_argument("--prompt-id", metavar="ID", help="play only this prompt")
    parser.add_argument("--gold", action="store_true", help="play gold turns instead of yours, on one prompt")


def play(env: Any, name: str, prompt_id: str, turns: Iterable[str]) -> bool:
    """Play one prompt; return whether the episode ended before the turns did."""
    say = partial(print, flush=True)
    reply = reset(env, Prompt(name, prompt_id, str(getattr(env, "domain", name))))
    say(f"── {name}")  # without the prompt id, which may contain the answer
    if reply.system:
        say(printable_lines(f"(system prompt) {reply.system}\n"))
    say(printable_lines(reply.observation))
    earned = 0.0
    for number, turn in enumerate(turns, 1):
        reply = step(env, turn)
        earned += reply.reward
        if reply.observation:
            say(printable_lines(reply.observation))
        if reply.info:
            say("info " + ", ".join(f"{key}={printable(str(value))}" for key, value in reply.info.items()))
        say(f"reward {reply.reward:g}")
        if reply.is_terminated or reply.is_truncated:
            ending = "terminated" if reply.is_terminated else "truncated"
            ending = reply.stop_reason.value if reply.stop_reason is not None else ending
            say(f"ended as {ending} after {number} turns, return {earned:g}, prompt id: {printable(prompt_id)}\n")
            return True
    return False


def typed(lines: TextIO, stop: str) -> Iterator[str]:
    while True:
        if lines.isatty():
            print(TURN_MARK, end="", flush=True)
        if not (line := lines.readline()):
            print("\nend of input")
            return
        yield line.removesuffix("\n").replace("\\n", "\n") + stop


def shown(turns: Iterable[str]) -> Iterator[str]:
    for turn in turns:
        print(f"{TURN_MARK}{printable_lines(turn)}", flush=True)
        yield turn


def run(arguments: argparse.Namespace, lines: TextIO | None = None) -> int:
    if arguments.env is None:
        print("\n".join(known_envs()))
        return 0
    env: Any = resolve(arguments.env)(read_values({"env_config": arguments.env_config})["env_config"])
    check_environment(env, arguments.env)
    if arguments.gold and not hasattr(env, "gold_turns"):
        raise EnvError(f"environment {arguments.env!r} has no gold_turns; expected one with gold_turns for --gold")
    by_hand = typed(lines or sys.stdin, next(iter(getattr(env, "stop_strings", ())), ""))
    chosen_id = arguments.prompt_id
    try:
        for prompt_id in prompts_of(env, arguments.split, arguments.seed) if chosen_id is None else [chosen_id]:
            turns = shown(env.gold_turns(prompt_id)) if arguments.gold else by_hand
            if not play(env, arguments.env, prompt_id, turns) or arguments.gold:
                break
    finally:
        env.close()
    return 0


main = Program(__doc__, add_flags, run)
