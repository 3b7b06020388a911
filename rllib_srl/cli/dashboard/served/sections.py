"""What the page of a served model shows: versions with their gates, and training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rllib_srl.cli.dashboard.served.model import ServedModel
from rllib_srl.cli.episodes import printable
from rllib_srl.studies.report.blocks import Block, Cell, Details, Notice, Table, Text

MOST_VERSIONS = 50  # on the page, the newest
GIVEN = "Version 0 is active: the model that was given."
Row = Mapping[str, Any]


def versions(model: ServedModel) -> Iterator[Block]:
    """Yield the versions, the newest first, each with its gates and its history."""
    rows = model.versions()
    active = next((row for row in rows if row["state"] == "active"), None)
    if active is None:
        yield Text(GIVEN)
    else:
        num = active["num_ratings"]
        of = f"trained from version {active['parent']} on {num:,} rating{'' if num == 1 else 's'}"
        yield Text(f"Version {active['number']} is active: {of}.")
    if not rows:
        yield Text("No version has been trained yet.")
        return
    newest = rows[: -MOST_VERSIONS - 1 : -1]
    left = f" of {len(rows)}; srl versions lists all" if len(rows) > len(newest) else ""
    header = ("version", "state", "reason", "ratings", "kept domains")
    caption = f"The newest {len(newest)} versions{left}." if left else "All versions, the newest first."
    yield Table(caption, header, tuple(map(_version_row, newest)), is_text=True)
    for row in newest:
        yield Details(f"Version {row['number']}: gates, canary and history", tuple(_about(row)))


def _version_row(row: Row) -> tuple[Cell, ...]:
    stale, withdrawn = row["num_stale_ratings"], row["num_withdrawn_ratings"]
    notes = [f"{stale} changed since"] * bool(stale) + [f"{withdrawn} withdrawn"] * bool(withdrawn)
    state = row["state"].replace("_", " ")
    changes = row["metrics"].get("changes", {}).items()
    kept = ", ".join(f"{name} {one['before']:.3f} → {one['after']:.3f}" for name, one in changes)
    return (
        Cell(str(row["number"]), f"parent {row['parent']}"),
        Cell(f"{state}, stale" if stale else state, shown_time(row["changed_at"])),
        Cell(printable(row["reason"]) or "-"),
        Cell(f"{row['num_ratings']:,}", ", ".join(notes)),
        Cell(printable(kept) or "-"),
    )


def shown_time(at: str) -> str:
    """Return a time of the stores to the minute."""
    return f"{at[:16].replace('T', ' ')} UTC"


def _about(row: Row) -> list[Text | Table]:
    """Return gates, metrics and history of a version."""
    metrics, found = row["metrics"], []
    blocks: list[Text | Table] = []
    for one in metrics.get("verdicts", ()):
        name = printable(f"{one['gate']} {one['domain']}".strip())
        found.append((Cell(name), Cell(printable(one["outcome"])), Cell(printable(one["reason"]) or "-")))
    if found:
        blocks.append(Table("Gates.", ("gate", "outcome", "figures and reason"), tuple(found), is_text=True))
    else:
        blocks.append(Text("It has not come to its gates."))
    if changes := metrics.get("changes"):
        header = ("domain", "before", "after", "points", "interval", "prompts")
        caption = "Held-out share of right answers, before: of the model that was given."
        blocks.append(Table(caption, header, tuple(_change_row(*pair) for pair in changes.items())))
    figures = [f"{name} {value:.3g}" for name, value in metrics.get("metrics", {}).items()]
    if figures:
        blocks.append(Text(printable(f"Training: {', '.join(figures)}.")))
    history = [(state.replace("_", " "), shown_time(at), printable(why) or "-") for state, at, why in row["history"]]
    caption = "History; the figures of the canary are those of the activation."
    blocks.append(Table(caption, ("state", "at", "reason"), tuple(tuple(map(Cell, one)) for one in history), True))
    return blocks


def _change_row(name: str, one: Row) -> tuple[Cell, ...]:
    shares = (f"{one['before']:.3f}", f"{one['after']:.3f}")
    points = (f"{100 * one['change']:+.1f}", f"[{100 * one['low']:+.1f}, {100 * one['high']:+.1f}]")
    return (Cell(printable(name)), *map(Cell, (*shares, *points, str(one["num"]))))


def training(model: ServedModel) -> Iterator[Block]:
    """Yield whether training goes on, and what waits for it."""
    state = model.status.get("training")
    if state is None:
        why = model.why_no_status
        yield Notice("No training at present", (f"{why[:1].upper()}{why[1:]}.",), "open")
        rows = [("ratings waiting", f"{model.num_waiting():,}")]
        if left := model.in_training():
            begun = shown_time(left.begun_at)
            rows += [("interrupted", f"version {left.number}, begun {begun}; the next start goes on")]
    else:
        if error := state.get("error"):
            yield Notice("Training has failed and is paused", (printable(error),), "warn")
        after = state["starts_after"]
        needed = f"; a version is trained from {after:,} on" if after else "; srl serve was started without training"
        rows = [("training", "paused" if state["is_paused"] else "on")]
        rows += [("ratings waiting", f"{state['num_new_ratings']:,}{needed}")]
        if "version" in state:
            slices = state["slices"]
            of = "?" if slices["of"] is None else slices["of"]
            rows += [("in training", f"version {state['version']}, slice {slices['done']} of {of}")]
        else:
            rows += [("in training", "no version")]
    cells = tuple((Cell(name), Cell(value)) for name, value in rows)
    yield Table("Waiting ratings can be trained on, and no version has used them.", ("", ""), cells, is_text=True)
