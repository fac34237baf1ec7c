"""Memory that a step gives free is kept for the next one."""

from __future__ import annotations

from trainer.core.malloc import glibc

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  #: of glibc's malloc.h

_KEEP = 2**31 - 1  #: bytes free at the end of the heap above which they are returned, the most mallopt takes


def keep_freed_memory() -> bool:
    """Have glibc's malloc neither map large blocks one by one nor return them when free; whether that is done.

    Arrays of a step are some ten to a hundred MiB each. Mapped, each costs a page fault per 4 KiB in every step, which
    took as long as a third of the step itself. Other C libraries and systems are left as they are.
    """
    libc = glibc()
    if libc is None:
        return False
    return libc.mallopt(_M_MMAP_MAX, 0) == 1 and libc.mallopt(_M_TRIM_THRESHOLD, _KEEP) == 1
