"""Node program: facts about this machine. Python 3.8, standard library only.

``main(request)`` with {"peer": an address other nodes have or "", "address": the one
configured or "", "workdir", "run_dir" and "session": what a run will make there or "", "ports": [..],
"manifest": path or ""} returns a dict of facts. More may be asked for: "devices": whether CUDA devices are
wanted, "names": [host names that must resolve], "code": digest of our code, "parts": folder of parts sent before.

It runs on all nodes at once, so it is sparing: what the answer does not need is neither imported nor looked at.
"""

from __future__ import annotations

import _socket as socket
import os
import sys
import time

from launcher.node.programs import folders, machine, packages
from launcher.node.programs.folders import Suspect, lives
from launcher.node.programs.network import addresses

TYPE_CHECKING = False  # typing takes a fifth of the time that Python takes to start
if TYPE_CHECKING:
    from typing import Any, Iterable, Sequence

LISTEN = "0A"  # state in /proc/net/tcp

LEASES = "/tmp/gnnfleet-leases"

RESOLVE_SECONDS = 8.0


def main(request: dict[str, Any]) -> dict[str, Any]:
    asked = machine.commands(bool(request.get("devices")))
    there = addresses()
    address = numeric(request["address"]) or own_address(request["peer"])
    leases, lease_error = held()
    facts: dict[str, Any] = {
        "hostname": socket.gethostname(),
        "home": os.path.expanduser("~"),
        "address": address,
        "addresses": there,
        "interface": interface_of(address, there),
        "python": sys.executable,
        "versions": packages.versions(),
        "boot_id": machine.read("/proc/sys/kernel/random/boot_id").strip(),
        "leases": leases,
        "lease_error": lease_error,
        "busy_ports": busy_ports(request["ports"], leases),
        "names": resolved(request.get("names", [])),
        "manifest": bool(request["manifest"]) and os.path.isfile(os.path.expanduser(request["manifest"])),
        "graph": packages.graph_size(request["manifest"]),
        "taken": taken(os.path.expanduser(request["run_dir"]), request["session"]),
    }
    facts.update(machine.capacity())
    facts.update(folders.folders(os.path.expanduser(request["workdir"]), request.get("code", "")))
    facts["stored"] = folders.stored(os.path.expanduser(request.get("parts", "")))
    facts["leftovers"] = leftovers(facts["workdir"])
    facts["tmux"] = machine.tmux_version(asked)
    facts.update(gpus(asked))
    return facts


def numeric(name: str) -> str:
    """An address for the configured name or address; '' when it does not resolve, or to loopback
    as many machines' own name does (unless loopback was asked for)."""
    found = lookup(name) if name else ""
    return "" if is_loopback(found) and found != name and name != "localhost" else found


def lookup(name: str) -> str:
    try:
        return str(socket.getaddrinfo(name, None)[0][4][0])
    except (OSError, UnicodeError):
        return ""


def resolved(names: Iterable[str]) -> dict[str, str]:
    """{name: address, '' when there is none}; a name server that does not answer takes its time, so all at once."""
    import threading

    found = dict.fromkeys(names, "")
    threads = [threading.Thread(target=lambda n=name: found.update({n: lookup(n)}), daemon=True) for name in found]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + RESOLVE_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(found)


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
        family, kind, proto, _, target = socket.getaddrinfo(peer, 9, 0, socket.SOCK_DGRAM)[0]
        sock = socket.socket(family, kind, proto)
        try:
            sock.connect(target)
            return str(sock.getsockname()[0])
        finally:
            sock.close()
    except OSError:
        return ""


def interface_of(address: str, there: list[tuple[str, str]]) -> str:
    """Name of the interface that owns ``address``; '' when none does."""
    return "lo" if address.startswith("127.") else next((name for name, own in there if own == address), "")


def taken(run_dir: str, session: str) -> str:
    """What is there already of what a run would make, in words; '' when nothing is."""
    if session and machine.tmux_has(session):
        return "tmux session %s" % session
    return run_dir if run_dir and os.path.exists(run_dir) else ""


def held() -> tuple[list[dict[str, Any]], str]:
    """Leases of living runs, and why they cannot be read; most machines have none, and nothing is loaded then."""
    try:
        if not os.listdir(os.environ.get("GNNFLEET_LEASES") or LEASES):
            return [], ""
    except FileNotFoundError:
        return [], ""
    except OSError:
        pass  # lease.held says it in words
    from launcher.node import leases as lease

    try:
        return [dict(one._asdict(), words=lease.describe(one)) for one in lease.held()], ""
    except lease.LeaseError as error:
        return [], str(error)


def leftovers(workdir: str) -> list[dict[str, Any]]:
    """Processes of runs whose supervisor is gone; looked for only where a run has ended without a result."""
    suspects = folders.ended_without_result(workdir)
    if not suspects:
        return []
    from launcher.node.programs import probe as orphans

    return orphans.of_runs(suspects)


def gpus(asked: dict[str, Any]) -> dict[str, Any]:
    """Devices in the order of nvidia-smi (PCI bus); "devices" are their names."""
    if "nvidia-smi" not in asked:
        return {"devices": [], "gpus": [], "driver": ""}
    from launcher.node.programs import machine as devices

    return devices.look(machine.finish(asked["nvidia-smi"]))


def busy_ports(ports: Sequence[int], leases: Iterable[dict[str, Any]] = ()) -> dict[str, str]:
    """{port: who holds it} for those that cannot be listened on, or that a run has leased."""
    busy = {str(port): holder(port) for port in ports if not can_listen(port)}
    for lease in leases:
        kind, _, port = lease["resource"].partition(":")
        if kind == "port" and int(port) in ports:
            busy[port] = lease["words"]
    return busy


def can_listen(port: int) -> bool:
    """Whether a server may listen on all addresses. SO_REUSEADDR as servers set it: connections
    that merely linger do not count, but listeners do, and listen() finds the ones bind() lets pass."""
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue  # no IPv6 here
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
        finally:
            sock.close()
    return True


def holder(port: int) -> str:
    """The process that listens on ``port``, as far as /proc shows it to this user."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in machine.read(table).splitlines()[1:]:
            words = line.split()
            if words[3] == LISTEN and int(words[1].rpartition(":")[2], 16) == port:
                inodes.add("socket:[%s]" % words[9])
    for pid in filter(str.isdigit, os.listdir("/proc")) if inodes else ():
        if inodes & open_files(pid):
            command = machine.read("/proc/%s/cmdline" % pid).replace("\0", " ").strip()
            return "pid %s: %s" % (pid, command[:80])
    return "a process of another user" if inodes else ""


def open_files(pid: str) -> set[str]:
    try:
        base = "/proc/%s/fd/" % pid
        return {os.readlink(base + fd) for fd in os.listdir(base)}
    except OSError:  # gone, or not ours
        return set()


def of_runs(suspects: Iterable[Suspect]) -> list[dict[str, Any]]:
    """[{"run_id", "pids", "commands"}] of the runs of which something still lives: what their last state.json
    names, and all that carries GNNFLEET_RUN_DIR of theirs in its environment."""
    named = {one.run_dir: one for one in suspects}
    pids: dict[str, set[int]] = {folder: known(one) for folder, one in named.items()}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        folder = run_dir_of(pid)
        if folder in pids:
            pids[folder].add(int(pid))
    return [
        {"run_id": named[folder].run_id, "pids": sorted(found), "commands": sorted({command(pid) for pid in found})}
        for folder, found in sorted(pids.items())
        if found
    ]


def known(suspect: Suspect) -> set[int]:
    return {entry["pid"] for entry in suspect.processes if lives(entry.get("pid"), entry.get("start_ticks"))}


def run_dir_of(pid: str) -> str:
    try:
        with open("/proc/%s/environ" % pid, "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:  # ended meanwhile, or another user's
        return ""
    value = next((entry for entry in entries if entry.startswith(b"GNNFLEET_RUN_DIR=")), b"=")
    return os.path.realpath(value.split(b"=", 1)[1].decode("utf-8", "replace")) if value != b"=" else ""


def command(pid: int) -> str:
    try:
        with open("/proc/%d/cmdline" % pid, "rb") as file:
            return file.read().replace(b"\0", b" ").decode("utf-8", "replace").strip()[:80]
    except OSError:
        return ""
