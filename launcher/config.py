"""The cluster config: one frozen dataclass per YAML section, every field documented.

``launcher.yaml_schema`` reads YAML into these; ``docs/config.md`` is generated from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


def key(help: str, default: Any = ..., **more: Any) -> Any:
    """A config field: its one-line help, its default (``...``: required)."""
    if default is ...:
        return field(metadata={"help": help, **more})
    if callable(default):
        return field(default_factory=default, metadata={"help": help, **more})
    return field(default=default, metadata={"help": help, **more})


HostKeys = Literal["strict", "accept-new", "insecure"]


@dataclass(frozen=True)
class NodeConfig:
    """One machine (or one share of a machine) of the cluster."""

    host: str = key("Name, address or ~/.ssh/config alias; `localhost` with `transport: local`.")
    port: int | None = key("SSH port; default from ~/.ssh/config, else 22.", None)
    user: str | None = key("SSH user; default from ~/.ssh/config, else yours.", None)
    key: str | None = key("Private key file; default: agent, ~/.ssh/config, usual places.", None)
    password: bool = key("Ask for a password once, without echo.", False)
    python: str = key("Python on the node, used when neither venv nor conda is given.", "python3")
    venv: str | None = key("Virtual environment folder on the node.", None)
    conda: str | None = key("Conda environment on the node, by name or prefix path.", None)
    workdir: str = key("Folder on the node for code, parts and runs; {node_rank} is filled in.", "~/gnnfleet/node{node_rank}")
    data_folder: str | None = key("This node's path of the shared partition folder (mode verify).", None)
    devices: tuple[int, ...] = key("CUDA device ids, one process each; empty: CPU.", ())
    procs: int | None = key("Processes on this node; default: one per device, else 1.", None)
    address: str | None = key("Address other nodes reach this one at; default: found by preflight.", None)
    interface: str | None = key("Network interface for gloo and NCCL; default: found by preflight.", None)
    env: Mapping[str, str] = key("Extra environment for everything on the node.", dict)
    setup: tuple[str, ...] = key("Shell lines run before anything else (module load …).", ())

    @property
    def nproc(self) -> int:
        """Trainer processes on this node."""
        return self.procs or len(self.devices) or 1


@dataclass(frozen=True)
class PartitionConfig:
    """How the graph is divided."""

    method: Literal["metis", "random"] = key("Partition algorithm.", "metis")
    seed: int = key("Seed of the algorithm.", 0)


@dataclass(frozen=True)
class DataConfig:
    """The graph, and where its parts live."""

    dataset: str = key("`synthetic`, `file`, `ogbn-…`, or a torch_geometric dataset as `Planetoid:Cora`.")
    source: str | None = key("Folder of .npy/.npz files or a .pt file (dataset: file); download cache otherwise.", None)
    options: Mapping[str, Any] = key("Dataset options, e.g. num_nodes for `synthetic`.", dict)
    folder: str = key("Partition folder: on this machine (mode sync) or as the nodes see it (mode verify).", "parts")
    num_parts: int | None = key("Number of parts; default: number of nodes.", None)
    partition: PartitionConfig = key("Partition algorithm.", PartitionConfig)
    mode: Literal["sync", "verify"] = key("`sync` sends each node its parts; `verify` checks a shared folder in place.", "sync")


@dataclass(frozen=True)
class TrainConfig:
    """The bundled trainer's settings; each becomes one flag of `python -m trainer train`."""

    model: Literal["sage", "gcn", "gat"] = key("Model.", "sage")
    hidden: int = key("Width of hidden layers.", 256)
    layers: int | None = key("Number of layers; default: length of fanouts, and must equal it.", None)
    heads: int = key("Attention heads (gat).", 4)
    dropout: float = key("Dropout probability.", 0.3)
    fanouts: tuple[int, ...] = key("Neighbours per hop, seeds outward; -1 takes all.", (15, 10, 5))
    eval_fanouts: tuple[int, ...] | None = key("Fanouts for evaluation; default: fanouts.", None)
    replace: bool = key("Sample neighbours with replacement.", False)
    batch_size: int = key("Global batch: seeds per step over all processes.", 1024)
    eval_batch_size: int = key("Global batch for evaluation.", 4096)
    epochs: int = key("Passes over the train seeds.", 10)
    lr: float = key("Learning rate (Adam).", 0.004)
    weight_decay: float = key("Weight decay (Adam).", 0.0)
    seed: int = key("Seed of order, samples, dropout and initial weights.", 0)
    eval_every: int = key("Evaluate on val every so many epochs; 0: only at the end.", 1)
    checkpoint_every: int = key("Checkpoint every so many epochs; 0: only at the end.", 1)
    sampler_threads: int = key("Sampler threads per process.", 1)
    prefetch: int = key("Batches in flight per process.", 3)
    backend: Literal["auto", "gloo", "nccl"] = key("torch.distributed backend.", "auto")
    timeout: float = key("Deadline in seconds of every wait between processes.", 120.0)
    resume: str | None = key("Checkpoint file, or run id of an earlier run here, to go on from.", None)


@dataclass(frozen=True)
class RunConfig:
    """How a run is placed and watched."""

    master_addr: str = key("Address of node 0 as the others see it, or `auto`.", "auto")
    master_port: int | Literal["auto"] = key("Port for torch.distributed on node 0, or `auto`.", "auto")
    service_port: int | Literal["auto"] = key("First port of the graph service, or `auto`.", "auto")
    runs_dir: str = key("Folder on this machine for logs and results.", "runs")
    connect_timeout: float = key("Seconds to wait for one SSH connection.", 10.0)
    start_timeout: float = key("Seconds to wait for a node's supervisor and graph server.", 60.0)
    grace: float = key("Seconds between SIGTERM and SIGKILL when stopping.", 5.0)
    encrypt: Literal["auto", "on", "off"] = key("CURVE between graph services; auto: on off this machine.", "auto")
    files: tuple[str, ...] = key("Extra files sent beside your own script.", ())


@dataclass(frozen=True)
class ClusterConfig:
    """A whole cluster.yml."""

    nodes: tuple[NodeConfig, ...] = key("The machines, in node_rank order.")
    data: DataConfig = key("The graph.")
    train: TrainConfig = key("The bundled trainer's settings.", TrainConfig)
    run: RunConfig = key("How the run is placed and watched.", RunConfig)
    transport: Literal["ssh", "local"] = key("`ssh`, or `local`: all nodes on this machine without sshd.", "ssh")
    host_keys: HostKeys = key("`strict`, `accept-new` (learn unknown ones) or `insecure`.", "strict")
    name: str = key("Shown in run ids and reports.", "run")

    @property
    def num_parts(self) -> int:
        return self.data.num_parts or len(self.nodes)

    @property
    def world_size(self) -> int:
        return sum(node.nproc for node in self.nodes)
