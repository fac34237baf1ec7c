"""Golden files: what users read, kept as text that can be read aloud. UPDATE_GOLDEN=1 writes them anew."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


def check_text(path: Path, text: str) -> None:
    """Compare ``text`` with a golden file; a difference is shown as a unified diff.

    UPDATE_GOLDEN=1 writes the file; read the difference before committing it.
    """
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    golden = path.read_text(encoding="utf-8")
    if text != golden:
        pytest.fail(_diff(path, golden, text), pytrace=False)


def check_messages(module: str, messages: Iterable[tuple[str, str]]) -> None:
    """Compare ``(how it was provoked, what was said)`` with golden/messages_<module>.txt."""
    check_text(GOLDEN / f"messages_{module}.txt", _joined(messages))


def check_lines(module: str, messages: Mapping[str, str]) -> None:
    """Every line of golden/messages_<module>.txt was said when it was provoked; more lines may have been.

    For scenes of several threads or processes: how many lines come, and in which order, depends on the machine.
    """
    path = GOLDEN / f"messages_{module}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        check_text(path, _joined(messages.items()))
    golden = dict(block.split("\n", 1) for block in ("\n" + path.read_text(encoding="utf-8")).split("\n# ")[1:])
    assert list(golden) == list(messages)
    missing = {
        how for how, said in messages.items() if set(golden[how].strip().splitlines()) - set(said.strip().splitlines())
    }
    if missing:
        expected, got = (
            _joined((how, of[how].strip()) for how in messages if how in missing) for of in (golden, messages)
        )
        pytest.fail(_diff(path, expected, got), pytrace=False)


def _joined(messages: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"# {how}\n{said.rstrip()}\n" for how, said in messages)


def _diff(path: Path, golden: str, text: str) -> str:
    lines = difflib.unified_diff(golden.splitlines(), text.splitlines(), f"golden/{path.name}", "said now", lineterm="")
    return "\n".join([*lines, "", "UPDATE_GOLDEN=1 writes the file anew."])
