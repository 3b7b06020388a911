"""What a live page shows: its tabs, made from files in one thread, and rendered again when these have changed."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from rllib_srl.people.lineage.conversations import ConversationsError
from rllib_srl.people.lineage.versions import LineageError
from rllib_srl.people.rating_store import RatingsError
from rllib_srl.replay.database import StoreError
from rllib_srl.studies.report.blocks import HERE as REPORT
from rllib_srl.studies.report.blocks import Block, Notice, templates_in

PAGE = Path(__file__).with_name("page")
BLOCKS = '{% from "blocks.html.j2" import show %}{% for block in blocks %}{{ show(block) }}{% endfor %}'
T = TypeVar("T")
# Files that cannot be read now; the message says why.
TROUBLES = (StoreError, RatingsError, LineageError, ConversationsError, ValueError, OSError)


def one_line(error: BaseException) -> str:
    """Return the message of an error in one line."""
    return " ".join(str(error).split())


class PageViews(ABC):
    """The tabs of one page. Invariant: the thread of the files runs one function at a time."""

    def __init__(self, title: str, tabs: Mapping[str, str], may_rate: bool) -> None:
        """Prepare the templates.

        Args:
            title: of the page.
            tabs: name in the address -> name shown.
            may_rate: whether the page may write.
        """
        self.title, self.tabs, self.may_rate = title, tabs, may_rate
        self._files = ThreadPoolExecutor(1, "files")
        self._kept: dict[str, tuple[str, str]] = {}  # tab -> version and HTML
        self._templates = templates_in(PAGE, REPORT)

    async def in_files(self, work: Callable[[], T]) -> T:
        """Run a function in the thread of the files."""
        return await asyncio.get_running_loop().run_in_executor(self._files, work)

    @abstractmethod
    def version_of(self, tab: str) -> str:
        """Return a text that changes whenever the blocks of a tab do."""

    @abstractmethod
    def blocks_of(self, tab: str) -> Iterator[Block]:
        """Yield the blocks of a tab."""

    @abstractmethod
    def state(self) -> str:
        """Return how far what is shown is, in words."""

    @abstractmethod
    def close(self) -> None:
        """Close what is open."""

    def html_of(self, tab: str) -> str:
        """Return the HTML of a tab of blocks."""
        try:
            version = self.version_of(tab)
            if (kept := self._kept.get(tab)) is None or kept[0] != version:
                self._kept[tab] = kept = version, self.rendered(self.blocks_of(tab))
            return kept[1]
        except TROUBLES as error:  # the other tabs stay readable
            return self.rendered([Notice("This cannot be read", (one_line(error),), "warn")])

    def rendered(self, blocks: Iterable[Block]) -> str:
        """Return blocks as HTML."""
        return self._templates.from_string(BLOCKS).render(blocks=list(blocks))

    async def page(self, template: str, tab: str, **values: Any) -> str:
        """Return a whole page."""

        def state() -> str:
            try:
                return self.state()
            except TROUBLES as error:
                return f"the files cannot be read: {one_line(error)}"

        about = {"title": self.title, "tabs": self.tabs, "tab": tab, "may_rate": self.may_rate}
        return self._templates.get_template(template).render(state=await self.in_files(state), **about, **values)

    async def end(self) -> None:
        """Close what is open, and end the thread."""
        await self.in_files(self.close)
        self._files.shutdown()
