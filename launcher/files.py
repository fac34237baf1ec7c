"""Local files: atomic writes, digests, bounded reads, and checks of paths and bytes received from nodes."""

from __future__ import annotations

import atexit
import hashlib
import os
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def written_path(path: Path) -> str:
    """Return ``path`` as text for a config file, with ``~/`` in place of the user's home folder.

    The home folder may have another path on other hosts.
    """
    home = os.path.expanduser("~").rstrip("/")
    text = str(path)
    return "~" + text[len(home) :] if home and text.startswith(home + "/") else text


CODE_ROOT = Path(__file__).resolve().parents[1]  #: the folder that contains ``launcher`` and ``trainer``


def is_plain_path(path: str) -> bool:
    """Whether ``path``, received from a node or read from a file, stays below the folder to which it is relative.

    False for absolute paths, for empty, ``.`` and ``..`` components, for control characters (NUL included) and for
    text that cannot be encoded as a file name.
    """
    try:
        words = os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return min(words, default=0) >= 32 and all(part not in (b"", b".", b"..") for part in words.split(b"/"))


def read_text(path: Path, most: int) -> str:
    """Read a UTF-8 file of at most ``most`` bytes; line ends become ``\\n``.

    Raises ValueError for a larger file or one that is not UTF-8, OSError if it cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"the file is larger than {most:,} bytes")
    try:
        return data.decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text (byte {error.start})") from None


def decompress(data: bytes, most: int) -> bytes:
    """Decompress zlib ``data``. Raises ValueError if it is damaged, cut off, or larger than ``most`` bytes."""
    unpacker = zlib.decompressobj()
    try:
        unpacked = unpacker.decompress(data, most + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(unpacked) > most:
        raise ValueError(f"the content is larger than {most:,} bytes")
    if not unpacker.eof:
        raise ValueError("the end of the compressed data is missing")
    return unpacked


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, as 64 hex digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


_unfinished: set[Path] = set()


@contextmanager
def atomic_file(dest: Path, *, mode: int | None = None) -> Iterator[BinaryIO]:
    """Open a temporary file next to ``dest``; rename it to ``dest`` when the ``with`` block ends without an error.

    Missing parent folders are created. ``mode``: permissions of the file before its first byte is written; None for the
    umask's default. An OSError about the temporary file names ``dest``.
    """
    dest.parent.mkdir(parents=True, exist_ok=True)
    temporary = dest.with_name(f".{uuid.uuid4().hex}.part")  # without the name, which may already be as long as allowed
    _unfinished.add(temporary)
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode or 0o666), "wb") as out:
            if mode is not None:
                os.fchmod(out.fileno(), mode)
            yield out
        temporary.replace(dest)
    except OSError as error:
        if str(error.filename) == str(temporary):
            error.filename = str(dest)  # the name that the user knows
        raise
    finally:
        temporary.unlink(missing_ok=True)
        _unfinished.discard(temporary)


@atexit.register
def remove_unfinished() -> None:
    """Remove temporary files that daemon threads are still writing when the program exits."""
    for path in tuple(_unfinished):
        path.unlink(missing_ok=True)


def write_whole(dest: Path, text: str, *, private: bool = False) -> None:
    """Write ``text`` to ``dest`` in UTF-8, atomically. ``private``: mode 0600, for text that may contain secrets."""
    with atomic_file(dest, mode=0o600 if private else None) as out:
        out.write(text.encode())
