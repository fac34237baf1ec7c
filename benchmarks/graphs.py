"""Makes the partitioned graphs of the benchmarks. They are kept on disk between runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trainer.partition.make import PartitionSpec, make_partition

#: The common workload of docs/LOG.md: 300k nodes, 15.5M edges (both directions), 24k train seeds.
LARGE = {"num_nodes": 300_000, "avg_degree": 52.95, "num_classes": 47, "num_features": 100, "train": 24_000}
SMALL = {"num_nodes": 20_000, "avg_degree": 20.0, "num_classes": 16, "num_features": 64, "train": 4_000}

#: The graphs for the comparison with other systems. Their evaluation splits are smaller than those of LARGE and SMALL,
#: because all systems evaluate in the same way. The tenfold graph has as many train seeds as the large one, so that
#: seconds per epoch can be compared.
PEER_SIZES = {
    "small": SMALL | {"val": 1_000, "test": 2_000},
    "large": LARGE | {"val": 1_000, "test": 10_000},
    "tenfold": LARGE | {"num_nodes": 3_000_000, "val": 1_000, "test": 10_000},
}

CACHE = Path(__file__).resolve().parent.parent / ".gnnfleet" / "bench"
FANOUTS, BATCH = (15, 10, 5), 1024


def partitioned(small: bool, num_parts: int) -> Path:
    """Return the folder of the large or small benchmark graph, partitioned at random into ``num_parts`` parts."""
    return _made(CACHE / f"{'small' if small else 'large'}-{num_parts}", SMALL if small else LARGE, num_parts, "random")


def peer_partition(size: str, num_parts: int, method: str = "random") -> Path:
    """Return the folder of the graph ``PEER_SIZES[size]``, partitioned with ``method``."""
    return _made(CACHE / f"peers/{size}-ours-{method}-{num_parts}", PEER_SIZES[size], num_parts, method)


def _made(folder: Path, sizes: Mapping[str, float], num_parts: int, method: str) -> Path:
    options = {name: str(value) for name, value in sizes.items()}
    make_partition(PartitionSpec("synthetic", str(folder), None, options, num_parts, method, force=True))
    return folder
