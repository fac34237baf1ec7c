"""Compares texts that users see with golden files; UPDATE_GOLDEN=1 rewrites the files."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


def check_text(path: Path, text: str) -> None:
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    golden = path.read_text(encoding="utf-8")
    if text != golden:
        pytest.fail(_diff(path, golden, text), pytrace=False)


def check_messages(module: str, messages: Iterable[tuple[str, str]]) -> None:
    check_text(GOLDEN / f"messages_{module}.txt", _joined(messages))


def check_lines(module: str, messages: Mapping[str, str]) -> None:
    """Assert that each text has all lines of its block in golden/messages_<module>.txt, in any order.

    messages: texts by the title of the block.
    """
    path = GOLDEN / f"messages_{module}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        check_text(path, _joined(messages.items()))
    golden = dict(block.split("\n", 1) for block in ("\n" + path.read_text(encoding="utf-8")).split("\n# ")[1:])
    assert list(golden) == list(messages)
    missing = {
        how for how, text in messages.items() if set(golden[how].strip().splitlines()) - set(text.strip().splitlines())
    }
    if missing:
        expected, got = (
            _joined((how, of[how].strip()) for how in messages if how in missing) for of in (golden, messages)
        )
        pytest.fail(_diff(path, expected, got), pytrace=False)


def _joined(messages: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"# {how}\n{text.rstrip()}\n" for how, text in messages)


def _diff(path: Path, golden: str, text: str) -> str:
    lines = difflib.unified_diff(
        golden.splitlines(), text.splitlines(), f"golden/{path.name}", "printed now", lineterm=""
    )
    return "\n".join([*lines, "", "UPDATE_GOLDEN=1 rewrites the file."])
