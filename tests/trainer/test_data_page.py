"""Tests that docs/data.md lists every dataset option with its default."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from trainer.data.options import SourceOptions, SyntheticHeteroOptions, SyntheticOptions

PAGE = Path(__file__).resolve().parents[2] / "docs" / "data.md"


def table(heading: str) -> dict[str, str]:
    rows = PAGE.read_text().split(heading)[1].split("| option |")[1].split("\n\n")[0]
    return dict(re.findall(r"^\| `(\w+)` \|\s*`?([^|`]*?)`?\s*\|", rows, re.MULTILINE))


def shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(value)
    return "" if value is None else str(value).lower()


@pytest.mark.parametrize(
    "heading,options",
    [
        ("## Options of `file`", SourceOptions),
        ("## Synthetic graphs", SyntheticOptions),
        ("## Synthetic heterogeneous graphs", SyntheticHeteroOptions),
    ],
)
def test_the_page_names_every_option_and_its_default(heading: str, options: type) -> None:
    known = {entry.name: shown(entry.default) for entry in dataclasses.fields(options)}
    assert {name: default.strip() for name, default in table(heading).items()} == known
