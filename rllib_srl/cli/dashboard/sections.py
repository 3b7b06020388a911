"""The sections of the live page: which tab each is on, what it is made from, and its blocks.

A new section is one more entry of `SECTIONS` and a function that yields blocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rllib_srl.cli.dashboard.live_run import LiveRun
from rllib_srl.cli.dashboard.memory_view import MemoryView
from rllib_srl.cli.dashboard.page_views import Blocks, Section
from rllib_srl.cli.episodes import printable
from rllib_srl.cli.memory import HEADING, ORDERS, row_of
from rllib_srl.cli.report.run_facts import RunFacts
from rllib_srl.cli.report.run_page import domain_table, memory_table, opening, shortened
from rllib_srl.cli.report.run_plots import PlotRow, cost_plots, domain_row, learner_plots, learning_plots, live_plot
from rllib_srl.cli.report.run_plots import memory_rows as memory_plots
from rllib_srl.cli.shared.display import rounded
from rllib_srl.replay.reading import Reading
from rllib_srl.replay.tools.describe import Found, all_items, described
from rllib_srl.studies.report.blocks import Cell, Details, Heading, Notice, Table, Text, Verbatim

MOST_ITEMS = 20
RECALL_COLUMNS = ("recall", "pass rate", "lapses", "visits", "due")  # of `srl memory list`
WIDEST = 60  # characters of a prompt in a table
NO_ITERATION = "No iteration has finished yet; this page fills by itself."
NO_MEMORY = "This run has no memory (replay_capacity = 0, or both fractions 0)."


@dataclass(frozen=True)
class Sources:
    """What sections are made from. Invariant: a section uses only what its `of_memory` names, in that one's thread."""

    run: LiveRun
    memory: MemoryView


# --- metrics --------------------------------------------------------------------------------------


def _of_facts(blocks: Callable[[RunFacts], Blocks]) -> Callable[[Sources], Blocks]:
    """Return a section's function of a run with at least one finished iteration."""

    def found(sources: Sources) -> Blocks:
        if sources.run.facts is None:
            yield Text(NO_ITERATION)
        else:
            yield from blocks(sources.run.facts)

    return found


def _summary(sources: Sources) -> Blocks:
    if faults := sources.run.faults:
        yield Notice("Damaged files", tuple(line + "." for line in faults), "warn")
    yield from _of_facts(opening)(sources)


def _learning(facts: RunFacts) -> Blocks:
    live, caption = live_plot(facts)
    yield PlotRow((*learning_plots(facts), live), f"Shaded: 95% interval. {caption}")


def _domains(facts: RunFacts) -> Blocks:
    if row := domain_row(facts):
        yield row
        yield domain_table(facts)
    else:
        yield Text("Held-out accuracy was not measured in two domains or more (evaluation_interval).")


def _forgotten(facts: RunFacts) -> Blocks:
    lost = {name: change for name, change in facts.domain_changes.items() if change.lost > 0}
    if not facts.domain_changes:
        yield Text("Held-out accuracy by domain was not measured (evaluation_interval).")
    elif not lost:
        yield Text("No domain is below its best held-out accuracy.")
    else:
        order = sorted(lost, key=lambda name: -lost[name].lost)
        of = f"{len(lost)} of {len(facts.domain_changes)} domains"
        caption = f"{of} are below their best evaluation: by forgetting, or by chance."
        rows = [(name, lost[name].best, lost[name].last, lost[name].lost) for name in order]
        cells = tuple((Cell(name), *(Cell(f"{value:.3f}") for value in values)) for name, *values in rows)
        yield Table(caption, ("domain", "best", "last", "lost"), cells)


def _learner(facts: RunFacts) -> Blocks:
    plots = (*learner_plots(facts), *cost_plots(facts))
    yield PlotRow(plots, "Metrics that are always 0 are left out.")


def _memory_curves(facts: RunFacts) -> Blocks:
    if rows := list(memory_plots(facts)):
        meanings = " ".join(f"{row.plots[0].title}: {row.caption[:1].lower()}{row.caption[1:]}" for row in rows)
        yield PlotRow(tuple(plot for row in rows for plot in row.plots), meanings)
    yield memory_table(facts) if facts.has("replay/num_items") else Text(NO_MEMORY)


# --- memory ---------------------------------------------------------------------------------------


def _of_memory(blocks: Callable[[Reading], Blocks]) -> Callable[[Sources], Blocks]:
    """Return a section's function of a run with a memory."""

    def found(sources: Sources) -> Blocks:
        if not sources.memory.exists:
            yield Text(NO_MEMORY)
        else:
            yield from blocks(sources.memory.reading())

    return found


def _items(reading: Reading) -> Blocks:
    newest = sorted(all_items(reading), key=lambda item: -int(item.row["last_review"]))[:MOST_ITEMS]
    rule = f"Drawn by rule {reading.settings.selection}, stored groups by {reading.settings.reuse_selection}."
    rows = tuple(map(_recall_row, newest))
    yield Table(f"The {len(rows)} items that were played last. {rule}", ("prompt", *RECALL_COLUMNS), rows)


def _item_cell(item: Found) -> Cell:
    prompt = item.prompt
    name = shown_id(prompt.prompt_id) or item.key
    return Cell(name, printable(prompt.domain or prompt.env_id), link=f"/memory/{item.key}")


def shown_id(prompt_id: str) -> str:
    """Return the id of a prompt for a table; of a long one, the beginning and the end, where ids often differ."""
    name = printable(prompt_id)
    half = WIDEST // 2
    return name if len(name) <= WIDEST else f"{name[:half]}…{name[-half:]}"


def _lapses(reading: Reading) -> Blocks:
    yield Heading("By domain", 3)
    by_domain: dict[str, list[Found]] = defaultdict(list)
    items = all_items(reading)
    for item in items:
        by_domain[item.prompt.domain].append(item)
    header = ("domain", "items", "reviewed", "recall now", "lapses")
    domains = tuple(_domain_row(name, by_domain[name]) for name in sorted(by_domain))
    predicts = reading.settings.has_due_dates
    how = "the mean of what the spacing rule predicts for reviewed items" if predicts else "none without a spacing rule"
    yield Table(f"Recall now: {how}.", header, domains)
    yield Heading("Most forgotten items", 3)
    known = [item for item in items if item.row["visits"] and item.row["is_solved"]]
    if known:
        order = "recall" if predicts else "pass_rate"
        rows = tuple(map(_recall_row, sorted(known, key=ORDERS[order])[:MOST_ITEMS]))
        first = "predicted recall" if predicts else "pass rate of the last visit"
        yield Table(f"Of those that were solved once: the lowest {first} first.", ("prompt", *RECALL_COLUMNS), rows)
    else:
        yield Text("No item has been solved yet.")


def _recall_row(item: Found) -> tuple[Cell, ...]:
    cells = dict(zip(HEADING, row_of(item), strict=True))
    return (_item_cell(item), *(Cell(cells[name]) for name in RECALL_COLUMNS))


def _domain_row(name: str, items: Sequence[Found]) -> tuple[Cell, ...]:
    recall = [item.recall for item in items if item.row["reps"]]
    lapses = sum(int(item.row["lapses"]) for item in items)
    mean = rounded(sum(recall) / len(recall)) if recall else "-"
    counts = (f"{len(items):,}", f"{len(recall):,}", mean, f"{lapses:,}")
    return (Cell(printable(name) or "-"), *map(Cell, counts))


def item_blocks(item: Found, groups: Sequence[tuple[str, Sequence[tuple[str, str]]]]) -> Blocks:
    """Yield what is known of one item.

    Args:
        item: in the memory.
        groups: title, and the role and text of each turn, of each stored episode.
    """
    yield Heading("Schedule")
    about = [(Cell(name), Cell(printable(value))) for name, value in described(item)]
    yield Table("", ("", ""), tuple(about), is_text=True)
    if groups:
        yield Heading("Stored episodes")
    for title, turns in groups:
        yield Details(title, tuple(Verbatim(shortened(text), role) for role, text in turns))


TABS = {"": "Overview", "forgetting": "Forgetting", "memory": "Memory", "episodes": "Episodes", "rate": "Rate"}
SECTIONS = (
    Section("summary", "", "", _summary),
    Section("learning", "Reward, accuracy and live tokens", "", _of_facts(_learning)),
    Section("domains", "Held-out accuracy by domain", "", _of_facts(_domains)),
    Section("learner", "Learner, tokens and time", "", _of_facts(_learner)),
    Section("forgotten", "Held-out accuracy that was lost", "forgetting", _of_facts(_forgotten)),
    Section("lapses", "What the memory saw forgotten", "forgetting", _of_memory(_lapses), True),
    Section("items", "Prompts in the memory", "memory", _of_memory(_items), True),
    Section("memory", "The memory over time", "memory", _of_facts(_memory_curves)),
)
