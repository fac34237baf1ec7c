"""Add edge weights and node times to the Debian package graph, derived from the relations between packages.

    python examples/prepare_debian.py debian derived
    python -m trainer partition make --dataset file --source derived --out parts/derived

edge_weight: strength of the strongest relation between two packages: 8 depends and pre-depends, 4 recommends, 2
suggests, 1 enhances and breaks.
time: length of the longest chain of dependencies below a package (not a date), so dependencies are earlier than their
dependents. A cycle is cut at the package that most of the remaining packages depend on.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import numpy as np

WEIGHTS = {"depends": 8, "pre-depends": 8, "recommends": 4, "suggests": 2, "enhances": 1, "breaks": 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", type=Path, help="folder with x.npy, y.npy, …_idx.npy and hetero/")
    parser.add_argument("out", type=Path, help="folder to write")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in ("x", "y", "train_idx", "val_idx", "test_idx"):
        shutil.copyfile(options.source / f"{name}.npy", options.out / f"{name}.npy")
    relations = {
        name: np.load(options.source / "hetero" / f"package__{name}__package.npy").astype(np.int64) for name in WEIGHTS
    }
    num_nodes = len(np.load(options.source / "y.npy", mmap_mode="r"))
    edge_index, weight = weighted(relations, num_nodes)
    time = depth(np.concatenate([relations["depends"], relations["pre-depends"]], axis=1), num_nodes)
    np.save(options.out / "edge_index.npy", edge_index.astype(np.int32))
    np.save(options.out / "edge_weight.npy", weight)
    np.save(options.out / "time.npy", time)
    print(
        f"{num_nodes:,} packages, {edge_index.shape[1]:,} edges; times from 0 to {time.max()}, mean {time.mean():.1f}"
    )


def weighted(relations: dict[str, np.ndarray], num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Merge all relations into one undirected graph without self loops: edges int64 [2, E], weights float32 [E].

    ``relations``: pairs of packages, [2, n], by name of the relation. A pair with several relations gets the largest
    of their weights.
    """
    keys, weights = [], []
    for name, (src, dst) in relations.items():
        own = src != dst
        for one, other in ((src[own], dst[own]), (dst[own], src[own])):
            keys.append(one * num_nodes + other)
            weights.append(np.full(len(one), WEIGHTS[name], np.float32))
    pairs, place = np.unique(np.concatenate(keys), return_inverse=True)
    largest = np.zeros(len(pairs), np.float32)
    np.maximum.at(largest, place, np.concatenate(weights))
    return np.stack([pairs // num_nodes, pairs % num_nodes]), largest


def depth(depends: np.ndarray, num_nodes: int) -> np.ndarray:
    """Return the length of the longest dependency chain below each package, int64 [N].

    depends: [2, E]; package ``depends[0, e]`` depends on package ``depends[1, e]``. A cycle is cut at the package that
    most of the remaining packages depend on.
    """
    src, dst = np.unique(depends[:, depends[0] != depends[1]], axis=1)
    level, waits = np.zeros(num_nodes, np.int64), np.bincount(src, minlength=num_nodes)
    settled = np.zeros(num_nodes, bool)
    while not settled.all():
        ready = (waits == 0) & ~settled
        if not ready.any():  # all remaining packages depend on cycles
            needed = np.bincount(dst[~settled[src]], minlength=num_nodes)
            ready[np.argmax(np.where(settled, -1, needed))] = True
        settled |= ready
        told = ready[dst] & ~settled[src]
        np.maximum.at(level, src[told], level[dst[told]] + 1)
        np.subtract.at(waits, src[told], 1)
    return level


if __name__ == "__main__":
    main()
