"""Time stamps, and the two ways to write a file of a run folder: replaced atomically, or appended by line."""

from __future__ import annotations

import errno
import json
import os
import time
from contextlib import suppress
from typing import Any


def stamp(when: float) -> str:
    """Seconds since the epoch as UTC, ``2026-11-20T21:00:00.123Z``."""
    milliseconds = int(when * 1000)
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(milliseconds // 1000))
    return f"{whole}.{milliseconds % 1000:03d}Z"


def write_json(path: str, value: Any) -> None:
    """Write ``value`` beside ``path`` and rename it into place."""
    write_text(path, json.dumps(value))


def write_text(path: str, text: str) -> None:
    """The same for text."""
    beside = f"{path}.{os.getpid()}.tmp"
    try:
        with open(beside, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(beside, path)
    except OSError:
        with suppress(OSError):  # it was not even made
            os.unlink(beside)
        raise


def why_unwritten(path: str, error: OSError) -> str:
    """Why a file of a run folder could not be written, in words."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of {os.path.dirname(path)} is full"
    return f"{path} cannot be written: {error.strerror}"


def read_json(path: str) -> Any:
    """The value in ``path``; None when the file is not there (yet)."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return None


def append_json(path: str, value: Any) -> None:
    """Add one line in one write, so that readers never see half of it with another writer's half."""
    line = json.dumps(value).encode() + b"\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        write_line(descriptor, line)
    finally:
        os.close(descriptor)


def write_line(descriptor: int, line: bytes) -> None:
    """Append a line to an open file; of one that a full disk takes in part nothing stays. Raises OSError."""
    written = os.write(descriptor, line)
    if written < len(line):
        os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
