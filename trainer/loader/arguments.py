"""Checks the arguments of loaders, and turns them into settings. Arguments are named as in torch_geometric."""

from __future__ import annotations

import difflib
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from trainer.core.errors import SettingsError
from trainer.core.graph_attrs import is_task_table
from trainer.core.schema import AnyType, EdgeType
from trainer.graph.open import Graph
from trainer.sampler.settings import check_settings
from trainer.sampler.types import GraphSchema, SampleSettings, TimeRule
from trainer.store.manifest import Manifest

if TYPE_CHECKING:
    from torch_geometric.sampler import NumNeighbors

_SUBGRAPH_TYPES = ("directional", "bidirectional", "induced")

Fanouts: TypeAlias = "Sequence[int] | Mapping[EdgeType, Sequence[int]] | NumNeighbors"

AttrNames: TypeAlias = Sequence[str] | Mapping[AnyType, Sequence[str]]

#: Arguments of torch's DataLoader that are not supported, with the reason.
_UNSUPPORTED = {
    "sampler": "not supported, as the loader orders the seeds and splits them over ranks; use shuffle, or pass seeds",
    "batch_sampler": "not supported, as the loader cuts the seeds into batches; use batch_size, shuffle and drop_last",
    "neighbor_sampler": "not supported, as the hosts of the graph's parts draw the neighbours; leave it out",
    "multiprocessing_context": "not supported, as threads of this process make the batches; leave it out",
}

_NO_EFFECT = ("dataset", "collate_fn", "persistent_workers", "pin_memory_device")

_ARGUMENTS = ("batch_size", "shuffle", "drop_last", "pin_memory", "timeout", "generator", "in_order", "local")

_WORKER_ARGUMENTS = ("num_workers", "prefetch_factor", "worker_init_fn")


@dataclass(frozen=True)
class LoadOptions:
    """How a loader shuffles seeds, divides them into batches and prefetches batches."""

    batch_size: int = 1  #: seeds per step and rank
    shuffle: bool = False
    drop_last: bool = False  #: leave out a last global batch that is not full
    pin_memory: bool = False
    seed: int = 0  #: seed of the order and of all draws
    threads: int = 1
    prefetch: int = 2  #: number of prefetched batches
    deadline: float = 120.0  #: seconds that one request may take
    local: bool = False  #: the loader yields all seeds in this process, without sharing them with other ranks
    thread_init: Callable[[int], Any] | None = None  #: called once on each sampler thread with its number

    def __post_init__(self) -> None:
        if isinstance(self.deadline, bool) or not (isinstance(self.deadline, (int, float)) and self.deadline > 0):
            raise SettingsError(f"deadline (or timeout) must be a number of seconds above 0, not {self.deadline!r}")


def whole_number(name: str, value: object, least: int | None) -> int:
    """Return an argument as ``int``. Raises ``SettingsError`` if it is not an integer or is below ``least``."""
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not whole or (least is not None and value < least):  # type: ignore[operator]
        at_least = "" if least is None else f" of at least {least}"
        raise SettingsError(f"{name} must be a whole number{at_least}, not {value!r}")
    return int(value)  # type: ignore[call-overload, no-any-return]


def load_options(
    given: Mapping[str, Any], *, seed: int | None, threads: int | None, prefetch: int | None, deadline: float
) -> LoadOptions:
    """Convert the arguments of a loader to ``LoadOptions``.

    ``given``: ``local`` and arguments of torch's ``DataLoader``. ``num_workers`` is the number of sampler threads,
    ``prefetch_factor`` the number of batches prefetched per thread. ``timeout`` replaces ``deadline``, and the initial
    seed of ``generator`` replaces ``seed``. ``worker_init_fn`` is called on each sampler thread, except with
    ``num_workers=0``. Raises ``SettingsError`` for unknown, unsupported or contradictory arguments.
    """
    for name, value in given.items():
        if name in _UNSUPPORTED and value is not None:
            raise SettingsError(f"{name}: {_UNSUPPORTED[name]}")
        if name == "in_order" and not value:
            raise SettingsError(
                "in_order=False: batches always come in order, so that all ranks are at the same step; leave it out"
            )
        if name not in (*_UNSUPPORTED, *_NO_EFFECT, *_ARGUMENTS, *_WORKER_ARGUMENTS):
            known = [*_ARGUMENTS, *_WORKER_ARGUMENTS, "num_neighbors", "input_nodes", "time_attr", "weight_attr"]
            nearest = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise SettingsError(f"unknown argument {name!r}{hint}")
    num_workers = whole_number("num_workers", given.get("num_workers", 0), 0)
    workers, thread_init = max(num_workers, 1), given.get("worker_init_fn")
    if thread_init is not None and not callable(thread_init):
        raise SettingsError(f"worker_init_fn must be a function of the thread's number, not {thread_init!r}")
    generator = given.get("generator")
    if generator is not None and seed is not None:
        raise SettingsError(
            "seed and generator were both given; the generator is used only for its seed, so pass one of them"
        )
    seed = 0 if seed is None else whole_number("seed", seed, None)
    factor = given.get("prefetch_factor")
    ahead = 3 if factor is None else whole_number("prefetch_factor", factor, 1) * workers
    return LoadOptions(
        batch_size=whole_number("batch_size", given.get("batch_size", 1), 1),
        shuffle=bool(given.get("shuffle")),
        drop_last=bool(given.get("drop_last")),
        local=bool(given.get("local")),
        pin_memory=bool(given.get("pin_memory")),
        seed=seed if generator is None else int(generator.initial_seed()),
        threads=workers if threads is None else whole_number("threads", threads, 1),
        prefetch=max(ahead, workers) if prefetch is None else whole_number("prefetch", prefetch, 1),
        deadline=given.get("timeout") or deadline,
        thread_init=thread_init if num_workers else None,
    )


def sample_settings(
    graph: Graph, num_neighbors: Fanouts, *, replace: bool = False, subgraph_type: Any = "directional",
    disjoint: bool = False, temporal_strategy: str = "uniform", time_attr: str | None = None,
    weight_attr: str | None = None, neighbors: str = "fanout",
) -> SampleSettings:  # fmt: skip
    """Turn torch_geometric's arguments, and ``neighbors``, into settings of the sampler.

    Raises ``SettingsError`` if they contradict each other or the graph.
    """
    if temporal_strategy not in ("uniform", "last"):
        raise SettingsError(f"temporal_strategy {temporal_strategy!r}; expected 'uniform' or 'last'")
    if neighbors not in ("fanout", "top"):
        raise SettingsError(f"neighbors {neighbors!r}; expected 'fanout' or 'top'")
    time, top = time_and_top(
        graph.manifest, time_attr, weight_attr, last=temporal_strategy == "last", top=neighbors == "top"
    )
    settings = SampleSettings(
        fanouts=fanouts_of(graph.manifest, num_neighbors),
        replace=replace,
        disjoint=disjoint or time is not None,
        weight=weight_attr,
        top=top,
        time=time,
        induced=subgraph_type == "induced",
        edge_ids=True,
        ask_again=False,
    )
    check_settings(graph.manifest, settings)
    return settings


def subgraph_kind(subgraph_type: Any, directed: bool) -> str:
    """Return ``directional``, ``bidirectional`` or ``induced`` for a string or a torch_geometric ``SubgraphType``.

    ``directed=False`` means ``induced``. Raises ``SettingsError`` for an unknown type.
    """
    if not directed:
        warnings.warn("directed=False is deprecated; use subgraph_type='induced'", DeprecationWarning, stacklevel=4)
        return "induced"
    kind = str(getattr(subgraph_type, "value", subgraph_type))
    if kind not in _SUBGRAPH_TYPES:
        raise SettingsError(f"subgraph_type {kind!r}; expected one of {', '.join(_SUBGRAPH_TYPES)}")
    return kind


def fanouts_of(manifest: Manifest, num_neighbors: Fanouts) -> dict[EdgeType, tuple[int, ...]]:
    """Return the fanouts of every edge type, one per hop. Raises ``SettingsError``.

    ``num_neighbors``: a list for all edge types, a mapping from every edge type to a list, or torch_geometric's
    ``NumNeighbors``.
    """
    # Imported here: it takes seconds, and the bundled trainer does not need it.
    from torch_geometric.sampler import NumNeighbors

    given = num_neighbors if isinstance(num_neighbors, NumNeighbors) else None
    values: Any = num_neighbors if given is None else given.values
    if isinstance(values, Mapping) and not manifest.hetero:
        raise SettingsError("num_neighbors is a mapping over edge types, but the graph is homogeneous; pass a list")
    if not isinstance(values, Mapping):
        hops = _whole(values)  # what the rows of a task table list is to be predicted
        rows = {of for of in manifest.edges if is_task_table(of[0], manifest.graph_attrs)}
        return {of: (0,) * len(hops) if of in rows else hops for of in manifest.edges}
    try:
        own = NumNeighbors(
            dict(values), None if given is None else given.default
        )  # a new object, as it caches its results
        found = own.get_values(list(manifest.edges))
    except ValueError as error:
        raise SettingsError(f"num_neighbors: {error}; the graph has {sorted(manifest.edges)}") from None
    return {of: _whole(fanouts) for of, fanouts in found.items()}


def _whole(fanouts: Any) -> tuple[int, ...]:
    try:
        numbers = tuple(map(operator.index, fanouts))
    except (TypeError, ValueError):
        raise SettingsError(f"num_neighbors: {fanouts!r} is not a list of whole numbers, one per hop") from None
    return numbers


def time_and_top(
    manifest: Manifest, time_attr: str | None, weight: str | None, *, last: bool, top: bool
) -> tuple[TimeRule | None, bool]:  # fmt: skip
    """Return the rule of times, and whether the heaviest neighbours are taken: without weights, ``top`` is the latest.

    Raises ``SettingsError`` as ``time_level``.
    """
    if time_attr is None:
        return None, top
    level = time_level(manifest, time_attr)
    return TimeRule(time_attr, level, last or (top and weight is None)), top and weight is not None


def time_level(manifest: Manifest, attr: str) -> Literal["node", "edge"]:
    """Return whether ``attr`` is an attribute of nodes or of edges.

    Raises ``SettingsError`` if it is an attribute of neither or of both.
    """
    on_nodes = [of for of, spec in manifest.nodes.items() if attr in spec.attrs]
    on_edges = [of for of, spec in manifest.edges.items() if attr in spec.attrs]
    if on_nodes and on_edges:
        raise SettingsError(
            f"time_attr {attr!r} is ambiguous: both nodes {on_nodes} and edges {on_edges} have it; rename one of them"
        )
    if not on_nodes and not on_edges:
        raise SettingsError(f"time_attr {attr!r} is neither a node-level nor an edge-level attribute of the graph")
    return "node" if on_nodes else "edge"


def wanted_attrs(graph: Graph, attrs: AttrNames | None) -> dict[AnyType, tuple[str, ...]]:
    """Return the names of the attributes to gather, for every node and edge type.

    Raises ``SettingsError`` for an unknown attribute or type.
    """
    known: dict[AnyType, tuple[str, ...]] = {}
    known |= {of: tuple(spec.attrs) for of, spec in graph.manifest.nodes.items()}
    known |= {of: tuple(spec.attrs) for of, spec in graph.manifest.edges.items()}
    if attrs is None:
        return known
    if graph.source is not None:
        raise SettingsError(
            "attrs selects the attributes that hosts send, but this graph is data in memory: batches have all its "
            "attributes; leave out attrs"
        )
    if not isinstance(attrs, Mapping):
        wanted = _name_list(attrs)
        _check_known(wanted, {name for names in known.values() for name in names})
        return {of: tuple(name for name in names if name in wanted) for of, names in known.items()}
    if unknown := set(attrs) - set(known):
        raise SettingsError(f"attrs: the graph has no type {unknown.pop()!r}; it has {list(known)}")
    given = {of: _name_list(names) for of, names in attrs.items()}
    for of, names in given.items():
        _check_known(names, set(known[of]))
    return {of: given.get(of, ()) for of in known}


def _name_list(names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(names, str):
        raise SettingsError(f"attrs: {names!r} is one name; pass a list of names, as [{names!r}]")
    return tuple(names)


def _check_known(names: Sequence[str], known: set[str]) -> None:
    if missing := [name for name in names if name not in known]:
        raise SettingsError(f"attrs: no attribute {missing[0]!r}; the graph has {sorted(known)}")


@dataclass(frozen=True)
class OutputOptions:
    subgraph_type: str = "directional"
    transform: Callable[[Any], Any] | None = None
    transform_sampler_output: Callable[[Any], Any] | None = None
    on_threads: bool = False  #: call the transforms in the sampler threads
    custom_cls: Callable[[], Any] | None = None  #: returns a new empty batch; for partitions and stores only


def induced_settings(schema: GraphSchema) -> SampleSettings:
    """Return settings for the subgraph induced by the seeds: no further nodes, all edges between the seeds."""
    return SampleSettings(dict.fromkeys(schema.edges, (0,)), induced=True, edge_ids=True, ask_again=False)


def check_homogeneous(graph: Graph, what: str) -> None:
    if graph.manifest.hetero:
        one_type = "HeteroData.to_homogeneous()" if graph.source is not None else "a partition of its to_homogeneous()"
        raise SettingsError(
            f"{what} takes homogeneous graphs only, as in torch_geometric, but the graph is heterogeneous;"
            f" pass {one_type}, or use DistNeighborLoader or DistClusterLoader"
        )
