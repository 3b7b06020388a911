"""The tabs of a run's page: its report, its memory, transcripts and ratings.

    metrics, settings    read again when their files have changed         Overview, as in `srl report`
    memory               a copy, made anew when the run has changed it    Memory, Rate
    transcripts          read for each search                             Episodes
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from rllib_srl.cli.dashboard.memory_view import SHARE, MemoryView
from rllib_srl.cli.dashboard.page_views import PageViews
from rllib_srl.cli.dashboard.rating_desk import RatingDesk
from rllib_srl.cli.episodes import is_wanted, printable
from rllib_srl.cli.memory import HEADING, ORDERS, row_of
from rllib_srl.cli.report.run_facts import RunFacts, episodes_in
from rllib_srl.cli.report.run_page import blocks_of, shortened
from rllib_srl.cli.shared.display import rounded
from rllib_srl.cli.shared.run_log import METRICS
from rllib_srl.cli.shared.runs import SETTINGS_FILE, RunError
from rllib_srl.replay.reading import PLACES, Reading
from rllib_srl.replay.tools.describe import Decode, Found, all_items, counted, described, turns
from rllib_srl.studies.report.blocks import Block, Cell, Details, Heading, Table, Text, Verbatim
from rllib_srl.studies.results import STUDY_FILE

TABS = {"": "Overview", "memory": "Memory", "episodes": "Episodes", "rate": "Rate"}
MOST_ITEMS = 20
RECALL_COLUMNS = ("recall", "pass rate", "lapses", "visits", "due")  # of `srl memory list`
WIDEST = 60  # characters of a prompt in a table
NO_ITERATION = "No iteration has finished yet; this page fills by itself."
NO_MEMORY = "This run has no memory (replay_capacity = 0, or both fractions 0)."


def check_is_run(directory: Path) -> None:
    """Check that a path is the directory of a run, which may not have finished an iteration yet.

    Raises:
        RunError: it is not.
    """
    if (directory / STUDY_FILE).is_file():
        raise RunError(f"{directory} is a study; expected the directory of a run (srl report shows studies)")
    has_files = any((directory / name).is_file() for name in (METRICS, SETTINGS_FILE))
    if not has_files and not any(directory.glob(PLACES[0])):
        there = "holds no run" if directory.is_dir() else "does not exist"
        raise RunError(f"{directory} {there}; expected the directory of a run ({METRICS})")


class Episodes(NamedTuple):
    """Transcripts that fit a search, the newest first. `num` fit; `stops` and `envs` are all that occur."""

    found: Sequence[Mapping[str, Any]]
    num: int
    stops: Sequence[str]
    envs: Sequence[str]
    num_damaged: int


class RunViews(PageViews):
    """The tabs of one run's page. Invariant: `_facts` are those of the files whose marks are `_marks`."""

    def __init__(
        self,
        directory: Path,
        decode: Callable[[], Decode],
        rater: str = "",
        may_rate: bool = False,
        trusts: bool = False,
    ) -> None:
        """Prepare the page of a run.

        Args:
            directory: of the run.
            decode: returns the function token ids -> text.
            rater: name of the person who rates.
            may_rate: whether ratings may be written.
            trusts: import and run rules that the memory's settings name as module:rule.
        """
        super().__init__(f"Run {directory.resolve().name}", TABS, may_rate)
        self.directory, self.memory = directory, MemoryView(directory, trusts)
        self._decode = cache(decode)
        self.desk = RatingDesk(directory, self.memory, self._decode, rater, may_rate)
        self._facts: RunFacts | None = None
        self._marks: list[tuple[int, int]] = []
        self.next_at = 0.0  # when the files of the metrics are looked at again

    def facts(self) -> RunFacts | None:
        """Return settings and metrics as of a moment ago; None before the first finished iteration."""
        if time.monotonic() >= self.next_at:
            paths = [self.directory / name for name in (METRICS, SETTINGS_FILE)]
            marks = [(one.st_size, one.st_mtime_ns) for one in (path.stat() for path in paths if path.is_file())]
            if marks != self._marks:
                has_rows = paths[0].is_file() and paths[0].stat().st_size > 0
                self._facts, self._marks = RunFacts.read(self.directory) if has_rows else None, marks
        return self._facts

    def html_of(self, tab: str) -> str:
        """Return the HTML of a tab; drawing an overview takes at most a tenth of the time."""
        begun = time.monotonic()
        html = super().html_of(tab)
        if tab == "" and self._facts:
            ended = time.monotonic()
            self.next_at = max(self.next_at, ended + (ended - begun) / SHARE)
        return html

    def version_of(self, tab: str) -> str:
        """Return a text that changes whenever the metrics or the memory do."""
        if tab == "":
            self.facts()
            return str(self._marks)
        if self.memory.exists:
            self.memory.reading()
        return str(self.memory.version)

    def blocks_of(self, tab: str) -> Iterator[Block]:
        """Yield the report of the run, or what its memory holds."""
        if tab == "":
            yield from blocks_of(self._facts) if self._facts else [Text(NO_ITERATION)]
        elif not self.memory.exists:
            yield Text(NO_MEMORY)
        else:
            yield from _memory_blocks(self.memory.reading())

    def state(self) -> str:
        """Return how far the run is, in words."""
        facts = self.facts()
        if facts is None:
            return "no finished iteration yet"
        done, planned = int(facts.iterations[-1]), facts.settings.get("iterations")
        of = f" of {planned:,}" if isinstance(planned, int) else ""
        end = "finished" if isinstance(planned, int) and done >= planned else "the last one"
        return f"{done:,}{of} iterations, {end} {_ago(time.time() - (self.directory / METRICS).stat().st_mtime)}"

    def episodes(self, filters: Namespace, text: str, env_id: str, skip: int, most: int) -> Episodes:
        """Search the transcripts.

        Args:
            filters: those of `srl episodes`.
            text: in a prompt id or a turn, whatever the case.
            env_id: "" for any.
            skip: number of the newest that are left out.
            most: number returned.
        """
        stops, envs = set(), set()

        def fits(one: Mapping[str, Any]) -> bool:
            stops.add(str(one["stop_reason"]))
            envs.add(str(one["env_id"]))
            texts = (str(one.get("prompt_id", "")), *(turn["text"] for turn in one["turns"]))
            has_text = any(text.lower() in part.lower() for part in texts)
            return has_text and env_id in ("", one["env_id"]) and is_wanted(one, filters)

        found, num_damaged = episodes_in(self.directory, fits)
        return Episodes(found[::-1][skip : skip + most], len(found), sorted(stops), sorted(envs), num_damaged)

    def item(self, key: str) -> str | None:
        """Return the HTML of an item of the memory; None without such an item."""
        if not self.memory.exists:
            return None
        found = next((item for item in all_items(self.memory.reading()) if item.key == key), None)
        return None if found is None else self.rendered(self._item_blocks(found))

    def _item_blocks(self, item: Found) -> Iterator[Block]:
        """Yield the state and the stored episodes of an item."""
        yield Heading(printable(f"{item.prompt.env_id} [{item.prompt.prompt_id}]"))
        about = [(Cell(name), Cell(printable(value))) for name, value in described(item)]
        yield Table("", ("", ""), tuple(about), is_text=True)
        try:
            decode = self._decode()
        except ValueError as error:  # no tokenizer
            yield Text(f"Stored episodes are not shown: {error}.")
            return
        groups = [item.reading.group(int(item.reading.stored.seqs[at])) for at in item.groups]
        for group in groups:
            for g in range(group.size):
                title = f"Reward {group.rewards_G[g]:g}, group {group.group_id}, ended as {group.stop_reasons[g].value}"
                said = (Verbatim(shortened(text), role) for role, text in turns(group, g, decode))
                yield Details(title, tuple(said))

    def close(self) -> None:
        """Close what is open."""
        self.desk.close()
        self.memory.close()


def _ago(seconds: float) -> str:
    """Return a time that has passed in its largest unit."""
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            return f"{counted(int(seconds // size), unit)} ago"
    return "less than a minute ago"


# --- the memory -----------------------------------------------------------------------------------


def _memory_blocks(reading: Reading) -> Iterator[Block]:
    """Yield the items played last, those most forgotten, and counts by domain."""
    items = all_items(reading)
    newest = sorted(items, key=lambda item: -int(item.row["last_review"]))[:MOST_ITEMS]
    rule = f"Drawn by rule {reading.settings.selection}, stored groups by {reading.settings.reuse_selection}."
    yield Heading("Prompts in the memory")
    yield _item_table(f"The {len(newest)} items that were played last. {rule}", newest)
    predicts = reading.settings.has_due_dates
    known = [item for item in items if item.row["visits"] and item.row["is_solved"]]
    yield Heading("Most forgotten")
    if known:
        first = "predicted recall" if predicts else "pass rate of the last visit"
        worst = sorted(known, key=ORDERS["recall" if predicts else "pass_rate"])[:MOST_ITEMS]
        yield _item_table(f"Of the items that were solved once: the lowest {first} first.", worst)
    else:
        yield Text("No item has been solved yet.")
    by_domain: dict[str, list[Found]] = defaultdict(list)
    for item in items:
        by_domain[item.prompt.domain].append(item)
    how = "the mean of what the spacing rule predicts for reviewed items" if predicts else "none without a spacing rule"
    rows = tuple(_domain_row(name, by_domain[name]) for name in sorted(by_domain))
    yield Heading("By domain")
    yield Table(f"Recall now: {how}.", ("domain", "items", "reviewed", "recall now", "lapses"), rows)


def _item_table(caption: str, items: Sequence[Found]) -> Table:
    rows = []
    for item in items:
        cells = dict(zip(HEADING, row_of(item), strict=True))
        name, domain = shown_id(item.prompt.prompt_id) or item.key, printable(item.prompt.domain or item.prompt.env_id)
        first = Cell(name, domain, link=f"/memory/{item.key}")
        rows.append((first, *(Cell(cells[column]) for column in RECALL_COLUMNS)))
    return Table(caption, ("prompt", *RECALL_COLUMNS), tuple(rows))


def _domain_row(name: str, items: Sequence[Found]) -> tuple[Cell, ...]:
    recall = [item.recall for item in items if item.row["reps"]]
    lapses = sum(int(item.row["lapses"]) for item in items)
    mean = rounded(sum(recall) / len(recall)) if recall else "-"
    counts = (f"{len(items):,}", f"{len(recall):,}", mean, f"{lapses:,}")
    return (Cell(printable(name) or "-"), *map(Cell, counts))


def shown_id(prompt_id: str) -> str:
    """Return the id of a prompt for a table; of a long one, the beginning and the end, where ids often differ."""
    name = printable(prompt_id)
    half = WIDEST // 2
    return name if len(name) <= WIDEST else f"{name[:half]}…{name[-half:]}"
