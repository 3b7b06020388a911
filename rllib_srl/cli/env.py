"""List the environments, or play one in a terminal: you write the turns and see observations, rewards and the end.

    srl env                                              the installed names
    srl env registers                                    a training prompt, then the next, until Ctrl-D
    srl env grid --env-config '{"width": 3, "height": 3}' --split heldout --seed 7
    srl env compare --prompt-id "17, 93, 40"             this one prompt
    srl env compare --gold                               play the gold turns
    printf ' 93\\n' | srl env compare --prompt-id "17, 93, 40"

ENV is an installed name, "package.module:Class" or another value of `SRLConfig.environment`. A line you type is one
turn; the environment's first stop string is appended, as in an engine's turn. "\\n" in a line stands for a line break.
`:gold` plays the next gold turn, `:next` goes to the next prompt, `:quit` or the end of input ends the program.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from rllib_srl.cli.episodes import printable, printable_lines
from rllib_srl.cli.shared.cluster import run_cleanly
from rllib_srl.cli.shared.command_line import Parser, add_debug, help_of
from rllib_srl.common.environments import WorldError, check_world, known_worlds, resolve
from rllib_srl.curriculum.prompts import SPLITS, prompts_of
from rllib_srl.rollout.replies import Reply, reset, step
from rllib_srl.types import Prompt

TURN_MARK = "> "


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(**help_of(__doc__))
    parser.add_argument("env", nargs="?", metavar="ENV", help="environment; without it, the installed names are listed")
    parser.add_argument("--env-config", type=json_object, default={}, metavar="JSON", help="its settings")
    parser.add_argument("--split", choices=SPLITS, default="train")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the order of prompts (default: 0)")
    parser.add_argument("--prompt-id", metavar="ID", help="play only this prompt")
    parser.add_argument("--gold", action="store_true", help="play gold turns instead of yours, on one prompt")
    add_debug(parser)
    arguments: argparse.Namespace = parser.parse_args(argv)
    return arguments


def json_object(text: str) -> dict[str, Any]:
    """Return a JSON object in an argument, for argparse."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        message = f"{text!r} is not valid JSON ({error}); expected an object as in '{{\"num_shots\": 0}}'"
        raise argparse.ArgumentTypeError(message) from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r}; expected a JSON object, as in '{{\"num_shots\": 0}}'")
    return value


class Player:
    """One person playing one environment. Invariant: an episode is in progress exactly while `is_playing`."""

    def __init__(self, env: Any, name: str, lines: TextIO, out: TextIO) -> None:
        """Play `env`, named `name`, with turns from `lines` and output to `out`."""
        self.env, self.name, self.lines, self.out = env, name, lines, out
        self.stop = next(iter(getattr(env, "stop_strings", ())), "")
        self.is_playing = False
        self.is_wanted = True  # whether to play another prompt
        self._gold: list[str] | None = None
        self._prompt_id = ""
        self._earned, self._num_turns = 0.0, 0

    def play(self, prompt_id: str, is_gold: bool) -> None:
        """Play one prompt until the episode or the input ends."""
        reply = reset(self.env, Prompt(self.name, prompt_id, str(getattr(self.env, "domain", self.name))))
        self.is_playing, self._gold, self._prompt_id = True, None, prompt_id
        self._earned, self._num_turns = 0.0, 0
        self._say(f"── {self.name}")  # without the prompt id, which may contain the answer
        if reply.system:
            self._say(printable_lines(f"(system prompt) {reply.system}\n"))
        self._say(printable_lines(reply.observation))
        while self.is_playing:
            turn = self._gold_turn() if is_gold else self._typed()
            if turn is not None:
                self._take(turn)
            elif is_gold:
                break  # the gold turns did not end the episode

    def _typed(self) -> str | None:
        """Return the turn in the next line; None after a command that plays no turn, or at the end of input."""
        if self.lines.isatty():
            self._say(TURN_MARK, end="")
        line = self.lines.readline()
        command = line.strip()
        if not line or command == ":quit":
            self.is_playing = self.is_wanted = False
            self._say("" if line else "\nend of input")
            return None
        if command == ":next":
            self.is_playing = False
            return None
        if command == ":gold":
            return self._gold_turn()
        return line.removesuffix("\n").replace("\\n", "\n") + self.stop

    def _gold_turn(self) -> str | None:
        gold = getattr(self.env, "gold_turns", None)
        if gold is None:
            self._say(f"(environment {self.name!r} has no gold turns)")
            return None
        self._gold = list(gold(self._prompt_id)) if self._gold is None else self._gold
        if not self._gold:
            self._say("(no gold turns left)")
            return None
        turn = self._gold.pop(0)
        self._say(f"{TURN_MARK}{printable_lines(turn)}")
        return turn

    def _take(self, turn: str) -> None:
        reply = step(self.env, turn)
        self._earned, self._num_turns = self._earned + reply.reward, self._num_turns + 1
        if reply.observation:
            self._say(printable_lines(reply.observation))
        if reply.info:
            self._say("info " + ", ".join(f"{key}={printable(str(value))}" for key, value in reply.info.items()))
        self._say(f"reward {reply.reward:g}")
        if reply.is_terminated or reply.is_truncated:
            self._say(
                f"ended as {_ending(reply)} after {self._num_turns} turns, return {self._earned:g}, "
                f"prompt id: {printable(self._prompt_id)}\n"
            )
            self.is_playing = False

    def _say(self, text: str, end: str = "\n") -> None:
        print(text, end=end, file=self.out, flush=True)


def _ending(reply: Reply) -> str:
    if reply.stop_reason is not None:
        return reply.stop_reason.value
    return "terminated" if reply.is_terminated else "truncated"


def wanted_prompts(env: Any, arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the prompts to play."""
    if arguments.prompt_id is not None:
        yield arguments.prompt_id
    else:
        yield from prompts_of(env, arguments.split, arguments.seed)


def main(argv: list[str] | None = None) -> int:
    """Run the subcommand."""
    return run_cleanly(lambda: run(argv), debug="--debug" in (sys.argv if argv is None else argv))


def run(argv: list[str] | None = None, lines: TextIO | None = None) -> int:
    """Play until the input ends."""
    arguments = parse(argv)
    if arguments.env is None:
        print("\n".join(known_worlds()))
        return 0
    env = resolve(arguments.env)(arguments.env_config)
    check_world(env, arguments.env)
    if arguments.gold and not hasattr(env, "gold_turns"):
        raise WorldError(f"environment {arguments.env!r} has no gold_turns; expected one with gold_turns for --gold")
    player = Player(env, arguments.env, lines or sys.stdin, sys.stdout)
    try:
        for prompt_id in wanted_prompts(env, arguments):
            player.play(prompt_id, arguments.gold)
            if arguments.gold or not player.is_wanted:
                break
    finally:
        env.close()
    return 0

