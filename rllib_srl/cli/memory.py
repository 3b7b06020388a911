"""Look into the memory of a run: its items, and the reasons for its draws.

    srl memory ls results/first --sort pass_rate --limit 20   items, hardest first
    srl memory show results/first 4b9d                        one item: schedule, episodes
    srl memory why results/first 4b9d                         why it was drawn, or not
    srl memory stats results/first                            gauges and counts
    srl memory plot results/first --out memory.png            visits, rewards, groups of equal rewards
    srl memory export results/first groups.jsonl              groups and items, for other programs
    srl memory import results/first groups.jsonl              groups into a memory that no run is using
    srl memory verify results/first                           every page, payload and invariant

DIR is a run's directory, a checkpoint, a buffer's directory or a journal file. ID is a prompt id, or the beginning of a
key. The run may still be running: the subcommands read a copy of its journal (in TMPDIR). Only `import` writes into
DIR; a run that is resumed from a checkpoint goes on without groups stored after it.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rllib_srl.cli.episodes import printable
from rllib_srl.cli.shared.command_line import add_debug, help_of
from rllib_srl.cli.shared.display import rounded, table
from rllib_srl.replay.buffer import SRLReplayBuffer
from rllib_srl.replay.buffer_metrics import by_domain, gauges
from rllib_srl.replay.ingest import decoder_of
from rllib_srl.replay.journal.journal import JournalError
from rllib_srl.replay.journal.reader import Reading, copied, journal_in, reading
from rllib_srl.replay.journal.transaction import JOURNAL
from rllib_srl.replay.settings import ReplaySettings, check_trusted
from rllib_srl.replay.tools.exchange import export_journal, import_into
from rllib_srl.replay.tools.explain import (
    Decode,
    Found,
    all_items,
    counted,
    described,
    find,
    lateness,
    turns,
    why,
)
from rllib_srl.replay.tools.verify import opened_buffer, verify
from rllib_srl.storage.checkpoints import MANIFEST, verify_sealed

WIDEST_PROMPT = 36  # characters of a prompt in `ls`
ORDERS: dict[str, Callable[[Found], float]] = {  # ascending; items without a value come last
    "due": lambda item: float(item.row["due"]),
    "recall": lambda item: math.inf if math.isnan(item.recall) else item.recall,
    "pass_rate": lambda item: float(item.row["pass_rate"]) if item.row["visits"] else math.inf,
    "lapses": lambda item: -int(item.row["lapses"]),
    "visits": lambda item: -int(item.row["visits"]),
    "diversity": lambda item: -float(item.row["diversity"]),
    "novelty": lambda item: -float(item.row["novelty"]),
    "created": lambda item: -int(item.row["created"]),
}
HEADING = ["key", "prompt", "domain", "due", "recall", "pass rate", "visits", "lapses", "diversity", "groups"]


def row_of(item: Found) -> list[str]:
    """Return an item's row in `ls`."""
    row, prompt = item.row, item.prompt
    late = item.reading.now - float(row["due"])
    due = lateness(late).removeprefix("due ") if item.reading.settings.has_due_dates else "any time"
    name = printable(f"{prompt.env_id} [{prompt.prompt_id}]" + (f" +{len(prompt.history)}" if prompt.history else ""))
    return [
        item.key[:10],
        name if len(name) <= WIDEST_PROMPT else name[: WIDEST_PROMPT - 1] + "…",
        printable(prompt.domain),
        due,
        rounded(item.recall),
        rounded(float(row["pass_rate"]) if row["visits"] else None),
        *(str(row[name]) for name in ("visits", "lapses")),
        rounded(float(row["diversity"]) if item.reading.settings.embedding_used else None),
        str(row["num_groups"]),
    ]


def group_lines(one: Reading, at: int, decode: Decode | None) -> Iterator[str]:
    """Yield the lines of a stored group: its numbers, then each episode."""
    row, seq = one.stored.groups[at], int(one.stored.seqs[at])
    group = one.group(seq)
    rewards = " ".join(f"{reward:g}" for reward in group.rewards_G)
    age, uses = counted(one.now - row["born"], "iteration"), counted(row["uses"], "time")
    yield (
        f"\ngroup {group.group_id}: age {age}, version {row['version']}, reused {uses}, {row['num_tokens']} tokens "
        f"({row['num_loss_tokens']} by the policy), rewards {rewards}"
    )
    for g in range(group.size if decode else 0):
        yield f"── episode {g}  reward {group.rewards_G[g]:g}  stop {group.stop_reasons[g].value}"
        assert decode is not None
        for role, text in turns(group, g, decode):
            for number, line in enumerate(text.removesuffix("\n").split("\n")):
                yield f"{role if number == 0 else '':>11} │ {printable(line)}".rstrip()


SETTINGS_FILE = "settings.yaml"  # as rllib_srl.cli.shared.runs names it; importing that takes seconds


# --- reading --------------------------------------------------------------------------------------


def ls(arguments: argparse.Namespace) -> int:
    """List items."""
    with reading(arguments.directory, arguments.trust_rules) as memory:
        if arguments.sort == "recall" and not memory.settings.has_due_dates:
            raise ValueError(
                "--sort recall: this memory has no spacing rule, so it predicts no recall; expected another order, "
                "such as pass_rate or visits"
            )
        items = all_items(memory)
        wanted = [
            item
            for item in items
            if arguments.domain in (None, item.prompt.domain)
        ]
        wanted.sort(key=ORDERS[arguments.sort])
        if wanted:
            print(table([HEADING, *map(row_of, wanted[: arguments.limit])], indent=""))
        shown = min(len(wanted), arguments.limit)
        print(f"{shown} of {len(items)} items, iteration {memory.now}, sorted by {arguments.sort}")
    return 0


def show(arguments: argparse.Namespace) -> int:
    """Show one item, and the text of its groups."""
    with reading(arguments.directory, arguments.trust_rules) as memory:
        item = find(memory, arguments.id)
        print(table([(name, printable(value)) for name, value in described(item)], indent=""))
        decode = known_decoder(arguments)
        if decode is None:
            print("\n(" + NO_TOKENIZER + ")", file=sys.stderr)
        for at in item.reading.groups_at(item.slot).tolist():
            print("\n".join(group_lines(item.reading, at, decode)))
    return 0


def say_why(arguments: argparse.Namespace) -> int:
    """Explain why an item was drawn, or not."""
    with reading(arguments.directory, arguments.trust_rules) as memory:
        item = find(memory, arguments.id)
        print(printable(f"{item.key}  {item.prompt.env_id} [{item.prompt.prompt_id}], iteration {item.reading.now}"))
        print("\n".join(why(item, arguments.limit)))
    return 0


def stats(arguments: argparse.Namespace) -> int:
    """Print gauges and counts."""
    with reading(arguments.directory, arguments.trust_rules) as memory:
        now, settings = memory.now, memory.settings
        found = _gauges(memory, now)
    rows = [[name, f"{value:.6g}"] for name, value in found.items() if not name.startswith("domains/")]
    days = f", {counted(settings.iterations_per_day, 'iteration')} per day"
    asked = f", desired retention {settings.desired_retention:g}{days}" if settings.has_due_dates else ""
    print(
        f"iteration {now}; spacing {settings.spacing}{asked}; selection {settings.selection}, "
        f"reuse {settings.reuse_selection}"
    )
    print(table(rows, indent=""))
    if domains := by_domain(found):
        heading = ["domain", *next(iter(domains.values()))]
        print("\n" + table([heading, *domain_rows(domains)], indent=""))
    return 0


def domain_rows(domains: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    """Return a row for each domain: its name and its counts."""
    return [[printable(domain), *(f"{num:g}" for num in counts.values())] for domain, counts in domains.items()]


OF_A_PROCESS = ("num_bytes_in_memory", "num_spilled", "num_read_back")  # of the running process; not in the journal


def _gauges(memory: Reading, now: int) -> dict[str, float]:
    with copied(memory.path) as directory, closing(opened_buffer(directory, memory.settings)) as buffer:
        return {name: value for name, value in gauges(buffer, now).items() if name not in OF_A_PROCESS}


# --- judging --------------------------------------------------------------------------------------


def plot(arguments: argparse.Namespace) -> int:
    """Draw the picture."""
    from rllib_srl.cli.shared.memory_plots import plot_memory

    with reading(arguments.directory, arguments.trust_rules) as memory:
        print(plot_memory(arguments.out, memory))
    return 0


def check(arguments: argparse.Namespace) -> int:
    """Verify a journal, and a checkpoint's manifest; the exit status is 1 if anything is wrong."""
    if (arguments.directory / MANIFEST).is_file():
        verify_sealed(arguments.directory)
    path = journal_in(arguments.directory)
    found = verify(path, arguments.trust_rules)
    counts = f"{found.num_items} items, {found.num_groups} groups"
    print(*(found.faults or [f"ok  {path}: {counts}, position {found.position}"]), sep="\n")
    return int(bool(found.faults))


# --- files ----------------------------------------------------------------------------------------


def export(arguments: argparse.Namespace) -> int:
    """Write all groups to a file."""
    with reading(arguments.directory, arguments.trust_rules) as memory:
        decode = known_decoder(arguments)
        num = export_journal(memory, arguments.file, decode, with_text=not arguments.no_text)
        bare = int((memory.stored.items["num_groups"] == 0).sum())
    text = "" if decode and not arguments.no_text else " without their text"
    print(f"{num} groups{text} in {arguments.file}; {bare} items have no stored group")
    return 0


def take_in(arguments: argparse.Namespace) -> int:
    """Take the groups of a file into a memory that no run is using, or into a new one."""
    settings, path, now = place_for(arguments)
    model_dir = model_of(arguments) if settings.admit else None
    if settings.admit and model_dir is None:
        raise ValueError(f"{NO_TOKENIZER}, to check groups (admit = {settings.admit!r})")
    with closing(SRLReplayBuffer(settings, directory=path.parent, model_dir=model_dir)) as buffer:
        now = now if arguments.now is None else arguments.now
        taken = import_into(buffer, arguments.file, now, "skip" if arguments.skip_broken else "refuse")
    refused = "".join(f", {num} {reason}" for reason, num in sorted(taken.refused.items()))
    print(
        f"{taken.num_stored} of {taken.num_read} groups stored, with iteration {now}; "
        f"{taken.num_new_items} new items; rejected: {refused.removeprefix(', ') or 'none'}"
    )
    for fault in taken.faults:
        print(f"skipped: {fault}")
    return 0


def place_for(arguments: argparse.Namespace) -> tuple[ReplaySettings, Path, int]:
    """Return settings, journal and iteration of the memory to write to; those of a new one if there is none.

    Raises:
        ValueError: the directory is a checkpoint, which is sealed, or holds other files.
    """
    directory: Path = arguments.directory
    if (directory.is_dir() and not any(directory.iterdir())) or not directory.exists():
        given = memory_settings(arguments.config) if arguments.config else {}
        return ReplaySettings.from_dict(given).checked(), directory / JOURNAL, 0
    path = journal_in(directory)
    if path.name != JOURNAL:
        raise ValueError(f"{path} is part of a checkpoint; expected the directory of a run, or a new one")
    if arguments.config:
        raise ValueError("--config is for a new memory; expected no --config: this memory has its settings")
    with reading(directory, arguments.trust_rules) as memory:
        if not arguments.trust_rules:
            check_trusted(memory.settings)
        return memory.settings, path, memory.now


# --- beside a run ---------------------------------------------------------------------------------

NO_TOKENIZER = f"no tokenizer: found no {SETTINGS_FILE} that names the model; expected --model"


def memory_settings(path: Path) -> dict[str, Any]:
    """Return the memory's settings in a YAML file, without their prefix."""
    values = settings_in(path)
    return {name.removeprefix("replay_"): value for name, value in values.items() if name.startswith("replay_")}


def settings_in(path: Path) -> dict[str, Any]:
    """Return the settings in a YAML file.

    Raises:
        ValueError: the file is not a mapping of settings.
    """
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} contains a {type(values).__name__}; expected lines of `name: value`")
    return values


def model_of(arguments: argparse.Namespace) -> Path | None:
    """Return the directory of the model that wrote the tokens: --model, or the model in the run's settings."""
    from rllib_srl.engine.models import local_model

    name = arguments.model
    for place in [arguments.directory, *arguments.directory.absolute().parents[:3]]:
        if name is None and (place / SETTINGS_FILE).is_file():
            name = settings_in(place / SETTINGS_FILE).get("model")
    return None if name is None else local_model(name)


def known_decoder(arguments: argparse.Namespace) -> Decode | None:
    """Return a function token ids -> text, or None if no tokenizer is known."""
    model_dir = model_of(arguments)
    return None if model_dir is None else decoder_of(model_dir)


def decoder_for(arguments: argparse.Namespace) -> Callable[[], Decode]:
    """Return a function that returns the decoder, and raises a ValueError if no tokenizer is known."""

    def decode() -> Decode:
        found = known_decoder(arguments)
        if found is None:
            raise ValueError(NO_TOKENIZER)
        return found

    return decode


# --- the command line -----------------------------------------------------------------------------


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(**help_of(__doc__))
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, action: Callable[[argparse.Namespace], int], *positional: str) -> argparse.ArgumentParser:
        meaning = (action.__doc__ or "").strip()
        added = commands.add_parser(name, help=meaning, description=meaning, allow_abbrev=False)
        added.set_defaults(action=action)
        added.add_argument("directory", type=Path, metavar="DIR", help="a run, a checkpoint, a buffer, or a journal")
        for word in positional:
            added.add_argument(word, type=Path if word == "file" else str, metavar=word.upper())
        trusted = "import and run rules given as module:rule"
        added.add_argument("--trust-rules", action="store_true", help=trusted)
        add_debug(added)
        return added

    listing = command("ls", ls)
    listing.add_argument("--domain", help="only items of this domain")
    listing.add_argument("--sort", choices=sorted(ORDERS), default="due", help="default: %(default)s")
    listing.add_argument("--limit", type=positive, default=40, help="maximum number of items (default: %(default)s)")
    showing = command("show", show, "id")
    asking = command("why", say_why, "id")
    asking.add_argument("--limit", type=positive, default=10, help="number of last draws (default: %(default)s)")
    command("stats", stats)
    command("plot", plot).add_argument("--out", type=Path, default=Path("memory.png"), help="default: %(default)s")
    exporting = command("export", export, "file")
    exporting.add_argument("--no-text", action="store_true", help="omit the column `text`")
    importing = command("import", take_in, "file")
    importing.add_argument("--config", type=Path, metavar="YAML", help="replay_* settings of a new memory")
    importing.add_argument("--now", type=int, help="iteration of the groups (default: the memory's)")
    importing.add_argument("--skip-broken", action="store_true", help="skip broken rows instead of rejecting the file")
    for added in (showing, exporting, importing):
        added.add_argument("--model", help="name or directory of the model, for its tokenizer (default: the run's)")
    command("verify", check)
    return parser.parse_args(argv)


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a number of at least 1")
    return int(text)


def main(argv: list[str] | None = None) -> int:
    """Run the subcommand."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    try:
        status: int = arguments.action(arguments)
        return status
    except (ValueError, OSError, JournalError) as error:  # the message is enough without a traceback
        if arguments.debug:
            raise
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return 1
