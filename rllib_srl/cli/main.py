"""Entry point of the console command `srl`: import the module of the given subcommand and run it.

    srl COMMAND ...          e.g. srl train --env compare --lr 2e-5
    python -m rllib_srl.cli COMMAND ...

A module of this folder, or of the folder that `COMMANDS` names, is a subcommand if it is in `COMMANDS`; its
`main(argv)` returns the exit status. This file imports no third-party package, so that `srl --help` is fast.
"""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass
from importlib import import_module
from io import TextIOWrapper

from rllib_srl.cli import supervisor
from rllib_srl.common.foreign_names import nearest

HELP = {"-h", "--help", "--help-all"}


@dataclass(frozen=True)
class Command:
    """A subcommand. Invariant: `module_of` its name, with _ for -, has a `main(argv)`."""

    summary: str
    is_supervised: bool = False  # a parent process starts it again after it has lost a process
    starts_ray: bool = False  # the output of Ray, vLLM and transformers is suppressed, unless --verbose
    folder: str = ""  # of this package, with the module
    is_paged: bool = False  # output often goes to `head` or `less`; ends without an error when the pipe closes


def module_of(name: str) -> str:
    return ".".join(filter(None, (__package__, COMMANDS[name].folder, name.replace("-", "_"))))


COMMANDS = {
    "quickstart": Command("train SmolLM2-135M on a CPU and show what it learned", starts_ray=True),
    "train": Command("train a model, or resume a run", starts_ray=True, is_supervised=True),
    "evaluate": Command("measure the accuracy of a model or a checkpoint on held-out prompts", starts_ray=True),
    "compare": Command("compare two runs or models on the same held-out prompts", starts_ray=True),
    "tune": Command("run a study: arms with paired seeds at an equal budget", starts_ray=True, folder="tuning"),
    "stream": Command("learn tasks one after another, with and without memory", starts_ray=True, folder="tuning"),
    "report": Command("write the report page of a run or a study"),
    "dashboard": Command("serve a live page of a run or a study in the browser"),
    "check-data": Command("check your own questions, their grading and lengths before training", starts_ray=True),
    "chat": Command("talk to a model, a checkpoint or a run in the terminal", starts_ray=True),
    "env": Command("list environments, or play one in the terminal"),
    "memory": Command("list, show and drop items of the memory of a run", is_paged=True),
    "rate": Command("rate answers of a run; ratings become rewards and grades", is_paged=True),
    "serve": Command("serve a model, take ratings and train on them in the background", folder="serving"),
    "versions": Command("list the versions of a served model, and roll back", folder="serving", is_paged=True),
    "export": Command("write a trained model and a model card", starts_ray=True),
    "doctor": Command("check this machine, or a run before it starts: settings and grading", starts_ray=True),
}


def help_page() -> str:
    width = max(map(len, COMMANDS))
    rows = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        ["usage: srl COMMAND ...", "", "GRPO with experience replay for language models on RLlib.", "", "commands:"]
        + rows
        + ["", "srl COMMAND --help lists the flags of a command."]
    )


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand; return the exit status, 2 if it is unknown.

    Without `argv` the command is that of this program, which then ends with its local Ray at once and may get a parent
    that starts it again (`supervisor.py`).
    """
    is_program = argv is None
    argv = sys.argv[1:] if argv is None else argv
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a locale such as C cannot show every character of people's texts
            stream.reconfigure(errors="backslashreplace")
    if is_program and (not argv or HELP & {*argv}):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a pager that ends early ends it, too
    if not argv or argv[0] in ("-h", "--help"):
        print(help_page())
        return 0
    name, *arguments = argv
    if name not in COMMANDS:
        near = nearest(name, COMMANDS)
        guess = f"; did you mean {near!r}?" if near else ""
        print(f"error: unknown command {name!r}{guess} (srl --help lists the commands)", file=sys.stderr)
        return 2
    sys.argv = [f"srl {name}", *arguments]  # the program's name in usage lines
    command = COMMANDS[name]
    if command.is_supervised and is_program:
        if supervisor.is_needed(arguments):
            return supervisor.supervise([sys.executable, *sys.orig_argv[1:]])
        supervisor.begin()
    if command.starts_ray and not HELP & {*arguments}:
        from rllib_srl.cli.shared.cluster import quiet

        quiet(verbose="--verbose" in arguments)  # before Ray, vLLM and transformers are imported
    if command.is_paged and is_program:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    status = int(import_module(module_of(name)).main(arguments) or 0)
    if is_program and command.starts_ray:
        from rllib_srl.cli.shared.cluster import end_with_local_ray

        end_with_local_ray(status)
    return status
