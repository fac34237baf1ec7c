"""The cluster config as frozen dataclasses, one per section of cluster.yml.

``launcher.config.loader`` reads YAML into these classes; ``launcher.config.reference`` generates ``docs/config.md``
from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal

from trainer.core.fields import ANY, CONTROLS, LINES, WORD, Form, setting
from trainer.core.train_config import TrainConfig


def node_workdir(node: NodeConfig, node_rank: int) -> str:
    """Return the node's ``workdir`` with {node_rank} replaced and without a trailing slash."""
    return node.workdir.replace("{node_rank}", str(node_rank)).rstrip("/") or "/"


# As OpenSSH limits host names and users, which commands of ssh_config and formats of tmux insert without quotes.
# Nor do names have the wildcards of ssh_config, begin as comments and options of hostfiles do, or look like two hosts
# (``gnn1,gnn2``) or a host with a number of processes (``gnn1/8``, ``gnn1=8``; the 8 of ``gnn1,8``).
_ADDRESS = Form(r"""(?!\d+$)[\w:][^\s'"`$\\;&<>|(){}*?!/,=\x00-\x1f\x7f-\x9f]*""", "a host name or address")
_USER = Form(rf"""(?!-)([^\s'"`;&<>|(){{}}{CONTROLS}]| (?!-))*(?<!\\)""", "a user name")

_VARIABLE = Form("[A-Za-z_][A-Za-z0-9_]*", "the name of a variable: letters, digits and _")
_SBATCH_OPTION = Form("[a-z][a-z0-9_-]*", "a long option of sbatch, such as partition or gpus-per-node")
_SLURM_JOB = Form(r"[0-9][0-9_+]*", "the number of a job")


def settings(section: type) -> tuple[Field[Any], ...]:
    """Return the fields of a section that are keys of cluster.yml."""
    return tuple(item for item in fields(section) if item.metadata)


HostKeys = Literal["auto", "strict", "accept-new", "insecure"]

_Role = Literal["worker", "server", "client"]

Event = Literal["end", "failure", "restart", "stall", "nan", "lost"]


def login_text(user: str | None, host: str, port: int | None) -> str:
    """Return ``user@host:port``. A user or port that is None is left out.

    An IPv6 address before a port is put in brackets.
    """
    name = f"[{host}]:{port}" if port and ":" in host else f"{host}:{port}" if port else host
    return f"{user}@{name}" if user else name


@dataclass(frozen=True)
class NodeConfig:
    """One node of the cluster. Several nodes may share a machine."""

    host: str = setting(
        "Host name, IP address or ~/.ssh/config alias; `localhost` when `transport: local`.", form=_ADDRESS
    )
    port: int | None = setting("SSH port; default from ~/.ssh/config, else 22.", None, at_least=1, at_most=65535)
    user: str | None = setting("SSH user; default from ~/.ssh/config, else yours.", None, form=_USER)
    key: str | None = setting(
        "Private key file on this machine; default: the SSH agent, ~/.ssh/config, the usual files in ~/.ssh.", None
    )
    password: bool = setting("Ask for an SSH password once, when a command starts, without echo.", False)
    python: str = setting(
        "Python on the node if neither venv nor conda is given; with `transport: local` or `slurm` the default is the "
        "launcher's.",
        "python3",
        form=WORD,
    )
    venv: str | None = setting("Virtual environment on the node: the folder that contains bin/python.", None)
    conda: str | None = setting("Conda environment on the node, by name or prefix path.", None, form=WORD)
    wrap: tuple[str, ...] = setting(
        "Words before the node's Python, to run all processes in a container, as `[apptainer, exec, --nv, image.sif]`; "
        "also with podman, docker, ch-run, enroot, conda run. `python` or `venv` is then one inside.",
        (),
    )
    workdir: str = setting(
        "Folder on the node for gnnfleet's code, the node's parts and its runs; {node_rank} is replaced by 0, 1, …",
        "~/gnnfleet-work/node{node_rank}",
    )
    data_folder: str | None = setting(
        "Path of the shared partition folder on this node, if not data.folder (mode verify).", None
    )
    role: _Role = setting(
        "`worker` holds parts and trains; `server` holds parts and samples for clients; `client` trains without parts.",
        "worker",
    )
    devices: tuple[int | str, ...] = setting(
        "CUDA devices, one process each: ids as [0, 1], or UUIDs of GPUs or MIG instances as `nvidia-smi -L` lists "
        "them; empty: train on the CPU.",
        (),
        at_least=0,
    )
    procs: int | None = setting(
        "Trainer processes on this node; default: one per device, or 1 on the CPU.", None, at_least=1, at_most=1024
    )
    cpus: int | None = setting(
        "Processors of the node in an exported run (Slurm, Kubernetes); default: its processes with their threads or, "
        "under Slurm without devices, all of its host.",
        None,
        at_least=1,
        at_most=65536,
    )
    memory: str | None = setting(
        "Memory of the node in an exported run (Slurm, Kubernetes), as `64GB`; default: estimated from its parts.", None
    )
    batch_share: float = setting(
        "Seeds of each step per process, relative to the processes of other nodes; for the bundled trainer.",
        1.0,
        above=0,
    )
    address: str | None = setting(
        "Address at which the other nodes reach this node; default: found by preflight.", None, form=_ADDRESS
    )
    interface: str | None = setting(
        "Network interface of `address`, as eth0, for gloo and NCCL; default: found by preflight.", None, form=_ADDRESS
    )
    env: Mapping[str, str] = setting(
        "Environment variables of all processes on the node.", dict, form=LINES, keys=_VARIABLE
    )
    setup: tuple[str, ...] = setting(
        "Bash lines run before each command on the node, as `module load cuda`.", (), form=LINES
    )
    replaces: str = field(default="", compare=False)  #: note on the environment of `defaults` that own keys replace

    @property
    def nproc(self) -> int:
        """Number of trainer processes on this node; 0 for a server."""
        return self.procs or len(self.devices) or 1 if self.trains else 0

    @property
    def holds(self) -> bool:
        """Whether the node stores parts of the graph: a worker or server."""
        return self.role != "client"

    @property
    def trains(self) -> bool:
        return self.role != "server"

    @property
    def login(self) -> str:
        """``user@host:port``; a user or port that the config does not give is left out."""
        return login_text(self.user, self.host, self.port)


@dataclass(frozen=True)
class PartitionConfig:
    """How the graph is cut into parts."""

    method: Literal["auto", "metis", "streaming", "frequency", "random", "hash", "keep"] = setting(
        "`metis` cuts few edges; `streaming` does so for graphs whose edges do not fit into memory; `auto` takes "
        "`metis` if it fits, else `streaming`; `frequency` puts each vertex into the part whose seeds sample it most "
        "with train.fanouts; `random` and `hash` (by vertex type and id) are fast and cut the most edges; `keep` keeps "
        "the parts of `dataset: partition`.",
        "auto",
    )
    balance: Literal["nodes", "types", "seeds", "types+seeds"] = setting(
        "What is balanced over the parts to within 3 % (not by random and hash): the number of vertices, of vertices "
        "of each type, of train seeds, or of both vertices and train seeds of each type.",
        "types+seeds",
    )
    clusters: int | None = setting(
        "Clusters per part, for batches of clusters (Cluster-GCN); default: none.", None, at_least=1
    )
    seed: int = setting("Seed of the partition algorithm.", 0, at_least=0, below=2**32)
    memory: str | None = setting(
        "Most memory that partitioning may use on this machine, such as `4GB`; default: what is available.", None
    )
    rows: Literal["stored", "float16", "int8"] = setting(
        "Type of floating-point attributes in the parts: that of the dataset, float16, or int8 with a scale per row.",
        "stored",
    )


@dataclass(frozen=True)
class DataConfig:
    """The graph, and where its parts are stored."""

    dataset: str = setting(
        "`synthetic`, `file`, `tables`, `partition`, an `ogbn-…` name, or a torch_geometric dataset as "
        "`Planetoid:Cora`; required unless `serving` is given.",
        "",
        form=WORD,
    )
    source: str | None = setting(
        "For `dataset: file` the folder of .npy/.npz files or the .pt file to read, for `dataset: tables` the folder "
        "of the tables, for `dataset: partition` a partition folder; else the download folder.",
        None,
    )
    options: Mapping[str, Any] = setting(
        "Options of the dataset, for instance num_nodes of `synthetic`.", dict, form=ANY
    )
    folder: str = setting(
        "Partition folder: a path on this machine in mode sync, on the nodes in mode verify.", "parts"
    )
    num_parts: int | None = setting(
        "Number of parts, at least one per node that holds parts; default: exactly one per such node.",
        None,
        at_least=1,
        at_most=65536,
    )
    replicas: int = setting(
        "Number of nodes that hold each part; with 2 or more a run survives the loss of a graph server.", 1, at_least=1
    )
    serving: str | None = setting(
        "Name of a serving cluster (`gnnfleet serve`) to train on; all nodes then train as its clients.", None
    )
    partition: PartitionConfig = setting("How the graph is cut into parts.", PartitionConfig)
    topology: Literal["auto", "replicated", "partitioned"] = setting(
        "Edges on each node that holds parts: `replicated` stores those of all parts, so that only rows cross the "
        "network; `partitioned` stores those of its own parts; `auto` replicates if that takes at most 4 GB and a "
        "tenth of the memory of each host.",
        "auto",
    )
    cache: str = setting(
        "Rows of other hosts that each host caches, the most often needed first: a share of them (10%), a size "
        "(512MB), or 0.",
        "10%",
    )
    mode: Literal["sync", "verify"] = setting(
        "`sync` sends each node its parts; `verify` checks parts that the nodes can already read.", "sync"
    )
    digests: bool = setting(
        "At the start of a run each node compares all files of its parts with their digests, at the speed of its disk; "
        "set `false` if that takes longer than `run.start_timeout`.",
        True,
    )
    store: str | None = setting(
        "URL of a folder, as `s3://bucket/products`, `gs://…` or `file:///…`: parts are uploaded there once, and each "
        "node fetches its own (mode sync).",
        None,
    )
    store_options: Mapping[str, Any] = setting(
        "Options of fsspec for the store, for instance endpoint_url of an S3 server; credentials come from the "
        "environment of each machine.",
        dict,
        form=ANY,
    )
    store_limit: str | None = setting(
        "Most disk space for fetched parts in each node's workdir (500GB); the least recently used ones that no run "
        "needs are deleted. Default: no limit.",
        None,
    )


@dataclass(frozen=True)
class RunConfig:
    """Ports, timeouts and failure handling of a run."""

    master_addr: str = setting(
        "Address at which the other nodes reach the lead node (the first that trains); auto: found by preflight.",
        "auto",
        form=_ADDRESS,
    )
    master_port: int | Literal["auto"] = setting(
        "Port for torch.distributed on the lead node; auto: 29500 or the next free port.",
        "auto",
        at_least=1,
        at_most=65535,
    )
    service_port: int | Literal["auto"] = setting(
        "Graph service port of node 0; each further node uses the next port; auto: free ports from 29600.",
        "auto",
        at_least=1,
        at_most=65535,
    )
    runs_dir: str = setting("Folder on this machine for logs, checkpoints and results of runs.", "runs")
    connect_timeout: float = setting("Seconds to wait for an SSH connection.", 10.0, above=0, below=1_000_000)
    start_timeout: float = setting(
        "Seconds to wait for a node's supervisor and graph server to start. A server that has to compile its kernels "
        "first has eight minutes more.",
        120.0,
        above=0,
        below=1_000_000,
    )
    grace: float = setting(
        "Seconds between SIGTERM and SIGKILL when processes are stopped.", 5.0, at_least=0, below=1_000_000
    )
    lost_after: float = setting(
        "Seconds without a connection to any node after which the launcher stops following; the run continues.",
        60.0,
        above=0,
        below=1_000_000,
    )
    control_port: int | Literal["auto"] = setting(
        "Port on the lead node for the connections between supervisors; auto: a free port from 29400.",
        "auto",
        at_least=1,
        at_most=65535,
    )
    peer_timeout: float = setting(
        "Seconds without a message from a node's supervisor after which the node counts as lost and the others stop.",
        6.0,
        at_least=2,
        below=1_000_000,
    )
    on_interrupt: Literal["ask", "stop", "detach"] = setting(
        "What the first Ctrl-C does: `ask`, `stop` every node, or `detach` and let the run continue.", "ask"
    )
    on_stall: Literal["stop", "warn"] = setting(
        "What happens when no process completes a step for `stall_after`.", "stop"
    )
    stall_after: float | Literal["auto"] = setting(
        "Seconds without a completed step after which a run counts as stalled; auto: derived from earlier steps.",
        "auto",
        above=0,
        below=1_000_000,
    )
    on_nan: Literal["stop", "warn"] = setting("What happens when the loss becomes NaN or infinite.", "warn")
    server_wait: float = setting(
        "Seconds to wait for a lost graph server to come back before the processes that need it fail.",
        60.0,
        at_least=0,
        below=1_000_000,
    )
    server_restarts: int = setting(
        "Number of times that a graph server that died is restarted, per hour.", 3, at_least=0
    )
    restarts: int = setting(
        "How many times a failed run restarts by itself, from the newest checkpoint and without the nodes that were "
        "lost; the launcher is not needed. 0: never.",
        0,
        at_least=0,
    )
    min_nodes: int = setting("Minimum number of training nodes for a restart.", 1, at_least=1)
    server_buffer: int = setting(
        "Maximum size in MB of the finished batches that a graph server keeps for its clients.", 512, at_least=1
    )
    server_threads: int | Literal["auto"] = setting(
        "Threads with which a graph server makes batches for clients; auto: one per processor.", "auto", at_least=1
    )
    wire_rows: Literal["stored", "float16", "int8"] = setting(
        "Type to which floating-point rows are rounded when sent between hosts; `int8` has a scale per row.", "stored"
    )
    encrypt: Literal["auto", "on", "off"] = setting(
        "Encrypt the graph service (TLS 1.3); auto: on, except with `transport: local`.", "auto"
    )
    files: tuple[str, ...] = setting("Files and folders of this machine to send along with your own script.", ())
    prometheus: str | None = setting(
        "Folder on each node in which node_exporter's textfile collector looks; the run's figures are written there.",
        None,
    )
    notify: tuple[str, ...] = setting(
        "Whom the lead node tells what happens to the run: URLs, which get JSON by POST, and commands, which get it on "
        "stdin; `$NAME` in a URL is a variable of that node.",
        (),
    )
    notify_on: tuple[Event, ...] = setting("The events that `notify` is told of; default: all.", ())


@dataclass(frozen=True)
class ClusterConfig:
    """A whole cluster.yml."""

    nodes: tuple[NodeConfig, ...] = setting(
        "The machines, in node_rank order; the first one that trains is the lead node."
    )
    data: DataConfig = setting("The graph, and where its parts are stored.")
    train: TrainConfig = setting("Settings of the bundled trainer.", TrainConfig)
    run: RunConfig = setting("Ports, timeouts and failure handling of a run.", RunConfig)
    transport: Literal["ssh", "local", "slurm"] = setting(
        "`ssh`; `local`: all nodes run on this machine, without SSH; `slurm`: the nodes are those of a Slurm job.",
        "ssh",
    )
    slurm: Mapping[str, str] = setting(
        "With `transport: slurm`, options of sbatch for the job to submit, as `{partition: gpu, nodes: 4, time: "
        '"2:00:00", requeue: true}`; `--slurm` sets them, too.',
        dict,
        keys=_SBATCH_OPTION,
    )
    slurm_job: str | None = setting(
        "Id of the Slurm job that has the nodes; set by gnnfleet inside a job.", None, form=_SLURM_JOB
    )
    host_keys: HostKeys = setting(
        "Unknown SSH host keys: `strict` refuses them, `accept-new` stores them, `insecure` accepts any key; "
        "`auto`: as StrictHostKeyChecking in ssh_config says, else `strict`.",
        "auto",
    )
    name: str = setting("Prefix of run ids; also shown in reports.", "run")

    @property
    def local(self) -> bool:
        """Whether all nodes run on this machine."""
        return self.transport == "local"

    @property
    def in_job_steps(self) -> bool:
        """Whether supervisors run in the steps of a job, instead of tmux sessions."""
        return self.transport == "slurm"

    @property
    def shares_files(self) -> bool:
        """Whether the nodes see the files of the launching machine."""
        return self.transport in ("local", "slurm")

    @property
    def holders(self) -> tuple[int, ...]:
        """node_ranks of the nodes that hold parts of the graph, ascending; () if a serving cluster holds the parts."""
        return tuple(k for k, node in enumerate(self.nodes) if node.holds) if not self.data.serving else ()

    @property
    def num_parts(self) -> int:
        """Number of parts of the graph; 0 if a serving cluster holds the parts."""
        return self.data.num_parts or len(self.holders)

    @property
    def makes_parts(self) -> bool:
        """Whether the launching machine cuts the graph and sends the parts."""
        return self.data.mode == "sync" and not self.data.serving

    @property
    def world_size(self) -> int:
        return sum(node.nproc for node in self.nodes)
