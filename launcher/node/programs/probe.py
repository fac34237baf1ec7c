"""Node program: collects facts about this machine. Python 3.8, standard library only.

``main(request)`` returns a dict of facts. Fields of ``request``:

- "address": configured address or host name of this node, or ""
- "peer": address of another node, or ""
- "workdir": work folder
- "run_dir", "session": run folder and tmux session of the planned run; "" if no run is planned
- "ports": ports that must be free
- "manifest": path of the manifest.json of a partition folder, or ""
- "devices" (optional): whether to list CUDA devices
- "packages" (optional): further packages to look for
- "names" (optional): host names to resolve
- "code" (optional): digest of the code of gnnfleet
- "parts" (optional): folder with parts sent earlier

The program runs on all nodes at once and must be fast: it imports and examines only what the answer needs.
"""

from __future__ import annotations

import _socket as socket
import os
import sys
import time

from launcher.node.programs import folders, machine, packages
from launcher.node.programs.network import addresses

TYPE_CHECKING = False  # typing takes a fifth of the time that Python takes to start
if TYPE_CHECKING:
    from typing import Any, Iterable, Sequence

_LISTEN = "0A"  # state of a listening socket in /proc/net/tcp

_LEASES = "/tmp/gnnfleet-leases"

_RUNS = 1000  # run folders that are examined at most, newest first

RESOLVE_SECONDS = 8.0  # for all names together


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Return facts about this machine; the module's docstring lists the fields of ``request``."""
    started = machine.commands(bool(request.get("devices")))
    own = addresses()
    address = numeric(request["address"]) or _own_address(request["peer"])
    leases, lease_error = _lease_facts()
    # What already exists of the planned run: its tmux session, else its run folder.
    run_dir, session = os.path.expanduser(request["run_dir"]), request["session"]
    taken = run_dir if run_dir and os.path.exists(run_dir) else ""
    if session and machine.tmux_has(session):
        taken = "tmux session %s" % session
    facts: dict[str, Any] = {
        "hostname": socket.gethostname(),
        "home": os.path.expanduser("~"),
        "ids": "%d:%d" % (os.getuid(), os.getgid()),
        "address": address,
        "addresses": own,
        "interface": interface_of(address, own),
        "python": sys.executable,
        "versions": packages.versions(request.get("packages", [])),
        "boot_id": machine.read("/proc/sys/kernel/random/boot_id").strip(),
        "leases": leases,
        "lease_error": lease_error,
        "busy_ports": busy_ports(request["ports"], leases),
        "names": resolved(request.get("names", [])),
        "manifest": bool(request["manifest"]) and os.path.isfile(os.path.expanduser(request["manifest"])),
        "graph": packages.graph_size(request["manifest"]),
        "taken": taken,
    }
    facts.update(machine.capacity())
    facts.update(folders.folders(os.path.expanduser(request["workdir"]), request.get("code", "")))
    facts["stored"] = folders.stored(os.path.expanduser(request.get("parts", "")))
    facts["leftovers"] = leftovers(facts["workdir"])
    facts["tmux"] = machine.tmux_version(started)
    facts["tmux_error"] = machine.tmux_folder_error()
    facts.update(gpus(started))
    return facts


def numeric(name: str) -> str:
    """Return the numeric address of a configured host name or address; '' when it does not resolve.

    Also returns '' for a host name other than ``localhost`` that resolves to a loopback address, as many machines
    resolve their own name to such an address.
    """
    found = lookup(name) if name else ""
    return "" if is_loopback(found) and found != name and name != "localhost" else found


def lookup(name: str) -> str:
    """Return the first address of a host name; '' when it does not resolve."""
    try:
        return str(socket.getaddrinfo(name, None)[0][4][0])
    except (OSError, UnicodeError):
        return ""


def resolved(names: Iterable[str]) -> dict[str, str]:
    """Return the address of each name, or '' when it does not resolve. Resolves all at once."""
    import threading

    found = dict.fromkeys(names, "")
    threads = [threading.Thread(target=lambda n=name: found.update({n: lookup(n)}), daemon=True) for name in found]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + RESOLVE_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(found)


def _own_address(peer: str) -> str:
    """Return this machine's address in the current SSH connection, else on the route to ``peer``, else loopback."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    arrived = words[2].replace("::ffff:", "").split("%")[0] if len(words) == 4 else ""
    if arrived and not is_loopback(arrived):
        return arrived
    try:
        family, kind, proto, _, target = socket.getaddrinfo(peer, 9, 0, socket.SOCK_DGRAM)[0]
        sock = socket.socket(family, kind, proto)
        try:
            sock.connect(target)
            return str(sock.getsockname()[0])
        finally:
            sock.close()
    except (OSError, UnicodeError):
        return arrived or "127.0.0.1"


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def interface_of(address: str, own: list[tuple[str, str]]) -> str:
    """Return the network interface of ``address``; '' when ``own`` lacks it. own: pairs (interface, address)."""
    return "lo" if address.startswith("127.") else next((name for name, one in own if one == address), "")


def _lease_facts() -> tuple[list[dict[str, Any]], str]:
    """Return the valid leases, and why leases cannot be read ('' if they can).

    Each lease is a dict of its fields; "words" has a description for messages, "needs" what it takes or waits for.
    """
    try:
        if not os.listdir(os.environ.get("GNNFLEET_LEASES") or _LEASES):
            return [], ""
    except FileNotFoundError:
        return [], ""
    except OSError:
        pass  # lease.held raises LeaseError with a message
    from launcher.node import leases as lease  # imported only where leases exist, to start fast

    try:
        return [dict(one._asdict(), words=lease.describe(one), needs=sorted(one.needs)) for one in lease.held()], ""
    except lease.LeaseError as error:
        return [], str(error)


def leftovers(workdir: str) -> list[dict[str, Any]]:
    """Return "run_id", "pids", "commands" of each run whose supervisor ended without a result and left processes.

    A process belongs to a run if the last state.json of the run lists it, or if GNNFLEET_RUN_DIR in its environment is
    the folder of the run. Only the last ``_RUNS`` runs by name are examined.
    """
    runs = os.path.join(workdir, "runs")
    run_ids: dict[str, str] = {}  # by run folder of a node, as are the pids
    pids: dict[str, set[int]] = {}
    for run_id in sorted(os.listdir(runs))[-_RUNS:] if os.path.isdir(runs) else ():
        run = os.path.join(runs, run_id)
        for name in os.listdir(run) if os.path.isdir(run) else ():
            folder = os.path.join(run, name)
            if name.startswith("node") and not os.path.exists(os.path.join(folder, "result.json")):
                from launcher.node import procs  # needed on few machines

                state = folders.state_of(folder)
                if state and not procs.alive(state.get("pid"), state.get("start_ticks")):
                    known = [
                        one["pid"] for one in state.get("processes", ()) if procs.alive(one["pid"], one["start_ticks"])
                    ]
                    run_ids[folder], pids[folder] = run_id, set(known)
    for pid in filter(str.isdigit, os.listdir("/proc")) if pids else ():
        try:
            with open("/proc/%s/environ" % pid, "rb") as file:
                entries = file.read().split(b"\0")
        except OSError:  # the process has ended, or belongs to another user
            continue
        value = next((entry for entry in entries if entry.startswith(b"GNNFLEET_RUN_DIR=")), b"=").split(b"=", 1)[1]
        folder = os.path.realpath(value.decode("utf-8", "replace")) if value else ""
        if folder in pids:
            pids[folder].add(int(pid))
    return [
        {"run_id": run_ids[folder], "pids": sorted(found), "commands": sorted({machine.command(pid) for pid in found})}
        for folder, found in sorted(pids.items())
        if found
    ]


def gpus(started: dict[str, Any]) -> dict[str, Any]:
    """Return {"devices": names, "gpus": facts about each, "driver": version}, in the order of nvidia-smi (PCI bus).

    Also "faults", of ``gpu_health.add``. started: started commands by name. The result is read from the output of
    "nvidia-smi"; without this command the lists are empty.
    """
    if "nvidia-smi" not in started:
        return {"devices": [], "gpus": [], "driver": "", "faults": []}
    from launcher.node.programs import gpu_health

    health = gpu_health.start()
    found = machine.look(machine.finish(started["nvidia-smi"]))
    return dict(found, faults=gpu_health.add(found["gpus"], health))


def busy_ports(ports: Sequence[int], leases: Iterable[dict[str, Any]] = ()) -> dict[str, str]:
    """Return {port: text} for the ports that are in use or leased: ``in use (pid 7: python)``, ``held by run X …``."""
    busy = {str(port): "in use (%s)" % (holder(port) or "process unknown") for port in ports if not _can_listen(port)}
    for lease in leases:
        kind, _, port = lease["resource"].partition(":")
        if kind == "port" and int(port) in ports:
            busy[port] = lease["words"]
    return busy


def _can_listen(port: int) -> bool:
    """Whether a server can listen on ``port`` on all addresses. Connections in TIME_WAIT do not count."""
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue  # no IPv6 on this machine
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            sock.bind((address, port))
            sock.listen(1)
        except OSError as error:
            if family == socket.AF_INET6 and error.errno == 99:  # EADDRNOTAVAIL: IPv6 is disabled
                continue
            return False
        finally:
            sock.close()
    return True


def holder(port: int) -> str:
    """Return pid and command of the process that listens on ``port``, as far as /proc shows them; '' if none."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in machine.read(table).splitlines()[1:]:
            words = line.split()
            if words[3] == _LISTEN and int(words[1].rpartition(":")[2], 16) == port:
                inodes.add("socket:[%s]" % words[9])
    for pid in filter(str.isdigit, os.listdir("/proc")) if inodes else ():
        if inodes & open_files(pid):
            return "pid %s: %s" % (pid, machine.command(int(pid)))
    return "a process of another user" if inodes else ""


def open_files(pid: str) -> set[str]:
    try:
        base = "/proc/%s/fd/" % pid
        return {os.readlink(base + fd) for fd in os.listdir(base)}
    except OSError:  # the process has ended, or belongs to another user
        return set()
