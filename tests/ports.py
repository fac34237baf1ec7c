"""Finds free ports for tests that run in parallel."""

from __future__ import annotations

import os
import random
import socket
from contextlib import ExitStack, suppress

#: Below the ports that `auto` and the kernel choose.
_FIRST, _LAST = 10_000, 29_300
_WORKERS = 16
_SHARE = (_LAST - _FIRST) // _WORKERS


def free_port(count: int = 1) -> int:
    """Return the first of ``count`` consecutive free ports of 127.0.0.1.

    Each pytest worker has its own range of ports, so that no other test can take the port.
    """
    while True:
        first = _next(count)
        with ExitStack() as stack, suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


def _next(count: int) -> int:
    global _offset
    if _offset + count > _SHARE:
        _offset = 0
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % _WORKERS
    first = _FIRST + worker * _SHARE + _offset
    _offset += count
    return first


_offset = random.randrange(_SHARE)  # different in two test runs at once
