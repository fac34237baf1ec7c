"""Atomic writes of local files, and the root folder of our own code."""

from __future__ import annotations

import atexit
import hashlib
import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def written_path(path: Path) -> str:
    """``~/…`` where it lies in the home folder of this machine, which is another one on the hosts."""
    home = os.path.expanduser("~").rstrip("/")
    text = str(path)
    return "~" + text[len(home) :] if home and text.startswith(home + "/") else text


CODE_ROOT = Path(__file__).resolve().parents[1]


def file_sha256(path: Path) -> str:
    """Hex digest of a whole file."""
    with path.open("rb") as file:
        return _hex(iter(lambda: file.read(1 << 20), b""))


def _hex(chunks: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


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
