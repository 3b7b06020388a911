"""The blocks of a report and their renderers: a self-contained HTML page, and Markdown.

All text is plain text; the template of the page escapes it (Jinja's autoescape).
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment

HERE = Path(__file__).parent
STYLES = HERE / "page.css"


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

    @property
    def plain(self) -> str:
        """Return both texts in one line."""
        return f"{self.text} ({self.small})" if self.small else self.text


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


def to_html(page: Page) -> str:
    """Return the page as HTML with embedded charts."""
    styles = STYLES.read_text(encoding="utf-8")
    return templates_in(HERE).get_template("page.html.j2").render(page=page, styles=styles)


def templates_in(*folders: Path) -> Environment:
    """Return the templates of some folders; they escape every text."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    how: Any = {"autoescape": True, "undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    return Environment(loader=FileSystemLoader(folders), **how)


def to_markdown(page: Page) -> str:
    """Return the page as Markdown; charts are replaced by their titles and captions."""
    return "\n\n".join([f"# {page.title}", *(text for block in page.blocks for text in _markdown(block))]) + "\n"


def _markdown(block: Block) -> Iterator[str]:
    if isinstance(block, Heading):
        yield "#" * block.level + " " + block.text
    elif isinstance(block, Text):
        yield _escaped(block.text)
    elif isinstance(block, Notice):
        yield "\n".join(f"> {_escaped(line)}  " for line in (f"**{block.title}**", *block.lines))
    elif isinstance(block, Table):
        if block.caption:
            yield _escaped(block.caption)
        yield markdown_table(block.header, [[cell.plain for cell in row] for row in block.rows], block.is_text)
    elif isinstance(block, Charts):
        titles = "; ".join(chart.title for chart in block.charts)
        yield f"*Pictures, on the HTML page: {_escaped(titles)}.* {_escaped(block.caption)}"
    elif isinstance(block, Verbatim):
        label = [f"{block.label}:"] if block.label else []
        yield "\n".join([*label, "", *(f"    {line}" for line in block.text.split("\n"))])
    else:
        yield f"*{_escaped(block.summary)}*"
        for inner in block.blocks:
            yield from _markdown(inner)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], is_text: bool = False) -> str:
    """Return a Markdown table; columns of numbers are aligned right."""
    rule = ["---", *(["---"] if is_text else ["---:"]) * (len(header) - 1)]
    lines = [[_escaped(cell) for cell in row] for row in (header, *rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (lines[0], rule, *lines[1:]))


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
