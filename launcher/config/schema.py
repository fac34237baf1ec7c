"""The cluster config as frozen dataclasses, one per section of cluster.yml.

``launcher.config.loader`` reads YAML into these classes; ``launcher.config.reference`` generates ``docs/config.md``
from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal


def node_workdir(node: NodeConfig, node_rank: int) -> str:
    """Return the node's ``workdir`` with {node_rank} replaced and without a trailing slash."""
    return node.workdir.replace("{node_rank}", str(node_rank)).rstrip("/") or "/"


@dataclass(frozen=True)
class Form:
    """The texts that a key accepts. Shells quote them all; a form refuses what no quoting makes harmless."""

    pattern: str
    words: str  #: what is accepted, for messages


_CONTROLS = r"\x00-\x1f\x7f-\x9f\u2028\u2029"

#: The texts of most keys: comments of scripts, ``#SBATCH`` lines and lines of a log hold them.
LINE = Form(f"[^{_CONTROLS}]*", "one line without control characters")

#: Texts that may have several lines.
LINES = Form(f"[^{_CONTROLS}]*([\n\t][^{_CONTROLS}]*)*", "text without control characters")

#: Values of any type, which reach commands as JSON or as one quoted word.
ANY = Form("(?s:.*)", "text")

#: Words that a command must not take for an option.
WORD = Form(f"(?!-)[^{_CONTROLS}]*", "one line that does not begin with -")

#: As OpenSSH limits host names and users, which commands of ssh_config and formats of tmux insert without quotes.
ADDRESS = Form(r"""(?!-)[^\s'"`$\\;&<>|(){}\x00-\x1f\x7f-\x9f]+""", "a host name or address")
USER = Form(rf"""(?!-)([^\s'"`;&<>|(){{}}{_CONTROLS}]| (?!-))*(?<!\\)""", "a user name")

VARIABLE = Form("[A-Za-z_][A-Za-z0-9_]*", "the name of a variable: letters, digits and _")
MODEL = Form(
    rf"\w[\w-]*|(?!-)[^:{_CONTROLS}]+\.py:[A-Za-z_]\w*|[A-Za-z_]\w*(\.[A-Za-z_]\w*)+",
    "the name of a bundled model, FILE.py:CLASS or PACKAGE.CLASS",
)
SBATCH_OPTION = Form("[a-z][a-z0-9_-]*", "a long option of sbatch, such as partition or gpus-per-node")
SLURM_JOB = Form(r"[0-9][0-9_+]*", "the number of a job")


def setting(help: str, default: Any = ..., form: Form = LINE, keys: Form = LINE, **limits: float) -> Any:
    """Return a dataclass field with a one-line help text, a default and limits.

    ``default`` is a value, a factory, or ``...`` for a required key. ``form``: that of the text, or of each text in a
    list or mapping. ``keys``: that of the names in a mapping. ``limits`` are ``at_least``, ``above``, ``at_most`` and
    ``below``; they apply to each element of a list.
    """
    metadata = {"help": help, "limits": limits, "form": form, "keys": keys}
    if default is ...:
        return field(metadata=metadata)
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def settings(section: type) -> tuple[Field[Any], ...]:
    """Return the fields of a section that are keys of cluster.yml."""
    return tuple(item for item in fields(section) if item.metadata)


HostKeys = Literal["auto", "strict", "accept-new", "insecure"]

Role = Literal["worker", "server", "client"]

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
        "Host name, IP address or ~/.ssh/config alias; `localhost` when `transport: local`.", form=ADDRESS
    )
    port: int | None = setting("SSH port; default from ~/.ssh/config, else 22.", None, at_least=1, at_most=65535)
    user: str | None = setting("SSH user; default from ~/.ssh/config, else yours.", None, form=USER)
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
    role: Role = setting(
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
        "Address at which the other nodes reach this node; default: found by preflight.", None, form=ADDRESS
    )
    interface: str | None = setting(
        "Network interface of `address`, as eth0, for gloo and NCCL; default: found by preflight.", None, form=ADDRESS
    )
    env: Mapping[str, str] = setting(
        "Environment variables of all processes on the node.", dict, form=LINES, keys=VARIABLE
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


#: Names of the bundled models.
MODELS = ("sage", "gcn", "gat", "rgcn", "hgt", "rsage", "lightgcn", "embedding", "token-transformer")

#: Bundled models that do not read the scores of neighbours by PageRank or walks.
WITHOUT_SCORES = ("lightgcn", "embedding")

#: Bundled models that divide messages by degrees in the whole graph, which count edges later than a seed.
OF_DEGREES = ("gcn", "lightgcn")

#: Settings of `train` that only some bundled models read, and no class.
OF_MODELS: Mapping[str, tuple[str, ...]] = {
    "output_heads": ("gat",),
    "activation": tuple(name for name in MODELS if name not in ("hgt", "lightgcn", "embedding", "token-transformer")),
    "input_dropout": tuple(name for name in MODELS if name not in ("lightgcn", "embedding")),
    "attention_dropout": ("gat",),
    "max_tokens": ("token-transformer",),
}


def is_own_model(model: str) -> bool:
    """Return whether ``train.model`` names a class, as ``FILE.py:CLASS`` or ``PACKAGE.CLASS``, not a bundled model."""
    return ":" in model or "." in model


#: Metrics on evaluation splits by task, the default one first; `loss` is another name that `train.early_stop` accepts.
METRICS: Mapping[str, tuple[str, ...]] = {
    "classification": ("accuracy", "macro_f1", "micro_f1", "roc_auc", "average_precision"),
    "multilabel": ("micro_f1", "accuracy", "macro_f1", "roc_auc", "average_precision"),
    "regression": ("mae", "rmse"),
    "link": ("mrr", "hits@1", "hits@10", "hits@50", "auc"),
}

#: Metrics of task `link` that are `NAME@K`, for any K; all but hits need `train.eval_negatives: all`.
AT_K = ("hits", "recall", "ndcg", "precision", "map")


_ADAM = "betas eps amsgrad maximize"

#: The optimizers of torch.optim with their arguments, without those that are keys of `train` and those about speed.
#: Left out are those that need a closure, sparse gradients, matrices only, or a wait for the GPU in each step.
OPTIMIZERS: Mapping[str, str] = {
    "Adam": f"{_ADAM} decoupled_weight_decay",
    "AdamW": _ADAM,
    "SGD": "momentum dampening nesterov maximize",
    "RMSprop": "alpha eps momentum centered maximize",
    "Adagrad": "lr_decay initial_accumulator_value eps maximize",
    "Adadelta": "rho eps maximize",
    "Adamax": "betas eps maximize",
    "NAdam": "betas eps momentum_decay decoupled_weight_decay maximize",
    "RAdam": "betas eps decoupled_weight_decay maximize",
    "ASGD": "lambd alpha t0 maximize",
    "Rprop": "etas step_sizes maximize",
}


#: The trackers with their options, and the Python package that the lead node needs for each.
TRACKERS: Mapping[str, tuple[str, str]] = {
    "tensorboard": ("", "tensorboard"),
    "wandb": ("project entity mode", "wandb"),
    "mlflow": ("experiment uri", "mlflow_skinny"),
}


@dataclass(frozen=True)
class EarlyStop:
    """When a run ends before `train.epochs`. `early_stop: 3` is short for `early_stop: {patience: 3}`."""

    patience: int = setting("The run ends after this many evaluations on val without an improvement.", at_least=1)
    metric: str | None = setting(
        "What must improve: `loss` or a metric of the task; default: the metric that chooses the best epoch.",
        None,
        form=WORD,
    )
    min_delta: float = setting("An improvement is a change by more than this.", 0.0, at_least=0)


#: The schedules with the keys that only some of them have.
SCHEDULES: Mapping[str, str] = {
    "constant": "",
    "cosine": "lowest epochs",
    "step": "every factor",
    "plateau": "factor patience metric lowest",
    "one-cycle": "rise lowest epochs",
}


@dataclass(frozen=True)
class Schedule:
    """How the learning rates change, that of trainable rows alike. `schedule: cosine` is short for `{name: cosine}`."""

    name: Literal["constant", "cosine", "step", "plateau", "one-cycle"] = setting(
        "`cosine` falls along a cosine; `step` multiplies by `factor` every few epochs, `plateau` once a metric on val "
        "no longer improves; `one-cycle` rises from 4 % and falls, both along a cosine."
    )
    warmup_steps: int = setting("Steps in which the rate first grows from 0 to its value.", 0, at_least=0)
    warmup_epochs: int = setting("The same in epochs.", 0, at_least=0)
    every: int | None = setting("step: epochs between two changes; default: 10.", None, at_least=1)
    factor: float | None = setting(
        "step, plateau: what the rate is multiplied by; default: 0.1.", None, above=0, below=1
    )
    patience: int | None = setting(
        "plateau: evaluations on val without an improvement before a change; default: 10.", None, at_least=1
    )
    metric: str | None = setting(
        "plateau: what must improve, `loss` or a metric of the task; default: the metric that chooses the best epoch.",
        None,
        form=WORD,
    )
    rise: float | None = setting(
        "one-cycle: share of the steps in which the rate rises; default: 0.3.", None, above=0, below=1
    )
    lowest: float | None = setting(
        "cosine, plateau, one-cycle: lowest rate, as a share of `train.lr`; default: 0.", None, at_least=0, below=1
    )
    epochs: int | None = setting(
        "cosine, one-cycle: epochs until the lowest rate; default: `train.epochs`.", None, at_least=1
    )


#: The ways to choose neighbours, with the keys that only some of them have.
NEIGHBORS: Mapping[str, str] = {
    "fanout": "",
    "top": "",
    "ppr": "alpha eps edge_types direction",
    "walks": "num_walks length restart metapath",
}


@dataclass(frozen=True)
class Neighbors:
    """How neighbours are chosen, as many as `train.fanouts` says. `neighbors: ppr` is short for `{name: ppr}`."""

    name: Literal["fanout", "top", "ppr", "walks"] = setting(
        "`fanout` draws them; `top` takes those of the highest `train.weight_attr`, or without it the latest by "
        "`train.time_attr`; `ppr` those of the highest personalised PageRank; `walks` those that random walks visit "
        "most often (PinSAGE). The last two with all models but lightgcn and embedding, and model classes that read "
        "edge_weight."
    )
    alpha: float | None = setting(
        "ppr: probability that a walk ends before each step; default: 0.15.", None, above=0, below=1
    )
    eps: float | None = setting(
        "ppr: residual per in-edge up to which a vertex is pushed; smaller: more exact and slower; default: 0.0001.",
        None,
        above=0,
        below=1,
    )
    edge_types: tuple[str, ...] | None = setting("ppr: edge types that walks follow; default: all.", None, form=WORD)
    direction: Literal["in", "out", "both"] | None = setting(
        "ppr: `in`: walks go from the target of an edge to its source; `out`: from source to target, along reverse "
        "edges, which `undirected` in `data.options` makes; default: in, also along reverse edges.",
        None,
    )
    num_walks: int | None = setting("walks: number of walks from each vertex; default: 50.", None, at_least=1)
    length: int | None = setting("walks: steps of each walk; default: 4.", None, at_least=1)
    restart: float | None = setting(
        "walks: probability that a walk returns to its vertex before a step; default: 0.15.", None, at_least=0, below=1
    )
    metapath: tuple[str, ...] | None = setting(
        "walks: edge types of one step, from the seed outwards and back to its type, as [user__buys__item, "
        "item__rev_buys__user]; a vertex of another type, here an item, walks round from there. Needed if there are "
        "several edge types.",
        None,
        form=WORD,
    )


@dataclass(frozen=True)
class Start:
    """The weights of another run from which a run starts. `start: RUN` is short for `start: {checkpoint: RUN}`."""

    checkpoint: str = setting(
        "A file on this machine, or the id of an earlier run in runs_dir; its best weights are taken."
    )
    modules: tuple[str, ...] = setting(
        "Names of the modules to take, as [layers.0]; `embedding` has the trainable rows. Default: all.", (), form=WORD
    )


@dataclass(frozen=True)
class TrainConfig:
    """Settings of the bundled trainer; each is passed as one flag of `python -m trainer train`."""

    model: str = setting(
        "`sage`, `gcn` or `gat`; for heterogeneous graphs `rgcn`, `hgt` or `rsage` (GraphSAGE per edge type); for task "
        "`link` also `lightgcn` and, without neighbours, `embedding`; for any graph `token-transformer`. Or a "
        "class: `FILE.py:CLASS`, or `PACKAGE.CLASS` such as torch_geometric.nn.GraphSAGE.",
        "sage",
        form=MODEL,
    )
    model_args: Mapping[str, Any] | None = setting(
        "Further arguments of a model class, by name, for instance `{act: elu}`.", None, form=ANY
    )
    task: Literal[
        "auto", "classification", "regression", "multilabel", "link", "edge-classification", "edge-regression"
    ] = setting(
        "What is learned: classes, numbers or several labels of vertices; `link`: which links exist; `edge-…`: classes "
        "or numbers of edges. `auto` decides by the labels.",
        "auto",
    )
    target: str | None = setting(
        "Vertex type with the labels, or edge type, as `user__rates__item`; for task `link` also several, as "
        "`user__clicks__item,user__buys__item`, or `all` except reverses `rev_…`. Default: the only one; of links all "
        "types of which some are held out.",
        None,
        form=WORD,
    )
    hidden: int = setting("Width of the hidden layers.", 256, at_least=1)
    layers: int | None = setting(
        "Number of layers; default, and the only valid value: the number of fanouts. token-transformer: any, default "
        "2.",
        None,
        at_least=1,
    )
    heads: int = setting("Number of attention heads (gat, hgt, token-transformer, model classes).", 4, at_least=1)
    max_tokens: int = setting(
        "Longest sequence of vertices around a seed, itself included (token-transformer); the nearest are kept.",
        128,
        at_least=2,
    )
    output_heads: int | None = setting(
        "Number of attention heads of the last layer (gat); default: those of the others.", None, at_least=1
    )
    activation: Literal["relu", "elu"] = setting("Function between layers, except in hgt.", "relu")
    dropout: float = setting("Dropout probability between layers.", 0.3, at_least=0, below=1)
    input_dropout: float = setting("Dropout probability of the features of vertices.", 0.0, at_least=0, below=1)
    attention_dropout: float = setting("Dropout probability of attention weights (gat).", 0.0, at_least=0, below=1)
    fanouts: tuple[int, ...] = setting(
        "Neighbours sampled per vertex, one number per hop, first hop first; -1: all neighbours.", (15, 10, 5)
    )
    eval_fanouts: tuple[int, ...] | None = setting("Fanouts for evaluation; default: those of training.", None)
    neighbors: Neighbors | None = setting(
        "How neighbours are chosen: a name, or the keys below; default: they are drawn.", None
    )
    replace: bool = setting("Sample neighbours with replacement.", False)
    weight_attr: str | None = setting(
        "Edge attribute used as sampling weight; edges of weight 0 are never sampled.", None, form=WORD
    )
    edge_attr: str | None = setting(
        "Edge attribute used as features of edges, by sage, rsage and model classes, and as score of neighbours, by "
        "token-transformer; `tables` calls the features of an edge table `edge_attr`.",
        None,
        form=WORD,
    )
    category_dims: Mapping[str, Any] | None = setting(
        "Width of the embeddings of columns of categories, by name, as `{region: 8, customer.plan: 0}`; 0: the column "
        "is not read. Default: half the number of categories, rounded up, at most 50.",
        None,
        form=ANY,
    )
    time_attr: str | None = setting(
        "Integer attribute used as time, of vertices or, for task link, of edges (`tables` calls it `edge_time`); "
        "neighbours later than their seed are never sampled.",
        None,
        form=WORD,
    )
    temporal_strategy: Literal["uniform", "last"] = setting(
        "With time_attr: `uniform` samples among the earlier neighbours, `last` takes the most recent ones.", "uniform"
    )
    disjoint: bool = setting(
        "Sample a separate subgraph for each seed; a vertex may then occur several times in a batch.", False
    )
    batch_size: int = setting("Global batch: seed vertices per step over all processes.", 1024, at_least=1)
    eval_batch_size: int = setting("Global batch for evaluation.", 4096, at_least=1)
    hide: bool = setting(
        "Labels of edges: leave the edges of a step, and their reverses `rev_…`, out of the sampled neighbourhoods, as "
        "task `link` does.",
        False,
    )
    decoder: Literal["dot", "distmult", "complex", "transe", "rotate"] = setting(
        "Task `link`: score of a link from the rows of its ends: their dot product, or one with weights for each edge "
        "type, as for knowledge graphs, by which also the sources of links are learned and ranked.",
        "dot",
    )
    loss: Literal["softmax", "in-batch", "bpr", "bce"] = setting(
        "Task `link`: loss of a link against the step's negatives: softmax; bpr (each negative is to score lower); bce "
        "(binary cross entropy). in-batch: softmax against the targets of the step's other links, in place of "
        "`negatives`, corrected by how often each target is linked.",
        "softmax",
    )
    negatives: int = setting(
        "Task `link`: randomly drawn targets per step, which its links share as negatives.",
        128,
        at_least=1,
    )
    hard_negatives: str | None = setting(
        "Task `link`: edge type from sources of links to vertices that are negatives of their links, beside "
        "`negatives`, as `user__returns__item`.",
        None,
        form=WORD,
    )
    num_hard_negatives: int = setting(
        "Largest number of `hard_negatives` per link; if there are more, they are drawn in each step.",
        4,
        at_least=1,
    )
    eval_negatives: int | Literal["all"] = setting(
        "Task `link`: number of randomly drawn vertices among which the target of a link is ranked; all: all to which "
        "its source is not linked yet, with metrics as `recall@20`.",
        1000,
        at_least=1,
    )
    eval_candidates: str | None = setting(
        "Task `link`: edge type from sources of links to the vertices among which the targets of their held-out links "
        "are ranked, as `user__shown__item`; with `time_attr`, those of the link's time. Default: by `eval_negatives`.",
        None,
        form=WORD,
    )
    epochs: int = setting("Total passes over the train seeds, including those before `resume`.", 10, at_least=1)
    lr: float = setting("Learning rate.", 0.004, above=0)
    optimizer: Mapping[str, Any] | None = setting(
        "Optimizer of torch.optim with its arguments, as `AdamW` or `{name: SGD, momentum: 0.9}`; `lr` and "
        "`weight_decay` are keys of their own. Default: Adam.",
        None,
        form=ANY,
    )
    schedule: Schedule | None = setting(
        "How the learning rates change: a name, or the keys below; default: they are constant.", None
    )
    clip: float | None = setting(
        "Largest norm of the gradient of all weights; a larger one is scaled down to it. Default: no limit.",
        None,
        above=0,
    )
    embeddings: Literal["auto", "featureless", "all"] = setting(
        "Which vertices have trainable rows, in rgcn, hgt, rsage, token-transformer and model classes. featureless: "
        "those without features, in heterogeneous graphs; all: all, also beside features; auto: as featureless, and "
        "for task `link` also the links' targets beside their features, if these rows take at most 1 GB.", "auto"
    )  # fmt: skip
    embedding_lr: float | None = setting(
        "Learning rate of trainable rows of vertices (SparseAdam); default: lr.", None, above=0
    )
    weight_decay: float = setting("Weight decay of the optimizer.", 0.0, at_least=0)
    class_weights: Literal["balanced"] | tuple[float, ...] | None = setting(
        "Classification: weight of each class in the loss, as [1, 1, 5]; `balanced`: the inverse of its share of the "
        "train seeds. Default: 1.",
        None,
        at_least=0,
    )
    label_smoothing: float = setting(
        "Classification: share of each label that is spread over all classes.", 0.0, at_least=0, below=1
    )
    seed: int = setting(
        "Random seed of batch order, sampling, dropout and initial weights.", 0, at_least=0, below=2**32
    )
    metrics: tuple[str, ...] = setting(
        "Metrics on val and test, as [macro_f1, roc_auc]; the first one chooses the best epoch. Default: those of the "
        "task.",
        (),
        form=WORD,
    )
    early_stop: EarlyStop | None = setting(
        "End the run once a metric on val no longer improves: a patience, or the keys below.", None
    )
    eval_every: int = setting("Epochs between evaluations on the val split; 0: only at the end.", 1, at_least=0)
    checkpoint_every: int = setting("Epochs between checkpoints; 0: only at the end.", 1, at_least=0)
    checkpoint_seconds: float = setting(
        "Seconds between checkpoints within an epoch; 0: none.", 60.0, at_least=0, below=1_000_000
    )
    track: Mapping[str, Mapping[str, Any]] | None = setting(
        "Trackers that the lead node sends the run to: `[tensorboard, wandb, mlflow]`, or each with its options, as "
        "`{wandb: {project: gnn, mode: offline}}`; also for your own command.",
        None,
        form=ANY,
    )
    sampler_threads: int = setting("Sampler threads per process.", 1, at_least=1)
    prefetch: int = setting(
        "Batches in memory per process, including the one in use; at least sampler_threads + 1.", 2, at_least=1
    )
    sampling: Literal["auto", "cpu", "cuda"] = setting(
        "Where batches are sampled and gathered. cuda: on each GPU, needs the topology of all parts on the node; auto: "
        "cuda where it is possible.", "auto"
    )  # fmt: skip
    device_cache: str = setting(
        "Feature rows cached on each GPU, the most often needed first: a share of all (10%), a size (512MB), or 0.", "0"
    )
    backend: Literal["auto", "gloo", "nccl"] = setting(
        "torch.distributed backend; auto: nccl if every training node has devices, else gloo.", "auto"
    )
    precision: Literal["float32", "bfloat16"] = setting(
        "Type in which the layers compute; `bfloat16` accumulates in float32, and changes results.", "float32"
    )
    timeout: float = setting("Seconds after which a wait for another process fails.", 120.0, above=0, below=1_000_000)
    keep: int = setting(
        "Checkpoints of the best epochs that are kept on the lead node, besides the newest.", 1, at_least=1
    )
    start: Start | None = setting(
        "Start from the weights of another run: a checkpoint, or the keys below; without effect if it is resumed.", None
    )
    resume: str | None = setting(
        "Checkpoint to continue from: a file on this machine, or the id of an earlier run in runs_dir.", None
    )


@dataclass(frozen=True)
class RunConfig:
    """Ports, timeouts and failure handling of a run."""

    master_addr: str = setting(
        "Address at which the other nodes reach the lead node (the first that trains); auto: found by preflight.",
        "auto",
        form=ADDRESS,
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
        keys=SBATCH_OPTION,
    )
    slurm_job: str | None = setting(
        "Id of the Slurm job that has the nodes; set by gnnfleet inside a job.", None, form=SLURM_JOB
    )
    host_keys: HostKeys = setting(
        "Unknown SSH host keys: `strict` refuses them, `accept-new` stores them, `insecure` accepts any key; "
        "`auto`: as StrictHostKeyChecking in ssh_config says, else `strict`.",
        "auto",
    )
    name: str = setting("Prefix of run ids; also shown in reports.", "run")

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
