"""Node program: measures how fast this machine is, in about two seconds. Python 3.8; torch or numpy if installed.

``main({"folder", "seconds"})`` measures each of three things for ``seconds`` and replies {"product": GFLOP/s of a
product of float32 matrices on all processors, "copy": GB/s of copying memory, "disk": MB/s of reading a file in
``folder``, "by": "torch", "numpy" or ""}; a figure is 0.0 if it could not be measured. The file has no name while it
is read, and its pages in memory are dropped before.
"""

from __future__ import annotations

import os
import site
import sys
import time
from importlib import import_module
from typing import Any, Callable, Optional

from launcher.node.programs import machine

_SIDE = 1536  # of the matrices; 9 MB each

_COPIED = 1 << 27  # bytes; more than caches hold

_BLOCK = 1 << 22  # bytes

_LARGEST = 1 << 29  # bytes of the file


def main(request: dict[str, Any]) -> dict[str, Any]:
    if sys.flags.no_site:
        site.main()  # installed packages
    by, multiply, copy = work()
    seconds = request["seconds"]
    return {
        "product": 2 * _SIDE**3 * rate(multiply, seconds) / 1e9 if multiply else 0.0,
        "copy": _COPIED * rate(copy, seconds) / 1e9,
        "disk": disk(os.path.expanduser(request["folder"]), seconds) / 1e6,
        "by": by,
    }


def work() -> tuple[str, Optional[Callable[[], Any]], Callable[[], Any]]:
    """Return the package that computes ('' for none), a function that multiplies matrices, one that copies memory."""
    old, new = memoryview(bytearray(_COPIED)), memoryview(bytearray(_COPIED))
    try:
        torch = import_module("torch")
        torch.set_num_threads(machine.cpus())
        x, source, target = torch.rand(_SIDE, _SIDE), torch.ones(_COPIED // 4), torch.empty(_COPIED // 4)
        return "torch", lambda: torch.mm(x, x), lambda: target.copy_(source)
    except Exception:  # not installed, or broken: preflight says so
        pass
    try:
        numpy = import_module("numpy")
        ones = numpy.ones((_SIDE, _SIDE), "float32")
        return "numpy", lambda: numpy.dot(ones, ones), lambda: new.__setitem__(slice(None), old)
    except Exception:
        return "", None, lambda: new.__setitem__(slice(None), old)


def rate(work: Callable[[], Any], seconds: float) -> float:
    """Return how often ``work`` is done per second, after a first time that does not count."""
    work()
    done, begin = 0, time.perf_counter()
    while True:
        work()
        done += 1
        passed = time.perf_counter() - begin
        if passed >= seconds:
            return done / passed


def disk(folder: str, seconds: float) -> float:
    """Return the bytes per second at which a new file in ``folder``, or a folder above it, is read; 0.0: unknown."""
    while folder and not os.path.isdir(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    name = os.path.join(folder, ".gnnfleet-speed-%d" % os.getpid())
    block, size = os.urandom(_BLOCK), 0
    try:
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:
        return 0.0
    try:
        os.unlink(name)
        end = time.perf_counter() + seconds
        while size < _LARGEST and (size < 4 * _BLOCK or time.perf_counter() < end):
            size += os.write(file, block)
            os.fdatasync(file)  # dirty pages cannot be dropped
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(file, 0, os.SEEK_SET)
        begin, count = time.perf_counter(), 0
        while time.perf_counter() < begin + seconds:
            data = os.read(file, _BLOCK)
            count += len(data)
            if not data:
                break
        return count / max(1e-6, time.perf_counter() - begin)
    except OSError:  # a full disk
        return 0.0
    finally:
        os.close(file)
