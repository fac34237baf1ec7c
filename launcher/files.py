"""Atomic writes of local files, checks of names and bytes that others give, and the root folder of our own code."""

from __future__ import annotations

import atexit
import hashlib
import os
import uuid
import zlib
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


def is_plain_path(path: str) -> bool:
    """Whether ``path``, which a node or a file gives, names something below the folder it is relative to.

    No absolute path, no empty part, ``.`` or ``..``, no NUL or other control character, nothing that no file can be
    called.
    """
    try:
        words = os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return min(words, default=0) >= 32 and all(part not in (b"", b".", b"..") for part in words.split(b"/"))


def read_text(path: Path, most: int) -> str:
    """The UTF-8 text of a file of at most ``most`` bytes. Raises ValueError (for other files) and OSError."""
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it is larger than {most:,} bytes")
    try:
        return data.decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text (byte {error.start})") from None


def inflated(data: bytes, most: int) -> bytes:
    """What zlib has packed in ``data``; raises ValueError when it is damaged, or larger than ``most`` bytes."""
    unpacker = zlib.decompressobj()
    try:
        unpacked = unpacker.decompress(data, most + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(unpacked) > most:
        raise ValueError(f"it is larger than {most:,} bytes")
    if not unpacker.eof:
        raise ValueError("it is cut off")
    return unpacked


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
