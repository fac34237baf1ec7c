"""The cluster config: one frozen dataclass per YAML section, every field documented.

``launcher.config.loader`` reads YAML into these; ``docs/config.md`` is generated from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


def node_workdir(node: NodeConfig, node_rank: int) -> str:
    """``workdir`` with {node_rank} filled in."""
    return node.workdir.replace("{node_rank}", str(node_rank)).rstrip("/") or "/"


def setting(help: str, default: Any = ..., **limits: float) -> Any:
    """A config field: its one-line help, its default (``...``: required), its limits.

    Limits are ``at_least``, ``above``, ``at_most``, ``below``; for a list they hold for each element.
    """
    metadata = {"help": help, "limits": limits}
    if default is ...:
        return field(metadata=metadata)
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


HostKeys = Literal["auto", "strict", "accept-new", "insecure"]

Role = Literal["worker", "server", "client"]


def login_text(user: str | None, host: str, port: int | None) -> str:
    """``user@host:port`` as far as given; an IPv6 address before a port stands in brackets."""
    name = f"[{host}]:{port}" if port and ":" in host else f"{host}:{port}" if port else host
    return f"{user}@{name}" if user else name


@dataclass(frozen=True)
class NodeConfig:
    """One machine (or one share of a machine) of the cluster."""

    host: str = setting("Host name, IP address or ~/.ssh/config alias; `localhost` when `transport: local`.")
    port: int | None = setting("SSH port; default from ~/.ssh/config, else 22.", None, at_least=1, at_most=65535)
    user: str | None = setting("SSH user; default from ~/.ssh/config, else yours.", None)
    key: str | None = setting(
        "Private key file on this machine; default: SSH agent, ~/.ssh/config, usual places.", None
    )
    password: bool = setting("Ask for an SSH password at start, once, without echo.", False)
    python: str = setting(
        "Python on the node when neither venv nor conda is given; with `transport: local` this very Python.", "python3"
    )
    venv: str | None = setting("Folder of a virtual environment on the node (the one that holds bin/python).", None)
    conda: str | None = setting("Conda environment on the node, by name or prefix path.", None)
    workdir: str = setting(
        "Folder on the node for our code, its parts and its runs; {node_rank} becomes 0, 1, …",
        "~/gnnfleet/node{node_rank}",
    )
    data_folder: str | None = setting(
        "Where this node sees the shared partition folder, if not at data.folder (mode verify).", None
    )
    role: Role = setting(
        "`worker` holds parts and trains; `server` holds parts and samples for others; `client` trains and holds none.",
        "worker",
    )
    devices: tuple[int, ...] = setting(
        "CUDA device ids, as [0, 1]: one process for each; empty: train on the CPU.", (), at_least=0
    )
    procs: int | None = setting(
        "Trainer processes on this node; default: one per device, or 1 on the CPU.", None, at_least=1, at_most=1024
    )
    address: str | None = setting("Address at which the other nodes reach this one; default: found by preflight.", None)
    interface: str | None = setting(
        "Network interface of that address, as eth0, for gloo and NCCL; default: found by preflight.", None
    )
    env: Mapping[str, str] = setting("Environment variables for everything that runs on the node.", dict)
    setup: tuple[str, ...] = setting("Bash lines run before anything else on the node, as `module load cuda`.", ())

    @property
    def nproc(self) -> int:
        """Trainer processes on this node."""
        return self.procs or len(self.devices) or 1 if self.trains else 0

    @property
    def holds(self) -> bool:
        """Whether it holds parts of the graph."""
        return self.role != "client"

    @property
    def trains(self) -> bool:
        return self.role != "server"

    @property
    def login(self) -> str:
        """``user@host:port`` as far as the config gives it."""
        return login_text(self.user, self.host, self.port)


@dataclass(frozen=True)
class PartitionConfig:
    """How the graph is divided."""

    method: Literal["metis", "random", "hash", "frequency"] = setting(
        "`metis` cuts few edges; `frequency` has vertices where train.fanouts visit them most; `random` and `hash` "
        "are quick and cut most edges, `hash` by a vertex's type and id alone.",
        "metis",
    )
    balance: Literal["nodes", "types", "seeds", "types+seeds"] = setting(
        "What the parts have equal numbers of, to 3 % (metis and frequency): vertices, those of each type, train "
        "seeds, or each type and its train seeds.",
        "types+seeds",
    )
    clusters: int | None = setting(
        "Divide each part into so many clusters, for batches of clusters (Cluster-GCN).", None, at_least=1
    )
    seed: int = setting("Seed of the partition algorithm.", 0, at_least=0, below=2**32)
    rows: Literal["stored", "float16", "int8"] = setting(
        "What floating-point attributes are kept as in the parts: as the dataset has them, rounded to float16, or to "
        "int8 with a scale for each row.",
        "stored",
    )


@dataclass(frozen=True)
class DataConfig:
    """The graph, and where its parts live."""

    dataset: str = setting(
        "`synthetic`, `file`, an `ogbn-…` name, or a torch_geometric dataset as `Planetoid:Cora`; not needed where "
        "`serving` names a cluster that has the graph.",
        "",
    )
    source: str | None = setting(
        "What `file` reads: a folder of .npy/.npz files or a .pt file; for others the download folder.", None
    )
    options: Mapping[str, Any] = setting("Options of the dataset, as num_nodes for `synthetic`.", dict)
    folder: str = setting(
        "Partition folder: on this machine in mode sync, as the nodes see it in mode verify.", "parts"
    )
    num_parts: int | None = setting(
        "Number of parts the graph is cut into, at least one per node that holds parts; default: one for each.",
        None,
        at_least=1,
        at_most=65536,
    )
    replicas: int = setting(
        "How many nodes hold each part: with 2 or more a run survives the loss of a graph server.", 1, at_least=1
    )
    serving: str | None = setting(
        "Name of a serving cluster (`gnnfleet serve`) that has the graph: all nodes are its clients then.", None
    )
    partition: PartitionConfig = setting("How the graph is cut.", PartitionConfig)
    topology: Literal["auto", "replicated", "partitioned"] = setting(
        "`replicated`: each node that holds parts has the edges of all, so that only rows cross the network; "
        "`partitioned`: its own only; `auto`: replicated where they take at most 4 GB, and a tenth of the memory, of "
        "each host.",
        "auto",
    )
    cache: str = setting(
        "Rows of other hosts that each host keeps, those most likely to be needed: a share of them (10%), a size "
        "(512MB), or 0.",
        "10%",
    )
    mode: Literal["sync", "verify"] = setting(
        "`sync` sends each node its parts; `verify` checks parts that the nodes already see.", "sync"
    )
    digests: bool = setting(
        "Each node compares all files of its parts with their digests when a run starts, at the speed of its disk; "
        "`false` for parts for which that takes longer than `run.start_timeout`.",
        True,
    )


@dataclass(frozen=True)
class TrainConfig:
    """The bundled trainer's settings; each becomes one flag of `python -m trainer train`."""

    model: Literal["sage", "gcn", "gat", "rgcn", "hgt", "rsage"] = setting(
        "GraphSAGE, GCN or GAT; for heterogeneous graphs RGCN, HGT or GraphSAGE per edge type.", "sage"
    )
    target: str | None = setting(
        "Vertex type to classify; default: the only one with labels, classes and train seeds.", None
    )
    hidden: int = setting("Width of the hidden layers.", 256, at_least=1)
    layers: int | None = setting(
        "Number of layers; follows from fanouts, and must equal its length if given.", None, at_least=1
    )
    heads: int = setting("Attention heads (gat and hgt).", 4, at_least=1)
    dropout: float = setting("Dropout probability.", 0.3, at_least=0, below=1)
    fanouts: tuple[int, ...] = setting(
        "Neighbours sampled per vertex and hop, first hop first; -1 takes all.", (15, 10, 5)
    )
    eval_fanouts: tuple[int, ...] | None = setting("The same for evaluation; default: as fanouts.", None)
    replace: bool = setting("Sample neighbours with replacement.", False)
    weight_attr: str | None = setting(
        "Edge attribute: a neighbour's chance to be sampled goes with it; 0: never.", None
    )
    time_attr: str | None = setting(
        "Integer vertex attribute: no neighbour that is later than its seed is sampled.", None
    )
    temporal_strategy: Literal["uniform", "last"] = setting(
        "With time_attr: `uniform` draws among the earlier neighbours, `last` takes the latest of them.", "uniform"
    )
    disjoint: bool = setting("Sample a subgraph for each seed that shares no vertex with the others.", False)
    batch_size: int = setting("Global batch: seed vertices per step over all processes.", 1024, at_least=1)
    eval_batch_size: int = setting("Global batch for evaluation.", 4096, at_least=1)
    epochs: int = setting("Passes over the train seeds in all, those before resume included.", 10, at_least=1)
    lr: float = setting("Learning rate of Adam.", 0.004, above=0)
    embedding_lr: float | None = setting(
        "Learning rate of the trainable rows of vertices without features (SparseAdam); default: lr.", None, above=0
    )
    weight_decay: float = setting("Weight decay of Adam.", 0.0, at_least=0)
    seed: int = setting("Seed of batch order, samples, dropout and initial weights.", 0, at_least=0, below=2**32)
    eval_every: int = setting("Evaluate on the val split every so many epochs; 0: only at the end.", 1, at_least=0)
    checkpoint_every: int = setting("Write a checkpoint every so many epochs; 0: only at the end.", 1, at_least=0)
    tensorboard: bool = setting("Write scalars for TensorBoard; needs the package tensorboard on each host.", False)
    sampler_threads: int = setting("Sampler threads per process.", 1, at_least=1)
    prefetch: int = setting(
        "Batches alive per process, the one in use among them; at least one more than sampler_threads.", 2, at_least=1
    )
    device_cache: str = setting(
        "Rows of features kept on each GPU, those asked for most: a share of all (10%), a size (512MB), or 0.", "0"
    )
    backend: Literal["auto", "gloo", "nccl"] = setting(
        "torch.distributed backend; auto: nccl when every node has devices, else gloo.", "auto"
    )
    precision: Literal["float32", "bfloat16"] = setting(
        "What layers compute in; `bfloat16` adds up in float32, and changes results.", "float32"
    )
    timeout: float = setting("Seconds after which any wait for another process fails.", 120.0, above=0, below=1_000_000)
    resume: str | None = setting(
        "Checkpoint to go on from: a file on this machine, or the id of an earlier run in runs_dir.", None
    )


@dataclass(frozen=True)
class RunConfig:
    """How a run is placed and watched."""

    master_addr: str = setting(
        "Address of the first node that trains, as the others see it; auto: found by preflight.", "auto"
    )
    master_port: int | Literal["auto"] = setting(
        "Port for torch.distributed on the first node that trains; auto: 29500 or the next free one.",
        "auto",
        at_least=1,
        at_most=65535,
    )
    service_port: int | Literal["auto"] = setting(
        "Graph service port of node 0, one higher for each next node; auto: free ones from 29600.",
        "auto",
        at_least=1,
        at_most=65535,
    )
    runs_dir: str = setting("Folder on this machine for logs, checkpoints and results of runs.", "runs")
    connect_timeout: float = setting("Seconds to wait for an SSH connection.", 10.0, above=0, below=1_000_000)
    start_timeout: float = setting(
        "Seconds to wait for a node's supervisor and graph server, which compiles its kernels first.",
        120.0,
        above=0,
        below=1_000_000,
    )
    grace: float = setting("Seconds between SIGTERM and SIGKILL when stopping.", 5.0, at_least=0, below=1_000_000)
    lost_after: float = setting(
        "Seconds without a line to any node after which this machine gives up following; the run goes on.",
        60.0,
        above=0,
        below=1_000_000,
    )
    control_port: int | Literal["auto"] = setting(
        "Port on the first node that trains by which the nodes know of each other; auto: a free one from 29400.",
        "auto",
        at_least=1,
        at_most=65535,
    )
    peer_timeout: float = setting(
        "Seconds without a sign of life between the nodes after which one counts as lost and the others stop.",
        6.0,
        at_least=2,
        below=1_000_000,
    )
    on_interrupt: Literal["ask", "stop", "detach"] = setting(
        "What the first Ctrl-C does: `ask`, `stop` every node, or `detach` and let the run go on.", "ask"
    )
    on_stall: Literal["stop", "warn"] = setting("What happens when no process gets on with its steps.", "stop")
    stall_after: float | Literal["auto"] = setting(
        "Seconds without a step after which a run counts as stalled; auto: learned from the steps before.",
        "auto",
        above=0,
        below=1_000_000,
    )
    on_nan: Literal["stop", "warn"] = setting("What happens when the loss is no number any more.", "warn")
    server_wait: float = setting(
        "Seconds that a lost graph server may take to come back before those who need it give up.",
        60.0,
        at_least=0,
        below=1_000_000,
    )
    server_restarts: int = setting(
        "How often a graph server that died is started again, within an hour.", 3, at_least=0
    )
    on_client_loss: Literal["stop", "go-on"] = setting(
        "When a `client` node is lost: `stop` the run, or `go-on` with the others (not without the first that trains).",
        "stop",
    )
    server_buffer: int = setting(
        "Megabytes of finished batches that a graph server keeps at most for those who ask for them.", 512, at_least=1
    )
    server_threads: int | Literal["auto"] = setting(
        "Threads by which a graph server makes batches for clients; auto: one per processor.", "auto", at_least=1
    )
    wire_rows: Literal["stored", "float16", "int8"] = setting(
        "What floating-point rows are rounded to on their way between hosts; `int8` has a scale for each row.",
        "stored",
    )
    encrypt: Literal["auto", "on", "off"] = setting(
        "Encrypt the graph service (TLS 1.3); auto: on, except with `transport: local`.", "auto"
    )
    files: tuple[str, ...] = setting("Files and folders of this machine that your own script needs beside it.", ())


@dataclass(frozen=True)
class ClusterConfig:
    """A whole cluster.yml."""

    nodes: tuple[NodeConfig, ...] = setting(
        "The machines, in node_rank order; the first one that trains is the master."
    )
    data: DataConfig = setting("The graph and where its parts live.")
    train: TrainConfig = setting("The bundled trainer's settings.", TrainConfig)
    run: RunConfig = setting("How the run is placed and watched.", RunConfig)
    transport: Literal["ssh", "local"] = setting("`ssh`, or `local`: every node on this machine, without sshd.", "ssh")
    host_keys: HostKeys = setting(
        "Unknown SSH host keys: `strict` refuses, `accept-new` learns them, `insecure` asks nothing; "
        "`auto`: as StrictHostKeyChecking in ssh_config says, which refuses by itself.",
        "auto",
    )
    name: str = setting("Begins the run ids and is shown in reports.", "run")

    @property
    def holders(self) -> tuple[int, ...]:
        """node_ranks that hold parts of the graph."""
        return tuple(k for k, node in enumerate(self.nodes) if node.holds) if not self.data.serving else ()

    @property
    def num_parts(self) -> int:
        """0 where a serving cluster has them."""
        return self.data.num_parts or len(self.holders)

    @property
    def makes_parts(self) -> bool:
        """Whether the graph is cut on this machine and sent from here."""
        return self.data.mode == "sync" and not self.data.serving

    @property
    def world_size(self) -> int:
        return sum(node.nproc for node in self.nodes)
