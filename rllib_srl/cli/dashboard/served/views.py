"""Make the parts of the page of a served model, in the one thread that reads its files."""

from __future__ import annotations

import hashlib
from pathlib import Path

from rllib_srl.cli.dashboard.page_views import TROUBLES, PageViews, Section
from rllib_srl.cli.dashboard.served.model import ServedModel
from rllib_srl.cli.dashboard.served.sections import SECTIONS, TABS


class ServedViews(PageViews):
    """The parts of the page of one served model. Invariant: its thread runs one function at a time."""

    def __init__(self, directory: Path, rater: str = "", may_rate: bool = False) -> None:
        """Prepare the page.

        Args:
            directory: of the served model.
            rater: name of the person who rates.
            may_rate: whether the page may rate, roll back and pause.

        Raises:
            ValueError: the name of the rater is too long.
        """
        super().__init__(f"Served model {directory.resolve().name}", TABS, SECTIONS, may_rate)
        self.model = ServedModel(directory, rater)

    async def part(self, section: Section[ServedModel]) -> tuple[str, str]:
        """Return the version and the HTML of a section."""
        return await self.in_files(lambda: self._part(section))

    async def versions(self, tab: str) -> dict[str, str]:
        """Return the version of each section of a tab, or the number of conversations."""
        if tab != "conversations":
            return await super().versions(tab)

        def look() -> str:
            try:
                return str(self.model.num_conversations())
            except TROUBLES:  # the page itself says so when it is loaded
                return "0"

        return {tab: await self.in_files(look)}

    async def state(self) -> str:
        """Return which version is active, and whether the server runs."""

        def look() -> str:
            try:
                self.model.refresh()
                active = self.model.active()
            except TROUBLES as error:
                return f"the files cannot be read: {' '.join(str(error).split())}"
            status = self.model.status
            runs = "the server runs" if status.get("is_ready") else "the server is starting its engine"
            return f"version {active.number if active else 0} is active, {runs if status else self.model.why_no_status}"

        return await self.in_files(look)

    def _part(self, section: Section[ServedModel]) -> tuple[str, str]:
        def version() -> str:
            self.model.refresh()
            change = self.model.change()
            seen = change + self.model.said() if section.tab == "training" else change
            return hashlib.sha256(seen.encode()).hexdigest()[:16]

        return self.made(section, self.model, version)

    async def close(self) -> None:
        """Close what is open, and end the thread."""
        await self.in_files(self.model.close)
        self._files.shutdown()
