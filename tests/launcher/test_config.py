"""Tests of reading a cluster.yml: values, defaults, ``--set`` overrides, and the message for each mistake."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from launcher.config.loader import load_config, to_yaml
from launcher.config.reference import config_page
from launcher.config.schema import ClusterConfig, NodeConfig
from launcher.errors import ConfigError, UsageError
from launcher.files import CODE_ROOT
from launcher.init.request import InitRequest, config_of, split_hosts
from launcher.run.config_of_options import overrides_of
from trainer.core.train_config import EarlyStop, Start, TrainConfig
from waiting import stretched

TWO = "nodes: [a, b]\ndata: {dataset: synthetic}\n"
Load = Callable[..., ClusterConfig]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def write_and_load(text: str, overrides: Sequence[str] = ()) -> ClusterConfig:
        path = tmp_path / "c.yml"
        path.write_text(text, encoding="utf-8")
        return load_config(path, overrides)

    return write_and_load


def problems(load: Load, text: str, overrides: Sequence[str] = ()) -> list[str]:
    """Return the mistakes in a config, as ``line: message`` or ``--set …: message``."""
    with pytest.raises(ConfigError) as caught:
        load(text, overrides)
    assert str(caught.value) == "\n".join(map(str, caught.value.problems))
    assert caught.value.exit_status == 2
    return [f"{p.line}: {p.message}" if p.line else str(p) for p in caught.value.problems]


NODES = "data: {dataset: synthetic}\nnodes:\n"
MISTAKES = {
    # config -> all of its messages in full
    "nodes: [a\ndata: {dataset: x}": [
        "2: not valid YAML: a list in [ ] without `,` or the closing `]` (begun on line 1)"
    ],
    "nodes:\n\t- a\n": ["2: not valid YAML: a tab cannot indent YAML; use spaces"],
    "name: a: b\n": ["1: not valid YAML: a `:` is not allowed here; check the indentation, or quote the text"],
    "name: x\n  nodes: [a]\n": [
        "2: not valid YAML: a `:` is not allowed here; check the indentation, or quote the text"
    ],
    "name: 'x\nnodes: [a]\n": ["1: not valid YAML: a quote that is never closed"],
    TWO + "---\n" + TWO: ["3: not valid YAML: a second document (`---`); one file holds one cluster (begun on line 1)"],
    "name: \x07\n": ["1: not valid YAML: the character '\\x07' is not allowed"],
    "": ["1: the file is empty; start from templates/cluster.yml"],
    "- a\n": ["1: expected keys such as `nodes:` and `data:`, or one host per line, as `gnn1` or `gnn1 slots=8`"],
    "nodes: [{host: a, python: ''}]\nrun:\n  files: ['']\n": [
        "1: nodes.0.python: is empty; leave it out, or give a value",
        "1: missing section `data`: the graph, and where its parts are stored",
        "3: run.files: is empty; leave it out, or give a value",
    ],
    "name: x\n": [
        "1: missing key `nodes`: the machines, in node_rank order; the first one that trains is the lead node",
        "1: missing section `data`: the graph, and where its parts are stored",
    ],
    TWO + "data: {}\n": ["3: key `data` is given twice; first on line 2"],
    TWO + "nam: x\n": ["3: unknown key `nam` at the top level; did you mean `name`?"],
    TWO + "epochs: 3\n": ["3: unknown key `epochs` at the top level; it belongs in train"],
    TWO + "train:\n  lr: 0.1\n  fanout: [3]\n": ["5: unknown key `fanout` in train; did you mean `fanouts`?"],
    TWO + "run:\n  workdir: /x\n": ["4: unknown key `workdir` in run; it belongs in an entry of nodes, or in defaults"],
    TWO + "train: {transport: local}\n": ["3: unknown key `transport` in train; it belongs at the top level"],
    "nodes: [a]\ndata: {dataset: synthetic, partition: {qqq: 1}}\n": [
        "2: unknown key `qqq` in data.partition; the keys here are method, balance, clusters, seed, memory, rows"
    ],
    "nodes: [a]\ndata: {dataset: synthetic,\n  cache: a lot}\n": [
        "3: data.cache: expected a share of the remote rows (10%), a size (512MB) or 0, found 'a lot'"
    ],
    "nodes: [a]\ndata:\n  dataset: synthetic\n  cache: 120%\n  topology: replicate\n": [
        "4: data.cache: expected at most 100% of the remote rows, found '120%'",
        "5: data.topology: expected one of auto, replicated, partitioned, found the text `replicate`; did you mean "
        "`replicated`?",
    ],
    TWO + "train: {device_cache: 1 rows}\n": [
        "3: train.device_cache: expected a share of all rows (10%), a size (512MB) or 0, found '1 rows'"
    ],
    TWO + "run: {wire_rows: fp16}\ntrain: {precision: bf16}\n": [
        "3: run.wire_rows: expected one of stored, float16, int8, found the text `fp16`",
        "4: train.precision: expected one of float32, bfloat16, found the text `bf16`; did you mean `bfloat16`?",
    ],
    "nodes: [gnn1:8]\ndata: {dataset: synthetic}\n": [
        "1: nodes.0.host: `gnn1:8` may mean an SSH port or 8 processes; write the host alone, and the key `port: 8` or "
        "`procs: 8`"
    ],
    "nodes: [a]\ndata: {dataset: ./graph.pt}\n": [
        "2: data.dataset: there is no dataset `./graph.pt`; a graph of your own is `dataset: file` with its path in "
        "`source`, and --dataset takes a path that exists"
    ],
    "nodes: [@a]\ndata: {dataset: synthetic}\n": ["1: not valid YAML: a text cannot begin with `@`; quote it"],
    TWO + "train: {optimizer: adamw}\n": [
        "3: train.optimizer: there is no optimizer of torch.optim 'adamw'; did you mean AdamW?"
    ],
    TWO + "train: {LR: 0.1, activation: ELU}\n": [
        "3: unknown key `LR` in train; did you mean `lr`?",
        "3: train.activation: expected one of relu, elu, found the text `ELU`; did you mean `elu`?",
    ],
    TWO + "train: {model: my.py}\n": ["3: train.model: my.py is a file without the name of a class; write my.py:CLASS"],
    TWO + "train: {class_weights: [0, 0], category_dims: 8}\n": [
        "3: train.category_dims: expected a section of keys, found `8`",
        "3: train.class_weights: no class has a weight above 0, so nothing would be learned",
    ],
    "nodes: [a]\ndatas: {dataset: synthetic}\n": ["2: unknown key `datas` at the top level; did you mean `data`?"],
    "nodes: [a]\ndata:\n  mode: sync\n": [
        "2: missing key `dataset` in data: `synthetic`, `file`, `tables`, `partition`, an `ogbn-…` name, or a "
        "torch_geometric dataset as `Planetoid:Cora`; required unless `serving` is given"
    ],
    NODES + "  - a\n  - port: 3\n": [
        "4: missing key `host` in nodes.1: host name, IP address or ~/.ssh/config alias; `localhost` when "
        "`transport: local`"
    ],
    TWO + "train: {epochs: many}\n": ["3: train.epochs: expected a whole number, found the text `many`"],
    TWO + "train: {epochs: 2.5}\n": ["3: train.epochs: expected a whole number, found `2.5`"],
    TWO + "train: {epochs: '2'}\n": ["3: train.epochs: expected a whole number, found the text `2` in quotes"],
    TWO + "run: {connect_timeout: 5s, grace: 2 min}\n": [
        "3: run.connect_timeout: expected a number, found the text `5s`; write 5 (seconds)",
        "3: run.grace: expected a number, found the text `2 min`; write 120 (seconds)",
    ],
    TWO + "train: {lr: fast}\n": ["3: train.lr: expected a number, found the text `fast`"],
    TWO + "train: {lr: .inf}\n": ["3: train.lr: expected a number, found `.inf`"],
    TWO + "train: {replace: maybe}\n": ["3: train.replace: expected true or false, found the text `maybe`"],
    TWO + "train: {fanouts: 5}\n": ["3: train.fanouts: expected a list such as [2, 1], found `5`"],
    TWO + "train: {fanouts: [5, x]}\n": ["3: train.fanouts.1: expected a whole number, found the text `x`"],
    TWO + "train: {hidden: [1]}\n": ["3: train.hidden: expected a whole number, found a list"],
    TWO + "train: 7\n": ["3: train: expected keys such as `model:`, found `7`"],
    TWO + "name: {a: 1}\n": ["3: name: expected text, found a section of keys"],
    "nodes: a\ndata: {dataset: synthetic}\n": ["1: nodes: expected a list of hosts, found the text `a`"],
    NODES + "  - [a]\n": ["3: nodes.0: expected keys such as `host:`, found a list"],
    NODES + "  - {host: a, env: [A]}\n": ["3: nodes.0.env: expected a section of keys, found a list"],
    NODES + "  - {host: a, env: {A: }}\n": ["3: nodes.0.env: A: expected text, found nothing"],
    TWO + 'train: {category_dims: {"x\\ny": z}}\n': [
        r"3: train.category_dims: x\ny: expected a whole number, found the text `z`"
    ],
    TWO + "train: {model: sagee}\n": [
        "3: train.model: there is no model 'sagee'; did you mean sage? (or a class: FILE.py:CLASS, PACKAGE.CLASS)"
    ],
    TWO + "train: {model: GraphSAGE}\n": [
        "3: train.model: there is no model 'GraphSAGE'; did you mean sage? (or a class: FILE.py:CLASS, PACKAGE.CLASS)"
    ],
    TWO + "train: {task: link, metrics: [recall@20, map@0]}\n": [
        "3: train.metrics: recall@20 needs eval_negatives: all",
        "3: train.metrics: no metric 'map@0'; the metrics of task link are mrr, hits@1, hits@10, hits@50, auc, "
        "hits@K, recall@K, ndcg@K, precision@K, map@K",
    ],
    TWO + "train: {task: regression, model: lightgcn}\n": ["3: train.model: lightgcn is for task link, not regression"],
    TWO + "train: {model: gcn, time_attr: at, disjoint: true}\n": [
        "3: train.time_attr: model gcn divides messages by degrees in the whole graph, which count later edges; use "
        "sage, for several types rsage"
    ],
    TWO + "train: {model: gat, model_args: {act: elu}}\n": [
        "3: train.model_args: gat is a bundled model, which takes no further arguments; leave them out"
    ],
    TWO + "host_keys: no\n": ["3: host_keys: expected one of auto, strict, accept-new, insecure, found `no`"],
    TWO + "run: {master_port: free}\n": [
        "3: run.master_port: expected a whole number or `auto`, found the text `free`"
    ],
    TWO + "run: {runs_dir: $HOME/runs}\n": [
        "3: run.runs_dir: `$HOME/runs`: `$HOME` is not replaced in paths; write its value, or ~/ for the home folder"
    ],
    NODES + "  - {host: a, workdir: '/data/${USER}/w'}\n": [
        "3: nodes.0.workdir: `/data/${USER}/w`: `${USER}` is not replaced in paths; "
        "write its value, or ~/ for the home folder"
    ],
    TWO + "run: {files: [~nobody-9/x]}\n": [
        "3: run.files.0: `~nobody-9/x`: there is no user nobody-9 on this machine, or no home folder"
    ],
    "nodes: []\ndata: {dataset: synthetic}\n": ["1: nodes: empty; list at least one host"],
    TWO + "train: {batch_size: 0}\n": ["3: train.batch_size: must be at least 1; found 0"],
    TWO + "train: {epochs: -1}\n": ["3: train.epochs: must be at least 1; found -1"],
    TWO + "train: {dropout: 1}\n": ["3: train.dropout: must be at least 0 and below 1; found 1.0"],
    TWO + "train: {lr: 0}\n": ["3: train.lr: must be above 0; found 0.0"],
    TWO + "run: {master_port: 65536}\n": ["3: run.master_port: must be at least 1 and at most 65535; found 65536"],
    NODES + "  - {host: a, procs: 0}\n": ["3: nodes.0.procs: must be at least 1 and at most 1024; found 0"],
    NODES + "  - a:70000\n": ["3: nodes.0.port: must be at least 1 and at most 65535; found 70000"],
    NODES + "  - {host: a, devices: [-1]}\n": ["3: nodes.0.devices: must be at least 0; found -1"],
    **{
        f"{NODES}  - '{host}'\n": [f"3: nodes.0.host: expected a host name or address, found '{host}'"]
        for host in ("gnn1,gnn2", "gnn1/8", "gnn1=8", "8")  # one host more, or a number of processes
    },
    NODES + "  - a b\n": ["3: nodes.0.host: expected host, user@host or user@host:port, found `a b`"],
    NODES + "  - host: u@a\n    user: v\n": ["3: nodes.0: user is given twice, in host and as a key of its own"],
    TWO + "train: {fanouts: [5, 0]}\n": ["3: train.fanouts: each must be -1 (all neighbours) or at least 1; found 0"],
    TWO + "train: {fanouts: [5, -2]}\n": ["3: train.fanouts: each must be -1 (all neighbours) or at least 1; found -2"],
    TWO + "train: {fanouts: []}\n": ["3: train.fanouts: empty; give one number per layer"],
    TWO + "train:\n  fanouts: [5, 5]\n  layers: 3\n": [
        "5: train.layers: 3, but fanouts has 2 numbers; give one fanout per layer, or leave layers out"
    ],
    TWO + "train: {eval_fanouts: [5]}\n": [
        "3: train.eval_fanouts: 1 numbers, but fanouts has 3; both need one per layer"
    ],
    TWO + "train:\n  early_stop:\n    patience: 0\n    wait: 1\n": [
        "5: train.early_stop.patience: must be at least 1; found 0",
        "6: unknown key `wait` in train.early_stop; the keys here are patience, metric, min_delta",
    ],
    TWO + "train: {track: [tensorbord]}\n": [
        "3: train.track: there is no tracker 'tensorbord'; did you mean tensorboard?"
    ],
    TWO
    + "train:\n  track:\n    wandb: {key: 1, mode: of}\n    mlflow: {uri: https://me:pw@host}\n    tensorboard: 3\n": [
        "4: train.track.wandb: wandb has no option 'key'; it has project, entity, mode",
        "4: train.track.wandb.mode: expected online or offline, found 'of'",
        "4: train.track.mlflow.uri: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD on the host instead of "
        "writing them here",
        "4: train.track.tensorboard: expected options of tensorboard, found 3",
    ],
    TWO + "train: {neighbors: {name: ppr, direction: inn}}\n": [
        "3: train.neighbors.direction: expected one of in, out, both, found the text `inn`; did you mean `in`?"
    ],
    TWO + "train: {optimizer: Adamm}\n": [
        "3: train.optimizer: there is no optimizer of torch.optim 'Adamm'; did you mean Adam?"
    ],
    TWO + "train: {optimizer: {betas: [0.9, 0.99]}}\n": [
        "3: train.optimizer: its name is missing; there are Adam, AdamW, SGD, RMSprop, Adagrad, Adadelta, Adamax, "
        "NAdam, RAdam, ASGD, Rprop"
    ],
    TWO + "train:\n  clip: 0\n  optimizer: {name: SGD, betas: [0.9, 0.99], nesterov: 1, momentum: yes, lr: 1}\n": [
        "4: train.clip: must be above 0; found 0.0",
        "5: train.optimizer: SGD has no argument 'betas'; it has momentum, dampening, nesterov, maximize",
        "5: train.optimizer.nesterov: expected true or false, found 1",
        "5: train.optimizer.momentum: expected a number, found True",
        "5: train.optimizer.lr: set lr instead",
    ],
    TWO + "train:\n  weight_decay: 0.1\n  optimizer: {name: Rprop, etas: [0.5, 1.2, 3]}\n": [
        "4: train.weight_decay: Rprop has none",
        "5: train.optimizer.etas: expected two numbers, found [0.5, 1.2, 3]",
    ],
    TWO + "train:\n  optimizer: {name: Adam, eps: -1, betas: [0.9, 1]}\n": [
        "4: train.optimizer.eps: expected at least 0, found -1",
        "4: train.optimizer.betas: expected two numbers of at least 0 and below 1, found [0.9, 1]",
    ],
    TWO + "train: {optimizer: {name: SGD, nesterov: true, momentum: 0}}\n": [
        "3: train.optimizer.nesterov: needs a momentum above 0, and no dampening"
    ],
    TWO + "train: {model: torch_geometric.nn.GCN, model_args: x}\n": [
        "3: train.model_args: expected a section of keys, found the text `x`"
    ],
    TWO + "train: {schedule: cosin}\n": [
        "3: train.schedule.name: expected one of constant, cosine, step, plateau, one-cycle, found the text `cosin`; "
        "did you mean `cosine`?"
    ],
    TWO + "train:\n  neighbors: {name: ppr, restart: 0.2}\n  model: lightgcn\n  task: link\n": [
        "4: train.neighbors.restart: ppr has no such key; it has alpha, eps, edge_types, direction",
        "4: train.neighbors: lightgcn does not read the scores that ppr gives; use another model",
    ],
    TWO + "train:\n  schedule:\n    name: step\n    rise: 0.1\n    warmup_steps: 4\n    warmup_epochs: 1\n": [
        "6: train.schedule.rise: step has no such key; it has every, factor",
        "7: train.schedule.warmup_steps: give warmup_steps or warmup_epochs, not both",
    ],
    TWO + "train:\n  task: regression\n  schedule: {name: plateau, metric: auc}\n": [
        "5: train.schedule.metric: no metric 'auc'; the metrics of task regression are mae, rmse"
    ],
    TWO + "train: {schedule: {name: one-cycle, warmup_epochs: 2}}\n": [
        "3: train.schedule.warmup_epochs: one-cycle has a rise of its own; leave it out"
    ],
    TWO + "train:\n  task: link\n  label_smoothing: 0.1\n  class_weights: balance\n": [
        "5: train.label_smoothing: is for task classification, not link",
        "6: train.class_weights: expected a list or `balanced`, found the text `balance`",
    ],
    TWO + "train:\n  attention_dropout: 0.6\n  activation: elu\n": [
        "4: train.attention_dropout: model sage does not read it; use gat"
    ],
    TWO + "train: {class_weights: [1, -1]}\n": ["3: train.class_weights: must be at least 0; found -1.0"],
    TWO + "train:\n  task: multilabel\n  metrics: [macro_f1, mrr]\n": [
        "5: train.metrics: no metric 'mrr'; the metrics of task multilabel are micro_f1, accuracy, macro_f1, roc_auc, "
        "average_precision"
    ],
    TWO + "train: {early_stop: soon}\n": [
        "3: train.early_stop.patience: expected a whole number, found the text `soon`"
    ],
    TWO + "train: {early_stop: {metric: loss}}\n": [
        "3: missing key `patience` in train.early_stop: the run ends after this many evaluations on val without an "
        "improvement"
    ],
    TWO + "train:\n  eval_every: 0\n  task: link\n  early_stop:\n    patience: 3\n    metric: accuracy\n": [
        "6: train.early_stop: needs evaluations on val, but eval_every is 0",
        "8: train.early_stop.metric: no metric 'accuracy'; the metrics of task link are mrr, hits@1, hits@10, hits@50, "
        "auc, "
        "hits@K, recall@K, ndcg@K, precision@K, map@K",
    ],
    TWO + "train:\n  model: gat\n  heads: 3\n": [
        "5: train.heads: 3 heads do not divide hidden (256), as gat needs; change one of them"
    ],
    TWO + "train:\n  model: gcn\n  edge_attr: w\n": [
        "5: train.edge_attr: model gcn does not read edge features; use sage, for several types rsage"
    ],
    TWO + "train: {batch_size: 1}\n": [
        "3: train.batch_size: the global batch is 1, fewer seeds than processes (2); raise it or use fewer processes"
    ],
    TWO + "train: {sampling: cuda}\n": [
        "3: train.sampling: cuda needs devices on every node, but a (node0) lists none"
    ],
    "nodes: [{host: a, devices: [0], role: client}, {host: b, role: server}]\ndata: {dataset: synthetic}\n"
    "train: {sampling: cuda}\n": [
        "3: train.sampling: cuda needs parts on the nodes that train, but a (node0) is a client"
    ],
    "nodes: [{host: a, devices: [0]}, {host: b, devices: [0]}]\ndata: {dataset: synthetic, topology: partitioned}\n"
    "train: {sampling: cuda}\n": [
        "3: train.sampling: cuda needs the edges of all parts on each node; set data.topology to replicated"
    ],
    TWO + "train: {backend: nccl}\n": ["3: train.backend: nccl needs devices on every node, but a (node0) lists none"],
    NODES + "  - host: a\n    devices: [0, 1, 0]\n": ["4: nodes.0.devices: device 0 is listed twice"],
    NODES + "  - host: a\n    devices: [0, one]\n": [
        "4: nodes.0.devices: `one` is neither a whole number nor a UUID as `nvidia-smi -L` lists it (GPU-…, MIG-…)"
    ],
    NODES + "  - {host: a, devices: [MIG-a-1, MIG-b-2]}\ntrain: {backend: nccl}\n": [
        "4: train.backend: nccl does not connect MIG instances (node0); use auto or gloo"
    ],
    NODES + "  - host: a\n    devices: [0, 1]\n    procs: 1\n": [
        "5: nodes.0: fewer procs (1) than devices (2); each process uses one device, so leave procs out or list as "
        "many devices"
    ],
    NODES + "  - host: a\n    devices: [0]\n    procs: 2\n": [
        "5: nodes.0: more procs (2) than devices (1); each process uses one device, so leave procs out or list as "
        "many devices"
    ],
    NODES + "  - host: a\n    venv: /v\n    conda: gnn\n": [
        "5: nodes.0: venv and conda are both given; keep the one in which torch is installed"
    ],
    NODES + "  - host: a\n    env: {GNNFLEET_TOKEN: 1}\n": [
        "4: nodes.0.env: GNNFLEET_TOKEN is set by gnnfleet for each process; leave it out"
    ],
    NODES + "  - host: a\n    env: {RANK: 1}\n": [
        "4: nodes.0.env: RANK is set by gnnfleet for each process; leave it out"
    ],
    NODES + "  - host: a\n    workdir: work\n": [
        "4: nodes.0.workdir is a path on the node, so it must begin with / or ~/; found `work`"
    ],
    NODES + "  - host: a\n    workdir: ~\n    name: x\n": [
        "5: unknown key `name` in nodes.0; it belongs at the top level"
    ],
    NODES + "  - host: a\n    data_folder: /d\n": [
        "4: nodes.0.data_folder: only for `data.mode: verify`; in mode sync the parts go below workdir"
    ],
    "nodes: [a, b]\ndata:\n  dataset: synthetic\n  num_parts: 1\n": [
        "4: fewer parts than nodes: data.num_parts is 1, but nodes has 2 entries; leave num_parts out or raise it"
    ],
    "nodes: [a]\ndata: {dataset: file}\n": [
        "2: data.source is missing; it is the folder or .pt file that `dataset: file` reads"
    ],
    "nodes: [a]\ndata:\n  dataset: synthetic\n  mode: verify\n  folder: parts\n": [
        "5: data.folder is a path on the node, so it must begin with / or ~/; found `parts`"
    ],
    NODES + "  - host: a\n    workdir: /w\n  - host: b\n    workdir: /w\n  - host: a\n    workdir: /w\n": [
        "7: nodes.2 has the same host and workdir as nodes.0 (a, /w); give each node its own workdir, or put "
        "{node_rank} into the path"
    ],
    "transport: local\ndefaults: {workdir: /w}\n" + NODES + "  - localhost\n  - 127.0.0.1\n": [
        "6: nodes.1 has the same host and workdir as nodes.0 (127.0.0.1, /w); give each node its own workdir, or put "
        "{node_rank} into the path"
    ],
    "transport: local\n" + NODES + "  - gnn1\n": [
        "4: nodes.0.host: `transport: local` runs nodes on this machine only; write localhost instead of `gnn1`, or "
        "use `transport: ssh`"
    ],
    "nodes: 2\ndata: {dataset: synthetic}\n": [
        "1: nodes: a number of nodes needs `transport: local`; list the hosts instead"
    ],
    TWO + "run: {service_port: 65535}\n": [
        "3: run.service_port: 2 nodes need ports 65535 to 65536, but 65535 is the highest"
    ],
    TWO + "run: {service_port: 7000, master_port: 7001}\n": [
        "3: run.master_port: 7001 is one of the graph service's ports, 7000 to 7001 (run.service_port)"
    ],
    TWO + "defaults:\n  prcs: 2\n  port: x\n": [
        "4: unknown key `prcs` in defaults; did you mean `procs`?",
        "5: defaults.port: expected a whole number, found the text `x`",
    ],
    TWO + "defaults: [a]\n": ["3: defaults: expected keys of a node, found a list"],
    "nodes: &n [*n]\ndata: {dataset: synthetic}\n": [
        "3: not valid YAML: the document is nested too deeply, or an alias contains itself"
    ],
}


@pytest.mark.parametrize("text", MISTAKES, ids=lambda text: repr(text)[-60:])
def test_every_mistake_is_reported_with_its_line(load: Load, text: str) -> None:
    assert problems(load, text) == MISTAKES[text]


def nested(opening: str, times: int) -> str:
    return f"{DATASET}name: {opening * times}\n"


DATASET = "data: {dataset: synthetic}\n"
BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{after}: &{after} [{', '.join([f'*{before}'] * 10)}]\n"
    for before, after in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGED = f"a: &a {{{', '.join(f'k{i}: 1' for i in range(1000))}}}\nb:\n" + "- <<: *a\n" * 1000
HUGE = {  # config that would exhaust time or memory if nothing limited it → its one message
    DATASET + "transport: local\nnodes: 20000000\n": "3: nodes: there may be 4,096 nodes at most",
    DATASET + f"transport: local\nnodes: {'9' * 5000}\n": "3: nodes: there may be 4,096 nodes at most",
    DATASET + "nodes: ['n[1-4000]', 'm[1-4000]']\n": "2: nodes: there may be 4,096 nodes at most",
    DATASET + "nodes: ['n[1-99]']\ndefaults: {procs: 1000}\ntrain: {batch_size: 1000000}\n":
        "2: nodes: 99,000 training processes in total, of at most 65,536; lower procs",
    BOMB: "6: not valid YAML: the document expands to more than 500,000 values",
    MERGED: "251: not valid YAML: the document expands to more than 500,000 values",
    nested("[", 100_000): "2: not valid YAML: the document is nested too deeply, or an alias contains itself",
    nested("{a: ", 100_000): "2: not valid YAML: the document is nested too deeply, or an alias contains itself",
    DATASET + f"nodes: [a]\nnmae: {'x' * 1000}\n": "3: unknown key `nmae` at the top level; did you mean `name`?",
    "nodes: [a]\n#" + "x" * (5 << 20): "1: the file is larger than 4,194,304 bytes",
    DATASET + "nodes: [a]\ntrain: {epochs: " + "9" * 5000 + "}\n":
        f"3: train.epochs: expected a whole number, found `{'9' * 200}…`",
    DATASET + "nodes: [a]\ntrain: {lr: 1__0_, seed: -1" + "0" * 30 + "}\n":
        f"3: train.seed: expected a whole number, found `-1{'0' * 30}`",
    DATASET + 'nodes: ["\\0"]\n': "2: not valid YAML: the character '\\x00' is not allowed",
    DATASET + 'nodes: ["\\ud800"]\n': "2: not valid YAML: the character '\\ud800' is not allowed",
    DATASET + 'nodes: ["\\U00110000"]\n': "2: not valid YAML: chr() arg not in range(0x110000)",
}  # fmt: skip


@pytest.mark.parametrize("text", HUGE, ids=lambda text: f"{len(text)}-{repr(text)[-30:]}")
def test_oversized_input_is_refused_within_seconds(load: Load, text: str) -> None:
    began = time.monotonic()
    assert problems(load, text) == [HUGE[text]]
    assert time.monotonic() - began < stretched(20)


def test_a_list_of_trackers_is_short_for_keys(load: Load) -> None:
    assert load(TWO + "train: {track: [wandb, mlflow]}\n").train.track == {"wandb": {}, "mlflow": {}}
    assert load(TWO + "train: {track: mlflow}\n").train.track == {"mlflow": {}}
    offline = load(TWO + "train: {track: [wandb, mlflow]}\n", ["train.track.wandb.mode=offline"]).train.track
    assert offline == {"wandb": {"mode": "offline"}, "mlflow": {}}
    bare = load(TWO + "train: {track: {wandb: , mlflow: {uri: file:/m}}}\n").train.track
    assert bare == {"wandb": {}, "mlflow": {"uri": "file:/m"}}


def test_all_mistakes_of_a_file_are_reported_together(load: Load) -> None:
    text = NODES + "  - host: a\n    procs: x\n  - host: b\n    port: 0\ntrain:\n  lr: -1\n  modl: sage\n"
    assert problems(load, text) == [
        "4: nodes.0.procs: expected a whole number, found the text `x`",
        "6: nodes.1.port: must be at least 1 and at most 65535; found 0",
        "8: train.lr: must be above 0; found -1.0",
        "9: unknown key `modl` in train; did you mean `model`?",
    ]


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none.yml: cannot be read: No such file"):
        load_config(tmp_path / "none.yml")
    (tmp_path / "latin.yml").write_bytes(b"name: caf\xe9\n")
    with pytest.raises(ConfigError, match="latin.yml:1: not UTF-8 text"):
        load_config(tmp_path / "latin.yml")


def test_missing_own_file_is_named(load: Load, tmp_path: Path) -> None:
    text = TWO + "run:\n  files:\n  - c.yml\n  - nix.py\n"
    assert problems(load, text) == [f"6: run.files: no file or folder `{tmp_path}/nix.py` on this machine"]


def test_common_spellings_of_numbers_and_booleans(load: Load) -> None:
    config = load(
        TWO + "train: {lr: 1e-3, weight_decay: 1, epochs: 1_000, fanouts: '15,10,5', replace: yes}\n"
        "run: {encrypt: on}\n"
        "name: 123\ndefaults: {env: {A: 1, FLAG: on, B: 1e3, GNNFLEET_KERNELS: /k}, setup: module load cuda}\n"
    )
    assert (config.train.lr, config.train.weight_decay, config.train.epochs) == (0.001, 1.0, 1000)
    assert config.train.fanouts == (15, 10, 5) and config.train.replace is True
    assert config.run.encrypt == "on" and config.name == "123"
    assert config.nodes[0].env == {"A": "1", "FLAG": "on", "B": "1e3", "GNNFLEET_KERNELS": "/k"}
    assert config.nodes[1].setup == ("module load cuda",)


def test_dataset_options_keep_their_types(load: Load) -> None:
    text = "nodes: [a]\ndata: {dataset: partition, source: x, "
    text += "options: {n: 100_000, p: 1e-3, q: '1e-3', r: true, s: [x, ~]}}\n"
    assert load(text).data.options == {"n": 100_000, "p": 0.001, "q": "1e-3", "r": True, "s": ["x", None]}


@pytest.mark.parametrize(
    ("written", "host", "user", "port"),
    [
        ("gnn1", "gnn1", None, None),
        ("u@gnn1:2222", "gnn1", "u", 2222),
        ("10.0.0.1:22", "10.0.0.1", None, 22),
        ("fe80::1", "fe80::1", None, None),
        ("u@[fe80::1]:22", "fe80::1", "u", 22),
    ],
)
def test_a_node_as_plain_text(load: Load, written: str, host: str, user: str | None, port: int | None) -> None:
    node = load(f'nodes: ["{written}"]\ndata: {{dataset: synthetic}}\n').nodes[0]
    assert (node.host, node.user, node.port) == (host, user, port)


def test_defaults_are_merged_into_every_node(load: Load) -> None:
    config = load(
        "defaults: {user: u, conda: gnn, env: {A: 1, B: 1}, setup: [one], procs: 3}\n"
        "nodes: [v@a, {host: b, venv: /v, env: {B: 2}, setup: [two, three], procs: null}]\ndata: {dataset: synthetic}\n"
    )
    first, second = config.nodes
    assert (first.user, first.conda, first.nproc, first.env) == ("v", "gnn", 3, {"A": "1", "B": "1"})
    assert (second.user, second.venv, second.conda, second.nproc) == ("u", "/v", None, 1)
    assert second.env == {"A": "1", "B": "2"} and second.setup == ("two", "three")


def test_many_nodes_on_the_host_of_defaults(load: Load) -> None:
    config = load("defaults: {host: u@gnn1}\nnodes: [{port: 2201}, {port: 2202}]\ndata: {dataset: synthetic}\n")
    assert [(node.host, node.user, node.port) for node in config.nodes] == [("gnn1", "u", 2201), ("gnn1", "u", 2202)]


def test_anchors_and_merge_keys(load: Load) -> None:
    config = load(NODES + "  - &first {host: a, port: 22, procs: 2}\n  - {<<: *first, host: b, procs: 4}\n")
    assert [(node.host, node.port, node.procs) for node in config.nodes] == [("a", 22, 2), ("b", 22, 4)]


def test_a_number_of_local_nodes(load: Load) -> None:
    config = load("transport: local\nnodes: 3\ndata: {dataset: synthetic}\ndefaults: {procs: 2}\n")
    assert config.nodes == (NodeConfig(host="localhost", procs=2),) * 3
    assert config.num_parts == 3 and config.world_size == 6


def test_overrides(load: Load) -> None:
    text = TWO + "train: {lr: 0.1}\n"
    sets = ["train.lr=1e-3", "nodes.1.procs=2", "defaults.user=me", "train.fanouts=[7, 7]", "train.fanouts=4,-1"]
    config = load(text, [*sets, "data.options.num_nodes=50", "data.partition.method=random", "train.batch_size=null"])
    assert config.train.lr == 0.001 and config.train.fanouts == (4, -1) and config.train.batch_size == 1024
    assert [(node.host, node.user, node.nproc) for node in config.nodes] == [("a", "me", 1), ("b", "me", 2)]
    assert config.data.options == {"num_nodes": 50} and config.data.partition.method == "random"
    assert load(text, ["train.fanouts=10"]).train.fanouts == (10,)
    assert len(load(text, ["transport=local", "nodes=4", "nodes.2.procs=2"]).nodes) == 4
    assert load(text, ["train.optimizer=SGD", "train.optimizer.momentum=0.9"]).train.optimizer == {
        "name": "SGD", "momentum": 0.9
    }  # fmt: skip
    for sets in (
        ["train.early_stop=4", "train.early_stop.metric=loss"],
        ["train.early_stop={patience: 4, metric: loss}"],
    ):
        assert load(text, sets).train.early_stop == EarlyStop(4, "loss")


ODD_WORDS = [
    "/data/runs #2", "a: b", "'q",
    '"q"', "*x", "&x", "yes", "1e3", "null", "~", "[a]", "{a: b}", "- x", "%y", "!t", "|",
    "007", "0x10", "a\\b", " x ", "-", "=", ",", "é",
]  # fmt: skip


@pytest.mark.parametrize("word", ODD_WORDS)
def test_options_of_the_command_line_are_taken_as_they_are(word: str, load: Load) -> None:
    options = {"config": None, "name": word, "runs_dir": f"x{word}", "resume": f"x{word}", "dataset": "synthetic"}
    config = load(TWO, overrides_of({**options, "venv": f"/x{word}"}, ["train.lr=1e-3"]))
    assert (config.name, config.run.runs_dir, config.data.dataset) == (word, f"x{word}", "synthetic")
    assert config.train.resume == f"x{word}" and config.train.lr == 1e-3
    assert {node.venv for node in config.nodes} == {f"/x{word}"}
    conda = f"e{word}" if word.startswith("-") else word  # a name with a dash would be an option of conda
    assert load(TWO, overrides_of({"config": None, "conda": conda}, ())).nodes[0].conda == conda
    comment = word.replace(",", "").strip()
    config = load(TWO, overrides_of({"config": None, "slurm": f"nodes=2,comment={comment}"}, ()))
    assert config.slurm["comment"] == comment


def test_an_option_without_a_value_is_refused() -> None:
    for name in ("name", "runs_dir", "epochs", "nodes", "dataset", "venv", "ssh_username"):
        with pytest.raises(UsageError, match=f"^--{name.replace('_', '-')}: the value is empty"):
            overrides_of({"config": None, name: ""}, ())


@pytest.mark.parametrize(("login", "user"), [("alice@corp@h1", "alice@corp"), (r"CORP\al@h1:22", r"CORP\al")])
def test_the_last_at_sign_separates_user_and_host(login: str, user: str, tmp_path: Path, load: Load) -> None:
    port = 22 if login.endswith(":22") else None
    assert [
        (one.user, one.host, one.port)
        for one in load(f"nodes: [h0, {login}]\ndata: {{dataset: synthetic}}\n").nodes[1:]
    ] == [(user, "h1", port)]
    given = load(TWO, overrides_of({"config": None, "nodes": f"h0,{login}"}, ()))
    assert (given.nodes[1].user, given.nodes[1].host, given.nodes[1].port) == (user, "h1", port)
    asked = config_of(InitRequest(hosts=split_hosts([f"h0,{login}"])))
    assert (asked.nodes[1].user, asked.nodes[1].host, asked.nodes[1].port) == (user, "h1", port)
    (tmp_path / "hosts").write_text(f"h0 slots=1\n{login.removesuffix(':22')} slots=2\n")
    listed = load_config(tmp_path / "hosts", ("data.dataset=synthetic",))
    assert (listed.nodes[1].user, listed.nodes[1].host, listed.nodes[1].procs) == (user, "h1", 2)


def test_values_of_options_need_no_list(load: Load) -> None:
    assert load(TWO, [("train.fanouts", "-1")]).train.fanouts == (-1,)
    assert load(TWO, ["train.track=[]"]).train.track == {}
    assert load(TWO, ['run.runs_dir="/data/runs #2"']).run.runs_dir == "/data/runs #2"


def test_mistakes_in_overrides_name_the_override(load: Load) -> None:
    sets = ["train.lrr=1", "train.epochs=x", "nodes.2.procs=2", "nodes", "train.lr.x=1"]
    sets += ["run.runs_dir=/data/runs #2", "name={"]
    assert problems(load, TWO + "train: {lr: 0.1}\n", sets) == [
        "--set nodes.2.procs=2: nodes has entries 0 to 1, but no `2`",
        "--set nodes: expected key=value, for instance train.lr=0.01 or nodes.0.procs=2",
        "--set train.lr.x=1: train.lr is `0.1`, which has no keys",
        "--set run.runs_dir=/data/runs #2: `#` begins a comment in YAML; put the text in quotes within those of the "
        "shell, as KEY='\"a #b\"'",
        "--set name={: not valid YAML: a value is missing here",
        "--set train.lrr=1: unknown key `lrr` in train; did you mean `lr`?",
        "--set train.epochs=x: train.epochs: expected a whole number, found the text `x`",
    ]


def test_relative_paths_start_from_the_file_or_the_working_folder(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (tmp_path / "m.py").touch()
    (tmp_path / "last.pt").touch()
    config = load(
        "defaults: {key: keys/id, workdir: ~/w}\nnodes: [a]\n"
        "data: {dataset: file, source: raw, folder: ../p}\nrun: {files: [m.py]}\ntrain: {resume: last.pt}\n"
    )
    assert config.nodes[0].key == str(tmp_path / "keys/id") and config.nodes[0].workdir == "~/w"
    assert config.data.source == str(tmp_path / "raw") and config.data.folder == str(tmp_path.parent / "p")
    assert config.run.files == (str(tmp_path / "m.py"),) and config.train.resume == str(tmp_path / "last.pt")
    assert config.run.runs_dir == "runs"
    assert load(TWO).data.folder == str(tmp_path / "parts")
    assert load(TWO, ["data.folder=here"]).data.folder == str(elsewhere / "here")
    assert load(TWO, ["train.start=run-1"]).train.start == Start("run-1")
    assert load(TWO + "train: {start: last.pt}\n").train.start == Start(str(tmp_path / "last.pt"))
    assert load(TWO, ["train.resume=run-1"]).train.resume == "run-1"
    local = load("transport: local\nnodes: 1\ndata: {dataset: synthetic}\n", ["defaults.venv=../.venv"])
    assert local.nodes[0].venv == str(tmp_path / ".venv")


@pytest.mark.parametrize("template", sorted((CODE_ROOT / "templates").glob("*.yml")), ids=lambda path: path.name)
def test_templates_are_equal_after_saving_and_loading(template: Path, tmp_path: Path) -> None:
    config = load_config(template)
    saved = tmp_path / "config.yml"
    saved.write_text(to_yaml(config), encoding="utf-8")
    assert load_config(saved) == config


def test_the_settings_of_the_page_on_training_are_valid(load: Load) -> None:
    page = (CODE_ROOT / "docs" / "training.md").read_text()
    blocks = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert blocks and all(load(TWO + block).train != TrainConfig() for block in blocks)


def test_saved_config_keeps_odd_values(load: Load, tmp_path: Path) -> None:
    config = load(
        'name: "on"\nnodes: [{host: a, env: {E: "1e-3", N: null_, Q: "it\'s: \\"x\\" #é"}, devices: [1]}]\n'
        'data: {dataset: partition, source: /x, options: {p: 1e-7, q: "1e-3", n: "12"}}\n'
        "run: {encrypt: off, master_port: 29511}\n"
        "train: {early_stop: 3, optimizer: AdamW, class_weights: [1, 2.5], metrics: roc_auc}\n"
    )
    saved = tmp_path / "saved.yml"
    saved.write_text(to_yaml(config), encoding="utf-8")
    assert load_config(saved) == config
    assert config.name == "on" and config.data.options == {"p": 1e-7, "q": "1e-3", "n": "12"}


def test_config_page_is_current() -> None:
    page = (CODE_ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert page == config_page(), "run `python -m launcher.config.reference`"
