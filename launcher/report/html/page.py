"""The parts of a report page before they become HTML. All their text is plain; the template escapes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Tone = Literal["", "good", "bad", "warn"]


@dataclass(frozen=True)
class Chart:
    """A plotly figure; colours of text and background are the page's own."""

    key: str  #: unique in the page, of letters, digits and -
    title: str
    data: Sequence[Mapping[str, Any]]  #: plotly's traces
    layout: Mapping[str, Any]
    height: int = 320  #: pixels
    note: str = ""
    kind: Literal["chart"] = "chart"


@dataclass(frozen=True)
class Table:
    """Columns whose name begins with ``#`` hold numbers, and are aligned to the right."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    kind: Literal["table"] = "table"


@dataclass(frozen=True)
class Lines:
    """Preformatted text, as a log; ``folded``: shown once it is asked for."""

    title: str
    text: str
    folded: bool = False
    kind: Literal["lines"] = "lines"


@dataclass(frozen=True)
class Words:
    """A paragraph each."""

    texts: tuple[str, ...]
    tone: Tone = ""
    kind: Literal["words"] = "words"


@dataclass(frozen=True)
class Fact:
    """A figure of the summary."""

    label: str
    value: str
    tone: Tone = ""


Block = Chart | Table | Lines | Words


@dataclass(frozen=True)
class Section:
    key: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class ReportPage:
    """A whole report."""

    title: str
    state: str  #: done, failed, interrupted, running
    headline: str  #: one sentence on how it stands
    facts: tuple[Fact, ...]
    sections: tuple[Section, ...]

    @property
    def charts(self) -> list[Chart]:
        """All of them, in the order of the page."""
        return [block for section in self.sections for block in section.blocks if isinstance(block, Chart)]
