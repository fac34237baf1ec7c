"""The C library's allocator, where it is glibc's: what is free in its heap goes back to the system only when asked."""

from __future__ import annotations

import ctypes
import sys


def glibc() -> ctypes.CDLL | None:
    """None with other C libraries (musl has no mallopt) and systems."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None


def give_back_freed_memory() -> None:
    """Return to the system what lies free between blocks in use: after work that is not done again soon."""
    if (libc := glibc()) is not None:
        libc.malloc_trim(0)
