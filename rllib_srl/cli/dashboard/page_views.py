"""The parts of a live page: tabs, sections, and how they become HTML."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from rllib_srl.cli.dashboard.drawing import drawing_of
from rllib_srl.cli.report.run_plots import PlotRow
from rllib_srl.people.lineage.conversations import ConversationsError
from rllib_srl.people.lineage.versions import LineageError
from rllib_srl.people.rating_store import RatingsError
from rllib_srl.replay.store import StoreError
from rllib_srl.studies.report.blocks import HERE as REPORT
from rllib_srl.studies.report.blocks import Block, Notice, templates_in

PAGE = Path(__file__).with_name("page")
Blocks = Iterator[Block | PlotRow]
S = TypeVar("S")
T = TypeVar("T")
# Files that cannot be read now; the message says why.
TROUBLES = (StoreError, RatingsError, LineageError, ConversationsError, ValueError, OSError)


@dataclass(frozen=True)
class Section(Generic[S]):
    """A part of a tab, made from sources S. `of_memory`: made from the memory of a run instead of the metrics."""

    name: str  # in addresses
    title: str
    tab: str
    blocks: Callable[[S], Blocks]
    of_memory: bool = False


class PageViews(ABC):
    """The parts of one page. Invariant: the thread of the files runs one function at a time."""

    def __init__(
        self, title: str, tabs: Mapping[str, str], sections: tuple[Section[Any], ...], may_rate: bool
    ) -> None:
        """Prepare the templates.

        Args:
            title: of the page.
            tabs: name in the address -> name shown.
            sections: of all tabs.
            may_rate: whether the page may write.
        """
        self.title, self.tabs, self.sections, self.may_rate = title, tabs, sections, may_rate
        self._files = ThreadPoolExecutor(1, "files")
        self._made: dict[str, tuple[str, str]] = {}  # section -> version and HTML
        self._templates = templates_in(PAGE, REPORT)
        self._templates.globals["drawing_of"] = drawing_of

    async def in_files(self, work: Callable[[], T]) -> T:
        """Run a function in the thread of the files."""
        return await asyncio.get_running_loop().run_in_executor(self._files, work)

    def made(self, section: Section[S], sources: S, version_of: Callable[[], str]) -> tuple[str, str]:
        """Return the version and the HTML of a section, rendered again if its version is another one."""
        try:
            version = version_of()
            if (made := self._made.get(section.name)) and made[0] == version:
                return made
            html = self.blocks(section.blocks(sources))
        except TROUBLES as error:  # the other parts of the page stay readable
            version = f"e{hash(str(error))}"
            html = self.blocks([Notice("This part cannot be read", (" ".join(str(error).split()),), "warn")])
        self._made[section.name] = version, html
        return version, html

    @abstractmethod
    async def part(self, section: Section[Any]) -> tuple[str, str]:
        """Return the version and the HTML of a section."""

    @abstractmethod
    async def state(self) -> str:
        """Return how far what is shown is, in words."""

    @abstractmethod
    async def close(self) -> None:
        """Close what is open."""

    async def versions(self, tab: str) -> dict[str, str]:
        """Return the version of each section of a tab, after a look at the files."""
        chosen = [one for one in self.sections if one.tab == tab]
        found = [await self.part(one) for one in chosen]
        return {one.name: version for one, (version, _) in zip(chosen, found, strict=True)}

    def blocks(self, blocks: Iterable[Any]) -> str:
        """Return blocks as HTML."""
        return self._templates.get_template("parts.html.j2").render(blocks=list(blocks))

    def render(self, template: str, tab: str, state: str, **values: Any) -> str:
        """Return a whole page."""
        about = {"title": self.title, "tabs": self.tabs, "tab": tab, "state": state, "may_rate": self.may_rate}
        return self._templates.get_template(template).render(**about, **values)
