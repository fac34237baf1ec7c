"""Generates Parquet tables of a citation graph of any size: string ids, planted classes, skewed degrees.

    python benchmarks/make_tables.py FOLDER --nodes 11000000 --edges 160000000

The default is a tenth of the size of ogbn-papers100M: 11M nodes with 128 features, 160M edges. Rows are written in
chunks, so that memory stays below a gigabyte. Needs the package duckdb.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import duckdb
import numpy as np

CLASSES = 64
NODES_AT_ONCE, EDGES_AT_ONCE = 250_000, 5_000_000


def write_nodes(folder: Path, num_nodes: int, num_features: int) -> None:
    """Write ``papers/*.parquet``: id, label, split (1.4 % train), features f0 … rounded to float16."""
    centres = np.random.default_rng(0).normal(size=(CLASSES, num_features)).astype(np.float32)
    for number, start in enumerate(range(0, num_nodes, NODES_AT_ONCE)):
        rng = np.random.default_rng([1, number])
        nodes = np.arange(start, min(start + NODES_AT_ONCE, num_nodes))
        label = nodes // -(-num_nodes // CLASSES)  # ids do not show it
        x = centres[label] + 2 * rng.standard_normal((len(nodes), num_features), np.float32)
        x = np.ascontiguousarray(x.T.astype(np.float16).astype(np.float32))
        columns = {f"f{k}": values for k, values in enumerate(x)}
        table = {"n": nodes, "label": label, "draw": rng.random(len(nodes)), **columns}
        with duckdb.connect() as database:
            database.register("chunk", table)
            database.execute(
                "COPY (SELECT 'paper-' || lpad((n * 7919 % 100000007)::VARCHAR, 9, '0') AS id, label, "
                "CASE WHEN draw < 0.014 THEN 'train' WHEN draw < 0.016 THEN 'val' "
                "WHEN draw < 0.018 THEN 'test' END AS split, "
                f"{', '.join(columns)} FROM chunk) TO '{folder}/papers/{number:04d}.parquet'"
            )


def write_edges(folder: Path, num_nodes: int, num_edges: int) -> None:
    """Write ``cites/*.parquet``: source, target. Six of ten edges join papers of one class."""
    per_class = -(-num_nodes // CLASSES)
    for number, start in enumerate(range(0, num_edges, EDGES_AT_ONCE)):
        rng = np.random.default_rng([2, number])
        count = min(EDGES_AT_ONCE, num_edges - start)
        sources = rng.integers(0, num_nodes, count)
        popular = rng.random(count) ** 3  # the density of targets falls with the power -2/3 of their rank
        within = sources // per_class * per_class + (popular * per_class).astype(np.int64)
        anywhere = (popular * num_nodes).astype(np.int64) * 4_000_037 % num_nodes
        targets = np.minimum(np.where(rng.random(count) < 0.6, within, anywhere), num_nodes - 1)
        with duckdb.connect() as database:
            database.register("chunk", {"s": sources, "t": targets})
            database.execute(
                "COPY (SELECT 'paper-' || lpad((s * 7919 % 100000007)::VARCHAR, 9, '0') AS source, "
                "'paper-' || lpad((t * 7919 % 100000007)::VARCHAR, 9, '0') AS target FROM chunk) "
                f"TO '{folder}/cites/{number:04d}.parquet'"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--nodes", type=int, default=11_000_000)
    parser.add_argument("--edges", type=int, default=160_000_000)
    parser.add_argument("--features", type=int, default=128)
    given = parser.parse_args()
    for name in ("papers", "cites"):
        (given.folder / name).mkdir(parents=True, exist_ok=True)
    write_nodes(given.folder, given.nodes, given.features)
    write_edges(given.folder, given.nodes, given.edges)
