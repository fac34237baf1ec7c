"""What is done before processes are forked: imports, and the making of kernels and of torch_geometric's layers.

A forked job of training then needs a third of the processor time. No thread is left when it forks, and no gradient is
computed: on a machine with a GPU, forked processes could then compute none.
"""

import tempfile
from pathlib import Path

import duckdb  # noqa: F401
import torch
import torch_geometric.loader  # noqa: F401
import torch_geometric.nn as gnn

import trainer.infer.edge_predictions
import trainer.infer.infer
import trainer.infer.node_predictions
import trainer.service.serve  # noqa: F401
from train_kit import job, write_parts
from trainer.core.ranks import RankGroup, Ranks
from trainer.core.schema import HOMO_NODE
from trainer.graph.open import open_graph
from trainer.graph.seed_order import RankLayout
from trainer.loader.block_loader import BatchLoader
from trainer.nn.models import build_model
from trainer.train.loaders import loader_settings
from trainer.train.model import model_facts
from trainer.train.tasks.choose import node_task


def load_kernels(folder: Path) -> None:
    for dataset, name, target in (("synthetic", "sage", HOMO_NODE), ("synthetic-hetero", "rsage", "paper")):
        parts = write_parts(folder / dataset, 2, dataset)
        settings = job(parts, folder, model=name).settings
        with open_graph(parts) as graph:
            task, *_ = node_task(graph, target, settings, ["train"], RankGroup(Ranks()))
            model = build_model(settings, model_facts(graph.manifest, target, task.outputs, None))
            loading = loader_settings(settings, target, "train", False)
            for batch in BatchLoader(graph, loading, 0, RankLayout.single(2)).epoch(1):
                model(batch)


def render_layers() -> None:
    """Make a layer of each class that tests use: for the first in a process, torch_geometric needs 0.2 s."""
    for conv in (gnn.SAGEConv, gnn.GCNConv, gnn.GATConv, gnn.GATv2Conv, gnn.GraphConv, gnn.LGConv, gnn.TAGConv):
        conv(*(() if conv is gnn.LGConv else (2, 2)))
    gnn.GINConv(torch.nn.Linear(2, 2))
    gnn.GatedGraphConv(2, 1)
    gnn.PNAConv(2, 2, ["mean"], ["identity"], torch.ones(2))
    gnn.HGTConv(2, 2, (["a"], [("a", "to", "a")]))


torch.set_num_threads(1)
render_layers()
with tempfile.TemporaryDirectory() as made, torch.no_grad():
    load_kernels(Path(made))
