"""Opens files that other processes write, and makes way for files. Standard library only, Python 3.8."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO


def open_at_once(path: str, flags: int) -> int:
    """Open a file, and do not wait for the other end if it is a pipe. Raises OSError.

    Waits for a lease on a file, as an NFS server on this machine takes for its clients, which give it up when asked.
    """
    try:
        return os.open(path, flags | os.O_NONBLOCK, 0o644)
    except BlockingIOError:  # there is a lease
        return os.open(path, flags, 0o644)


def open_regular(path: str) -> BinaryIO:
    """Open a file to read it. Raises OSError, also for a pipe, which would block, and a device, which may not end."""
    file = open(path, "rb", opener=open_at_once)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", path)
    return file


def make_way(path: str, below: str) -> None:
    """Delete what is no file at ``path``, such as a folder, a pipe or a dangling link, and what is no folder above it.

    Only what is in the folder ``below`` is looked at, not what is behind a link to a folder there. Raises OSError.
    """
    at = below
    with suppress(FileNotFoundError):  # another launch has just deleted it
        for name in os.path.relpath(path, below).split(os.sep)[:-1]:
            at = os.path.join(at, name)
            if os.path.lexists(at) and not os.path.isdir(at):
                os.unlink(at)
            elif os.path.islink(at):
                return
        if os.path.isdir(path) and not os.path.islink(path):
            import shutil

            shutil.rmtree(path)
        elif os.path.lexists(path) and not os.path.isfile(path):
            os.unlink(path)
