"""Tests that docs/security.md names an existing test for each promise."""

from __future__ import annotations

import ast
import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = (REPOSITORY / "docs" / "security.md").read_text()
SECTIONS = {text.split("\n", 1)[0]: text for text in PAGE.split("\n## ")[1:]}
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def functions_of(file: Path) -> set[str]:
    nodes = ast.walk(ast.parse(file.read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test")}


def test_every_test_named_in_the_page_exists() -> None:
    named = TEST.findall(PAGE)
    assert len(named) > 30
    assert [f"{file}::{name}" for file, name in named if name not in functions_of(REPOSITORY / file)] == []


def test_every_promise_names_a_test() -> None:
    rows = [line for line in PAGE.splitlines() if re.match(r"\| (?!promise|-)", line)]
    assert [row for row in rows if not TEST.search(row.split("|")[2])] == []
    without = [name for name, text in SECTIONS.items() if not TEST.search(text)]
    assert without == ["Threat model"]
