"""The plan: every command, file and port of a run as one frozen value.

``make_plan`` is pure: the same config and facts give the same plan, and it opens no
connection. ``launch`` applies exactly this value; ``--dry-run`` prints it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from launcher.script import Command


@dataclass(frozen=True)
class NodeFacts:
    """What preflight learned about one node (see ``launcher.preflight``)."""

    node_rank: int
    hostname: str
    home: str  #: absolute; replaces ``~`` in the plan
    address: str  #: where other nodes reach this one
    interface: str  #: of ``address``
    python: str  #: absolute interpreter path
    versions: Mapping[str, str]  #: package -> version, '' when missing; includes 'python'
    tmux: str  #: version, '' when missing
    devices: tuple[str, ...]  #: names of CUDA devices by index
    disk_free: int  #: bytes at workdir
    memory: int  #: bytes
    cpus: int
    clock_offset: float  #: node clock minus this machine's, seconds
    free_ports: tuple[int, ...]  #: of those asked for, the ones that could be bound


@dataclass(frozen=True)
class PlannedFile:
    """One file to be on the node before start. Exactly one of source/content is set."""

    dest: str  #: path on the node
    bytes: int
    source: str = ""  #: path on this machine
    content: str = ""  #: generated text
    sha256: str = ""  #: '' when made at launch (a part not partitioned yet)
    mode: int = 0o644
    secret: bool = False


@dataclass(frozen=True)
class NodePlan:
    """All that happens on one node."""

    node_rank: int
    target: str  #: user@host:port, as a person would read it
    nproc: int
    ranks: tuple[int, ...]
    devices: tuple[int, ...]
    parts: tuple[int, ...]  #: part ids this node owns
    address: str
    workdir: str
    code_dir: str  #: <workdir>/code/<digest>
    data_dir: str  #: partition folder as this node sees it
    run_dir: str  #: <workdir>/runs/<run_id>
    master_port: int
    service_port: int
    session: str  #: tmux session name
    start: Command  #: what tmux runs: the supervisor
    server: Command | None  #: what the supervisor starts first; None: nothing to serve
    trainer: Command  #: torch.distributed.run with the rank runner
    files: tuple[PlannedFile, ...]
    log_files: tuple[str, ...]


@dataclass(frozen=True)
class LaunchPlan:
    """A run, complete."""

    run_id: str
    name: str
    world_size: int
    num_parts: int
    master_addr: str
    master_port: int
    nodes: tuple[NodePlan, ...]
    partition: Command | None  #: run here before sync; None: parts exist or mode verify
    runs_dir: str
    code_digest: str
    final: bool  #: made with the facts of preflight, so nothing can change any more
    notes: tuple[str, ...] = ()  #: what preflight will still decide
