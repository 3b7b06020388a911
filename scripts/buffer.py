#!/usr/bin/env python3
"""Look into the memory of a run: what it holds, why it drew what it drew, and how well it knew.

    python scripts/buffer.py ls results/first --sort recall --limit 20      items, most forgotten first
    python scripts/buffer.py show results/first 4b9d                        one item: schedule, reviews, episodes
    python scripts/buffer.py why results/first 4b9d                         why it was drawn, or not
    python scripts/buffer.py stats results/first                            gauges and counts
    python scripts/buffer.py plot results/first --out memory.png            forgetting curves, calibration, intervals
    python scripts/buffer.py fit results/first                              the spacing rule, refitted to the reviews
    python scripts/buffer.py export results/first groups.parquet            groups and items, for other programs
    python scripts/buffer.py import results/first groups.jsonl              groups into a memory that no run is using
    python scripts/buffer.py verify results/first                           every checksum and invariant

DIR is a run's directory, a checkpoint, a buffer's directory or a journal file; shards are shown as one. ID is a prompt
id, or the beginning of a key. The run may be going on: its journal is copied (to where TMPDIR says) and the copy is
read. Only `import` writes into DIR; a run that is resumed from a checkpoint keeps what came after it for reuse.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not scripts/, whose files would hide packages

from rllib_srl.checkpoints import MANIFEST, verify_sealed
from rllib_srl.replay.buffer import SRLReplayBuffer
from rllib_srl.replay.exchange import export_journals, import_into
from rllib_srl.replay.explain import STATUS_NAMES, all_items, counted, described, find, why
from rllib_srl.replay.intake import decoder_of
from rllib_srl.replay.journal import JournalError
from rllib_srl.replay.ledger import JOURNAL
from rllib_srl.replay.look import gauges, merged
from rllib_srl.replay.readings import Reading, copied, journals_in, readings
from rllib_srl.replay.refit import config_of, refit, whole_log
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.replay.turns import Decode
from rllib_srl.replay.verify import opened_buffer, verify
from scripts.buffer_rows import HEADING, ORDERS, group_lines, review_rows, row_of
from scripts.display import table
from scripts.episodes import printable

SETTINGS_FILE = "settings.yaml"  # as scripts.runs names it; importing that takes seconds


# --- reading --------------------------------------------------------------------------------------


def ls(arguments: argparse.Namespace) -> int:
    """List items."""
    with readings(arguments.directory) as shards:
        items = all_items(shards)
        wanted = [
            item
            for item in items
            if arguments.domain in (None, item.prompt.domain)
            and arguments.status in (None, STATUS_NAMES[int(item.row["status"])])
        ]
        wanted.sort(key=ORDERS[arguments.sort])
        if wanted:
            print(table([HEADING, *map(row_of, wanted[: arguments.limit])], indent=""))
        shown = min(len(wanted), arguments.limit)
        print(f"{shown} of {len(items)} items, iteration {shards[0].now}, sorted by {arguments.sort}")
    return 0


def show(arguments: argparse.Namespace) -> int:
    """Show one item with its reviews, and its groups with what was said."""
    with readings(arguments.directory) as shards:
        item = find(shards, arguments.id)
        print(table([(name, printable(value)) for name, value in described(item)], indent=""))
        if len(reviews := item.reviews()):
            print("\nreviews\n" + table(list(review_rows(reviews))))
        decode = known_decoder(arguments)
        if decode is None:
            print("\n(" + NO_TOKENIZER + ")", file=sys.stderr)
        for at in item.reading.groups_at(item.slot).tolist():
            print("\n".join(group_lines(item.reading, at, decode)))
    return 0


def say_why(arguments: argparse.Namespace) -> int:
    """Say why an item was drawn, or not."""
    with readings(arguments.directory) as shards:
        item = find(shards, arguments.id)
        print(printable(f"{item.key}  {item.prompt.env_id} [{item.prompt.prompt_id}], iteration {item.reading.now}"))
        print("\n".join(why(item, arguments.limit)))
    return 0


def stats(arguments: argparse.Namespace) -> int:
    """Print gauges and counts."""
    with readings(arguments.directory) as shards:
        now, settings = shards[0].now, shards[0].settings
        found = [_gauges(shard, now) for shard in shards]
    names = [["", "all", *(f"shard {i}" for i in range(len(found)))][: 2 + len(found) * (len(found) > 1)]]
    columns = [merged(found), *(found if len(found) > 1 else [])]
    rows = [[name, *(f"{column[name]:.6g}" for column in columns)] for name in columns[0]]
    print(
        f"iteration {now}; spacing {settings.spacing}, desired retention {settings.desired_retention:g}, "
        f"{counted(settings.iterations_per_day, 'iteration')} a day; selection {settings.selection}, "
        f"reuse {settings.reuse_selection}, load control {settings.load_control}"
    )
    print(table([*(names if len(found) > 1 else []), *rows], indent=""))
    return 0


OF_A_PROCESS = ("num_bytes_in_memory", "num_spilled", "num_read_back")  # of the run's, which a copy does not tell


def _gauges(shard: Reading, now: int) -> dict[str, float]:
    with copied(shard.path) as directory, closing(opened_buffer(directory, shard.settings)) as buffer:
        return {name: value for name, value in gauges(buffer, now).items() if name not in OF_A_PROCESS}


# --- judging --------------------------------------------------------------------------------------


def plot(arguments: argparse.Namespace) -> int:
    """Draw the picture."""
    from scripts.buffer_plots import plot_memory

    with readings(arguments.directory) as shards:
        print(plot_memory(arguments.out, shards))
    return 0


def fit(arguments: argparse.Namespace) -> int:
    """Refit the spacing rule, and say whether that helps."""
    with readings(arguments.directory) as shards:
        log, rule = whole_log(shards), shards[0].rule
    found = refit(rule, log, arguments.min_reviews)
    figures = [("parameter", "before", "after")]
    figures += [(name, f"{before:g}", f"{after:g}") for name, (before, after) in found.turned.items()]
    print(f"spacing {rule.name}, {found.after.num_reviews} reviews of {found.after.num_items} items that came back")
    print(table(figures))
    losses = [("log loss, nats an episode", ""), ("  rule as it is set", f"{found.before.log_loss:.4f}")]
    losses += [("  rule as fitted", f"{found.after.log_loss:.4f}")]
    held_out = "-  (too few reviews)" if found.held_out is None else f"{found.held_out.log_loss:.4f}"
    losses += [("  fitted to half of the items, on the other half", held_out)]
    losses += [("  constant: the pass rate of these reviews", f"{found.after.log_loss_constant:.4f}")]
    print(table(losses))
    judged = found.held_out or found.after
    beats = "beats" if judged.beats_constant else "does not beat"
    on = "items it did not see" if found.held_out else "the reviews it was fitted to"
    print(f"on {on}, the fitted rule {beats} the constant: {judged.gain:+.4f} +- {judged.gain_error:.4f} nats (1 s.e.)")
    print("settings to paste:")
    print(f"replay_spacing_config: {json.dumps(config_of(found.fitted))}")
    return 0


def check(arguments: argparse.Namespace) -> int:
    """Verify journals, and a checkpoint's manifest; the exit status is 1 if anything is wrong."""
    num_faults = 0
    if (arguments.directory / MANIFEST).is_file():
        verify_sealed(arguments.directory)
    for path in journals_in(arguments.directory):
        found = verify(path)
        num_faults += len(found.faults)
        counts = f"{found.num_items} items, {found.num_groups} groups, {found.num_reviews} reviews"
        print(*(found.faults or [f"ok  {path}: {counts}, position {found.position}"]), sep="\n")
    return int(num_faults > 0)


# --- files ----------------------------------------------------------------------------------------


def export(arguments: argparse.Namespace) -> int:
    """Write all groups to a file."""
    with readings(arguments.directory) as shards:
        decode = known_decoder(arguments)
        num = export_journals(shards, arguments.file, decode, with_text=not arguments.no_text)
        bare = sum(int((shard.stored.items["num_groups"] == 0).sum()) for shard in shards)
    text = "" if decode and not arguments.no_text else " without their text"
    print(f"{num} groups{text} in {arguments.file}; {bare} items without a stored group are not in it")
    return 0


def take_in(arguments: argparse.Namespace) -> int:
    """Take the groups of a file into a memory that no run is using, or into a new one."""
    settings, paths, now = place_for(arguments)
    model_dir = None if settings.on_secret == "keep" else model_of(arguments)
    if settings.on_secret != "keep" and model_dir is None:
        raise ValueError(f"{NO_TOKENIZER}, to find secrets (on_secret = {settings.on_secret!r})")
    with ExitStack() as stack:
        buffers = [
            stack.enter_context(closing(SRLReplayBuffer(settings, directory=path.parent, model_dir=model_dir)))
            for path in paths
        ]
        now = now if arguments.now is None else arguments.now
        taken = import_into(buffers, arguments.file, now, "skip" if arguments.skip_broken else "refuse")
    refused = "".join(f", {num} {reason}" for reason, num in sorted(taken.refused.items()))
    print(
        f"{taken.num_stored} of {taken.num_read} groups stored, born in iteration {now}; "
        f"{taken.num_new_items} new items; refused: {refused.removeprefix(', ') or 'none'}"
    )
    for fault in taken.faults:
        print(f"left out: {fault}")
    return 0


def place_for(arguments: argparse.Namespace) -> tuple[ReplaySettings, list[Path], int]:
    """Return settings, journals and iteration of the memory that is written into; a new one's if there is none.

    Raises:
        ValueError: a checkpoint, which is sealed, or a place that holds something else.
    """
    directory: Path = arguments.directory
    if (directory.is_dir() and not any(directory.iterdir())) or not directory.exists():
        given = memory_settings(arguments.config) if arguments.config else {}
        return ReplaySettings.from_dict(given).checked(), [directory / JOURNAL], 0
    paths = journals_in(directory)
    if faulty := [path for path in paths if path.name != JOURNAL]:
        raise ValueError(f"{faulty[0]} is part of a checkpoint; expected a run's directory, or one that is new")
    if arguments.config:
        raise ValueError("--config with a memory that exists; expected none: it has its settings")
    with readings(directory) as shards:
        return shards[0].settings, paths, shards[0].now


# --- beside a run ---------------------------------------------------------------------------------

NO_TOKENIZER = f"the tokenizer is not known: no {SETTINGS_FILE} with a model is near; expected --model"


def memory_settings(path: Path) -> dict[str, Any]:
    """Return the memory's settings in a YAML file, without their prefix."""
    values = settings_in(path)
    return {name.removeprefix("replay_"): value for name, value in values.items() if name.startswith("replay_")}


def settings_in(path: Path) -> dict[str, Any]:
    """Return a YAML file of settings.

    Raises:
        ValueError: it is none.
    """
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds {type(values).__name__}; expected lines of `name: value`")
    return values


def model_of(arguments: argparse.Namespace) -> Path | None:
    """Return the directory of the model that wrote the tokens: --model, or what the run's settings say."""
    from rllib_srl.models import local_model

    name = arguments.model
    for place in [arguments.directory, *arguments.directory.absolute().parents[:3]]:
        if name is None and (place / SETTINGS_FILE).is_file():
            name = settings_in(place / SETTINGS_FILE).get("model")
    return None if name is None else local_model(name)


def known_decoder(arguments: argparse.Namespace) -> Decode | None:
    """Return token ids -> text, None where no tokenizer is known."""
    model_dir = model_of(arguments)
    return None if model_dir is None else decoder_of(model_dir)


# --- the command line -----------------------------------------------------------------------------


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, action: Callable[[argparse.Namespace], int], *positional: str) -> argparse.ArgumentParser:
        meaning = (action.__doc__ or "").strip()
        added = commands.add_parser(name, help=meaning, description=meaning, allow_abbrev=False)
        added.set_defaults(action=action)
        added.add_argument("directory", type=Path, metavar="DIR", help="a run, a checkpoint, a buffer, or a journal")
        for word in positional:
            added.add_argument(word, type=Path if word == "file" else str, metavar=word.upper())
        added.add_argument("--debug", action="store_true", help="show the traceback of an error")
        return added

    listing = command("ls", ls)
    listing.add_argument("--domain", help="only items of this domain")
    listing.add_argument("--status", choices=sorted(STATUS_NAMES.values()), help="only items of this status")
    listing.add_argument("--sort", choices=sorted(ORDERS), default="due", help="default: %(default)s")
    listing.add_argument("--limit", type=positive, default=40, help="at most so many (default: %(default)s)")
    showing = command("show", show, "id")
    asking = command("why", say_why, "id")
    asking.add_argument("--limit", type=positive, default=10, help="the last draws (default: %(default)s)")
    command("stats", stats)
    command("plot", plot).add_argument("--out", type=Path, default=Path("memory.png"), help="default: %(default)s")
    command("fit", fit).add_argument("--min_reviews", type=positive, default=64, help="default: %(default)s")
    exporting = command("export", export, "file")
    exporting.add_argument("--no-text", action="store_true", help="leave the column `text` out")
    importing = command("import", take_in, "file")
    importing.add_argument("--config", type=Path, metavar="YAML", help="of a new memory: its replay_* settings")
    importing.add_argument("--now", type=int, help="iteration that the groups are born in (default: the memory's)")
    importing.add_argument("--skip-broken", action="store_true", help="leave broken rows out instead of taking nothing")
    for added in (showing, exporting, importing):
        added.add_argument("--model", help="name or directory of the model, for its tokenizer (default: the run's)")
    command("verify", check)
    return parser.parse_args(argv)


def positive(text: str) -> int:
    """Return a number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a number of at least 1")
    return int(text)


def main(argv: list[str] | None = None) -> int:
    """Run the script."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    try:
        return arguments.action(arguments)
    except (ValueError, OSError, JournalError) as error:  # the message tells all
        if arguments.debug:
            raise
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return 1


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a traceback
    sys.exit(main())
