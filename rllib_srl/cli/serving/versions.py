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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rllib_srl.cli.serving.served_directory import DirectoryError, InUse, ServedDirectory, ask
from rllib_srl.cli.shared.display import printable, table
from rllib_srl.cli.shared.flags import Program
from rllib_srl.people.served_store import FILE, ServedStore

TIMEOUT_S = 900.0  # for the server: answers of the version that goes may take long to end
MOST_NAMED = 5  # ratings that a rollback names; the rest is counted


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="the directory of srl serve")
    parser.add_argument("--rollback", action="store_true", help="roll the active version back to its parent")
    parser.add_argument("--reason", default="", metavar="TEXT", help="why, for the list")
    parser.add_argument("--json", action="store_true", help="print the list as JSON")


def versions(arguments: argparse.Namespace) -> int:
    served = ServedDirectory(arguments.directory)
    if not served.exists:
        raise DirectoryError(f"{arguments.directory} is not a served model; expected a directory of srl serve")
    if arguments.reason and not arguments.rollback:
        raise DirectoryError("--reason without --rollback; expected both")
    if arguments.rollback:
        print(printable(in_words(roll_back(served, arguments.reason or "rolled back by hand"))))
        return 0
    with ServedStore(served.path / FILE) as store:
        rows = store.rows()
    if arguments.json:
        print(json.dumps(rows, indent=1))
    else:
        print_rows(rows)
    return 0


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    shown = [["version", "parent", "state", "since", "ratings", "gate", "reason"]]
    for row in rows:
        used = f"{row['num_ratings']}"
        used += f", {row['num_withdrawn_ratings']} withdrawn" if row["num_withdrawn_ratings"] else ""
        changes = row["metrics"].get("changes", {})
        gate = ", ".join(f"{name} {change['before']:.3f} -> {change['after']:.3f}" for name, change in changes.items())
        which = [str(row["number"]), str(row["parent"])]
        texts = [printable(text) or "-" for text in (gate, row["reason"])]  # a reason is what a client has sent
        shown.append([*which, row["state"], row["changed_at"], used, *texts])
    print(table(shown, indent=""))
    active = next((row["number"] for row in rows if row["state"] == "active"), 0)
    print(f"version {active} is active" + ("" if active else ": the model that was given"))


def roll_back(served: ServedDirectory, reason: str) -> dict[str, Any]:
    """Roll the active version back, through the server if one runs; return what `ServedStore.roll_back` does."""
    try:
        with served.locked(), ServedStore(served.path / FILE) as store:
            return store.roll_back(reason)
    except InUse:  # by a server
        return ask(served, "/rollback", TIMEOUT_S, {"reason": reason})


def in_words(done: Mapping[str, Any]) -> str:
    withdrawn = done["withdrawn_ratings"]
    text = "1 rating is withdrawn" if len(withdrawn) == 1 else f"{len(withdrawn)} ratings are withdrawn"
    if withdrawn:
        more = f" and {len(withdrawn) - MOST_NAMED} more" if len(withdrawn) > MOST_NAMED else ""
        text += f": {', '.join(withdrawn[:MOST_NAMED])}{more}"
    return f"version {done['rolled_back']} was rolled back; version {done['active']} is active; {text}"


main = Program(__doc__, add_flags, versions)
