"""Types of the content of a report page, before it is rendered as HTML.

All text is plain: the HTML template escapes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Tone = Literal["", "good", "bad", "warn"]


@dataclass(frozen=True)
class Chart:
    """A plotly figure; the page sets the colours of text and background."""

    key: str  #: unique in the page, of letters, digits and -
    title: str
    data: Sequence[Mapping[str, Any]]  #: traces of plotly
    layout: Mapping[str, Any]  #: layout of plotly
    height: int = 320  #: pixels
    note: str = ""
    kind: Literal["chart"] = "chart"


@dataclass(frozen=True)
class Table:
    """A table; columns whose name begins with ``#`` contain numbers and are aligned to the right."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    kind: Literal["table"] = "table"


@dataclass(frozen=True)
class Lines:
    """Preformatted text, such as a log; ``folded``: collapsed until the reader opens it."""

    title: str
    text: str
    folded: bool = False
    kind: Literal["lines"] = "lines"


@dataclass(frozen=True)
class Words:
    texts: tuple[str, ...]
    tone: Tone = ""
    kind: Literal["words"] = "words"


@dataclass(frozen=True)
class Fact:
    """A labelled value in the summary at the top of a report page."""

    label: str
    value: str
    tone: Tone = ""


Block = Chart | Table | Lines | Words


@dataclass(frozen=True)
class PageSection:
    """A section of the page, with a heading; ``key`` is the anchor for links to the section."""

    key: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class ReportPage:
    title: str
    state: str  #: done, failed, stopped, running
    headline: str  #: one sentence on the state of the run
    facts: tuple[Fact, ...]
    sections: tuple[PageSection, ...]
    about: str = "report of a run"  #: what the page is, beside the name of the program

    @property
    def charts(self) -> list[Chart]:
        return [block for section in self.sections for block in section.blocks if isinstance(block, Chart)]
