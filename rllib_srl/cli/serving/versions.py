"""List the versions of a served model, and roll back to the one before.

    srl versions results/served                                   all versions: parent, state, ratings, gates, reason
    srl versions results/served --rollback --reason "it is rude"  the parent of the active version answers again
    srl versions results/served --json

Rolling back works while the server runs, without losing an answer, and while it does not. Ratings that only the version
that was rolled back had used are withdrawn: they are kept, listed, and not trained on again unless they are changed.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllib_srl.cli.episodes import printable
from rllib_srl.cli.serving.served_directory import MOST_NAMED, DirectoryError, InUse, ServedDirectory, ask
from rllib_srl.cli.serving.stores import Stores
from rllib_srl.cli.shared.command_line import add_debug, help_of
from rllib_srl.cli.shared.display import table

TIMEOUT_S = 900.0


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(**help_of(__doc__))
    parser.add_argument("directory", type=Path, metavar="DIR", help="the directory of srl serve")
    parser.add_argument("--rollback", action="store_true", help="roll the active version back to its parent")
    parser.add_argument("--reason", default="", metavar="TEXT", help="why, for the list")
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    add_debug(parser)
    return parser.parse_args(argv)


def versions(arguments: argparse.Namespace) -> int:
    """Do what the flags say."""
    served = ServedDirectory(arguments.directory)
    if not served.exists:
        raise DirectoryError(f"{arguments.directory} is no served model; expected a directory of srl serve")
    if arguments.reason and not arguments.rollback:
        raise DirectoryError("--reason is for --rollback")
    if arguments.rollback:
        print(printable(str(roll_back(served, arguments.reason or "rolled back by hand"))))
        return 0
    stores = Stores(served)
    try:
        rows = stores.now(lambda: rows_of(stores))
    finally:
        stores.close()
    if arguments.json:
        print(json.dumps(rows, indent=1))
    else:
        print_rows(rows)
    return 0


def rows_of(stores: Stores) -> list[dict[str, Any]]:
    """Return all versions, with the number of their ratings, and of those that changed or were withdrawn.

    It belongs into the thread of the stores.
    """
    lineage = stores.lineage
    stale, withdrawn = stores.stale_versions(), lineage.withdrawn()
    return [
        {
            **vars(one),
            "num_ratings": len(uses := lineage.uses(one.number)),
            "num_stale_ratings": stale.get(one.number, 0),
            "num_withdrawn_ratings": len(withdrawn & set(uses.items())),
            "history": lineage.history(one.number),
        }
        for one in lineage.all()
    ]


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print the versions as a table."""
    shown = [["version", "parent", "state", "since", "ratings", "gate", "reason"]]
    for row in rows:
        state = f"{row['state']}, {row['num_stale_ratings']} stale" if row["num_stale_ratings"] else row["state"]
        used = f"{row['num_ratings']}"
        used += f", {row['num_withdrawn_ratings']} withdrawn" if row["num_withdrawn_ratings"] else ""
        changes = row["metrics"].get("changes", {})
        gate = ", ".join(f"{name} {one['before']:.3f} -> {one['after']:.3f}" for name, one in changes.items())
        which = [str(row["number"]), str(row["parent"])]
        texts = [printable(text) or "-" for text in (gate, row["reason"])]  # a reason is what a client has sent
        shown.append([*which, state, row["changed_at"], used, *texts])
    print(table(shown, indent=""))
    active = next((row["number"] for row in rows if row["state"] == "active"), 0)
    print(f"version {active} is active" + ("" if active else ": the model that was given"))


@dataclass(frozen=True)
class Rollback:
    """What a rollback has done. Invariant: `withdrawn` has the ids of the first `MOST_NAMED` of the answers."""

    before: int  # the version that was rolled back
    after: int  # the one that is active
    num_withdrawn: int  # ratings that only the first one had used
    withdrawn: list[str]

    def __str__(self) -> str:
        num, named = self.num_withdrawn, ", ".join(self.withdrawn)
        text = "1 rating is withdrawn" if num == 1 else f"{num} ratings are withdrawn"
        if num:
            text += f": {named}" + (f" and {num - len(self.withdrawn)} more" if num > len(self.withdrawn) else "")
        return f"version {self.before} was rolled back; version {self.after} is active; {text}"


def roll_back(
    served: ServedDirectory, reason: str, number: int | None = None, timeout_s: float = TIMEOUT_S
) -> Rollback:
    """Roll back, through the server if one runs.

    Args:
        served: its directory.
        reason: why.
        number: of the version that is meant; None: the active one.
        timeout_s: for the server; answers of the version that goes may take long to end.

    Raises:
        RuntimeError: the lineage or the server refuses; the message says why.
        DirectoryError: the server refuses, or cannot be asked.
    """
    try:
        with served.locked():
            stores = Stores(served)
            try:
                before, after = stores.now(lambda: stores.lineage.roll_back(reason, number))
                withdrawn = stores.now(lambda: stores.lineage.withdrawn_by(before))
                in_training = stores.now(stores.lineage.in_training)
                if in_training is not None:
                    why = f"version {before}, from which it was trained, was rolled back"
                    stores.now(lambda: stores.lineage.reject(in_training.number, why, None, True))
            finally:
                stores.close()
    except InUse:  # a server holds the directory
        body = {"reason": reason, **({} if number is None else {"version": number})}
        found = ask(served, "/rollback", timeout_s, body)
        num, named = found["num_withdrawn_ratings"], found["withdrawn_ratings"]
        return Rollback(found["rolled_back"], found["active"], num, named)
    return Rollback(before, after, len(withdrawn), withdrawn[:MOST_NAMED])


def main(argv: list[str] | None = None) -> int:
    """Run the subcommand."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    try:
        return versions(arguments)
    except (ValueError, OSError, RuntimeError) as error:  # the message is enough without a traceback
        if arguments.debug:
            raise
        print(printable("error: " + " ".join(str(error).split())), file=sys.stderr)
        return 1
