"""What ``netns`` needs from the kernel and its tools: ip, ssh-keygen, /proc."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple


class NetnsError(RuntimeError):
    """A host could not be set up; the message carries the tool's own words."""


class Process(NamedTuple):
    """A process of a host, as the host itself sees it."""

    pid: int
    cmdline: str


def kill_namespace(name: str) -> None:
    for pid in ip(f"netns pids {name}", check=False).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def state(pid: int) -> str:
    """R, S, D, Z …; '' when there is no such process."""
    return _stat(pid)[0]


def start_ticks(pid: int) -> str:
    """When ``pid`` started, in clock ticks since boot; '' when there is no such process."""
    return _stat(pid)[19]


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return [""] * 20


def processes_of(init_pid: int) -> Iterator[Process]:
    namespace = os.readlink(f"/proc/{init_pid}/ns/pid")
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(entry / "ns/pid") == namespace:
                inner = (entry / "status").read_text().split("NSpid:")[1].split("\n")[0].split()[-1]
                yield Process(int(inner), (entry / "cmdline").read_text().replace("\0", " ").strip())


def free_prefix(seed: int) -> str:
    """The first three numbers of a /24 in 10/8 that no route of this machine touches.

    ``seed`` tells apart clusters that start at the same moment.
    """
    routes = ip("-4 route show table all")
    for offset in range(1000):
        number = (seed + offset) % (128 * 256)
        prefix = f"10.{100 + number // 256}.{number % 256}"
        if f"{prefix}." not in routes:
            return prefix
    raise NetnsError("no free 10.x.y.0/24 on this machine")


def public_key(path: Path) -> str:
    """Type and key, without the comment."""
    return " ".join(path.read_text().split()[:2])


def keygen(path: Path, comment: str) -> None:
    tool(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)])


def ip(words: str, *, check: bool = True) -> str:
    return tool(["ip", *words.split()], check=check)


def tool(argv: Sequence[str], *, check: bool = True) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    if check and done.returncode:
        raise NetnsError(f"{shlex.join(argv)} exited {done.returncode}: {done.stderr.strip()}")
    return done.stdout
