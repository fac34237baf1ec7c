"""Use a graph on graph servers from a notebook or laptop: list its types, load batches, score a trained model.

    gnnfleet serve key products -o products.key
    python examples/remote_loader.py --key products.key --checkpoint runs/RUN/checkpoints/last.pt

No part of the graph is stored on this machine. In a notebook keep ``graph`` open while you work; close it at the end.
"""

from __future__ import annotations

import argparse

import torch

import gnnfleet as gf


def look(graph):
    """Load batches that the servers sample, and print their size.

    ``DistNeighborLoader`` is used like torch_geometric's ``NeighborLoader``.
    """
    print(graph)
    loader = gf.DistNeighborLoader(graph, [10, 5], batch_size=256, input_nodes=range(1000), prefetch_factor=4)
    nodes = sum(batch.num_nodes for batch in loader)
    print(f"{len(loader)} batches around nodes 0 to 999: {nodes:,} nodes with their features")
    print("one of them:", loader([7]))


@torch.no_grad()
def score(graph, checkpoint):
    """Print the test accuracy, on sampled neighbours, of a model that the bundled trainer trained."""
    saved = gf.load_checkpoint(checkpoint)
    model, _ = gf.trained_model(saved)
    wants_degree = bool(getattr(model, "needs_degree", False))
    settings = gf.loader_settings(gf.TrainSettings(**saved.settings), saved.graph["target"], "test", wants_degree)
    right = seeds = 0
    for batch in gf.BatchLoader(graph, settings, 0, graph.layout).epoch(0):
        right += int((model(batch).argmax(1) == batch.y).sum())
        seeds += batch.num_seeds
    print(f"test accuracy {right / seeds:.4f} of {seeds:,} nodes")


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    args.add_argument("endpoint", nargs="*", help="tcp://host:port of a graph server; default: those in the key file")
    args.add_argument("--key", help="key file; none for servers that do not encrypt")
    args.add_argument("--checkpoint", help="score this model, of a run of the bundled trainer on the same graph")
    options = args.parse_args()
    with gf.connect(options.endpoint or None, options.key, name="remote_loader") as graph:
        look(graph)
        if options.checkpoint:
            score(graph, options.checkpoint)


if __name__ == "__main__":
    main()
