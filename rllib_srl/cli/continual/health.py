"""Compare the health of two models on a fixed battery: before and after training.

    srl health results/first                                the start of a run and its newest checkpoint
    srl health smollm2-135m results/first                   a model and a checkpoint
    srl health tiny results/first --parts domains degeneration --domains compare 'lookup={num_pairs: 3}'
    srl health results/first --tasks mine.yaml --json health.json

The parts of the battery:
    tasks          task files of lm-eval (everyday knowledge, grammar, sums, copying), or those of --tasks
    domains        held-out prompts of environments, answered greedily: those of the run, or of --domains
    degeneration   forty openings continued freely: repetition, length and entropy

Both models get the same questions. Prints each measure before and after, with the paired 95 % interval of its change,
and whether it passes its gate: a share of right or readable answers may not drop by more than --max_drop, repetition
may rise by .1, length and entropy may halve or double. A gate fails only if the harm is significant; a change that the
battery is too small to see passes. `tasks` needs lm-eval: pip install 'rllib_srl[health]'.

Exit status: 0 all gates pass; 1 an error; 3 a gate fails. `srl upgrade --health` uses the same gates before delivery.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rllib_srl.algorithm.checkpointing import export_checkpoint
from rllib_srl.algorithm.settings import ALIASES
from rllib_srl.cli.continual.stream_plan import world_named
from rllib_srl.cli.evaluate import checkpoint_named
from rllib_srl.cli.shared import runs
from rllib_srl.cli.shared.cluster import hushed_stderr, run_cleanly
from rllib_srl.cli.shared.command_line import help_of
from rllib_srl.cli.shared.display import showing_progress, table
from rllib_srl.cli.shared.settings import (
    Parser,
    SettingsError,
    add_flags_of_played_runs,
    build_config,
    check,
    given_settings,
    model_config_of,
    refuse_stub,
    with_underscores,
)
from rllib_srl.engine.models import check_model_name, local_model
from rllib_srl.storage.checkpoints import verify_sealed
from rllib_srl.studies.gates import Change, Shift, Verdict
from rllib_srl.studies.health.battery import DOMAINS, PARTS, Battery, measure
from rllib_srl.studies.health.comparison import MAX_DROP, Comparison
from rllib_srl.studies.recording import write_whole

UNHEALTHY = 3  # exit status
OWN_DOMAINS = ("compare", "lookup", "copy_words")  # without a run and --domains
PLACES = ("env", "env_config", "worlds", "mixture", "stream")  # settings that name environments
# Settings of playing; those of training do not act here.
OF_PLAYING = (
    *PLACES, "model", "seed", "compute_dtype", "engine", "prompt_format", "max_turns", "max_turn_tokens",
    "max_episode_tokens", "env_timeout_s", "num_env_threads", "max_concurrent_episodes", "sample_timeout_s",
    "num_gpus_per_env_runner",
)  # fmt: skip


@dataclass(frozen=True)
class Side:
    """One of the two models. Invariant: validated; nothing was started."""

    what: str
    checkpoint: Path | None  # None: `what` is a model
    settings: Mapping[str, Any]  # of the checkpoint's run, {} without one


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(
        usage="%(prog)s RUN | BEFORE AFTER [--parts PART ...] [--domains ENV ...] [--tasks FILE ...] [--json FILE] "
        "[--SETTING VALUE ...]",
        **help_of(__doc__),
    )
    text = "a model, a checkpoint, or a run's directory; a run alone is compared with the model it started from"
    parser.add_argument("what", nargs="+", metavar="RUN|MODEL|CHECKPOINT", help=text)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), metavar="PART", help="(default: all three)")
    text = "environments: ENV, or ENV#NAME={settings} (default: the run's, else " + ", ".join(OWN_DOMAINS) + ")"
    parser.add_argument("--domains", nargs="+", default=[], metavar="ENV", help=text)
    text = "task files of lm-eval over local JSONL files (default: the package's)"
    parser.add_argument("--tasks", nargs="+", type=Path, default=[], metavar="FILE", help=text)
    text = "held-out prompts of each environment (default: %(default)s)"
    parser.add_argument("--prompts", type=int, default=100, metavar="N", help=text)
    text = "share of right or readable answers that may be lost (default: %(default)s)"
    flags = ("--max_drop", "--max-drop")
    parser.add_argument(*flags, dest="max_drop", type=float, default=MAX_DROP, metavar="SHARE", help=text)
    text = 'write all results to FILE as JSON; "-": print only the JSON'
    parser.add_argument("--json", type=Path, metavar="FILE", help=text)
    add_flags_of_played_runs(parser)
    arguments: argparse.Namespace = parser.parse_args(with_underscores(argv))
    if len(arguments.what) > 2:
        parser.error(f"{len(arguments.what)} models; expected a run, or two models")
    if not 0 <= arguments.max_drop < 1:
        parser.error(f"--max_drop = {arguments.max_drop}; expected a share from 0, below 1")
    return arguments


def health(arguments: argparse.Namespace) -> int:
    """Measure both models and print the comparison; return the exit status."""
    battery = Battery(tuple(arguments.parts), tuple(arguments.tasks), arguments.prompts)
    battery.check()
    given = given_settings(arguments)
    sides = sides_of(arguments.what, arguments.trust_checkpoint, given.get("seal_key_file"))
    values = values_of(sides, given, arguments.domains, battery)
    is_silent = arguments.json == Path("-")
    with (
        tempfile.TemporaryDirectory(prefix="rllib_srl-") as scratch,
        showing_progress(1, sys.stderr if is_silent else None) as progress,
    ):
        check(config_for(values, local_model(values["model"])))
        models = [_model_of(side, Path(scratch) / str(number)) for number, side in enumerate(sides)]
        names = [str(side.checkpoint or side.what) for side in sides]
        with hushed_stderr(arguments.verbose):
            found = compared(battery, values, models, names, progress.begin)
    verdicts = found.verdicts(arguments.max_drop)
    figures = {"before": names[0], "after": names[1], "parts": list(battery.parts), **found.as_json()}
    figures |= {"max_drop": arguments.max_drop, "verdicts": [asdict(verdict) for verdict in verdicts]}
    text = json.dumps(figures, indent=1)
    if is_silent:
        print(text)
    else:
        print(f"before  {names[0]}\nafter   {names[1]}")
        print(*lines_of(found, verdicts), sep="\n")
        if arguments.json:
            write_whole(arguments.json, text + "\n")
    return 0 if all(verdict.is_passed for verdict in verdicts) else UNHEALTHY


def sides_of(what: Sequence[str], trust: bool, key_file: str | None) -> list[Side]:
    """Return both models, the one before training first.

    Raises:
        ValueError: a model or checkpoint cannot be used, or one model alone is given.
    """
    found = [_side(one, trust, key_file) for one in what]
    if len(found) == 2:
        return found
    (end,) = found
    if end.checkpoint is None:
        raise SettingsError(f"{end.what} is a model; expected a second one to compare it with, or a run's directory")
    start = str(end.settings["model"])
    check_model_name(start)
    return [Side(start, None, {}), end]


def _side(what: str, trust: bool, key_file: str | None) -> Side:
    checkpoint = checkpoint_named(what)
    if checkpoint is None:
        check_model_name(what)
        return Side(what, None, {})
    verify_sealed(checkpoint)
    settings = runs.settings_of(checkpoint, trust, key_file)
    if not settings:
        raise SettingsError(f"{checkpoint.parent} has no {runs.SETTINGS_FILE}; expected a run of srl train")
    refuse_stub(build_config(settings), "a model is measured")
    return Side(what, checkpoint, settings)


def values_of(
    sides: Sequence[Side], given: Mapping[str, Any], domains: Sequence[str], battery: Battery
) -> dict[str, Any]:
    """Return the settings of playing: the run's (the last side's that has one), then those given.

    Raises:
        SettingsError: domains are given twice or without their part, or cannot be read.
    """
    run = next((side.settings for side in reversed(sides) if side.settings), {})
    if idle := [name for name in given if not _is_of_playing(name) and name != "seal_key_file"]:
        raise SettingsError(f"{', '.join(idle)}: not a setting of playing; expected some of {', '.join(OF_PLAYING)}")
    named = [name for name in PLACES if given.get(name)]
    if domains and named:
        raise SettingsError(f"--domains and {named[0]} = {given[named[0]]!r}; expected one of the two")
    if domains and DOMAINS not in battery.parts:
        raise SettingsError(f"--domains {' '.join(domains)}; expected the part {DOMAINS!r} with it")
    values = {**run, **given}
    values.setdefault("model", sides[0].what)
    if domains or not (run or named):
        values = {name: value for name, value in values.items() if name not in PLACES}
        worlds = [world_named(text) for text in domains or OWN_DOMAINS]
        entries = [world.entry() for world in worlds]
        values["stream"] = {"domains": entries, "schedule": [[0, {world.domain: 1.0 for world in worlds}]]}
    return values


def config_for(values: Mapping[str, Any], model_dir: Path) -> Any:
    """Return the config to measure a model in this process, not yet validated; settings of training do not act."""
    played = {name: value for name, value in values.items() if _is_of_playing(name)}
    return build_config({"seed": 0, **played, "model": str(model_dir), "num_env_runners": 0, "checkpoint_every": 0})


def _is_of_playing(name: str) -> bool:
    """Return whether a setting, by its own or a former name, is one of playing."""
    return ALIASES.get(name, name).partition(".")[0] in OF_PLAYING


def compared(
    battery: Battery,
    values: Mapping[str, Any],
    models: Sequence[Path],
    names: Sequence[str],
    tell: Callable[[str], None],
) -> Comparison:
    """Measure both models, one after the other, and compare them.

    Args:
        battery: checked.
        values: settings of playing.
        models: directories of the models before and after training.
        names: of the models, for messages.
        tell: called with a line about what is being done.
    """
    found = []
    for model_dir, name in zip(models, names, strict=True):
        config = config_for(values, model_dir)
        check(config)
        found.append(measure(battery, config, model_dir, partial(_tell, tell, name)))
    before, after = found
    return Comparison.of(before, after)


def _tell(tell: Callable[[str], None], name: str, text: str) -> None:
    tell(f"{name}: {text}")


def _model_of(side: Side, scratch: Path) -> Path:
    if side.checkpoint is None:
        return local_model(side.what)
    export_checkpoint(side.checkpoint, model_config_of(side.settings), scratch)
    return scratch


def lines_of(found: Comparison, verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yield the table, lost episodes, and the gates that fail."""
    of = {verdict.domain: verdict for verdict in verdicts}
    rows = [["", "before", "after", "change, 95 % interval", "questions", "gate"]]
    paired: dict[str, Change | Shift] = {**found.changes, **found.shifts}
    for name, one in paired.items():
        span = f"{one.change:+.3f}  [{one.low:+.3f}, {one.high:+.3f}]"
        rows.append([name, f"{one.before:.3f}", f"{one.after:.3f}", span, str(one.num), of[name].outcome])
    yield table(rows)
    if any(found.num_lost):
        yield f"{found.num_lost[0]} held-out episodes failed before and {found.num_lost[1]} after, not counted"
    for verdict in verdicts:
        if not verdict.is_passed:
            yield f"{verdict.outcome}: {verdict.gate} {verdict.domain}: {verdict.reason}"
    if all(verdict.is_passed for verdict in verdicts):
        yield "healthy: no significant harm is seen"


def main(argv: list[str] | None = None) -> int:
    """Run the subcommand."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    return run_cleanly(lambda: health(arguments), arguments.debug)
