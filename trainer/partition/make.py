"""Makes a partition folder from a dataset: loads, assigns parts and writes (``partition make``)."""

from __future__ import annotations

import resource
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainer.core.errors import PartitionError
from trainer.core.remote_settings import WireRows
from trainer.data.dataset import Dataset
from trainer.data.load import dataset_fingerprint, load_dataset
from trainer.data.options import SourceOptions, parse_options
from trainer.partition.assign import assign_parts, method_options
from trainer.partition.folder import check_same_graph, describe_partition, is_compared, reusable
from trainer.partition.frequency import Fanouts
from trainer.partition.write import options_with, partition_fingerprint, write_partition
from trainer.store.manifest import Manifest


@dataclass(frozen=True)
class PartitionSpec:
    """The arguments of ``make_partition``."""

    dataset: str  #: name of the dataset, see ``load_dataset``
    folder: str  #: partition folder to write
    source: str | None = None  #: files or download folder of the dataset
    options: Mapping[str, Any] = field(default_factory=dict)  #: dataset options
    num_parts: int = 1
    method: str = "metis"  #: one of ``assign.METHODS``
    seed: int = 0  #: seed of the method
    balance: str | None = None  #: one of ``assign.BALANCES``; None: the method's default
    fanouts: Fanouts | None = None  #: for method `frequency`; None: its default
    clusters: int = 0  #: number of clusters per part, stored as node attribute `cluster`; 0: none
    rows: WireRows = "stored"  #: type that floating-point attributes with two or more dimensions are rounded to
    force: bool = False  #: replace a partition of another graph in ``folder``

    def method_record(self) -> dict[str, Any]:
        """Return all options of the partition method with defaults, as JSON values. Raises ``PartitionError``."""
        options = method_options(self.method, balance=self.balance, fanouts=self.fanouts)
        options |= {"clusters": self.clusters} if self.clusters else {}
        return dict(options_with(options, self.rows))

    def fingerprint(self) -> str:
        """Return the fingerprint that the partition will have, without reading data.

        Raises ``DataError`` or ``PartitionError`` for invalid options and missing files.
        """
        dataset = dataset_fingerprint(self.dataset, self.source, self.options)
        time_attrs = Dataset.time_attrs
        if "time_attrs" in self.options:
            given = {"time_attrs": self.options["time_attrs"]}
            time_attrs = parse_options(SourceOptions, given, self.dataset).times
        return partition_fingerprint(dataset, self.num_parts, self.method, self.seed, self.method_record(), time_attrs)


def make_partition(spec: PartitionSpec, say: Callable[[str], None] = print) -> Manifest:
    """Load the dataset, assign its nodes to parts and write the partition folder.

    If the folder already holds a partition with the same fingerprint, the dataset is not loaded and nothing is written.
    ``say`` is called with each line of progress. Raises ``DataError`` or ``PartitionError``, and leaves no files behind
    then.
    """
    folder = Path(spec.folder)
    if (done := reusable(folder, spec.fingerprint(), say)) is not None:
        what = f"{done.dataset}, {done.num_parts} parts by {done.algorithm}"
        sizes = f"files of the right sizes; `python -m trainer partition verify {folder}` compares their contents"
        say(f"{folder} is up to date: {what}" if is_compared(done) else f"{folder} holds {what}: {sizes}")
        return done
    with _work_folder(folder) if spec.dataset == "tables" else nullcontext() as work:
        return _make(spec, folder, say, work)


def _make(spec: PartitionSpec, folder: Path, say: Callable[[str], None], work: Path | None) -> Manifest:
    stages = _StageTimer(say)
    dataset = load_dataset(spec.dataset, spec.source, spec.options, work)
    stages.end("load", f"{dataset.name}: {_counts(dataset)}")
    if not spec.force:
        check_same_graph(folder, dataset)
    if (other := describe_partition(folder)) is not None:
        say(f"replacing {other} in {folder}")
    for note in (*dataset.notes, *_notes_for_training(dataset)):
        say(f"note: {note}")
    assignment = assign_parts(
        dataset, spec.num_parts, spec.method, spec.seed, balance=spec.balance, fanouts=spec.fanouts
    )
    stages.end("assign", f"{spec.method}: cut {assignment.edge_cut:.2%}, balance {assignment.balance:.3f}")
    if spec.clusters:
        from trainer.partition.clusters import with_clusters

        dataset = with_clusters(dataset, assignment, spec.clusters)
        assignment = replace(assignment, options=spec.method_record())
        stages.end("divide", f"each part into {spec.clusters} clusters")
    manifest = write_partition(dataset, assignment, folder, spec.rows)
    stages.end("write", f"{folder}: {sum(entry.bytes for entry in manifest.files) / 1e6:,.1f} MB")
    return manifest


@contextmanager
def _work_folder(folder: Path) -> Iterator[Path]:
    """Create an empty folder beside ``folder`` for the arrays of dataset `tables`, and delete it at the end.

    A folder that is left of a killed process is deleted first.
    """
    work = folder.with_name(f".{folder.name}.tables")
    try:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        yield work
    except OSError as error:
        raise PartitionError(f"{work} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _notes_for_training(dataset: Dataset) -> Iterator[str]:
    if not any(len(nodes.splits.get("train", ())) for nodes in dataset.nodes.values()):
        yield "no train split: the bundled trainer needs train_idx or train_mask"


def _counts(dataset: Dataset) -> str:
    nodes, edges = (f" of {len(types)} types" if dataset.hetero else "" for types in (dataset.nodes, dataset.edges))
    return f"{dataset.num_nodes:,} nodes{nodes}, {dataset.num_edges:,} edges{edges}"


class _StageTimer:
    """Prints the seconds and the peak memory of each stage."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._since = say, time.monotonic()

    def end(self, stage: str, result: str) -> None:
        now = time.monotonic()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        self._say(f"{stage:<7}{now - self._since:7.1f} s  {peak:5.2f} GB peak  {result}")
        self._since = now
