"""Chooses for each host a Python environment and devices, with package versions that match across hosts."""

from __future__ import annotations

import os
import pickletools
import re
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.init.discover import Environment, Gpu, HostFacts
from launcher.init.request import InitRequest
from launcher.plan.partition import drafted_tables
from launcher.preflight.check_devices import MOST_USED

Choice = dict[int, Environment | None]  #: by index of the host in the request; None: no usable environment


def choose(request: InitRequest, facts: Mapping[int, HostFacts]) -> Choice:
    """Return for each host the environment to use, or None if none is usable.

    An environment that the request names is used. Otherwise, environments with torch are ranked by these criteria, the
    most important first: all packages are present; the versions are those that most hosts have; torch is built with
    CUDA if the host has GPUs, else without; the path is the one that most hosts have. Without SSH, the Python of this
    process is used.
    """
    if request.local and not request.environment:  # the first environment is the Python of this process
        return {k: next(iter(host.environments), None) for k, host in facts.items()}
    if request.environment:
        return {k: _named(request, host.environments) for k, host in facts.items()}

    # The versions that most hosts have of all packages; of equally frequent ones, those with the newest torch.
    counts: Counter[tuple[str, ...]] = Counter()
    newest: dict[tuple[str, ...], tuple[int, ...]] = {}
    for host in facts.values():
        complete = [one for one in host.environments if one.complete]
        counts.update({one.matched_versions for one in complete})
        newest |= {one.matched_versions: one.numbers("torch") for one in complete}
    common = max(counts, key=lambda versions: (counts[versions], newest[versions]), default=())
    paths = Counter(
        (one.key, one.path) for host in facts.values() for one in host.environments if one.matched_versions == common
    )

    chosen: Choice = {}
    for k, host in facts.items():
        usable = [one for one in host.environments if one.versions.get("torch")]
        ranks = [
            (
                one.complete,
                one.matched_versions == common,
                bool(one.versions.get("cuda")) == bool(host.gpus),
                paths[one.key, one.path],
                -len(one.lacking),
                one.numbers("torch"),
            )
            for one in usable
        ]
        chosen[k] = usable[ranks.index(max(ranks))] if usable else None
    return chosen


def _named(request: InitRequest, found: Sequence[Environment]) -> Environment | None:
    [(key, text)] = request.environment.items()
    path = text.rstrip("/")
    for one in found:
        if one.path == path or key == "conda" and one.key == "conda" and one.path.rpartition("/")[2] == path:
            return Environment(key, text, one.versions)
    return None


def devices(host: HostFacts, environment: Environment | None) -> tuple[Gpu, ...]:
    """Return the GPUs that a node may use: the free ones, or none if the environment's torch is built without CUDA.

    If ``environment`` is None, the free GPUs are returned: ``gnnfleet setup`` will install a torch with CUDA there.
    """
    if environment is not None and not environment.versions.get("cuda"):
        return ()
    return tuple(gpu for gpu in host.gpus if free(gpu))


def free(gpu: Gpu) -> bool:
    """Whether a GPU is free: MIG mode is off, and at most the fraction ``MOST_USED`` of its memory is in use."""
    return not gpu.mig and gpu.used <= gpu.memory * MOST_USED


_HETERO_NAMES = ("synthetic-hetero", "ogbn-mag", "OGB_MAG", "DBLP", "IMDB", "AMiner")

_MAX_PICKLE = 16 << 20  #: bytes read of a pickle; it does not contain the tensors


@dataclass(frozen=True)
class GraphDraft:
    """The graph in the new cluster.yml: ``data.dataset``, ``data.source`` and ``data.options``."""

    dataset: str
    source: str | None = None
    hetero: bool = False  #: whether it is heterogeneous
    options: Mapping[str, Any] = field(default_factory=dict)
    about: str = ""  #: comment on ``data.dataset``
    #: for dataset `tables`, comments on the tables: by node and edge type, and ``unused`` on files
    comments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def short_name(self) -> str:
        name = Path(self.source).stem if self.source else self.dataset
        return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.").lower() or "graph"


def graph_of(dataset: str, source: str | None) -> GraphDraft:
    """Return the dataset, source and options of the graph, as cluster.yml will have them.

    Guesses from the file names in ``source`` whether the graph is heterogeneous. For a .pt file, guesses from the
    strings in its pickle, without unpickling it.
    """
    if dataset == "synthetic":
        about = "generated; others: `file`, ogbn-products, Planetoid:Cora …"
        return GraphDraft(dataset, source, options={"num_nodes": 100_000, "avg_degree": 15}, about=about)
    if dataset == "file" and source:
        path = Path(os.path.expanduser(source))
        if path.is_dir():  # the trainer uses the same rule
            names = {one.stem for one in path.iterdir()}
            typed = any(re.fullmatch(r"[^_].*?__.+?__.+", name) for name in names)
            hetero = typed and "edge_index" not in names
        else:
            hetero = _pickled_hetero(path)
        return GraphDraft(dataset, source, hetero, about="your own arrays, or a Data or HeteroData (docs/data.md)")
    if dataset == "tables" and source:
        options = drafted_tables(source)
        comments = options.pop("comments", {})
        hetero = len(options["nodes"]) > 1 or len(options["edges"]) > 1 or "tasks" in options
        about = "CSV or Parquet files; correct the columns below"
        return GraphDraft(dataset, source, hetero, options, about, comments)
    return GraphDraft(dataset, source, dataset.rpartition(":")[2] in _HETERO_NAMES)


def _pickled_hetero(path: Path) -> bool:
    # Judged by the strings in its pickle, which is not loaded.
    try:
        with zipfile.ZipFile(path) as archive:
            pickled = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            with archive.open(pickled) as file:
                words = [
                    str(word) for _, word, _ in pickletools.genops(file.read(_MAX_PICKLE)) if isinstance(word, str)
                ]
    except (OSError, ValueError, StopIteration, zipfile.BadZipFile):
        return False  # the trainer reports why the file cannot be read
    return "_global_store" in words or any(word.endswith(" HeteroData") for word in words)
