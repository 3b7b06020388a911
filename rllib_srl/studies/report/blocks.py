"""The blocks of a report, and the HTML page that shows them.

All text is plain text; the template of the page escapes it (Jinja's autoescape).
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Heading:
    """A heading; level 2 starts a section."""

    text: str
    level: int = 2
    kind: str = "heading"


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str
    kind: str = "text"


@dataclass(frozen=True)
class Notice:
    """A box; `tone` is "good", "bad", "open" or "warn" and sets its colour; the title repeats it in words."""

    title: str
    lines: tuple[str, ...]
    tone: str
    kind: str = "notice"


@dataclass(frozen=True)
class Cell:
    """A table's cell: a text, a smaller text below it, and the strength of its shading in [0, 1]."""

    text: str
    small: str = ""
    shade: float = 0.0
    style: str = ""  # colour of the marker in front of an arm's name


@dataclass(frozen=True)
class Table:
    """A table; the first column names the row."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    is_text: bool = False  # all columns hold words, not numbers
    kind: str = "table"


@dataclass(frozen=True)
class Chart:
    """A chart as SVG, with `alt` as its text alternative."""

    svg: bytes
    title: str
    alt: str
    kind: str = "chart"

    @property
    def source(self) -> str:
        """Return the chart as a data URI."""
        return "data:image/svg+xml;base64," + base64.b64encode(self.svg).decode()


@dataclass(frozen=True)
class Charts:
    """Charts side by side if the page is wide enough, with one caption and one legend: (title, chart of the line)."""

    charts: tuple[Chart, ...]
    caption: str
    legend: tuple[tuple[str, Chart], ...] = ()
    kind: str = "charts"


@dataclass(frozen=True)
class Verbatim:
    """A text whose line breaks are kept, with a word about it in front, such as who said it."""

    text: str
    label: str = ""
    kind: str = "verbatim"


@dataclass(frozen=True)
class Details:
    """Blocks that are collapsed at first."""

    summary: str
    blocks: tuple[Heading | Text | Table | Verbatim, ...]
    kind: str = "details"


Block = Heading | Text | Notice | Table | Charts | Verbatim | Details


@dataclass(frozen=True)
class Page:
    """A report."""

    title: str
    blocks: tuple[Block, ...] = field(default=())


def to_html(page: Page, is_live: bool = False) -> str:
    """Return a page as HTML with embedded charts; a live one takes styles and script from its server."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    how: Any = {"autoescape": True, "undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    template = Environment(loader=FileSystemLoader(HERE), **how).get_template("page.html.j2")
    return template.render(page=page, styles=(HERE / "page.css").read_text(encoding="utf-8"), is_live=is_live)
