"""YAML with comments: lines of text whose remarks stand in one column."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import yaml

COLUMN = 40

WIDTH = 118


@dataclass(frozen=True)
class Line:
    """A line of a file; one without text is a remark of its own."""

    text: str = ""
    about: str = ""


def render(lines: Iterable[Line]) -> str:
    return "\n".join(text for line in lines for text in _rendered(line)) + "\n"


def _rendered(line: Line) -> Iterator[str]:
    """A remark that is too long for its line stands above it."""
    if not line.about:
        yield line.text.rstrip()
        return
    beside = f"{line.text:<{COLUMN - 1}} # {line.about}"
    if line.text.strip() and len(beside) <= WIDTH:
        yield beside
        return
    indent = " " * (len(line.text) - len(line.text.lstrip())) + "# "
    yield from textwrap.wrap(line.about, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    if line.text.strip():
        yield line.text


def value(plain: Any) -> str:
    """A value in YAML's short form, on one line."""
    if isinstance(plain, int) and not isinstance(plain, bool) and plain >= 10_000:
        return f"{plain:_}"
    if isinstance(plain, dict):
        return "{" + ", ".join(f"{key}: {value(item)}" for key, item in plain.items()) + "}"
    if isinstance(plain, (list, tuple)):
        return "[" + ", ".join(map(value, plain)) + "]"
    return yaml.safe_dump(plain, default_flow_style=True, width=10**6, allow_unicode=True).removesuffix("...\n").strip()
