"""Full-graph inference with your own model: train on samples, then compute every node from all its neighbours.

    python -m trainer partition make --dataset synthetic --out parts/synthetic
    python examples/full_inference.py --parts parts/synthetic --out predictions

Computes one layer after the other, each node once per layer. A rank stores the rows of its nodes on disk and sends
other ranks the rows they need. The bundled models need no script: python -m trainer infer.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from common import arguments, opened, say, total
from node_classification import train

import gnnfleet as gf


class Layers:
    """torch_geometric's GraphSAGE as a ``LayerStack``, which ``WholeGraph`` computes layer by layer."""

    needs_degree = False

    def __init__(self, gnn):
        self.gnn = gnn
        self.needs = (gf.nn.LayerNeed((gf.HOMO_NODE,), (gf.HOMO_NODE,), (gf.HOMO_EDGE,)),) * gnn.num_layers

    def begin(self, batch):
        return batch.x

    def layer(self, number, blocks, rows, num_dst, degree):
        """Return the rows that layer ``number`` computes for the first ``num_dst`` nodes, the targets.

        rows: input of the targets and of all their neighbours. blocks: the edges, as CSR by target.
        """
        x, block = rows[gf.HOMO_NODE], blocks[gf.HOMO_EDGE]
        targets = torch.repeat_interleave(torch.arange(block.num_dst), block.indptr.diff())
        edges = torch.stack([block.indices.long(), targets])
        h = self.gnn.convs[number]((x, x[: num_dst[gf.HOMO_NODE]]), edges)
        return {gf.HOMO_NODE: h if number + 1 == self.gnn.num_layers else self.gnn.act(h)}


def main() -> None:
    own_output = os.path.join(os.environ.get("GNNFLEET_RUN_DIR", "."), "output")
    options = arguments(__doc__, out=own_output).parse_args()
    with opened(options.parts) as graph:
        model, sampled = train(graph, options)
        folder, ranks = Path(options.out), gf.Ranks.from_env(os.environ)
        scratch = folder / f".layers-rank{ranks.rank}"
        scratch.mkdir(parents=True, exist_ok=True)
        whole = gf.WholeGraph(graph, graph.layout, gf.RankGroup(ranks, torch.device("cpu")), scratch)
        rows = whole.run(Layers(model.model.eval()))[gf.HOMO_NODE]
        own = [np.arange(each.first, each.last) for each in rows.shares.own(ranks.rank)]
        ids = np.concatenate([np.empty(0, np.int64), *own])
        (found,) = graph.access.gather([gf.RowRequest(gf.HOMO_NODE, ids, ("orig_id",))])
        np.savez(folder / f"rank{ranks.rank}.npz", node=found["orig_id"], logits=rows.values)
        say(f"test accuracy by sampling {sampled:.4f}, with all neighbours {accuracy(graph, rows, ranks.rank):.4f}")


def accuracy(graph, rows, rank):
    """Return the accuracy on the test nodes. Each rank scores the nodes that it computed."""
    seeds = np.asarray(graph.store.seeds(gf.HOMO_NODE, "test"))
    seeds = seeds[rows.shares.owners(seeds) == rank]
    (found,) = graph.access.gather([gf.RowRequest(gf.HOMO_NODE, seeds, ("y",))])
    right, count = total((rows.values[rows.shares.rows(seeds)].argmax(1) == found["y"]).sum(), len(seeds))
    return right / count


if __name__ == "__main__":
    main()
