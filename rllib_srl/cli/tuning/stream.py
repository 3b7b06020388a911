"""Learn tasks one after another, with and without memory: a study of tasks of your own.

    srl stream                                              the five tasks of the stream cpu, tiny model
    srl stream --tasks compare lookup my.jsonl --model smollm2-135m --tokens 20000 --out results/mine
    srl stream --tasks 'registers#larger={task: larger}' 'registers#smaller={task: smaller}'
    srl stream --short                                      two short tasks: a minute or two
    srl stream --resume results/mine                        after a kill: only what is not finished

A task is an environment or a file of questions (.jsonl, .json, .csv, .parquet). The tasks are learned in the given
order, with and without memory, with the same seeds. Prompts are answered once before they are trained on: the share of
right first answers is the online accuracy. Prints the measures of both with 95 % intervals and whether the memory is
better; docs/continual.md defines them, `srl report DIR` writes the report. Settings with replay_ in front are those of
the memory; others hold for both. Those of tasks, seeds and lengths (env, stream, data, seed, iterations, ...) are
refused, in a file of --config, too.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rllib_srl.algorithm.named import MEMORIES
from rllib_srl.algorithm.own_data import data_settings
from rllib_srl.cli.shared.cluster import command
from rllib_srl.cli.shared.flags import Program, integer_from, local_directory
from rllib_srl.cli.shared.runs import RunError, new_directory
from rllib_srl.cli.shared.settings import build_config, given_settings, plain
from rllib_srl.cli.tuning import tune
from rllib_srl.common.environments import resolve
from rllib_srl.common.loading import OWN_DATA
from rllib_srl.curriculum.prompts import PromptSource
from rllib_srl.curriculum.streams import stream_errors
from rllib_srl.envs.math.data_place import kind_of, stem_of
from rllib_srl.studies.records import read_study
from rllib_srl.studies.study import Arm, Primary, Study
from rllib_srl.tune_configs.arms import COMMON, NO_REPLAY, STAGE_TOKENS, domains_of
from rllib_srl.tune_configs.streams import STREAMS

MEMORY, NO_MEMORY = "memory", "no_memory"  # arms
OF_MEMORY = "replay_"  # in front of settings that only the arm with memory gets
STREAM = "cpu"  # without tasks
BESIDE = ("resume", "verbose", "debug")  # flags allowed with --resume
SEEDS = (1, 2)
# Flags in place of settings that a stream fixes.
INSTEAD = {**dict.fromkeys(tune.OF_TASKS, "--tasks"), "seed": "--seeds", "iterations": "--tokens"}


def add_flags(parser: argparse.ArgumentParser) -> None:
    text = f"environments (ENV, ENV#NAME={{settings}}) or files of questions (default: those of the stream {STREAM})"
    parser.add_argument("--tasks", nargs="+", default=[], metavar="TASK", help=text)
    text = f"seeds of each arm (default: {' '.join(map(str, SEEDS))})"
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", help=text)
    text = f"generated tokens of a task (default: {STAGE_TOKENS})"
    parser.add_argument("--tokens", type=integer_from(1), metavar="N", help=text)
    parser.add_argument("--short", action="store_true", help="two tasks, one seed, a few iterations")
    parser.add_argument("--out", type=local_directory, metavar="DIR", help="new directory (default: under results/)")
    parser.add_argument("--resume", type=local_directory, metavar="DIR", help="resume a stream; takes no settings")


def error_of(arguments: argparse.Namespace) -> str:
    others = [name for name, value in vars(arguments).items() if value and name not in BESIDE]
    if arguments.resume and others:
        return f"--resume DIR keeps all settings; expected no others, not {', '.join(others)}"
    seeds = arguments.seeds or ()
    if len({*seeds}) < len(seeds) or min(seeds, default=0) < 0:
        return f"--seeds {' '.join(map(str, seeds))}; expected different integers of at least 0"
    return ""


def run(arguments: argparse.Namespace) -> int:
    """Run what is not finished of a stream and print the results; return 1 if a trial is not finished."""
    settings = {} if arguments.resume else given_settings(arguments)
    if errors := tune.errors_of_fixed(settings, INSTEAD):
        raise RunError("srl stream does not accept these settings:\n" + "\n".join(errors))
    max_failures = tune.max_failures_in(settings)
    if arguments.resume:
        study = read_study(directory := arguments.resume.absolute())
        plan = tune.Plan(study, tuple(arm.name for arm in study.arms), study.seeds, directory)
    else:
        directory = (arguments.out or new_directory("stream")).absolute()
        if directory.exists():
            raise RunError(f"--out {directory} exists; expected a new directory, or --resume {directory}")
        tokens = arguments.tokens or (tune.SHORT_TOKENS if arguments.short else STAGE_TOKENS)
        stages = stages_of(arguments.tasks, tokens)
        seeds = arguments.seeds or SEEDS[: 1 if arguments.short else None]
        if arguments.short:
            stages, settings = stages[: tune.SHORT_STAGES], {**tune.SHORT, **settings}
        plan = tune.planned(study_of(directory.name, stages, seeds, settings), {}, directory)
    print(rates_in_words(plan.study))
    how_to_resume = f"resume with: {command('stream', '--resume', directory)}"
    is_resumed = bool(arguments.resume)
    return tune.run_study(plan, max_failures, how_to_resume, is_resumed=is_resumed, verbose=arguments.verbose)


def env_named(text: str) -> dict[str, Any]:
    """Parse "compare", "compare#large" or "compare#large={lowest: 100, highest: 999}"; construct it once as a check.

    Returns:
        Its `env`, `env_config`, and the `domain` of its prompts if there is one in the text.
    """
    name, equals, settings = text.partition("=")
    env_name, _, domain = name.partition("#")
    env_config = plain(settings) if equals else {}
    if not isinstance(env_config, dict):
        raise ValueError(f"environment {text!r}; expected its settings as ENV={{name: value, ...}}")
    env = resolve(env_name)(env_config)
    env.close()
    return {"env": env_name, "env_config": env_config, **({"domain": domain} if domain else {})}


def stages_of(tasks: Sequence[str], tokens: int) -> list[dict[str, Any]]:
    """Return the tasks, each of `tokens` generated tokens; without any those of `STREAM`. RunError: one is invalid."""
    if not tasks:
        stages = [{key: value for key, value in stage.items() if key != "iterations"} for stage in STREAMS[STREAM]]
        return [{**stage, "tokens": tokens} for stage in stages]
    stages, errors = [], []
    for text in tasks:
        try:
            stages.append(_stage_of(text) | {"tokens": tokens})
        except (ValueError, OSError) as error:
            errors.append(f"  {text}: {error}")
    if errors:
        raise RunError("invalid --tasks:\n" + "\n".join(errors))
    if len(stages) < 2:
        raise RunError(f"tasks: {len(stages)}; expected at least 2, one after another")
    if errors := stream_errors(stages):
        raise RunError("invalid tasks:\n" + "\n".join(f"  {error}" for error in errors))
    names = [domain.name for domain in domains_of(stages)]
    if len(names) < len(stages):
        expected = "expected one each (ENV#NAME={...} names another)"
        raise RunError(f"{len(stages)} tasks have the domains {', '.join(names)}; {expected}")
    return stages


def _stage_of(text: str) -> dict[str, Any]:
    """Return a task: a file of questions, or an environment as ENV, ENV#NAME or ENV#NAME={settings}."""
    path = Path(text).expanduser().absolute()
    if kind_of(text) or ("/" in text and path.is_dir()):  # a bare name is an environment's
        if not path.exists():
            raise ValueError("there is no such file")
        return {"env": OWN_DATA, "domain": stem_of(text), "env_config": data_settings(str(path))}
    return env_named(text)


def memory_in_words(settings: Mapping[str, Any]) -> str:
    """Return what the memory does with these settings."""
    parts = ["old prompts come back"] if settings["replay_revisit_fraction"] else []
    parts += ["stored right answers are held"] if settings["replay_retain"] else []
    text = ", ".join(parts) or "prompts are stored"
    return f"{text[0].upper()}{text[1:]}."


def rates_in_words(study: Study) -> str:
    """Return the learning rate of each arm, in a line."""
    rates = {arm.title: arm.settings.get("lr", study.settings["lr"]) for arm in study.arms}
    each = ", ".join(f"{rate} {title}" for title, rate in rates.items())
    first, *others = rates.values()
    return f"learning rate: {each}" + ("" if all(rate == first for rate in others) else "; --lr sets one for both")


def study_of(
    name: str, stages: Sequence[Mapping[str, Any]], seeds: Sequence[int], settings: Mapping[str, Any]
) -> Study:
    """Return a study of GRPO with a memory against plain GRPO; RunError, ValueError: a task lacks prompts."""
    of_memory = {setting: value for setting, value in settings.items() if setting.startswith(OF_MEMORY)}
    shared = {setting: value for setting, value in settings.items() if setting not in of_memory}
    without = {setting: value for setting, value in NO_REPLAY.items() if setting not in shared}
    with_memory = {**MEMORIES["srl"], **of_memory}
    study = Study(
        name=re.sub(r"[^A-Za-z0-9_.+-]", "-", name),
        question="Does the memory raise the accuracy on these tasks, before and after they are learned?",
        answered_by="Final and online accuracy are higher with memory, paired by seed.",
        arms=(
            Arm(MEMORY, "with memory", memory_in_words(with_memory), with_memory),
            Arm(NO_MEMORY, "without memory", "Nothing is stored: plain GRPO.", without),
        ),
        domains=domains_of(stages),
        num_stages=len(stages),
        seeds=tuple(seeds),
        budget=sum(stage["tokens"] for stage in stages),
        primary=Primary(MEMORY, (NO_MEMORY,), ("average_accuracy", "online_accuracy")),
        settings={**COMMON, **shared, "stream": [dict(stage) for stage in stages]},
    )
    config = build_config(study.settings_of(MEMORY, study.seeds[0]))
    config.validate()
    envs = (config.env_creators(), config.env_configs(), config.mixture_weights())
    source = PromptSource(*envs, config.seed, config.task_stream())
    for env_id in source.env_ids:
        source.first(env_id)  # raises if there is none
    measured = {prompt.env_id for prompt in source.heldout(config.evaluation_duration)}
    if missing := [env_id for env_id in source.env_ids if env_id not in measured]:
        raise RunError(f"tasks without held-out prompts: {', '.join(missing)}; expected at least one prompt each")
    return study


USAGE = "%(prog)s [--tasks TASK ...] [--seeds N ...] [--tokens N] [--out DIR] [--short] [--SETTING VALUE ...]\n"
USAGE += "       %(prog)s --resume DIR"
main = Program(
    __doc__, add_flags, run, usage=USAGE, without=(), refused=tune.REFUSED, verbose=tune.LIBRARIES, error=error_of
)
