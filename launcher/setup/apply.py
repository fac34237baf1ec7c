"""Carries out a ``SetupPlan``: brings the wheels to the hosts and installs them, on all hosts in parallel."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.command import Command
from launcher.node.programs.packages import PACKAGES
from launcher.plan.model import PlannedFile
from launcher.setup.plan import HostPlan, SetupPlan
from launcher.setup.wheels import SetupError, Wheel
from launcher.sync.progress import TransferProgress
from launcher.sync.transfer import FileTransfer, Stopped
from launcher.text import count
from launcher.transport.base import Transport
from launcher.transport.fanout import on_nodes
from launcher.transport.rpc import NodeAgent

_POLL = 1.0  # seconds between progress reports of downloads

_CALL_TIMEOUT = 120.0  # seconds

_INSTALL_TIMEOUT = 5400.0  # seconds; longer than the timeouts of node/programs/install.py together

#: Modules that must be importable after an installation, and their packages
_MODULES = {**{name: name.replace("_", "-") for name in PACKAGES}, "numba.cuda": "numba-cuda", "gnnfleet": "gnnfleet"}


@dataclass(frozen=True)
class Connections:
    """Open connections to the nodes, by node_rank."""

    transports: Mapping[int, Transport]
    agents: Mapping[int, NodeAgent]
    pythons: Mapping[int, Command]  #: commands that start some Python there
    connect_timeout: float  #: seconds


@dataclass(frozen=True)
class Result:
    """A finished installation on one host."""

    seconds: float
    tool: str  #: uv or pip
    cuda: bool  #: whether torch can use CUDA there


@dataclass(frozen=True)
class _Receiver:
    node_rank: int
    label: str
    python: Command


class _WheelTransfer(FileTransfer):
    """The transfer of wheels to one host."""

    def __init__(self, files: list[PlannedFile], *rest: Any):
        super().__init__(*rest)
        self.files = files

    def send_all(self) -> None:
        self.send_files(list(zip(self.files, self.inventory(self.files)["files"], strict=True)))


def apply(
    plan: SetupPlan, paths: Mapping[Wheel, Path], connections: Connections, progress: TransferProgress
) -> tuple[dict[int, Result], dict[int, Exception]]:
    """Install on all hosts of ``plan.work``. A failure on one host does not stop the other hosts.

    Returns results and errors by node_rank. ``paths``: files on this machine of the wheels that are to be sent.
    """
    stop = threading.Event()
    hosts = {host.state.node_rank: host for host in plan.work}
    try:
        answers = on_nodes(hosts, lambda k: _set_up(hosts[k], paths, connections, progress, stop))
    finally:
        stop.set()  # Ctrl-C: threads of hosts that receive wheels end
    return answers.values, answers.errors


def _set_up(
    host: HostPlan,
    paths: Mapping[Wheel, Path],
    connections: Connections,
    progress: TransferProgress,
    stop: threading.Event,
) -> Result:
    k = host.state.node_rank
    folder = f"{host.state.environment}.setup"  # removed when the installation is complete
    wheels = f"{folder}/wheels"
    agent, environment, label = connections.agents[k], host.state.environment, host.state.label
    if host.fetched:  # the host downloads them; their bytes count as progress
        asked = [{"file": wheel.file, "url": wheel.url, "sha256": wheel.sha256} for wheel in host.fetched]
        agent.call("downloads", {"op": "fetch", "folder": wheels, "wheels": asked}, _CALL_TIMEOUT)
        received = total = 0
        while not stop.is_set():
            state = agent.call("downloads", {"op": "fetched", "seconds": _POLL}, _CALL_TIMEOUT)
            progress.start(k, state["total"] - total)
            progress.advance(k, state["bytes"] - received)
            received, total = state["bytes"], state["total"]
            if state["done"] and state["error"]:
                raise SetupError(f"{label}: a download failed: {state['error']}. Run gnnfleet setup again")
            if state["done"]:
                break
    if host.sent:
        files = [
            PlannedFile(f"{wheels}/{wheel.file}", paths[wheel].stat().st_size, str(paths[wheel]), sha256=wheel.sha256)
            for wheel in host.sent
        ]
        node = _Receiver(k, label, connections.pythons[k])
        transport = connections.transports[k]
        _WheelTransfer(files, node, transport, progress, stop, connections.connect_timeout).run()
    if stop.is_set():
        raise Stopped("stopped")
    progress.note(k, f"installing {count(len(host.changes), 'package')} in {environment}")
    assert host.lock is not None
    uv = host.lock.uv if host.lock.uv in host.wheels else None
    changed = {change.name for change in host.changes}
    request = {
        "op": "install",
        "environment": environment,
        "folder": folder,
        "base": host.base,
        "requirements": [wheel.pin for wheel in host.lock.wheels if wheel.name in changed],
        "uv": host.state.uv,
        "tool": uv.file if uv else "",
        "pip": host.lock.pip.file,
        "imports": [module for module, name in _MODULES.items() if name in host.lock.versions],
    }
    answer = agent.call("install", request, _INSTALL_TIMEOUT)
    if answer["error"]:
        raise SetupError(f"{label}: {answer['error']}")
    return Result(answer["seconds"], answer["tool"], answer["cuda"])
