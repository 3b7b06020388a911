"""Look into the memory of a run, and remove items from it.

    srl memory stats results/first                                gauges and counts
    srl memory list results/first --sort pass_rate --limit 20     items, hardest first
    srl memory show results/first 4b9d                            one item: state, draws, episodes
    srl memory drop results/first 4b9d                            remove items for good, also from the checkpoints

DIR is a run's directory, a checkpoint, a buffer's directory or a database file. ITEM is a prompt id, or the beginning
of a key. The run may still be running: all but `drop` read a copy of its database (in TMPDIR).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rllib_srl.cli.shared.display import counted, figure, one_line, printable, rounded, table
from rllib_srl.cli.shared.flags import Program, integer_from
from rllib_srl.common.decoder import decoder_of
from rllib_srl.replay.admission import Decode, turns_of
from rllib_srl.replay.metrics import by_domain
from rllib_srl.replay.reading import Reading, drop, reading
from rllib_srl.types import Prompt

WIDEST_PROMPT = 36  # characters of a prompt in `list`


@dataclass(frozen=True)
class Item:
    memory: Reading
    slot: int

    @property
    def row(self) -> np.void:
        row: np.void = self.memory.tables.items[self.slot]
        return row

    @property
    def prompt(self) -> Prompt:
        return self.memory.tables.prompt_of(self.slot)

    @property
    def recall(self) -> float:
        """Return its predicted recall; nan without a review or a rule that predicts it."""
        return self.memory.recall[self.slot] if self.memory.settings.has_due_dates else math.nan


ORDERS: dict[str, Callable[[Item], float]] = {  # ascending; items without a value come last
    "due": lambda item: float(item.row["due"]),
    "recall": lambda item: math.inf if math.isnan(item.recall) else item.recall,
    "pass_rate": lambda item: float(item.row["pass_rate"]) if item.row["visits"] else math.inf,
    "lapses": lambda item: -int(item.row["lapses"]),
    "visits": lambda item: -int(item.row["visits"]),
    "diversity": lambda item: -float(item.row["diversity"]),
}
HEADING = ["key", "prompt", "domain", "due", "recall", "pass rate", "visits", "lapses", "diversity", "groups"]
SETTINGS_FILE = "settings.yaml"  # as rllib_srl.cli.shared.runs names it; importing that takes seconds
NO_TOKENIZER = f"no tokenizer: found no {SETTINGS_FILE} that names the model; expected --model"


def stats(arguments: argparse.Namespace) -> None:
    """Print gauges and counts."""
    with reading(arguments.directory) as memory:
        settings, now, gauges = memory.settings, memory.now, memory.stats()
    spacing = f"spacing {settings.spacing}"
    if settings.has_due_dates:
        days = counted(settings.iterations_per_day, "iteration")
        spacing += f", desired retention {settings.desired_retention:g}, {days} per day"
    print(f"iteration {now}; {spacing}; selection {settings.selection}, reuse {settings.reuse_selection}")
    whole = {name: value for name, value in gauges.items() if not name.startswith("domains/")}
    print(table([[name, f"{value:.6g}"] for name, value in whole.items()], indent=""))
    if domains := by_domain(gauges):
        rows = [[printable(name), *(f"{num:g}" for num in counts.values())] for name, counts in domains.items()]
        print("\n" + table([["domain", *next(iter(domains.values()))], *rows], indent=""))


def list_items(arguments: argparse.Namespace) -> None:
    """List items."""
    with reading(arguments.directory) as memory:
        if arguments.sort == "recall" and not memory.settings.has_due_dates:
            text = "this memory has no spacing rule, so it predicts no recall; expected another order, such as visits"
            raise ValueError(f"--sort recall: {text}")
        items = [Item(memory, slot) for slot in memory.tables.slots().tolist()]
        wanted = [item for item in items if arguments.domain in (None, item.prompt.domain)]
        wanted.sort(key=ORDERS[arguments.sort])
        if wanted:
            print(table([HEADING, *map(row_of, wanted[: arguments.limit])], indent=""))
        shown = min(len(wanted), arguments.limit)
        print(f"{shown} of {len(items)} items, iteration {memory.now}, sorted by {arguments.sort}")


def row_of(item: Item) -> list[str]:
    row, prompt, settings = item.row, item.prompt, item.memory.settings
    due = lateness(item.memory.now - float(row["due"])).removeprefix("due ") if settings.has_due_dates else "any time"
    name = f"{prompt.env_id} [{prompt.prompt_id}]" + (f" +{len(prompt.history)}" if prompt.history else "")
    return [
        prompt.key[:10],
        one_line(name, WIDEST_PROMPT),
        printable(prompt.domain),
        due,
        rounded(item.recall),
        rounded(float(row["pass_rate"]) if row["visits"] else None),
        *(str(row[name]) for name in ("visits", "lapses")),
        rounded(float(row["diversity"]) if settings.embedding_used else None),
        str(len(item.memory.tables.groups_of(item.slot))),
    ]


def show(arguments: argparse.Namespace) -> None:
    """Show one item: its state, and the text of its groups."""
    with reading(arguments.directory) as memory:
        item, decode = Item(memory, memory.find(arguments.item)), known_decoder(arguments)
        print(table([(name, printable(value)) for name, value in described(item)], indent=""))
        if decode is None:
            print(f"\n({NO_TOKENIZER})", file=sys.stderr)
        for at in memory.tables.groups_of(item.slot):
            print("\n".join(group_lines(memory, memory.tables.groups[at], decode)))


def described(item: Item) -> Iterator[tuple[str, str]]:
    """Yield the name and the value, in words and with units, of each property of an item."""
    row, prompt, settings, now = item.row, item.prompt, item.memory.settings, item.memory.now
    yield "item", prompt.key
    yield "prompt", f"{prompt.env_id} [{prompt.prompt_id}]" + (f", step {prompt.step}" if prompt.step else "")
    for number, turn in enumerate(prompt.history, 1):
        yield f"history, turn {number}", repr(turn)
    yield "domain", prompt.domain
    if settings.has_due_dates:
        yield "due", f"at iteration {figure(row['due'])} ({lateness(now - float(row['due']))})"
    if settings.has_due_dates and row["reps"]:
        asked = f"the rule asks for {settings.desired_retention:g}"
        yield "recall", f"{item.recall:.2f} expected now, iteration {now}; {asked}"
        days = counted(settings.iterations_per_day, "iteration")
        stability = f"stability {counted(row['stability'], 'day')}, difficulty {figure(row['difficulty'])}"
        yield "memory state", f"{stability} ({days} a day)"
        yield "reviews", f"{row['reps']}, {counted(row['lapses'], 'lapse')}"
    if row["visits"]:
        passed = f"{row['num_success']} of {row['group_size']} episodes passed, mean reward {float(row['reward']):.2f}"
        yield "last visit", f"iteration {row['last_review']}, version {row['version']}: {passed}"
    yield "visits", f"{row['visits']}, first met in iteration {row['created']}"
    if settings.embedding_used:
        parts = ", ".join(f"{name} {float(row[name]):.2f}" for name in ("variance", "novelty"))
        yield "diversity", f"{float(row['diversity']):.2f} among the items ({parts})"


def lateness(late: float) -> str:
    """Return "due 3 iterations ago", "due now" (0 <= late < 1) or "due in 2 iterations"."""
    if 0 <= late < 1:
        return "due now"
    return f"due {counted(late, 'iteration')} ago" if late > 0 else f"due in {counted(-late, 'iteration')}"


def group_lines(memory: Reading, row: np.void, decode: Decode | None) -> Iterator[str]:
    """Yield the lines of a stored group by its row: its numbers, then each episode."""
    group = memory.store.group(int(row["seq"]))
    rewards = " ".join(f"{reward:g}" for reward in group.rewards_G)
    age, uses = counted(memory.now - row["born"], "iteration"), counted(row["uses"], "time")
    yield (
        f"\ngroup {group.group_id}: age {age}, version {row['version']}, reused {uses}, {row['num_tokens']} tokens "
        f"({row['num_loss_tokens']} by the policy), rewards {rewards}"
    )
    if decode is None:
        return
    for g in range(group.size):
        yield f"── episode {g}  reward {group.rewards_G[g]:g}  stop {group.stop_reasons[g].value}"
        for is_policy, _, _, text in turns_of(group, g, decode):
            role = "policy" if is_policy else "environment"
            for number, line in enumerate(text.removesuffix("\n").split("\n")):
                yield f"{role if number == 0 else '':>11} │ {printable(line)}".rstrip()


def drop_items(arguments: argparse.Namespace) -> None:
    """Remove items for good from a run and its checkpoints; transcripts and ratings keep their texts."""
    which = {"domain": arguments.domain, "before": arguments.before}
    if not arguments.items and set(which.values()) == {None}:
        raise ValueError("nothing to remove; expected an ITEM, --domain or --before")
    for path, num in drop(arguments.directory, arguments.items, **which).items():
        print(f"{counted(num, 'item')} removed from {path}")


def known_decoder(arguments: argparse.Namespace) -> Decode | None:
    """Return a function token ids -> text, by --model or the model in the run's settings; None if none is known."""
    import yaml

    from rllib_srl.engine.models import local_model

    name, places = arguments.model, [arguments.directory, *arguments.directory.absolute().parents[:3]]
    path = next((place / SETTINGS_FILE for place in places if (place / SETTINGS_FILE).is_file()), None)
    if name is None and path is not None:
        try:
            name = str(yaml.safe_load(path.read_text(encoding="utf-8"))["model"])
        except (yaml.YAMLError, TypeError, KeyError) as error:
            raise ValueError(f"{path} names no model ({error!r}); expected `model: NAME` in it, or --model") from error
    return None if name is None else decoder_of(local_model(name))


def decoder_for(arguments: argparse.Namespace) -> Callable[[], Decode]:
    """Return a function that returns the decoder, and raises a ValueError if no tokenizer is known."""

    def decode() -> Decode:
        if (decoder := known_decoder(arguments)) is None:
            raise ValueError(NO_TOKENIZER)
        return decoder

    return decode


def add_flags(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, action: Callable[[argparse.Namespace], None]) -> argparse.ArgumentParser:
        meaning = (action.__doc__ or "").strip()
        added = commands.add_parser(name, help=meaning, description=meaning, allow_abbrev=False)
        added.set_defaults(action=action)
        added.add_argument("directory", type=Path, metavar="DIR", help="a run, a checkpoint, a buffer, or a database")
        text = "show the traceback of an error"
        added.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=text)
        return added

    command("stats", stats)
    listing = command("list", list_items)
    listing.add_argument("--domain", help="only items of this domain")
    listing.add_argument("--sort", choices=sorted(ORDERS), default="due", help="default: %(default)s")
    text = "maximum number of items (default: %(default)s)"
    listing.add_argument("--limit", type=integer_from(1), default=40, help=text)
    showing = command("show", show)
    showing.add_argument("item", metavar="ITEM")
    showing.add_argument("--model", help="name or directory of the model, for its tokenizer (default: the run's)")
    dropping = command("drop", drop_items)
    dropping.add_argument("items", nargs="*", metavar="ITEM")
    dropping.add_argument("--domain", help="also all items of this domain")
    text = "also items and groups from before iteration N"
    dropping.add_argument("--before", type=integer_from(1), metavar="N", help=text)


def run(arguments: argparse.Namespace) -> int:
    arguments.action(arguments)
    return 0


main = Program(__doc__, add_flags, run)
