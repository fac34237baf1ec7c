"""The graph that benchmarks run on, partitioned once and kept between runs."""

from __future__ import annotations

from pathlib import Path

from trainer.partition.make import PartitionSpec, make_partition

#: The common workload of docs/LOG.md: 300k nodes, 15.5M edges (both directions), 24k train seeds.
LARGE = {"num_nodes": 300_000, "avg_degree": 52.95, "num_classes": 47, "num_features": 100, "train": 24_000}
SMALL = {"num_nodes": 20_000, "avg_degree": 20.0, "num_classes": 16, "num_features": 64, "train": 4_000}

CACHE = Path(__file__).resolve().parent.parent / ".gnnfleet" / "bench"
FANOUTS, BATCH = (15, 10, 5), 1024


def partitioned(small: bool, num_parts: int) -> Path:
    """Folder of the benchmark graph cut at random into ``num_parts``."""
    folder = CACHE / f"{'small' if small else 'large'}-{num_parts}"
    options = {name: str(value) for name, value in (SMALL if small else LARGE).items()}
    make_partition(PartitionSpec("synthetic", str(folder), None, options, num_parts, "random"))
    return folder
