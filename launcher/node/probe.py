"""Node program: what this machine is and has. Python 3.8, standard library only.

``main(request)`` with {"peer": an address other nodes have or "", "address": the one
configured or "", "workdir", "run_dir" and "session": what a run will make there or "", "ports": [..],
"manifest": path or ""} returns a dict of facts.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from typing import Any, Iterable

PACKAGES = ("torch", "torch_geometric", "numba", "numpy", "pyzmq")
LISTEN = "0A"  # state in /proc/net/tcp


def main(request: dict[str, Any]) -> dict[str, Any]:
    started = time.time()
    address = numeric(request["address"]) or own_address(request["peer"])
    facts = {
        "hostname": socket.gethostname(),
        "home": os.path.expanduser("~"),
        "address": address,
        "interface": interface_of(address),
        "python": sys.executable,
        "versions": versions(),
        "tmux": tmux_version(),
        "devices": cuda_devices(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "cpus": cpus(),
        "boot_id": read("/proc/sys/kernel/random/boot_id").strip(),
        "busy_ports": busy_ports(request["ports"]),
        "manifest": bool(request["manifest"]) and os.path.isfile(os.path.expanduser(request["manifest"])),
    }
    facts["taken"] = taken(os.path.expanduser(request["run_dir"]), request["session"])
    facts.update(folder(os.path.expanduser(request["workdir"])))
    facts["times"] = [started, time.time()]
    return facts


def numeric(name: str) -> str:
    """An address for the configured name or address; '' when it does not resolve, or to loopback
    as many machines' own name does (unless loopback was asked for)."""
    try:
        found = str(socket.getaddrinfo(name, None)[0][4][0]) if name else ""
    except OSError:
        return ""
    return "" if is_loopback(found) and found != name and name != "localhost" else found


def own_address(peer: str) -> str:
    """Where this SSH connection arrived; without one, where a packet to ``peer`` would leave."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    arrived = words[2].replace("::ffff:", "").split("%")[0] if len(words) == 4 else ""
    if arrived and not is_loopback(arrived):
        return arrived
    return route_to(peer) or arrived or "127.0.0.1"


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def route_to(peer: str) -> str:
    """Source address of the route to ``peer``; '' when there is none."""
    try:
        family, kind, proto, _, target = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as sock:
            sock.connect(target)
            return str(sock.getsockname()[0])
    except OSError:
        return ""


def interface_of(address: str) -> str:
    """Name of the interface that owns ``address``; '' when none does."""
    return "lo" if address.startswith("127.") else by_ip_command(address) or by_ioctl(address)


def by_ip_command(address: str) -> str:
    for line in output(["ip", "-o", "addr", "show"]).splitlines():
        words = line.split()
        if len(words) > 3 and words[3].split("/")[0] == address:
            return words[1]
    return ""


def by_ioctl(address: str) -> str:
    """For machines without iproute2; sees only the first IPv4 address of an interface."""
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(sock, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
            except OSError:
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return ""


def versions() -> dict[str, str]:
    """Installed versions without importing anything; '' when missing."""
    from importlib import metadata

    found = {"python": "%d.%d.%d" % sys.version_info[:3]}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = ""
    return found


def tmux_version() -> str:
    words = output(["tmux", "-V"]).split()
    return words[1] if len(words) > 1 else ""


def taken(run_dir: str, session: str) -> str:
    """What is there already of what a run would make, in words; '' when nothing is."""
    if session and session in output(["tmux", "list-sessions", "-F", "#S"]).splitlines():
        return "tmux session %s" % session
    return run_dir if run_dir and os.path.exists(run_dir) else ""


def cuda_devices() -> list[str]:
    """Names by index, in the order of nvidia-smi (PCI bus)."""
    listed = output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
    return [line.strip() for line in listed.splitlines() if line.strip()]


def cpus() -> int:
    """CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def folder(path: str) -> dict[str, Any]:
    """Facts about the work folder, or of the nearest folder above it that exists."""
    real = os.path.realpath(path)
    there = real
    while not os.path.exists(there):
        there = os.path.dirname(there)
    status = os.stat(there)
    return {
        "workdir": real,
        "workdir_base": there,
        "workdir_writable": os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK),
        "workdir_id": "%d:%d" % (status.st_dev, status.st_ino),
        "disk_free": shutil.disk_usage(there).free,
    }


def busy_ports(ports: Iterable[int]) -> dict[str, str]:
    """{port: who holds it} for those that cannot be listened on."""
    return {str(port): holder(port) for port in ports if not can_listen(port)}


def can_listen(port: int) -> bool:
    """Whether a server may listen on all addresses. SO_REUSEADDR as servers set it: connections
    that merely linger do not count, but listeners do, and listen() finds the ones bind() lets pass."""
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue  # no IPv6 here
        with sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                sock.bind((address, port))
                sock.listen(1)
            except OSError as error:
                if family == socket.AF_INET6 and error.errno == 99:  # EADDRNOTAVAIL: IPv6 switched off
                    continue
                return False
    return True


def holder(port: int) -> str:
    """The process that listens on ``port``, as far as /proc shows it to this user."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in read(table).splitlines()[1:]:
            words = line.split()
            if words[3] == LISTEN and int(words[1].rpartition(":")[2], 16) == port:
                inodes.add("socket:[%s]" % words[9])
    for pid in filter(str.isdigit, os.listdir("/proc")) if inodes else ():
        if inodes & open_files(pid):
            command = read("/proc/%s/cmdline" % pid).replace("\0", " ").strip()
            return "pid %s: %s" % (pid, command[:80])
    return "a process of another user" if inodes else ""


def open_files(pid: str) -> set[str]:
    try:
        base = "/proc/%s/fd/" % pid
        return {os.readlink(base + fd) for fd in os.listdir(base)}
    except OSError:  # gone, or not ours
        return set()


def read(path: str) -> str:
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def output(argv: list[str]) -> str:
    """What a command prints; '' when it is missing, fails or hangs."""
    try:
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else ""
