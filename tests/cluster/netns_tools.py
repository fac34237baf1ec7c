"""Tools of ``netns``: calls of ip and ssh-keygen, memory limits with cgroups, and processes from /proc."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

FIRST_UID = 2001  #: uid of the first of ``Machine.users``
STATE = Path("/var/tmp/gnnfleet-netns")  # not in /tmp or /run, because every host has its own
TOOLS = {
    "ip": "iproute2",
    "bridge": "iproute2",
    "tc": "iproute2",
    "ssh": "openssh-client",
    "sshd": "openssh-server",
    "ssh-keygen": "openssh-client",
    "unshare": "util-linux",
    "nsenter": "util-linux",
}
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Machine:
    interface: str = "eth0"
    sshd: Mapping[str, str] = field(default_factory=dict)  #: lines of sshd_config
    authorized: Path | None = None  #: the public key that may log in; None: that of the operator
    password: bool = False  #: whether sshd accepts the password PASSWORD
    behind: int | None = None  #: index of the jump host, through which alone the operator reaches this host
    shell: str = "/bin/bash"  #: login shell of root and the other accounts
    users: tuple[str, ...] = ()  #: accounts with uids from ``FIRST_UID`` on, whose homes are made by ``Host.welcome``
    own_memory: bool = False  #: whether ``Host.limit_memory`` is usable; needs a memory cgroup


def no_memory_limits() -> str:
    """Return the reason why this machine cannot limit the memory of hosts, or '' if it can."""
    probe = MemoryCgroup(f"gfprobe{os.getpid()}")
    try:
        probe.make()
        probe.limit(None)
    except OSError as error:
        return f"no memory cgroup can be made here: {error}"
    finally:
        probe.remove()
    return ""


class MemoryCgroup:
    """A memory cgroup of version 1 or 2, whichever this machine has."""

    def __init__(self, name: str):
        self._old = Path("/sys/fs/cgroup/memory")
        self.folder = (self._old if self._old.is_dir() else Path("/sys/fs/cgroup")) / name
        self.processes = self.folder / "cgroup.procs"

    @property
    def mounts(self) -> list[str]:
        """Return shell lines that mount the cgroup file system in a new mount namespace."""
        if not self._old.is_dir():
            return ["mount -t cgroup2 cgroup2 /sys/fs/cgroup"]
        return [
            "mount -t tmpfs tmpfs /sys/fs/cgroup",
            f"mkdir {self._old}",
            f"mount -t cgroup -o memory cgroup {self._old}",
        ]

    def make(self) -> None:
        if not self._old.is_dir():
            (self.folder.parent / "cgroup.subtree_control").write_text("+memory")
        self.folder.mkdir(exist_ok=True)

    def limit(self, size: int | None) -> None:
        """Limit the memory to ``size`` bytes. None removes the limit."""
        name, none = ("memory.limit_in_bytes", "-1") if self._old.is_dir() else ("memory.max", "max")
        (self.folder / name).write_text(none if size is None else str(size))

    def used(self) -> int:
        name = "memory.usage_in_bytes" if self._old.is_dir() else "memory.current"
        return int((self.folder / name).read_text())

    def remove(self) -> None:
        for _ in range(100):  # the kernel releases the last process after a moment
            try:
                self.folder.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.02)
            else:
                return


def unavailable() -> str:
    """Return the reason why no hosts can be created on this machine, or '' if they can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "needs Linux and root"
    missing = {package for tool, package in TOOLS.items() if not shutil.which(tool, path=SEARCH_PATH)}
    if missing:
        return f"apt install {' '.join(sorted(missing))}"
    probe = subprocess.run(["unshare", "-m", "-n", "-p", "-u", "-f", "true"], capture_output=True, text=True)
    return f"no namespaces here: {probe.stderr.strip()}" if probe.returncode else ""


class NetnsError(RuntimeError):
    pass


class Process(NamedTuple):
    """A process on a host. ``pid`` is its pid as the host sees it."""

    pid: int
    cmdline: str


def kill_namespace(name: str) -> None:
    for pid in ip(f"netns pids {name}", check=False).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def state(pid: int) -> str:
    """Return the state of process ``pid`` (R, S, D, Z …), or '' if the process does not exist."""
    return _stat(pid)[0]


def start_ticks(pid: int) -> str:
    """Return the start time of process ``pid`` in clock ticks since boot, or '' if the process does not exist."""
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
    """Return the first three numbers of an unused /24 network in 10.0.0.0/8.

    seed: number that determines where the search starts. Clusters that start together should pass different numbers.
    """
    routes = ip("-4 route show table all")
    for offset in range(1000):
        number = (seed + offset) % (128 * 256)
        prefix = f"10.{100 + number // 256}.{number % 256}"
        if f"{prefix}." not in routes:
            return prefix
    raise NetnsError("no free 10.x.y.0/24 on this machine")


def public_key(path: Path) -> str:
    """Return the type and the key in a public key file, without the comment."""
    return " ".join(path.read_text().split()[:2])


def keygen(path: Path, comment: str) -> None:
    tool(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)])


def ip(words: str, *, check: bool = True) -> str:
    return tool(["ip", *words.split()], check=check)


def tool(argv: Sequence[str], *, check: bool = True, stdin: str = "") -> str:
    done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=120)
    if check and done.returncode:
        raise NetnsError(f"{shlex.join(argv)} exited {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def remove_leftovers() -> None:
    """Remove the hosts and files of clusters that were not removed because their test process was killed."""
    for owner in STATE.glob("gf*/owner"):
        try:
            pid, _, ticks = owner.read_text().partition(" ")
        except FileNotFoundError:  # removed by its owner at this moment
            continue
        if start_ticks(int(pid)) == ticks:
            continue
        name = owner.parent.name
        for folder in owner.parent.glob("h[0-9]*"):
            kill_namespace(name + folder.name)
            ip(f"netns del {name}{folder.name}", check=False)
        ip(f"link del {name}b", check=False)
        shutil.rmtree(owner.parent, ignore_errors=True)
