"""Starts graph servers and waits until they serve; on failure stops those that were started."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from launcher.command import Command
from launcher.config.schema import RunConfig
from launcher.errors import FleetError, TransportError, reason_of
from launcher.manage.node_views import if_there, node_view, was_absent
from launcher.node import procs
from launcher.plan.model import LaunchPlan, NodePlan
from launcher.report.run_folder import boot_id, user_at_host
from launcher.report.verdict import NodeView
from launcher.run.tmux_session import STOP_EXTRA, how_to_stop, start_session, stop_session
from launcher.serving.cluster_state import ServerState, on_lines, remove_files
from launcher.transport.base import Completed, Transport
from launcher.transport.fanout import on_nodes

_EVERY = 0.5  # seconds between two looks

_SLACK = 15.0  # seconds a supervisor may take beyond start_timeout to say that it failed

_STOP = 5.0

_ENDED = (
    "state.json result.json team.json server.ready digests.json server_stats.json control outcomes procs clients"
).split()

_NO_FILES = ("--only", "")


def clear_node(node: NodePlan, line: Transport, *, keeps_key: bool) -> None:
    """End what a dead supervisor has left, and remove what would be taken for news of the next one."""
    words = ("stop", node.run_dir, "--timeout", f"{_STOP:g}", "--session", node.session, "--now")
    stop = node.program("control", *words, "--why", "gnnfleet serve")
    done = line.run(if_there(node, stop), timeout=_STOP + STOP_EXTRA)
    if done.returncode and not was_absent(done):
        said = (done.stderr or done.stdout).decode("utf-8", "replace").strip().splitlines()
        raise FleetError(f"{node.label}: what is left of its last graph server cannot be ended: {' '.join(said[-1:])}")
    names = _ENDED if keeps_key else [*_ENDED, "service.key"]
    remove_files(line, [f"{node.run_dir}/{name}" for name in names])


def bring_up(plan: LaunchPlan, lines: Mapping[int, Transport], run: RunConfig) -> None:
    """Start all nodes of ``plan``, whose files are there, and return when all serve.

    Raises FleetError with the first cause; no node of ``plan`` is left running then, nor after Ctrl-C.
    """
    nodes = {node.node_rank: node for node in plan.nodes}
    try:
        on_nodes(nodes, lambda k: start_session(lines[k], nodes[k], start_timeout=run.start_timeout)).or_raise()
        _await_serving(nodes, lines, time.monotonic() + run.start_timeout + _SLACK)
    except BaseException as error:
        left = _stop_all(nodes, lines, run.grace)
        if left and isinstance(error, FleetError):
            raise FleetError(f"{error}\n" + "\n".join(left)) from error
        raise


def _await_serving(nodes: Mapping[int, NodePlan], lines: Mapping[int, Transport], deadline: float) -> None:
    waiting = set(nodes)
    while waiting:
        views = on_nodes(waiting, lambda k: node_view(nodes[k], lines[k], _NO_FILES)).or_raise()
        ended = [view for view in views.values() if view.result is not None or view.lost]
        if ended:
            raise FleetError(_why_ended(min(ended, key=_when), lines))
        waiting = {k for k, view in views.items() if view.word != "serving"}
        if waiting and time.monotonic() > deadline:
            late = ", ".join(nodes[k].label for k in sorted(waiting))
            raise FleetError(f"{late}: no graph server there, and no word of why; see {_log(nodes[min(waiting)])}")
        if waiting:
            time.sleep(_EVERY)


def _when(view: NodeView) -> float:
    cause: Mapping[str, Any] = (view.result or {}).get("cause") or {}
    return float(cause.get("t", view.now)) - view.offset


def _why_ended(view: NodeView, lines: Mapping[int, Transport]) -> str:
    """The node's own words, and the last of its graph server."""
    result = view.result or {}
    why = view.lost or str(result.get("reason", "")) or f"it ended ({view.word})"
    tail = [line for one in result.get("outcomes", ()) if one["name"] == "server" for line in one["tail"]]
    said = "".join(f"\n  {line}" for line in tail[-12:])
    return f"{view.node.label}: {why}{said}\nits log: {_log(view.node)}"


def _log(node: NodePlan) -> str:
    where = "" if node.login is None else f"{node.target}:"
    return f"{where}{node.run_dir}/logs/server.log"


def _stop_all(nodes: Mapping[int, NodePlan], lines: Mapping[int, Transport], grace: float) -> list[str]:
    """What may go on running, in words."""
    errors = on_nodes(nodes, lambda k: _stop_node(nodes[k], lines[k], grace)).errors
    return [f"{nodes[k].label} may still run: {error}. {how_to_stop(nodes[k])}" for k, error in errors.items()]


def _stop_node(node: NodePlan, line: Transport, grace: float) -> None:
    report = stop_session(line, node, timeout=grace + STOP_EXTRA, by=user_at_host(), why="gnnfleet serve")
    if not report.stopped:
        raise FleetError(f"still running: {', '.join(report.leftovers)}")


Lines = Mapping[int, Transport | TransportError]

_TOLD = ("run.json", "cluster.json")  # the last one is what servers look at


def tell_others(plan: LaunchPlan, lines: Lines, but: Sequence[int]) -> list[str]:
    """Give the nodes that go on (all but those) the plan as it is now; of those that do not get it, why."""
    others = {node.node_rank: node for node in plan.nodes if node.parts and node.node_rank not in but}

    def tell(k: int, line: Transport) -> None:
        for name in _TOLD:
            file = next(file for file in others[k].files if file.dest.endswith(f"/{name}"))
            line.write(file.content.encode(), file.dest, mode=file.mode)

    errors = on_lines({k: lines[k] for k in others}, tell)
    return [
        f"{others[k].label} has not been told of the change ({reason_of(error)}); when it can be reached, serve again"
        for k, error in sorted(errors.items())
    ]


def stop_gone(
    nodes: Mapping[int, NodePlan], lines: Lines, there: Mapping[int, ServerState], gone: Sequence[int], grace: float
) -> list[str]:
    """Stop the nodes that were taken out; of those that may still run, why."""
    alive = [k for k in gone if there[k].view.alive or there[k].view.unreachable]
    errors = on_lines({k: lines[k] for k in alive}, lambda k, line: _stop_node(nodes[k], line, grace))
    return [
        f"{nodes[k].label} was taken out, but may still run: {reason_of(error)}. {how_to_stop(nodes[k])}"
        for k, error in sorted(errors.items())
    ]


_TIMEOUT = 30.0

_KEPT_EVERY = 15.0  # seconds between two signs of life of the launcher whose turn it is

_DEAD_AFTER = 90  # seconds without one after which a turn is over

#: $1 file, $2 who, $3 run folder, $4 seconds after which a file that nobody touches is a dead launcher's. Exit status
#: 9: somebody else's turn, with who on stdout; 8: a supervisor works there, as its heartbeat of each second shows.
_TAKE = """
mkdir -p -- "$(dirname -- "$1")"
touched=$(stat -c %Y "$1" 2>/dev/null) && [ $(($(date +%s) - touched)) -gt "$4" ] && rm -f -- "$1"
if ! (set -C; printf %s "$2" >"$1") 2>/dev/null; then
  [ -e "$1" ] || exit 1
  cat -- "$1"; exit 9
fi
[ ! -e "$3/result.json" ] && beat=$(stat -c %Y "$3/state.json" 2>/dev/null) || exit 0
[ $(($(date +%s) - beat)) -gt 4 ] || { rm -- "$1"; exit 8; }
"""

_TAKEN, _STARTED = 9, 8

#: Of a launcher: who, pid, start of the process, boot id of its machine.
_WHO = re.compile(r"(?P<who>[^\s@]+@\S+) (?P<pid>\d{1,9}) (?P<start_ticks>\d{1,18}) (?P<boot_id>[\w-]+)$")


@contextmanager
def own_turn(plan: LaunchPlan, lines: Mapping[int, Transport]) -> Iterator[None]:
    """Nobody else starts the nodes of ``plan`` meanwhile; raises FleetError when somebody does, or just has."""
    nodes = {node.node_rank: node for node in plan.nodes}
    taken: set[int] = set()
    over = threading.Event()

    def begin(k: int) -> None:
        _begin_turn(nodes[k], lines[k], plan.run_id)
        taken.add(k)

    def keep() -> None:
        while not over.wait(_KEPT_EVERY):
            on_nodes(taken, lambda k: lines[k].run(Command(("touch", "-c", _file(nodes[k]))), timeout=_TIMEOUT))

    try:
        on_nodes(nodes, begin).or_raise()
        threading.Thread(target=keep, daemon=True).start()
        yield
    finally:
        over.set()
        on_nodes(taken, lambda k: _end_turn(nodes[k], lines[k]))


def _file(node: NodePlan) -> str:
    return f"{node.run_dir}.starting"


def _begin_turn(node: NodePlan, line: Transport, name: str) -> None:
    me = procs.look(os.getpid())
    mark = f"{user_at_host()} {os.getpid()} {me.start_ticks if me else 0} {boot_id() or '-'}"
    words = ("bash", "-c", _TAKE, "bash", _file(node), mark, node.run_dir, str(_DEAD_AFTER))
    done = line.run(Command(words), timeout=_TIMEOUT)
    if done.returncode == _TAKEN and _is_dead(_said(done)):
        remove_files(line, [_file(node)])
        done = line.run(Command(words), timeout=_TIMEOUT)
    if done.returncode == _STARTED:
        raise FleetError(f"{node.label}: its graph server has been started meanwhile; serve again")
    if done.returncode == _TAKEN:
        told = _WHO.search(_said(done))
        who = told["who"] if told else _said(done) or "somebody"
        raise FleetError(
            f"{node.label}: {who} is starting serving cluster {name} at this moment; when that is done, serve again "
            f"(should it have died: {_DEAD_AFTER} s after that)"
        )
    if done.returncode:
        raise FleetError(f"{node.label}: {_file(node)} cannot be written: {done.stderr.decode('utf-8', 'replace')}")


def _said(done: Completed) -> str:
    """Its last line; a profile may print before it."""
    return (done.stdout.decode("utf-8", "replace").strip().splitlines() or [""])[-1]


def _is_dead(mark: str) -> bool:
    """Whether a launcher of this machine has left it and runs no more."""
    told = _WHO.search(mark)
    here = told is not None and told["boot_id"] == boot_id() and told["who"].endswith(f"@{socket.gethostname()}")
    return told is not None and here and not procs.alive(int(told["pid"]), int(told["start_ticks"]))


def _end_turn(node: NodePlan, line: Transport) -> None:
    with suppress(TransportError, FleetError):  # then it counts no more when it is not kept
        remove_files(line, [_file(node)])
