"""The blocks of a report, and the HTML page that shows them.

All text is plain text; the template escapes it (Jinja's autoescape). A page stands alone: charts and styles are in it.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STYLES = HERE / "page.css"


@dataclass(frozen=True)
class Heading:
    """A heading of a section."""

    text: str
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
    lines: Sequence[str]
    tone: str
    kind: str = "notice"


@dataclass(frozen=True)
class Table:
    """A table; the first column names the row."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    is_text: bool = False  # all columns hold words, not numbers
    kind: str = "table"


@dataclass(frozen=True)
class Chart:
    """A chart as SVG, with `alt` as its text alternative."""

    svg: bytes
    alt: str

    @property
    def source(self) -> str:
        """Return the chart as a data URI."""
        return "data:image/svg+xml;base64," + base64.b64encode(self.svg).decode()


@dataclass(frozen=True)
class Charts:
    """Charts side by side if the page is wide enough, with one caption."""

    charts: Sequence[Chart]
    caption: str
    kind: str = "charts"


@dataclass(frozen=True)
class Verbatim:
    """A text whose line breaks are kept, and who said it."""

    text: str
    label: str
    kind: str = "verbatim"


@dataclass(frozen=True)
class Details:
    """Blocks that are collapsed at first."""

    summary: str
    blocks: Sequence[Table | Verbatim]
    kind: str = "details"


Block = Heading | Text | Notice | Table | Charts | Details


@dataclass(frozen=True)
class Page:
    """A report."""

    title: str
    blocks: Sequence[Block]


def to_html(page: Page, refresh_s: int = 0) -> str:
    """Return a page as HTML; with `refresh_s` the browser reloads it so often, and the styles from its server."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    options: Any = {"autoescape": True, "undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    template = Environment(loader=FileSystemLoader(HERE), **options).get_template("page.html.j2")
    return template.render(page=page, styles=STYLES.read_text(encoding="utf-8"), refresh_s=refresh_s)
