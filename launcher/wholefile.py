"""Files of this machine that appear whole or not at all."""

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
def appearing(dest: Path) -> Iterator[BinaryIO]:
    """A file written beside ``dest`` that takes its place only when the block ends well; parents are made."""
    dest.parent.mkdir(parents=True, exist_ok=True)
    beside = dest.with_name(f".{dest.name}.{uuid.uuid4().hex[:8]}.part")
    _unfinished.add(beside)
    try:
        with beside.open("wb") as out:
            yield out
        beside.replace(dest)
    finally:
        beside.unlink(missing_ok=True)
        _unfinished.discard(beside)


@atexit.register
def remove_unfinished() -> None:
    """Of threads that the program's end overtakes."""
    for path in tuple(_unfinished):
        path.unlink(missing_ok=True)


def write_whole(dest: Path, text: str, *, private: bool = False) -> None:
    """``dest`` with ``text`` in UTF-8; ``private``: for this user's eyes only, as it may hold his environment."""
    with appearing(dest) as out:
        if private:
            os.fchmod(out.fileno(), 0o600)
        out.write(text.encode())
