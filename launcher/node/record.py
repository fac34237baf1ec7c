"""Writes the files of a run folder: replaced atomically, or appended line by line. Formats time stamps."""

from __future__ import annotations

import errno
import json
import os
import time
from contextlib import suppress
from typing import Any

from launcher.node.regular_file import open_at_once


def stamp(when: float) -> str:
    """Format ``when``, seconds since the epoch, in UTC: ``2026-11-20T21:00:00.123Z``."""
    milliseconds = int(when * 1000)
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(milliseconds // 1000))
    return f"{whole}.{milliseconds % 1000:03d}Z"


def write_json(path: str, value: Any) -> None:
    """Atomically replace ``path`` by ``value`` as JSON. Raises OSError."""
    write_text(path, json.dumps(value))


def write_text(path: str, text: str) -> None:
    """Atomically replace ``path`` by ``text``: write a temporary file and rename it. Raises OSError."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):  # the temporary file may not exist
            os.unlink(temporary)
        raise


def why_unwritten(path: str, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of {os.path.dirname(path)} is full"
    return f"{path} cannot be written: {error.strerror}"


def append_json(path: str, value: Any) -> None:
    """Append ``value`` as a line of JSON in a single write, so that lines of several writers never mix."""
    line = json.dumps(value).encode() + b"\n"
    descriptor = open_at_once(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        write_line(descriptor, line)
    finally:
        os.close(descriptor)


def write_line(descriptor: int, line: bytes) -> None:
    """Append a line to an open file. Raises OSError.

    If the disk is full and only a part of the line was written, that part is removed again.
    """
    written = os.write(descriptor, line)
    if written < len(line):
        os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
