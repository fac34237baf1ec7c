"""Starts and stops the graph servers of a serving cluster; a lock on each node admits one ``serve`` at a time."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from launcher.command import Command
from launcher.config.schema import RunConfig
from launcher.errors import FleetError
from launcher.manage.node_views import node_view
from launcher.node import procs
from launcher.node.supervisor.server_keeper import COMPILING
from launcher.plan.model import LaunchPlan, NodePlan
from launcher.report.launch_file import user_at_host
from launcher.report.verdict import NodeView
from launcher.run.tmux_session import start_session, stop_node, stop_session
from launcher.serving.cluster_state import remove_files
from launcher.transport.base import Completed, Transport
from launcher.transport.fanout import on_nodes

_EVERY = 0.5  # seconds between two queries

_SLACK = 15.0  # seconds beyond start_timeout for a supervisor to report a failure

_STOP = 5.0  # seconds for leftover processes to stop

_OLD_FILES = (
    "state.json result.json server.ready digests.json server_stats.json control outcomes procs clients"
).split()

_NO_FILES = ("--only", "")


def clear_node(node: NodePlan, transport: Transport, *, keeps_key: bool) -> None:
    """End the processes that a dead supervisor left on a node, and remove its files.

    ``keeps_key``: keep ``service.key``.
    """
    report = stop_session(transport, node, timeout=_STOP, why="gnnfleet serve", now=True, if_there=True)
    if report.leftovers:
        left = ", ".join(report.leftovers)
        raise FleetError(f"{node.label}: processes of its last graph server cannot be stopped: {left}")
    names = _OLD_FILES if keeps_key else [*_OLD_FILES, "service.key"]
    remove_files(transport, [f"{node.run_dir}/{name}" for name in names])


def start_servers(plan: LaunchPlan, transports: Mapping[int, Transport], run: RunConfig) -> None:
    """Start all nodes of ``plan``, whose files were sent before, and return when all serve.

    Raises FleetError for the first node that fails; on any exception all nodes of ``plan`` are stopped.
    """
    nodes = {node.node_rank: node for node in plan.nodes}
    try:
        on_nodes(nodes, lambda k: start_session(transports[k], nodes[k], start_timeout=run.start_timeout)).or_raise()
        deadline = time.monotonic() + run.start_timeout + COMPILING + _SLACK
        waiting = set(nodes)
        while waiting:
            views = on_nodes(waiting, lambda k: node_view(nodes[k], transports[k], _NO_FILES)).or_raise()
            ended = [view for view in views.values() if view.result is not None or view.lost]
            if ended:
                view = min(ended, key=_when)
                result = view.result or {}
                why = view.lost or str(result.get("reason", "")) or f"it ended ({view.word})"
                tail = [text for one in result.get("outcomes", ()) if one["name"] == "server" for text in one["tail"]]
                log = "".join(f"\n  {text}" for text in tail[-12:])
                raise FleetError(f"{view.node.label}: {why}{log}\nits log: {_log(view.node)}")
            waiting = {k for k, view in views.items() if view.word != "serving"}
            if waiting and time.monotonic() > deadline:
                late = ", ".join(nodes[k].label for k in sorted(waiting))
                log = _log(nodes[min(waiting)])
                raise FleetError(f"{late}: the graph server did not start in time and reported no error; see {log}")
            if waiting:
                time.sleep(_EVERY)
    except BaseException as error:
        notes = on_nodes(nodes, lambda k: stop_node(nodes[k], transports[k], run, "gnnfleet serve")).values
        left = [note for note in notes.values() if note]
        if left and isinstance(error, FleetError):
            raise FleetError(f"{error}\n" + "\n".join(left)) from error
        raise


def _when(view: NodeView) -> float:
    cause: Mapping[str, Any] = (view.result or {}).get("cause") or {}
    return float(cause.get("t", view.now)) - view.offset


def _log(node: NodePlan) -> str:
    where = "" if node.login is None else f"{node.target}:"
    return f"{where}{node.run_dir}/logs/server.log"


_TIMEOUT = 30.0

_TOUCH_EVERY = 15.0  # seconds between two updates of the lock file by its owner

_DEAD_AFTER = 90  # seconds without update after which the lock is void

#: Takes the lock. $1: lock file, $2: owner, $3: run folder, $4: seconds without update after which a lock is void. Exit
#: status 9: another process has the lock, its owner is on stdout; 8: a supervisor runs there, by its heartbeat and pid.
_TAKE_LOCK = """
mkdir -p -- "$(dirname -- "$1")"
touched=$(stat -c %Y "$1" 2>/dev/null) && [ $(($(date +%s) - touched)) -gt "$4" ] && rm -f -- "$1"
if ! (set -C; printf %s "$2" >"$1") 2>/dev/null; then
  [ -e "$1" ] || exit 1
  cat -- "$1"; exit 9
fi
[ ! -e "$3/result.json" ] && beat=$(stat -c %Y "$3/state.json" 2>/dev/null) || exit 0
[ $(($(date +%s) - beat)) -gt 4 ] && exit 0
pid=$(grep -o '"pid": [0-9]*' -- "$3/state.json" | head -n 1)
[ -n "$pid" ] && case $(sed 's/.*) //' "/proc/${pid##* }/stat" 2>/dev/null) in
  ''|[ZX]*) exit 0 ;;  # it has ended; tmux may leave it a zombie for seconds
esac
rm -- "$1"; exit 8
"""

_LOCKED, _STARTED = 9, 8

#: Content of a lock file: user and host, pid, start time of the process in ticks, boot id of the machine.
_OWNER = re.compile(r"(?P<who>[^\s@]+@\S+) (?P<pid>\d{1,9}) (?P<start_ticks>\d{1,18}) (?P<boot_id>[\w-]+)$")


@contextmanager
def start_lock(plan: LaunchPlan, transports: Mapping[int, Transport]) -> Iterator[None]:
    """Hold a lock on each node of ``plan``, so that no other ``serve`` starts it at the same time.

    Raises FleetError if another process holds a lock, or a supervisor is already running on a node.
    """
    nodes = {node.node_rank: node for node in plan.nodes}
    locked: set[int] = set()
    over = threading.Event()

    def lock(k: int) -> None:
        _lock(nodes[k], transports[k], plan.run_id)
        locked.add(k)

    def keep() -> None:
        while not over.wait(_TOUCH_EVERY):
            on_nodes(
                locked, lambda k: transports[k].run(Command(("touch", "-c", _lock_file(nodes[k]))), timeout=_TIMEOUT)
            )

    try:
        on_nodes(nodes, lock).or_raise()
        threading.Thread(target=keep, daemon=True).start()
        yield
    finally:
        over.set()
        # a lock that cannot be removed becomes void, as it is no longer updated
        on_nodes(locked, lambda k: remove_files(transports[k], [_lock_file(nodes[k])]))


def _lock_file(node: NodePlan) -> str:
    return f"{node.run_dir}.starting"


def _lock(node: NodePlan, transport: Transport, name: str) -> None:
    process = procs.look(os.getpid())
    owner = f"{user_at_host()} {os.getpid()} {process.start_ticks if process else 0} {procs.boot_id() or '-'}"
    words = ("bash", "-c", _TAKE_LOCK, "bash", _lock_file(node), owner, node.run_dir, str(_DEAD_AFTER))
    done = transport.run(Command(words), timeout=_TIMEOUT)
    if done.returncode == _LOCKED and _is_dead(_last_row(done)):
        remove_files(transport, [_lock_file(node)])
        done = transport.run(Command(words), timeout=_TIMEOUT)
    if done.returncode == _STARTED:
        raise FleetError(f"{node.label}: another command has started its graph server; run `gnnfleet serve` again")
    if done.returncode == _LOCKED:
        match = _OWNER.search(_last_row(done))
        who = match["who"] if match else _last_row(done) or "another process"
        raise FleetError(
            f"{node.label}: {who} is starting serving cluster {name} at this moment; run `gnnfleet serve` again when "
            f"that command has ended, or after {_DEAD_AFTER} s if it was killed"
        )
    if done.returncode:
        raise FleetError(
            f"{node.label}: {_lock_file(node)} cannot be written: {done.stderr.decode('utf-8', 'replace')}"
        )


def _last_row(done: Completed) -> str:
    # A shell profile may have printed lines before the last one.
    return (done.stdout.decode("utf-8", "replace").strip().splitlines() or [""])[-1]


def _is_dead(owner: str) -> bool:
    """Whether ``owner``, the content of a lock file, names a process of this machine that has ended."""
    match = _OWNER.search(owner)
    if match is None or match["boot_id"] != procs.boot_id() or not match["who"].endswith(f"@{socket.gethostname()}"):
        return False
    return not procs.alive(int(match["pid"]), int(match["start_ticks"]))
