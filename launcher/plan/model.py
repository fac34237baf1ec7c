"""The types of a plan: LaunchPlan, NodePlan, PlannedFile and others, and NodeFacts, from which a plan is built."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from launcher.command import Command
from launcher.config.schema import login_text
from launcher.files import file_sha256
from launcher.node.spec import RunNode
from trainer.core.train_config import TrainConfig

#: Option of Python for programs of ``launcher/node`` that need the standard library only. Without it Python reads the
#: .pth files of all installed packages, which can take longer than the rest of its start.
NO_SITE = "-S"


@dataclass(frozen=True)
class NodeFacts:
    node_rank: int
    hostname: str
    home: str  #: absolute path; replaces ``~`` in the plan
    address: str  #: address at which other nodes reach this one
    interface: str  #: network interface of ``address``
    python: str  #: absolute interpreter path
    versions: Mapping[str, str]  #: package -> version, '' if missing; includes 'python'
    tmux: str  #: version, '' if missing
    devices: tuple[str, ...]  #: names of CUDA devices by index
    disk_free: int  #: bytes at workdir
    memory: int  #: bytes
    cpus: int
    clock_offset: float  #: node's clock minus the launching machine's, seconds
    free_ports: tuple[int, ...]  #: candidate ports that are free, in order of preference
    addresses: tuple[str, ...] = ()  #: all addresses of the node
    topology_bytes: int = 0  #: mode ``verify``: bytes of the edges of all parts; 0 if the node does not have all
    device_memory: tuple[tuple[str, int], ...] = ()  #: UUID of each CUDA device, by index, and bytes of its memory
    ids: str = ""  #: ``uid:gid`` of the user
    bfloat16: str | None = None  #: the CPU's instructions for bfloat16, such as avx512_bf16; '' for none; None: unknown
    leases: tuple[Mapping[str, Any], ...] = ()  #: of all runs, see ``launcher.node.leases``

    def device_bytes(self, device: int | str) -> int:
        """Return the bytes of memory of a CUDA device, given by index or UUID; 0 if unknown, as for MIG instances."""
        if isinstance(device, int):
            return self.device_memory[device][1] if device < len(self.device_memory) else 0
        return next((size for uuid, size in self.device_memory if uuid.startswith(device)), 0)


@dataclass(frozen=True, kw_only=True)
class NodePlan(RunNode):
    """One node of a run: what all nodes know of it, and what the launcher needs."""

    node_rank: int
    login: Login | None  #: None: the launching machine itself (``transport: local``)
    devices: tuple[int | str, ...]  #: ids or UUIDs
    workdir: str
    code_dir: str  #: <workdir>/code/<digest>
    data_dir: str  #: path of the partition folder on this node; '' without parts
    run_dir: str  #: <workdir>/runs/<run_id>/node<k>
    service_port: int  #: of the graph server; 0: no server
    session: str  #: name of the tmux session, or of the step of the Slurm job
    start: Command  #: the supervisor, run by tmux or as that step; with ``wrap`` before it
    wrap: tuple[str, ...] = ()  #: words before every command that needs the trainer's Python, as for a container
    outer_python: tuple[str, ...] = ()  #: argv of a Python outside of ``wrap``; () without ``wrap``
    server: Command | None = None  #: the graph server, which the supervisor starts first; None: no server
    trainer: Command | None = None  #: the rank runner with its command, started once per rank; None: does not train
    files: tuple[PlannedFile, ...] = ()  #: all but gnnfleet's code, which is ``LaunchPlan.code``
    copies: tuple[int, ...] = ()  #: the parts in ``parts`` of which another node is the first holder
    home: str = ""  #: label of the graph server that a client asks first
    topology_bytes: int = 0  #: replicated topology: bytes of edges sent to the node for parts that it does not hold
    #: Slurm job of the node, of which the supervisor is a step; '%j': not submitted yet; '': it runs in a tmux session
    slurm_job: str = ""

    @property
    def place(self) -> str:
        """Where its supervisor runs: ``job 7``, or ``tmux session gnnfleet-r1-node0``."""
        return f"job {self.slurm_job}" if self.slurm_job else f"tmux session {self.session}"

    @property
    def target(self) -> str:
        """Name of the node's machine: ``user@host:port`` or, for the launching machine itself, ``local``.

        User and port are left out if the config does not give them.
        """
        return target_text(self.login)

    @property
    def host(self) -> str:
        """Host name to which SSH connects; ``local`` for the launching machine itself."""
        return self.login.host if self.login else "local"

    @property
    def python(self) -> Command:
        """Command that starts the node's Python, with the shell lines (``setup``) that make this Python available.

        With ``wrap``, it is the one outside, which can run ``launcher/node`` and may lack all packages.
        """
        return Command(self.outer_python or self.start.argv[:1], setup=self.start.setup)

    def file(self, name: str) -> PlannedFile:
        """Return the file ``name`` of the run folder itself, which a file of the user cannot be."""
        return next(file for file in self.files if file.dest == f"{self.run_dir}/{name}")

    def program(self, name: str, *words: str) -> Command:
        """Return the command that runs ``launcher/node/<name>.py`` on the node with the arguments ``words``.

        Interpreter, environment, working folder and ``setup`` are those of the supervisor; only the programs in
        ``store/`` can import installed packages, and only they run in ``wrap``.
        """
        python = (*self.wrap, self.start.argv[0]) if name.startswith("store/") else (*self.python.argv, NO_SITE)
        argv = (*python, f"{self.code_dir}/launcher/node/{name}.py", *words)
        return Command(argv, self.start.env, self.start.cwd, self.start.setup)


@dataclass(frozen=True)
class Topology:
    """Whether nodes have the edges of all parts (``replicated``) or of their own parts only (``partitioned``)."""

    choice: Literal["", "replicated", "partitioned"] = ""  #: '': not decided yet, or no parts on other nodes
    why: str = ""  #: reason, as text; '' if there is no choice
    bytes: int = 0  #: bytes of the edges of all parts; 0: unknown

    @property
    def replicated(self) -> bool:
        return self.choice == "replicated"


@dataclass(frozen=True)
class Partitioning:
    """The command by which the launching machine partitions the graph; it does nothing if the parts exist."""

    command: Command
    folder: str
    source: str  #: the graph: ``data.source``, else ``data.dataset``
    method: str
    graph: tuple[str, ...]  #: arguments for graph and method, without the folder; equal for equal parts
    store: str = ""  #: ``data.store``, to which the parts are uploaded; '' if they are sent from the folder


@dataclass(frozen=True)
class OwnCommand:
    """A user's command as it runs on every node, and the files for its working folder."""

    argv: tuple[str, ...]
    files: tuple[PlannedFile, ...]  #: dest relative to ``files/``
    notes: tuple[str, ...]  #: notes for the user


@dataclass(frozen=True)
class LaunchPlan:
    """The plan of a run or of a serving cluster: its nodes, ports, files and commands."""

    run_id: str
    name: str
    world_size: int
    num_parts: int
    master_addr: str
    master_port: int
    nodes: tuple[NodePlan, ...]
    partition: Partitioning | None  #: None in mode ``verify``, and if the parts belong to a serving cluster
    runs_dir: str
    code_digest: str
    final: bool  #: built with the facts of preflight
    notes: tuple[str, ...] = ()  #: notes for the user, such as values that preflight will fill in
    control_port: int | None = None  #: port of the hub on the lead node; None: supervisors do not connect to each other
    lead: int = 0  #: node_rank of the lead node: rank 0, master port, control port
    serving: str = ""  #: name of the serving cluster whose clients the nodes are; '': none
    version: int = 1  #: version of cluster.json
    topology: Topology = Topology()  #: whether each node has the edges of all parts
    sampling: str = ""  #: where processes with GPUs sample, as text; '': only CPUs sample, or the trainer does not run
    dataset: str = ""  #: ``data.dataset``; '' if the serving cluster defines it
    encrypted: bool = False  #: connections between graph servers and clients use the keys in ``service.key``
    own_command: tuple[str, ...] = ()  #: the user's command that ranks run; (): the bundled trainer
    train: TrainConfig | None = None  #: settings of the bundled trainer; None if it does not run
    manifest: str = ""  #: SHA-256 of the ``manifest.json`` sent with the parts; '' if no parts are sent (yet)
    code: tuple[PlannedFile, ...] = ()  #: gnnfleet's code; ``dest`` is relative to ``code_dir`` of each node

    @property
    def serve_only(self) -> bool:
        """Whether this is the plan of a serving cluster, in which no node trains."""
        return not self.world_size

    def sent_bytes(self, node: NodePlan) -> int:
        """Return the bytes of all files that ``node`` gets: gnnfleet's code, and its own files."""
        return sum(file.bytes for file in node.files) + self._code_bytes

    def sent_files(self, node: NodePlan) -> int:
        """Return the number of these files."""
        return len(node.files) + len(self.code)

    @cached_property
    def _code_bytes(self) -> int:
        return sum(file.bytes for file in self.code)


def target_text(login: Login | None) -> str:
    """Return the name of a node's machine: ``user@host:port`` or, without ``login``, ``local``.

    User and port are left out if the config does not give them.
    """
    return str(login) if login else "local"


@dataclass(frozen=True)
class Login:
    """User, host and port for SSH; if user or port is None, ssh_config decides."""

    user: str | None
    host: str
    port: int | None

    def __str__(self) -> str:
        return login_text(self.user, self.host, self.port)


@dataclass(frozen=True)
class PlannedFile:
    """A file that a node needs before its processes start.

    One of ``source``, ``content`` and ``url`` is set; none for files created at launch (run.json, service.key).
    """

    dest: str  #: path on the node
    bytes: int  #: 0 if created at launch
    source: str = ""  #: path on the launching machine
    content: str = ""  #: generated text; a ``Secret`` if ``secret``
    sha256: str = ""  #: '' if created at launch
    mode: int = 0o644
    secret: bool = False
    url: str = ""  #: place in ``data.store``, from which the node fetches the file itself


def generated(dest: str, content: str, *, mode: int = 0o644, secret: bool = False) -> PlannedFile:
    raw = content.encode()
    return PlannedFile(dest, len(raw), "", content, hashlib.sha256(raw).hexdigest(), mode, secret)


def copied(dest: str, source: Path, *, mode: int = 0o644) -> PlannedFile:
    """Return a ``PlannedFile`` that is copied from the launching machine; reads ``source`` for its size and digest."""
    return PlannedFile(dest, source.stat().st_size, str(source), "", file_sha256(source), mode)
