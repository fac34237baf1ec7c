"""Makes a partition folder from a dataset or another partition folder: loads, assigns parts and writes.

The other partition folder can be of another program, or get another number of parts.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from trainer.core.errors import PartitionError
from trainer.core.files import allow_many_files
from trainer.core.graph_attrs import HELD_OUT
from trainer.core.memory import available_memory, parse_size, size_text
from trainer.core.progress import reporting
from trainer.core.remote_settings import WireRows
from trainer.core.row_sort import Scratch
from trainer.data.dataset import Dataset
from trainer.data.options import SourceOptions, parse_options
from trainer.data.stored_dataset import read_stored_dataset, store_dataset
from trainer.partition.clusters import with_clusters
from trainer.partition.folder import check_same_graph, describe_partition, is_compared, reusable
from trainer.partition.methods.assign import (
    KEEP,
    METHODS,
    PartitionAssignment,
    assign_parts,
    choose_method,
    fanouts_of,
    given_assignment,
    made_by,
    method_options,
    read_assignment,
    store_assignment,
)
from trainer.partition.methods.frequency import Fanouts
from trainer.partition.methods.metis import metis_memory
from trainer.partition.restore import PartitionedGraph
from trainer.partition.source import DATASET, PartitionSource, open_source
from trainer.partition.work_folder import WorkFolder, locked, work_folder
from trainer.partition.write import SORT_MEMORY, options_with, partition_fingerprint, write_partition
from trainer.sources.load import dataset_fingerprint, load_dataset
from trainer.store.manifest import Manifest

#: Share of the memory for reading: for the database that reads tables, which takes a little more than its limit, or for
#: arrays made from those in other sources.
_LOAD_SHARE = 0.6

_PROCESS_BYTES = 150 << 20  #: of Python and its packages

_NODE_BYTES = 60  #: of all arrays with one value per node that a step holds at the same time

_UNKNOWN_MEMORY = 4 << 30  #: assumed where the system does not tell how much memory is available

_LEAST_BYTES = 64 << 20  #: of memory for sorting


@dataclass(frozen=True)
class PartitionSpec:
    dataset: str  #: name of the dataset, see ``load_dataset``; or ``partition``: another partition folder
    folder: str  #: partition folder to write
    source: str | None = None  #: files or download folder of the dataset
    options: Mapping[str, Any] = field(default_factory=dict)  #: dataset options
    num_parts: int = 1
    method: str = "auto"  #: one of ``assign.METHODS``; for dataset `partition` also ``assign.KEEP``
    seed: int = 0  #: seed of the method
    balance: str | None = None  #: one of ``assign.BALANCES``; None: the method's default
    fanouts: Fanouts | None = None  #: for method `frequency`; None: its default
    clusters: int = 0  #: number of clusters per part, stored as node attribute `cluster`; 0: none
    rows: WireRows = "stored"  #: type that floating-point attributes with two or more dimensions are rounded to
    memory: str | None = None  #: most memory to use, such as 4GB; None: what the machine has
    force: bool = False  #: replace a partition of another graph in ``folder``

    @cached_property
    def partition_source(self) -> PartitionSource:
        """The partition folder to read, for dataset `partition`. Raises ``DataError`` or ``PartitionError``."""
        return open_source(self.source, self.options)

    @property
    def kept_source(self) -> PartitionSource:
        """The partition folder from which method `keep` takes the part of each node.

        Raises ``PartitionError`` unless the dataset is `partition`, and the folder has ``num_parts`` parts.
        """
        if self.dataset != DATASET:
            raise PartitionError("method `keep` needs dataset `partition`, with a partition folder as source")
        found = self.partition_source.num_parts
        if found == 0:
            raise PartitionError(
                f"{self.partition_source.folder}: the nodes are not assigned to parts yet; assign them with "
                "`gnnfleet partition repartition FOLDER OUT --num-parts N`"
            )
        if found != self.num_parts:
            raise PartitionError(
                f"{self.partition_source.folder} has {found} parts, but {self.num_parts} are needed; set "
                f"data.num_parts (--num-parts) to {found}, or choose another method than keep to assign the nodes anew"
            )
        return self.partition_source

    def method_record(self) -> dict[str, Any]:
        """Return all options of the partition method with defaults, as JSON values. Raises ``PartitionError``."""
        if self.method == KEEP:
            options: dict[str, Any] = {"format": self.kept_source.format.key if self.kept_source.format else "gnnfleet"}
        else:
            options = method_options(self.method, balance=self.balance, fanouts=self.fanouts)
        options |= {"clusters": self.clusters} if self.clusters else {}
        return dict(options_with(options, self.rows))

    def fingerprint(self) -> str:
        """Return the fingerprint that the partition will have, without reading data.

        Raises ``DataError`` or ``PartitionError`` for invalid options and missing files.
        """
        if self.dataset == DATASET:
            source = self.kept_source if self.method == KEEP else self.partition_source
            return partition_fingerprint(
                source.fingerprint, self.num_parts, self.method, self.seed, self.method_record(), source.time_attrs
            )
        dataset = dataset_fingerprint(self.dataset, self.source, self.options)
        time_attrs = Dataset.time_attrs
        if "time_attrs" in self.options:
            given = {"time_attrs": self.options["time_attrs"]}
            time_attrs = parse_options(SourceOptions, given, self.dataset).times
        return partition_fingerprint(dataset, self.num_parts, self.method, self.seed, self.method_record(), time_attrs)


def make_partition(spec: PartitionSpec, say: Callable[[str], None] = print) -> Manifest:
    """Load the dataset, assign its nodes to parts and write the partition folder.

    Does nothing if the folder already holds a partition with the same fingerprint. Waits while another process makes
    or sends the parts in this folder. ``say`` is called with each line of progress. Raises ``DataError`` or
    ``PartitionError``.

    If the dataset is `tables` or ``spec.memory`` is set, an interrupted call leaves its intermediate results in a
    hidden folder beside the partition folder. The same call then continues from them.
    """
    allow_many_files()  # of each attribute, while the graph is read and changed
    with locked(Path(spec.folder), say):
        return _make_locked(spec, Path(spec.folder), say)


def _make_locked(spec: PartitionSpec, folder: Path, say: Callable[[str], None]) -> Manifest:
    fingerprint = spec.fingerprint()
    if (done := reusable(folder, fingerprint, say)) is not None:
        what = f"{done.dataset}, {done.num_parts} parts by {done.algorithm}"
        sizes = f"files of the right sizes; `gnnfleet partition verify {folder}` compares their contents"
        say(f"{folder} is up to date: {what}" if is_compared(done) else f"{folder} holds {what}: {sizes}")
        return done
    keep = spec.dataset == "tables" or spec.memory is not None
    with work_folder(folder, fingerprint, keep) as work, reporting(say):
        if before := work.stages_done():
            left = f"what an interrupted run left in {work.path} ({', '.join(before)})"
            say(f"going on with {left}; delete it to start again")
        limit = parse_size(spec.memory) if spec.memory is not None else available_memory() or _UNKNOWN_MEMORY
        stages = _StageTimer(say)
        source, load_memory = None, int(_LOAD_SHARE * limit)
        if spec.dataset == DATASET:
            own = None if spec.memory is None else load_memory
            source = spec.partition_source.read(work.emptied("dataset"), own)
            dataset = source.dataset
        elif spec.dataset != "tables":
            # only where memory is limited: files take longer
            scratch = None if spec.memory is None else Scratch(work.emptied("dataset"), load_memory)
            dataset = load_dataset(spec.dataset, spec.source, spec.options, scratch)
        else:
            if not work.is_done("load"):
                scratch = Scratch(work.emptied("dataset"), load_memory)
                store_dataset(load_dataset(spec.dataset, spec.source, spec.options, scratch), scratch.folder)
                work.once("load", lambda: None)
            dataset = read_stored_dataset(work.folder("dataset"))
        nodes, edges = (f" of {len(types)} types" if dataset.hetero else "" for types in (dataset.nodes, dataset.edges))
        stages.end("load", f"{dataset.name}: {dataset.num_nodes:,} nodes{nodes}, {dataset.num_edges:,} edges{edges}")
        if not spec.force:
            check_same_graph(folder, dataset)
        if (other := describe_partition(folder)) is not None:
            say(f"replacing {other} in {folder}")
        for note in dataset.notes:
            say(f"note: {note}")
        trains = any(len(nodes.splits.get("train", ())) for nodes in dataset.nodes.values())
        if not trains and HELD_OUT not in dataset.graph_attrs:
            say("note: no train split: the bundled trainer needs train_idx or train_mask")
        memory = _memory_of_steps(dataset, limit)
        assignment, reason = _assigned(spec, dataset, source, memory, work)
        how = f"{assignment.algorithm} ({reason})" if reason else assignment.algorithm
        stages.end("assign", f"{how}: cut {assignment.edge_cut:.2%}, balance {assignment.balance:.3f}")
        if spec.clusters:
            dataset = with_clusters(dataset, assignment, spec.clusters, None if spec.memory is None else memory)
            assignment = replace(assignment, options=spec.method_record())
            stages.end("divide", f"each part into {spec.clusters} clusters")
        manifest = write_partition(dataset, assignment, folder, spec.rows, min(memory, SORT_MEMORY), work, fingerprint)
        stages.end("write", f"{folder}: {sum(entry.bytes for entry in manifest.files) / 1e6:,.1f} MB")
        return manifest


def _memory_of_steps(dataset: Dataset, limit: int) -> int:
    """Return how many bytes of memory each step may use, besides the arrays with one value per node.

    This is ``limit`` without these arrays and the memory of the process itself. Raises ``PartitionError`` if less than
    64 MiB are left.
    """
    fixed = _PROCESS_BYTES + _NODE_BYTES * dataset.num_nodes
    if limit - fixed < _LEAST_BYTES:
        raise PartitionError(
            f"{dataset.num_nodes:,} nodes need at least {size_text(fixed + _LEAST_BYTES)} of memory, but only "
            f"{size_text(limit)} may be used; raise data.partition.memory (--memory), or use a larger machine"
        )
    return limit - fixed


def _assigned(
    spec: PartitionSpec, dataset: Dataset, source: PartitionedGraph | None, memory: int, work: WorkFolder
) -> tuple[PartitionAssignment, str]:
    """Return the assignment, and for method `auto` the reason for the chosen method, else ''."""

    if spec.method == KEEP and source is not None:
        return given_assignment(dataset, source.parts, source.num_parts, KEEP, spec.seed, spec.method_record()), ""

    def assign() -> str:
        method, reason = (spec.method, "") if spec.method != "auto" else choose_method(dataset, memory)
        if spec.memory is not None and method in ("metis", "frequency") and spec.num_parts > 1:
            chances = (4 * spec.num_parts + 24) * dataset.num_nodes + 8 * dataset.num_edges
            needed = max(metis_memory(dataset.num_nodes, dataset.num_edges), chances if method == "frequency" else 0)
            if needed > memory:
                raise PartitionError(
                    f"method {method} needs about {size_text(needed)}, but data.partition.memory (--memory) leaves "
                    f"{size_text(memory)}; raise it, or take method streaming, which keeps the edges on disk"
                )
        scratch = Scratch(work.emptied("sort"), memory) if method == "streaming" else None
        options = {"balance": spec.balance, "fanouts": spec.fanouts}
        assignment = assign_parts(dataset, spec.num_parts, method, spec.seed, scratch, **options)
        assignment = replace(assignment, options=method_options(spec.method, **options))
        store_assignment(assignment, work.emptied("assign"))
        return reason

    reason = work.once("assign", assign)
    return read_assignment(work.folder("assign")), reason


class _StageTimer:
    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._since = say, time.monotonic()

    def end(self, stage: str, result: str) -> None:
        now = time.monotonic()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        self._say(f"{stage:<7}{now - self._since:7.1f} s  {peak:5.2f} GB peak  {result}")
        self._since = now


def convert_partition(
    source: str | Path, folder: str | Path, options: Mapping[str, Any] | None = None, *, rows: WireRows = "stored",
    force: bool = False, say: Callable[[str], None] = print,
) -> Manifest:  # fmt: skip
    """Convert the partition folder of another program to ``folder``. Every node stays in its part.

    ``options``: as for ``open_source``; ``rows`` and ``force``: as in ``PartitionSpec``. Raises ``DataError`` or
    ``PartitionError``. After an error, no new files are left.
    """
    found = open_source(source, options)
    if found.format is None:
        raise PartitionError(
            f"{found.folder} is a partition of gnnfleet already; `partition repartition` changes its parts"
        )
    say(f"{found.folder}: {found.title}, {found.num_parts or 'not assigned to'} parts")
    spec = PartitionSpec(
        DATASET, str(folder), str(found.folder), options or {}, found.num_parts, KEEP, rows=rows, force=force
    )
    return make_partition(spec, say)


def repartition_spec(
    source: str | Path, folder: str | Path, num_parts: int, method: str | None = None, seed: int | None = None,
    balance: str | None = None, fanouts: Fanouts | None = None,
) -> PartitionSpec:  # fmt: skip
    """Return how to divide the graph of the partition folder ``source`` into ``num_parts`` parts.

    Arguments that are None get the values that ``source`` was made with, or else their defaults. Raises ``DataError``
    or ``PartitionError``.
    """
    made = open_source(source).manifest
    kept = made if made is not None and made.algorithm in METHODS else None
    method = method or (made_by(kept) if kept else "auto")
    same = kept.options if kept is not None and made_by(kept) == method else {}
    options = made.options if made is not None else {}
    return PartitionSpec(
        dataset=DATASET,
        folder=str(folder),
        source=str(source),
        num_parts=num_parts,
        method=method,
        seed=seed if seed is not None else made.seed if made is not None else 0,
        balance=balance or same.get("balance"),
        fanouts=fanouts or (fanouts_of(same["fanouts"]) if "fanouts" in same else None),
        clusters=options.get("clusters", 0),
        rows=options.get("rows", "stored"),
    )
