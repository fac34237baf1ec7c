"""What a run of an own script leaves to tell at its end: its last losses, and the files that came of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from launcher.words import count

_TAIL = 1 << 14  # bytes from the end of a metrics file that hold a line

_SHOWN = 8  # files


def last_loss(files: Iterable[Path]) -> str:
    """``last loss: 0.4123, mean of 4 ranks (epoch 3, step 12 of 12)`` by each rank's last step line; '' without any."""
    lines = [line for line in map(_last_step, files) if line]
    if not lines:
        return ""
    loss = sum(line["loss"] for line in lines) / len(lines)
    last = max(lines, key=lambda line: (line["epoch"], line["step"]))
    at = f"epoch {last['epoch']}, step {last['step'] + 1}" + (f" of {last['steps']}" if "steps" in last else "")
    mean = f", mean of {count(len(lines), 'rank')}" if len(lines) > 1 else ""
    return f"last loss told: {loss:.4f}{mean} ({at})"


def output_lines(folder: Path) -> Iterator[str]:
    """The files under ``folder``/output with their sizes."""
    top = folder / "output"
    found = sorted(path for path in top.rglob("*") if path.is_file()) if top.is_dir() else []
    if found:
        yield f"output: {count(len(found), 'file')} in {top}"
    for path in found[:_SHOWN]:
        yield f"  {path.relative_to(top)}  {decimal(path.stat().st_size)}"
    if len(found) > _SHOWN:
        yield f"  and {len(found) - _SHOWN:,} more"


def _last_step(file: Path) -> Mapping[str, Any]:
    """The last whole step line; {} without one that tells a loss, as of a file that is not there."""
    if not file.is_file():
        return {}
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - _TAIL))
        texts = opened.read().splitlines()
    return next(filter(None, map(_step, reversed(texts))), {})


def _step(text: bytes) -> Mapping[str, Any]:
    try:
        line = json.loads(text)
    except ValueError:  # cut short, or not from its beginning
        return {}
    known = isinstance(line, dict) and line.get("kind") == "step"
    return line if known and all(_is_number(line.get(name)) for name in ("epoch", "step", "loss")) else {}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
