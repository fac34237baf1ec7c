"""The plan: every command, file and port of a run as one frozen value.

``make_plan`` is pure: the same config and facts give the same plan, and it opens no
connection. ``launch`` applies exactly this value; ``--dry-run`` prints it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.command import Command, Secret
from launcher.config.roles import ServingCluster, Standing, carried_out, lead, left_out
from launcher.config.schema import ClusterConfig, Role, login_text
from launcher.errors import UsageError, node_label
from launcher.hostlist import fold
from launcher.plan.codefiles import CODE_ROOT
from launcher.plan.commands import Job, node_commands
from launcher.plan.files import SharedFiles, node_files, shared_files
from launcher.plan.manifest import PartitionFiles
from launcher.plan.model import Login, PlannedFile
from launcher.plan.own_script import own_command_files, resume_file
from launcher.plan.placement import (
    Site,
    choose,
    control_candidates,
    make_sites,
    master_candidates,
    node_login,
    session_name,
    target_text,
)
from launcher.plan.topology import Topology, decide
from launcher.words import count, spans


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
    def label(self) -> str:
        """``node1 (alice@gnn2)``, as messages name a node."""
        return node_label(self.node_rank, self.target)


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
    partition: Command | None  #: run here before sync, a no-op when the parts exist; None in mode verify
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
    own_command: bool = False  #: the ranks run the user's command; False: the bundled trainer
    manifest: str = ""  #: sha256 of the ``manifest.json`` that is sent with the parts; '' where none are (yet)

    @property
    def serve_only(self) -> bool:
        """Nothing trains: a serving cluster."""
        return not self.world_size


_OWN_GOES_ON = (
    "run.on_client_loss: go-on: the bundled trainer goes on without a lost client (in an own command too, by "
    "trainer.train.job.train); others have to form a new process group themselves (team.json, docs/ARCHITECTURE.md)"
)


def make_plan(
    config: ClusterConfig,
    *,
    run_id: str,
    code_digest: str,
    facts: Mapping[int, NodeFacts] | None = None,
    own_command: tuple[str, ...] = (),
    manifest: PartitionFiles | None = None,
    token: Secret | None = None,
    operator: str = "",
    cwd: Path = Path(),
    serve_only: bool = False,
    standing: Standing | None = None,
    serving: ServingCluster | None = None,
) -> LaunchPlan:
    """The whole run as a value; opens no connection and starts nothing.

    ``facts`` are preflight's, ``manifest`` describes the parts that exist on this machine (mode sync),
    ``token`` marks the run's processes, ``operator`` (``alice@laptop``) their leases. ``cwd`` is where the
    files of ``own_command``, ``runs_dir`` and a relative ``resume`` are looked up. ``serve_only``: a serving
    cluster, which keeps what is ``standing``. ``serving``: what a config with ``data.serving`` attaches to. The
    plan's nodes are those of ``carried_out(config)``. Raises UsageError when one of the files is named but not
    there, and when nothing would train.
    """
    unused = left_out(config)
    config = _as_run(config, serve_only)
    facts = facts or {}
    usable = manifest if _fits(config, manifest) else None
    sites = make_sites(config, run_id, facts, code_digest, usable, serving, standing)
    own = own_command_files(own_command, config.run.files, cwd) if own_command else None
    warned = own is not None and config.run.on_client_loss == "go-on"
    first = lead(config)
    job = Job(
        config=config,
        run_id=run_id,
        token=token or Secret(),
        operator=operator,
        sites=sites,
        lead=first,
        master_addr=_master_addr(config, sites[first]),
        master_port=_port(master_candidates(config), facts.get(first)) or 0,
        control_port=_port(control_candidates(config), facts.get(first)),
        own=own,
        resume=None if own or serve_only else resume_file(config, cwd),
        serving=serving,
        version=standing.version if standing else 1,
        topology=decide(config, sites, config.num_parts, usable, facts),
    )
    shared = shared_files(job)
    return LaunchPlan(
        run_id=run_id,
        name=config.name,
        world_size=config.world_size,
        num_parts=job.num_parts,
        master_addr=job.master_addr,
        master_port=job.master_port,
        nodes=tuple(_node_plan(job, site, shared, usable) for site in sites),
        partition=partition_command(config) if config.makes_parts else None,
        runs_dir=config.run.runs_dir,
        code_digest=code_digest,
        final=_all_known(config, facts) and _parts_known(config, usable, serving),
        notes=(
            *filter(None, [unused, _OWN_GOES_ON if warned else ""]),
            *_notes(config, facts, manifest, usable, serving),
            *(own.notes if own else ()),
        ),
        control_port=job.control_port,
        lead=first,
        serving=config.data.serving or "",
        version=job.version,
        topology=job.topology,
        dataset=config.data.dataset,
        encrypted=job.encrypted,
        own_command=own is not None,
        manifest=usable.files[-1].sha256 if usable else "",
    )


def _as_run(config: ClusterConfig, serve_only: bool) -> ClusterConfig:
    """``config`` as its nodes carry it out; raises UsageError when nobody would train."""
    if not config.world_size and not serve_only:
        raise UsageError(
            "nodes: all are servers, so nothing would train. `gnnfleet serve --config FILE` keeps them up for runs "
            "that attach to them; for a run of its own give a node `role: client` or `role: worker`"
        )
    return carried_out(config, serve_only=serve_only)


def _master_addr(config: ClusterConfig, first: Site) -> str:
    if not config.world_size:
        return ""
    return first.address if config.run.master_addr == "auto" else config.run.master_addr


def partition_command(config: ClusterConfig) -> Command:
    """``trainer partition make`` with this machine's own python; it does nothing when the parts are there."""
    data, parts = config.data, str(config.num_parts)
    argv = [sys.executable, "-m", "trainer", "partition", "make", "--dataset", data.dataset, "--num-parts", parts]
    argv += [*_method_words(config), "--out", os.path.expanduser(data.folder)]
    argv += ["--source", data.source] if data.source else []
    for name, value in data.options.items():
        argv += ["--option", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    path = os.pathsep.join([str(CODE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return Command(tuple(argv), {"PYTHONPATH": path})


def _method_words(config: ClusterConfig) -> list[str]:
    how = config.data.partition
    words = ["--method", how.method, "--seed", str(how.seed)]
    if how.method in ("metis", "frequency"):
        words += ["--balance", how.balance]
    if how.method == "frequency":
        words += ["--fanouts", ",".join(map(str, config.train.fanouts))]
    words += ["--clusters", str(how.clusters)] if how.clusters else []
    return [*words, *(["--rows", how.rows] if how.rows != "stored" else [])]


def _node_plan(job: Job, site: Site, shared: SharedFiles, manifest: PartitionFiles | None) -> NodePlan:
    commands = node_commands(job, site)
    replicated = job.topology.replicated and bool(site.parts)
    logs = ["supervisor", *(["runners"] if site.ranks else []), *(["server"] if site.serves else [])]
    logs += [f"rank{rank}" for rank in site.ranks]
    return NodePlan(
        node_rank=site.node_rank,
        login=node_login(job.config, site.node),
        nproc=len(site.ranks),
        ranks=site.ranks,
        devices=site.node.devices,
        parts=site.parts,
        address=site.address,
        workdir=site.workdir,
        code_dir=site.code_dir,
        data_dir=site.data_dir,
        run_dir=site.run_dir,
        master_port=job.master_port,
        service_port=site.service_port,
        session=session_name(job.run_id, site.node_rank),
        start=commands.start,
        server=commands.server,
        trainer=commands.trainer,
        files=node_files(job, site, commands, shared, manifest),
        log_files=tuple(f"{site.run_dir}/logs/{name}.log" for name in logs),
        role=site.node.role,
        copies=site.copies,
        home=site.home,
        trainer_index=job.trainer_index(site),
        topology_bytes=manifest.topology_beside(site.parts) if manifest and replicated else 0,
    )


def _port(candidates: tuple[int, ...], fact: NodeFacts | None) -> int | None:
    return choose(candidates, fact) if candidates else None


def _fits(config: ClusterConfig, manifest: PartitionFiles | None) -> bool:
    return manifest is not None and config.makes_parts and manifest.num_parts == config.num_parts


def _parts_known(config: ClusterConfig, usable: PartitionFiles | None, serving: ServingCluster | None) -> bool:
    return serving is not None if config.data.serving else usable is not None or not config.makes_parts


def _all_known(config: ClusterConfig, facts: Mapping[int, NodeFacts]) -> bool:
    return all(k in facts for k in range(len(config.nodes)))


def _notes(
    config: ClusterConfig,
    facts: Mapping[int, NodeFacts],
    manifest: PartitionFiles | None,
    usable: PartitionFiles | None,
    serving: ServingCluster | None,
) -> list[str]:
    notes = []
    if config.data.serving and serving is None:
        notes.append(f"the servers of `{config.data.serving}`, and their keys, are looked up at launch")
    notes += _servers_of(serving) if serving else []
    if not _all_known(config, facts):
        notes.append(
            "preflight will fill in addresses, network interfaces, free ports (picked at random from some that begin "
            "with those shown), home folders for ~, absolute interpreter paths, and OMP_NUM_THREADS (cpus / processes)"
        )
    if config.makes_parts and usable is None:
        notes.append("parts are made at launch: their files, sizes and digests are not known yet")
        if manifest:
            notes.append(f"{config.data.folder} holds {manifest.num_parts} parts, and {config.num_parts} are wanted")
    return [*notes, *_shared_hosts(config)]


def _servers_of(serving: ServingCluster) -> list[str]:
    return [
        f"{serving.label(one)} serves {'part' if len(one.parts) == 1 else 'parts'} {spans(one.parts)} at {one.endpoint}"
        for one in serving.servers
    ]


def _shared_hosts(config: ClusterConfig) -> list[str]:
    """Hosts that carry several nodes, which two ranges may do unawares."""
    if config.transport == "local":
        return []
    nodes: dict[str, list[str]] = {}
    for k, node in enumerate(config.nodes):
        nodes.setdefault(login_text(None, node.host, node.port), []).append(f"node{k}")
    return [f"{host} carries {count(len(ranks), 'node')}: {fold(ranks)}" for host, ranks in nodes.items() if ranks[1:]]
