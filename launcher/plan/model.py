"""The plan as values: LaunchPlan, NodePlan, the files it places on nodes, and the facts it is made from."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from launcher.command import Command
from launcher.config.schema import Role, TrainConfig, login_text
from launcher.errors import node_label
from launcher.files import file_sha256


@dataclass(frozen=True)
class NodeFacts:
    """What preflight learned about one node (see ``launcher.preflight.preflight``)."""

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
    free_ports: tuple[int, ...]  #: of those asked for, the ones that could be bound, in the order to take them
    addresses: tuple[str, ...] = ()  #: all of its own
    topology_bytes: int = 0  #: in mode verify, of the edges of all parts, if it sees them all


@dataclass(frozen=True)
class NodePlan:
    """All that happens on one node."""

    node_rank: int
    login: Login | None  #: None: the launching machine itself (``transport: local``)
    nproc: int
    ranks: tuple[int, ...]
    devices: tuple[int, ...]
    parts: tuple[int, ...]  #: part ids this node holds
    address: str
    workdir: str
    code_dir: str  #: <workdir>/code/<digest>
    data_dir: str  #: partition folder as this node sees it; '' without parts
    run_dir: str  #: <workdir>/runs/<run_id>/node<k>
    master_port: int
    service_port: int
    session: str  #: tmux session name
    start: Command  #: what tmux runs: the supervisor
    server: Command | None  #: what the supervisor starts first; None: nothing to serve
    trainer: Command | None  #: the rank runner with its command, started once for each rank; None: nothing to train
    files: tuple[PlannedFile, ...]
    log_files: tuple[str, ...]
    role: Role = "worker"
    copies: tuple[int, ...] = ()  #: of ``parts``, those that another node holds in the first place
    home: str = ""  #: label of the graph server that a client asks first
    trainer_index: int | None = None  #: among the nodes that train: GROUP_RANK
    topology_bytes: int = 0  #: edges of parts that it does not hold, sent to it all the same

    @property
    def target(self) -> str:
        """``user@host:port`` as far as the cluster file gives it, or ``local``."""
        return target_text(self.login)

    @property
    def host(self) -> str:
        """The host of the login, or ``local``."""
        return self.login.host if self.login else "local"

    @property
    def python(self) -> Command:
        """The node's interpreter, with the setup lines that it needs."""
        return Command(self.start.argv[:1], setup=self.start.setup)

    def program(self, name: str, *words: str) -> Command:
        """``launcher/node/<name>.py`` of the run's code, with the interpreter and surroundings of the supervisor."""
        argv = (*self.start.argv[:1], f"{self.code_dir}/launcher/node/{name}.py", *words)
        return Command(argv, self.start.env, self.start.cwd, self.start.setup)

    @property
    def label(self) -> str:
        """``node1 (alice@gnn2)``, as messages name a node."""
        return node_label(self.node_rank, self.target)


@dataclass(frozen=True)
class Topology:
    """The choice, and why."""

    choice: Literal["", "replicated", "partitioned"] = ""  #: '': not decided yet, or no parts on other nodes
    why: str = ""  #: in words; '' where there is nothing to choose
    bytes: int = 0  #: of the edges of all parts, on every node that holds some; 0: not known

    @property
    def replicated(self) -> bool:
        return self.choice == "replicated"


@dataclass(frozen=True)
class Partitioning:
    """What the partitioner makes on this machine before sync; nothing when the parts are there."""

    command: Command
    folder: str
    source: str  #: what is cut: ``data.source``, else ``data.dataset``
    method: str
    graph: tuple[str, ...]  #: the arguments that say what is cut, and how; equal for equal parts, in whatever folder


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
    partition: Partitioning | None  #: None in mode verify, and where the parts are a serving cluster's
    runs_dir: str
    code_digest: str
    final: bool  #: made with the facts of preflight, so nothing can change any more
    notes: tuple[str, ...] = ()  #: what preflight will still decide
    control_port: int | None = None  #: on the lead node, by which the nodes know of each other; None: they need not
    lead: int = 0  #: node_rank of the first node that trains: rank 0, master port, control port
    serving: str = ""  #: the serving cluster whose clients the nodes are; '': they serve themselves
    version: int = 1  #: of cluster.json
    topology: Topology = Topology()  #: whether each node has the edges of all parts
    dataset: str = ""  #: ``data.dataset``; '' where the file leaves it to the serving cluster
    encrypted: bool = False  #: graph servers and clients talk by the keys in ``service.key``
    own_command: tuple[str, ...] = ()  #: what the ranks run; (): the bundled trainer
    train: TrainConfig | None = None  #: of the bundled trainer; None with an own command, and where nothing trains
    manifest: str = ""  #: sha256 of the ``manifest.json`` that is sent with the parts; '' where none are (yet)

    @property
    def serve_only(self) -> bool:
        """Nothing trains: a serving cluster."""
        return not self.world_size


@dataclass(frozen=True)
class KeptServers:
    """What a serving cluster keeps when its plan is made anew, with other nodes: by node_rank in the new plan."""

    version: int = 1  #: of the new cluster.json
    parts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    service_ports: Mapping[int, int] = field(default_factory=dict)
    nodes: Mapping[int, NodePlan] = field(default_factory=dict)  #: those not started now, as they were planned


def target_text(login: Login | None) -> str:
    """``user@host:port`` as far as given, or ``local``: how messages and tables name a node's machine."""
    return str(login) if login else "local"


@dataclass(frozen=True)
class Login:
    """How SSH reaches a node, as far as the cluster file says; the rest is for ssh_config to say."""

    user: str | None
    host: str
    port: int | None

    def __str__(self) -> str:
        return login_text(self.user, self.host, self.port)


@dataclass(frozen=True)
class PlannedFile:
    """One file to be on the node before start.

    Exactly one of source and content is set; neither for what is made at launch (service.key).
    """

    dest: str  #: path on the node
    bytes: int  #: 0 when made at launch
    source: str = ""  #: path on this machine
    content: str = ""  #: generated text; a ``Secret`` when ``secret``
    sha256: str = ""  #: '' when made at launch
    mode: int = 0o644
    secret: bool = False


def generated(dest: str, content: str, *, mode: int = 0o644, secret: bool = False) -> PlannedFile:
    """A file whose text the plan itself holds."""
    raw = content.encode()
    return PlannedFile(dest, len(raw), "", content, hashlib.sha256(raw).hexdigest(), mode, secret)


def copied(dest: str, source: Path, *, mode: int = 0o644) -> PlannedFile:
    """A file of this machine, read for its size and digest."""
    return PlannedFile(dest, source.stat().st_size, str(source), "", file_sha256(source), mode)
