"""Atomic file writes: a temporary file in the same folder, then a rename; and how many files may be open."""

from __future__ import annotations

import errno
import json
import os
import resource
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

_MAX_FILES = 65_536


def allow_many_files() -> None:
    """Raise this process's soft limit on open files to ``_MAX_FILES``, or to the hard limit if that is lower.

    Connections need files, and so does each memory-mapped array.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def write_whole(
    path: Path, content: str | bytes | Callable[[BinaryIO], object], *, mode: int = 0o666, sync: bool = False
) -> None:
    """Replace ``path`` atomically: readers see the old or the new content, and an error leaves the old content.

    Args:
        content: text (written as UTF-8), bytes, or a function that writes to the open file.
        mode: permissions of the new file, before the umask is applied.
        sync: wait until the content and the rename are on the disk (fsync).

    Raises:
        OSError: when the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    temporary.unlink(missing_ok=True)  # left by a killed process that had the same process id
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if sync:
        sync_path(path.parent)


def read_regular(path: Path, most: int | None = None) -> bytes:
    """Return the content of a regular file.

    Raises ``OSError`` for a pipe or device, since reading could block, and for more than ``most`` bytes.
    """
    with open(path, "rb", opener=_open_at_once) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if most is not None and found.st_size > most:
            raise OSError(errno.EFBIG, f"it has {found.st_size:,} bytes, more than {most:,}", str(path))
        return file.read()


def _open_at_once(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_NONBLOCK)  # does not wait for the other end of a pipe
    except BlockingIOError:  # there is a lease, which an NFS server takes for its clients: they give it up when asked
        return os.open(path, flags)


def read_json(path: Path, most: int = 64 << 20) -> Any:
    """Parse a JSON file of at most ``most`` bytes.

    Raises ``OSError`` if it cannot be read, and ``ValueError`` if it is no JSON, larger, or nested too deeply.
    """
    return parse_json(read_regular(path, most))


def parse_json(text: bytes | str) -> Any:
    """Parse JSON. Raises ``ValueError`` if it is invalid or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("lists or objects are nested too deeply") from None


def sync_path(path: str | Path) -> None:
    """Flush the content of a file, or the entries of a folder, to the disk (fsync). Raises ``OSError``."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
