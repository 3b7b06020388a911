"""Make the parts of the live page: each in the thread that owns the files it reads, rendered again when these changed.

    files thread     metrics, settings, transcripts       LiveRun
    memory thread    copies of the memory, ratings        MemoryView, RatingDesk
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TypeVar

from rllib_srl.cli.dashboard.live_run import LiveRun
from rllib_srl.cli.dashboard.memory_view import MemoryView
from rllib_srl.cli.dashboard.page_views import TROUBLES, PageViews, Section
from rllib_srl.cli.dashboard.rating_desk import RatingDesk
from rllib_srl.cli.dashboard.sections import SECTIONS, TABS, Sources, item_blocks
from rllib_srl.replay.tools.describe import Decode, Found, all_items, turns
from rllib_srl.studies.report.blocks import Text

T = TypeVar("T")


class Views(PageViews):
    """The parts of one run's page. Invariant: each of the two threads runs one function at a time."""

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
        memory = MemoryView(directory, trusts)
        super().__init__(f"Run {directory.resolve().name}", TABS, SECTIONS, may_rate)
        self.sources = Sources(LiveRun(directory), memory)
        self._decode = cache(decode)
        self.desk = RatingDesk(directory, memory, self._decode, rater, may_rate)
        self._memory = ThreadPoolExecutor(1, "memory")

    async def in_memory(self, work: Callable[[], T]) -> T:
        """Run a function in the thread of the memory."""
        return await asyncio.get_running_loop().run_in_executor(self._memory, work)

    async def part(self, section: Section[Sources]) -> tuple[str, str]:
        """Return the version and the HTML of a section."""
        run_in = self.in_memory if section.of_memory else self.in_files
        return await run_in(lambda: self._part(section))

    async def versions(self, tab: str) -> dict[str, str]:
        """Return the version of each section of a tab, and the number of transcripts, after a look at the files."""
        if tab == "episodes":
            return {tab: str(len(self.sources.run.transcripts))}
        return await super().versions(tab)

    async def state(self) -> str:
        """Return how far the run is, in words."""

        def look() -> str:
            try:
                self.sources.run.refresh()
                return self.sources.run.state()
            except TROUBLES as error:
                return f"the files of the run cannot be read: {' '.join(str(error).split())}"

        return await self.in_files(look)

    def _part(self, section: Section[Sources]) -> tuple[str, str]:
        run, memory = self.sources.run, self.sources.memory

        def version() -> str:
            if not section.of_memory:
                run.refresh()
                return f"f{run.version}"
            if memory.exists:
                memory.reading()
            return f"m{memory.version}"

        return self.made(section, self.sources, version)

    def item(self, key: str) -> tuple[str, str] | None:
        """Return the name and the HTML of an item of the memory, in the memory's thread; None without such an item."""
        if not self.sources.memory.exists:
            return None
        found = [item for item in all_items(self.sources.memory.reading()) if item.key == key]
        if not found:
            return None
        prompt = found[0].prompt
        name = f"{prompt.env_id} [{prompt.prompt_id}]"
        try:
            decode = self._decode()
        except ValueError as error:  # no tokenizer
            return name, self.blocks([*item_blocks(found[0], ()), Text(f"Stored episodes are not shown: {error}.")])
        return name, self.blocks(item_blocks(found[0], self._episodes_of(found[0], decode)))

    @staticmethod
    def _episodes_of(item: Found, decode: Decode) -> list[tuple[str, Sequence[tuple[str, str]]]]:
        """Return title and turns of each stored episode of an item."""
        reading = item.reading
        episodes: list[tuple[str, Sequence[tuple[str, str]]]] = []
        for at in item.groups:
            group = reading.group(int(reading.stored.seqs[at]))
            for g in range(group.size):
                told = f"Reward {group.rewards_G[g]:g}, group {group.group_id}, ended as {group.stop_reasons[g].value}"
                episodes.append((told, turns(group, g, decode)))
        return episodes

    async def close(self) -> None:
        """Close what is open, and end the threads."""
        await self.in_memory(self.desk.close)
        await self.in_memory(self.sources.memory.close)
        self._files.shutdown()
        self._memory.shutdown()
