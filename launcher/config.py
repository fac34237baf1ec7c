"""The cluster config: one frozen dataclass per YAML section, every field documented.

``launcher.yaml_schema`` reads YAML into these; ``docs/config.md`` is generated from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


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


HostKeys = Literal["strict", "accept-new", "insecure"]


@dataclass(frozen=True)
class NodeConfig:
    """One machine (or one share of a machine) of the cluster."""

    host: str = setting("Name, address or ~/.ssh/config alias; `localhost` with `transport: local`.")
    port: int | None = setting("SSH port; default from ~/.ssh/config, else 22.", None, at_least=1, at_most=65535)
    user: str | None = setting("SSH user; default from ~/.ssh/config, else yours.", None)
    key: str | None = setting("Private key file; default: agent, ~/.ssh/config, usual places.", None)
    password: bool = setting("Ask for a password once, without echo.", False)
    python: str = setting("Python on the node, used when neither venv nor conda is given.", "python3")
    venv: str | None = setting("Virtual environment folder on the node.", None)
    conda: str | None = setting("Conda environment on the node, by name or prefix path.", None)
    workdir: str = setting("Folder on the node for code, parts and runs; {node_rank} is filled in.", "~/gnnfleet/node{node_rank}")
    data_folder: str | None = setting("This node's path of the shared partition folder (mode verify).", None)
    devices: tuple[int, ...] = setting("CUDA device ids, one process each; empty: CPU.", (), at_least=0)
    procs: int | None = setting("Processes on this node; default: one per device, else 1.", None, at_least=1)
    address: str | None = setting("Address other nodes reach this one at; default: found by preflight.", None)
    interface: str | None = setting("Network interface for gloo and NCCL; default: found by preflight.", None)
    env: Mapping[str, str] = setting("Extra environment for everything on the node.", dict)
    setup: tuple[str, ...] = setting("Shell lines run before anything else (module load …).", ())

    @property
    def nproc(self) -> int:
        """Trainer processes on this node."""
        return self.procs or len(self.devices) or 1


@dataclass(frozen=True)
class PartitionConfig:
    """How the graph is divided."""

    method: Literal["metis", "random"] = setting("Partition algorithm.", "metis")
    seed: int = setting("Seed of the algorithm.", 0, at_least=0)


@dataclass(frozen=True)
class DataConfig:
    """The graph, and where its parts live."""

    dataset: str = setting("`synthetic`, `file`, `ogbn-…`, or a torch_geometric dataset as `Planetoid:Cora`.")
    source: str | None = setting("Folder of .npy/.npz files or a .pt file (dataset: file); download cache otherwise.", None)
    options: Mapping[str, Any] = setting("Dataset options, e.g. num_nodes for `synthetic`.", dict)
    folder: str = setting("Partition folder: on this machine (mode sync) or as the nodes see it (mode verify).", "parts")
    num_parts: int | None = setting("Number of parts; default: number of nodes.", None, at_least=1)
    partition: PartitionConfig = setting("Partition algorithm.", PartitionConfig)
    mode: Literal["sync", "verify"] = setting("`sync` sends each node its parts; `verify` checks a shared folder in place.", "sync")


@dataclass(frozen=True)
class TrainConfig:
    """The bundled trainer's settings; each becomes one flag of `python -m trainer train`."""

    model: Literal["sage", "gcn", "gat"] = setting("Model.", "sage")
    hidden: int = setting("Width of hidden layers.", 256, at_least=1)
    layers: int | None = setting("Number of layers; default: length of fanouts, and must equal it.", None, at_least=1)
    heads: int = setting("Attention heads (gat).", 4, at_least=1)
    dropout: float = setting("Dropout probability.", 0.3, at_least=0, below=1)
    fanouts: tuple[int, ...] = setting("Neighbours per hop, seeds outward; -1 takes all.", (15, 10, 5))
    eval_fanouts: tuple[int, ...] | None = setting("Fanouts for evaluation; default: fanouts.", None)
    replace: bool = setting("Sample neighbours with replacement.", False)
    batch_size: int = setting("Global batch: seeds per step over all processes.", 1024, at_least=1)
    eval_batch_size: int = setting("Global batch for evaluation.", 4096, at_least=1)
    epochs: int = setting("Passes over the train seeds.", 10, at_least=1)
    lr: float = setting("Learning rate (Adam).", 0.004, above=0)
    weight_decay: float = setting("Weight decay (Adam).", 0.0, at_least=0)
    seed: int = setting("Seed of order, samples, dropout and initial weights.", 0, at_least=0)
    eval_every: int = setting("Evaluate on val every so many epochs; 0: only at the end.", 1, at_least=0)
    checkpoint_every: int = setting("Checkpoint every so many epochs; 0: only at the end.", 1, at_least=0)
    sampler_threads: int = setting("Sampler threads per process.", 1, at_least=1)
    prefetch: int = setting("Batches in flight per process.", 3, at_least=1)
    backend: Literal["auto", "gloo", "nccl"] = setting("torch.distributed backend.", "auto")
    timeout: float = setting("Deadline in seconds of every wait between processes.", 120.0, above=0)
    resume: str | None = setting("Checkpoint file, or run id of an earlier run here, to go on from.", None)


@dataclass(frozen=True)
class RunConfig:
    """How a run is placed and watched."""

    master_addr: str = setting("Address of node 0 as the others see it, or `auto`.", "auto")
    master_port: int | Literal["auto"] = setting("Port for torch.distributed on node 0, or `auto`.", "auto", at_least=1, at_most=65535)
    service_port: int | Literal["auto"] = setting("First port of the graph service, or `auto`.", "auto", at_least=1, at_most=65535)
    runs_dir: str = setting("Folder on this machine for logs and results.", "runs")
    connect_timeout: float = setting("Seconds to wait for one SSH connection.", 10.0, above=0)
    start_timeout: float = setting("Seconds to wait for a node's supervisor and graph server.", 60.0, above=0)
    grace: float = setting("Seconds between SIGTERM and SIGKILL when stopping.", 5.0, at_least=0)
    encrypt: Literal["auto", "on", "off"] = setting("CURVE between graph services; auto: on off this machine.", "auto")
    files: tuple[str, ...] = setting("Extra files sent beside your own script.", ())


@dataclass(frozen=True)
class ClusterConfig:
    """A whole cluster.yml."""

    nodes: tuple[NodeConfig, ...] = setting("The machines, in node_rank order.")
    data: DataConfig = setting("The graph.")
    train: TrainConfig = setting("The bundled trainer's settings.", TrainConfig)
    run: RunConfig = setting("How the run is placed and watched.", RunConfig)
    transport: Literal["ssh", "local"] = setting("`ssh`, or `local`: all nodes on this machine without sshd.", "ssh")
    host_keys: HostKeys = setting("`strict`, `accept-new` (learn unknown ones) or `insecure`.", "strict")
    name: str = setting("Shown in run ids and reports.", "run")

    @property
    def num_parts(self) -> int:
        return self.data.num_parts or len(self.nodes)

    @property
    def world_size(self) -> int:
        return sum(node.nproc for node in self.nodes)
