"""Atomic writes on this machine: a file appears whole or not at all. ``node/`` has its own, for hosts without this."""

from __future__ import annotations

import atexit
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_unfinished: set[Path] = set()


@contextmanager
def appearing(dest: Path, *, mode: int | None = None) -> Iterator[BinaryIO]:
    """A file written beside ``dest`` that takes its place only when the block ends well; parents are made.

    ``mode``: permissions of the file, from its first byte on; None: as the umask has it.
    """
    dest.parent.mkdir(parents=True, exist_ok=True)
    beside = dest.with_name(f".{dest.name}.{uuid.uuid4().hex[:8]}.part")
    _unfinished.add(beside)
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode or 0o666), "wb") as out:
            if mode is not None:
                os.fchmod(out.fileno(), mode)
            yield out
        beside.replace(dest)
    finally:
        beside.unlink(missing_ok=True)
        _unfinished.discard(beside)


@atexit.register
def remove_unfinished() -> None:
    """Remove what threads have begun to write when the program ends."""
    for path in tuple(_unfinished):
        path.unlink(missing_ok=True)


def write_whole(dest: Path, text: str, *, private: bool = False) -> None:
    """Write ``text`` in UTF-8 to ``dest``; ``private``: readable by this user only, as it may hold secrets."""
    with appearing(dest, mode=0o600 if private else None) as out:
        out.write(text.encode())
