"""One ``gnnfleet serve`` at a time: two that start the same nodes at once would end each other's servers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from launcher.command import Command
from launcher.errors import FleetError, TransportError
from launcher.fanout import on_nodes
from launcher.plan.build import LaunchPlan, NodePlan
from launcher.report.run_folder import user_at_host
from launcher.serving.cluster_state import remove_files
from launcher.transport.base import Transport

_TIMEOUT = 30.0

#: $1 file, $2 who, $3 run folder. Exit status 9: somebody else's turn, with who on stdout; 8: a supervisor works there,
#: as its heartbeat of each second shows. A file left by a dead launcher counts for an hour.
_TAKE = """
mkdir -p -- "$(dirname -- "$1")" && find "$1" -mmin +60 -delete 2>/dev/null
if ! (set -C; printf %s "$2" >"$1") 2>/dev/null; then
  [ -e "$1" ] || exit 1
  cat -- "$1"; exit 9
fi
[ ! -e "$3/result.json" ] && beat=$(stat -c %Y "$3/state.json" 2>/dev/null) || exit 0
[ $(($(date +%s) - beat)) -gt 4 ] || { rm -- "$1"; exit 8; }
"""

_TAKEN, _STARTED = 9, 8


@contextmanager
def own_turn(plan: LaunchPlan, lines: Mapping[int, Transport]) -> Iterator[None]:
    """Nobody else starts the nodes of ``plan`` meanwhile; raises FleetError when somebody does, or just has."""
    nodes = {node.node_rank: node for node in plan.nodes}
    taken: set[int] = set()

    def take(k: int) -> None:
        _take(nodes[k], lines[k], plan.run_id)
        taken.add(k)

    try:
        on_nodes(nodes, take).or_raise()
        yield
    finally:
        on_nodes(taken, lambda k: _give_back(nodes[k], lines[k]))


def _file(node: NodePlan) -> str:
    return f"{node.run_dir}.starting"


def _take(node: NodePlan, line: Transport, name: str) -> None:
    done = line.run(Command(("bash", "-c", _TAKE, "bash", _file(node), user_at_host(), node.run_dir)), timeout=_TIMEOUT)
    if done.returncode == _STARTED:
        raise FleetError(f"{node.label}: its graph server has been started meanwhile; serve again")
    if done.returncode == _TAKEN:
        who = done.stdout.decode("utf-8", "replace").strip().splitlines()[-1:] or ["somebody"]
        raise FleetError(
            f"{node.label}: {who[0]} is starting serving cluster {name} at this moment; when that is done, serve again "
            f"(should it have died: remove {_file(node)} there)"
        )
    if done.returncode:
        raise FleetError(f"{node.label}: {_file(node)} cannot be written: {done.stderr.decode('utf-8', 'replace')}")


def _give_back(node: NodePlan, line: Transport) -> None:
    with suppress(TransportError, FleetError):  # then it counts no more in an hour
        remove_files(line, [_file(node)])
