"""Measures the bytes that a host receives from other hosts in an epoch, without and with a row cache.

One process simulates all hosts, each with one part and replicated topology.

GNNFLEET_DEBIAN: folder of the Debian dependency graph, as for ``data.dataset: file``. If unset, this graph is left out.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from table import Row, show
from trainer.core.arrays import Columns
from trainer.core.batch_cost import Cost
from trainer.core.ranks import RankGroup, Ranks
from trainer.core.remote_settings import CacheSize
from trainer.graph.cache_fill import fill_cache
from trainer.graph.open import Graph
from trainer.graph.seed_order import RankLayout
from trainer.loader.block_loader import BatchLoader, LoaderSettings
from trainer.partition.make import PartitionSpec, make_partition
from trainer.sampler.dist_graph import DistGraph
from trainer.sampler.local_graph import LocalGraph
from trainer.sampler.replicas import ReadyAnswer
from trainer.sampler.requests import Gather
from trainer.store.part_store import open_parts
from trainer.train.job import batch_plan

CACHE = Path(__file__).resolve().parent.parent / ".gnnfleet" / "bench"


@dataclass(frozen=True)
class Case:
    name: str
    dataset: str
    options: Mapping[str, str]
    fanouts: tuple[int, ...]
    batch: int
    cuts: tuple[tuple[int, str], ...]  #: (number of parts, partitioning method)
    source: str | None = None


def cases(small: bool) -> list[Case]:
    scale = 20 if small else 1
    skewed = {"num_nodes": 1_000_000 // scale, "avg_degree": 10, "skew": 1.8, "num_features": 16, "train": 0.05}
    planted = {"num_nodes": 300_000 // scale, "avg_degree": 52.95 / scale, "num_classes": 47, "num_features": 16}
    cuts = ((2, "random"), (2, "metis"), (4, "random"), (4, "metis"))
    batch = 1024 // scale
    return [
        Case("skewed", "synthetic", _text(skewed), (15, 10, 5), batch, cuts),
        Case("planted", "synthetic", _text({**planted, "train": 24_000 // scale}), (15, 10, 5), batch, cuts[:1]),
    ]


def _text(options: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in options.items()}


def run(small: bool) -> list[Row]:
    rows = []
    for case in [*cases(small), *_debian()]:
        for num_parts, method in case.cuts:
            folder = str(CACHE / f"cache-{case.name}-{'small' if small else 'large'}-{num_parts}-{method}")
            spec = PartitionSpec(case.dataset, folder, case.source, case.options, num_parts, method, force=True)
            make_partition(spec, lambda _: None)
            for held in (0, None):
                rows += _rows(case, Path(folder), num_parts, method, held)
    if not os.environ.get("GNNFLEET_DEBIAN"):
        print("Debian graph left out: GNNFLEET_DEBIAN does not name its folder")
    return rows


def _debian() -> list[Case]:
    source = os.environ.get("GNNFLEET_DEBIAN")
    cuts = ((2, "random"), (2, "metis"), (4, "random"), (4, "metis"))
    return [Case("debian", "file", {}, (15, 10, 5), 1024, cuts, source)] if source else []


def _rows(case: Case, folder: Path, num_parts: int, method: str, held: int | None) -> list[Row]:
    # held: number of earlier batches whose remote rows are kept; None for the default
    name = f"{case.name}, {num_parts} parts by {method}" + (", no held rows" if held == 0 else "")
    without, _, _ = _epoch(case, folder, num_parts, held, "0")
    with_cache, predicted, seconds = _epoch(case, folder, num_parts, held, "10%")
    received = with_cache.remote_bytes / 1e6
    rows = [Row(f"{name}: received with 10%", received, "MB", "without", without.remote_bytes / 1e6)]
    if held is None:
        rows.append(Row("… predicted", predicted / 1e6, "MB", "received", received, "equal"))
        rows.append(Row("… presampling and fetching", seconds, "CPU s"))
    return rows


def _epoch(case: Case, folder: Path, num_parts: int, held: int | None, size: str) -> tuple[Cost, float, float]:
    """Load an epoch. Returns its ``Cost``, the predicted remote bytes, and the CPU seconds of filling the cache.

    held: number of earlier batches whose remote rows are kept; None for the default. size: size of the row cache.
    """
    graph = _host(folder, num_parts, held)
    loader = BatchLoader(graph, LoaderSettings("train", case.fanouts, case.batch), 0, graph.layout)
    group, began = RankGroup(Ranks(), torch.device("cpu")), time.process_time()
    with tempfile.TemporaryDirectory() as scratch:
        plan, limit = batch_plan(graph, loader), CacheSize.parse(size)
        prediction = fill_cache(graph.access, graph.store, plan, "host 0", limit, Path(scratch), group)
    seconds = time.process_time() - began
    assert prediction is not None
    cost = Cost.total(loader.load(share).cost for share in loader.shares(1))
    return cost, prediction.remote_bytes, seconds


def _host(folder: Path, num_parts: int, held: int | None) -> Graph:
    store = open_parts(folder, [0], "replicated")
    others = {part: _Owner(part, LocalGraph(open_parts(folder, [part]))) for part in range(1, num_parts)}
    options = {} if held is None else {"held": held}
    layout = RankLayout(num_parts, tuple((part,) for part in range(num_parts)))
    return Graph(store, DistGraph(LocalGraph(store), others, **options), placed=layout)


@dataclass(frozen=True)
class _Owner:
    """A connection to another host that is simulated in this process."""

    part: int
    local: LocalGraph

    @property
    def part_ids(self) -> tuple[int, ...]:
        return (self.part,)

    @property
    def name(self) -> str:
        return f"host {self.part}"

    def submit(self, request: Gather) -> ReadyAnswer[list[Columns]]:
        answer = request.answer(self.local)
        return ReadyAnswer(answer, sum(values.nbytes for rows in answer for values in rows.values()))


def main() -> None:
    show("cache", run("--small" in sys.argv))


if __name__ == "__main__":
    main()
