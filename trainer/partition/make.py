"""From a dataset's name to a partition folder, stage by stage."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.data.dataset import Dataset
from trainer.data.load import dataset_fingerprint, load_dataset
from trainer.partition.folder import replaced, reusable
from trainer.partition.format import Manifest
from trainer.partition.write import partition_fingerprint, write_partition


@dataclass(frozen=True)
class PartitionSpec:
    """What to divide, how, and where to."""

    dataset: str
    folder: str
    source: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    num_parts: int = 1
    method: str = "metis"
    seed: int = 0


def make_partition(spec: PartitionSpec, say: Callable[[str], None] = print) -> Manifest:
    """Load, assign, write; an equal partition already there is found before any data is read.

    Raises ``DataError`` or ``PartitionError``; nothing is left behind then.
    """
    folder = Path(spec.folder)
    fingerprint = dataset_fingerprint(spec.dataset, spec.source, spec.options)
    done = reusable(folder, partition_fingerprint(fingerprint, spec.num_parts, spec.method, spec.seed))
    if done is not None:
        say(f"{folder} is up to date: {done.dataset}, {done.num_parts} parts by {done.algorithm}")
        return done
    if (other := replaced(folder)) is not None:
        say(f"replacing {other} in {folder}")
    # METIS is slow to import where there is nothing to divide
    from trainer.partition.assign import assign_parts

    stages = _Stages(say)
    dataset = load_dataset(spec.dataset, spec.source, spec.options)
    stages.end("load", f"{dataset.name}: {dataset.num_nodes:,} nodes, {dataset.num_edges:,} edges")
    for note in (*dataset.notes, *_notes_for_training(dataset)):
        say(f"note: {note}")
    assignment = assign_parts(dataset, spec.num_parts, spec.method, spec.seed)
    stages.end("assign", f"{spec.method}: cut {assignment.edge_cut:.2%}, balance {assignment.balance:.3f}")
    manifest = write_partition(dataset, assignment, folder)
    stages.end("write", f"{folder}: {sum(entry.bytes for entry in manifest.files) / 1e6:,.1f} MB")
    return manifest


def _notes_for_training(dataset: Dataset) -> Iterator[str]:
    if not len(dataset.splits.get("train", ())):
        yield "no train split: the bundled trainer needs train_idx or train_mask"


class _Stages:
    """Says what each stage took."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._since = say, time.monotonic()

    def end(self, stage: str, result: str) -> None:
        now = time.monotonic()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        self._say(f"{stage:<7}{now - self._since:7.1f} s  {peak:5.2f} GB peak  {result}")
        self._since = now
