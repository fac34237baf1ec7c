"""Converts ``edge_label_index`` in any of its forms to seed links, as original ids."""

from __future__ import annotations

import difflib
import hashlib
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.core.arrays import Array, Ids
from trainer.core.errors import SettingsError
from trainer.core.schema import HOMO_EDGE, EdgeType, NodeType, reverse_type
from trainer.graph.open import Graph
from trainer.loader.edge_endpoints import EdgeEndpoints, HeldEndpoints, StoredEndpoints
from trainer.loader.negatives import NegativeDraw
from trainer.loader.node_seeds import as_array, checked_ids
from trainer.sampler.types import RowRequest, SampleSettings


@dataclass(frozen=True)
class LinkInputs:
    """The seed links of a loader. The *position* of a link is its index among the seed links.

    If the user gives no ids, the links are all edges of ``edge_type``, and the position of an edge is its original id.
    """

    edge_type: EdgeType
    ends: EdgeEndpoints  #: sources and targets, by position
    are_edges: bool  #: the links are all edges of the type, not given by ids
    label: Tensor | None = None  #: [n, …]
    times: Ids | None = None  #: int64 [n]
    input_id: Ids | None = None  #: int64 [n] ids that batches report; None: the links' positions

    def __len__(self) -> int:
        return len(self.ends)

    def all_ends(self) -> tuple[Ids, Ids]:
        """Return the sources and targets of all links, as original ids, int64 [n] each. Raises ``ServiceError``."""
        return self.ends.ends_of(np.arange(len(self)))

    def digest(self) -> str:
        total = hashlib.sha256(f"{self.edge_type} {len(self)}".encode())
        self.ends.add_to(total)
        for array in (self.times, None if self.label is None else as_array(self.label)):
            total.update(b"" if array is None else np.ascontiguousarray(array).data)
        return total.hexdigest()


def link_inputs(
    graph: Graph, edge_label_index: Any, edge_label: Any = None, edge_label_time: Any = None, input_id: Any = None
) -> LinkInputs:
    """Return the links that ``edge_label_index`` describes.

    Homogeneous graph: None (all edges) or ids [2, n]. Heterogeneous graph: an edge type, or (edge type, None | ids). If
    ids are given, the graph need not have edges of the type.

    Reads all edges if no ids are given and the partition has no ``endpoints`` files. Raises ``ServiceError`` if a host
    fails meanwhile, and ``SettingsError`` for invalid arguments.
    """
    edge_type, given = _typed(graph, edge_label_index)
    ends: EdgeEndpoints
    if given is None:
        ends = StoredEndpoints(graph, edge_type)
    else:
        pair = isinstance(given, (tuple, list)) and len(given) == 2
        values = as_array([as_array(end) for end in given] if pair else given)
        if values.ndim != 2 or values.shape[0] != 2:
            raise SettingsError(f"edge_label_index: shape is {list(values.shape)}, expected [2, number of links]")
        sizes = [graph.manifest.nodes[of].num_nodes for of in (edge_type[0], edge_type[2])]
        src = checked_ids(values[0], sizes[0], edge_type[0], "edge_label_index, sources")
        ends = HeldEndpoints(src, checked_ids(values[1], sizes[1], edge_type[2], "edge_label_index, targets"))
    count, label = len(ends), None
    if edge_label is not None:
        try:
            # torch.tensor copies: arrays of a partition are read-only
            label = edge_label if isinstance(edge_label, Tensor) else torch.tensor(as_array(edge_label))
        except TypeError:
            raise SettingsError(f"edge_label: expected numbers, one row for each of {count} links") from None
        if label.ndim == 0 or len(label) != count:
            raise SettingsError(f"edge_label: shape is {list(label.shape)}, expected one row for each of {count} links")
    return LinkInputs(
        edge_type, ends, given is None, label,
        times=None if edge_label_time is None else _per_link("edge_label_time", edge_label_time, count),
        input_id=None if input_id is None else _per_link("input_id", input_id, count),
    )  # fmt: skip


def node_draw(graph: Graph, of: NodeType, weight: Array | None, settings: SampleSettings) -> NegativeDraw:
    """Return what draws negatives of one type.

    With temporal sampling by node times, this reads the times of all nodes of the type. The result then takes 12 bytes
    per node, and sorting the times takes 24 bytes per node.
    """
    time, spec, times = settings.time, graph.manifest.nodes[of], None
    if time is not None and time.on == "node" and time.attr in spec.attrs:
        # The ids are freed before the times are sorted.
        (rows,) = graph.access.gather(
            [RowRequest(of, graph.store.to_global(of, np.arange(spec.num_nodes)), (time.attr,))]
        )
        times = rows[time.attr]
    return NegativeDraw(spec.num_nodes, weight, times)


def canonical(graph: Graph, given: Any, with_ids: bool = False, where: str = "edge_label_index") -> EdgeType:
    """Return the edge type that ``given`` names: a full triple, or an unambiguous (source, target) pair or relation.

    With ``with_ids``, the graph need not have the type: a triple is returned unchanged, and a pair gets the relation
    ``to``, as in torch_geometric. Warns if the graph has a type of a similar name. Raises ``SettingsError`` for any
    other name; ``where``: the argument that it names.
    """
    names = (given,) if isinstance(given, str) else tuple(given)
    if names in graph.manifest.edges:
        return names  # type: ignore[return-value]
    ends = [of for of in graph.manifest.edges if names in ((of[0], of[2]), (of[1],))]
    if with_ids and not ends and len(names) in (2, 3) and {names[0], names[-1]} <= set(graph.manifest.nodes):
        relation = names[1] if len(names) == 3 else "to"
        alike = [of[1] for of in graph.manifest.edges if (of[0], of[2]) == (names[0], names[-1])]
        if nearest := difflib.get_close_matches(relation, alike, 1):
            warnings.warn(
                f"{where}: the graph has no edges of {(names[0], relation, names[-1])}, so the batches have"
                f" none either; did you mean {nearest[0]!r}?",
                stacklevel=5,
            )
        return names[0], relation, names[-1]
    if len(ends) != 1:
        problem = "is ambiguous" if ends else "is not an edge type"
        raise SettingsError(f"{where}: {given!r} {problem}; the graph has {sorted(graph.manifest.edges)}")
    return ends[0]


def given_or_reverse(graph: Graph, edge_type: EdgeType, given: Any, why: str) -> EdgeType:
    """Return ``given``, the type of the reverse edges of ``edge_type``, or by default ``reverse_type``.

    Raises ``SettingsError`` if it does not lead back, or the graph has no such type; ``why``: what needs it.
    """
    if given is not None:
        reverse = canonical(graph, given, where="reverse_type")
        if (reverse[0], reverse[2]) != (edge_type[2], edge_type[0]):
            raise SettingsError(f"reverse_type {reverse} does not lead from {edge_type[2]!r} to {edge_type[0]!r}")
        return reverse
    if (found := reverse_type(edge_type, graph.manifest.edges)) is None:
        named = (edge_type[2], f"rev_{edge_type[1]}", edge_type[0])
        raise SettingsError(
            f"{why}: the graph has no edge type {named}; pass the type of the reverse edges as reverse_type, or"
            " partition the graph with undirected: true"
        )
    return found


def _typed(graph: Graph, given: Any) -> tuple[EdgeType, Any]:
    if not graph.manifest.hetero:
        if isinstance(given, str) or (isinstance(given, (tuple, list)) and any(map(_is_type, given[:1]))):
            raise SettingsError("edge_label_index names an edge type, but the graph is homogeneous; pass the ids alone")
        return HOMO_EDGE, given
    if isinstance(given, str) or (isinstance(given, (tuple, list)) and _is_name_tuple(given)):
        return canonical(graph, given), None
    if isinstance(given, (tuple, list)) and len(given) == 2 and _is_type(given[0]):
        return canonical(graph, given[0], given[1] is not None), given[1]
    raise SettingsError(
        "the graph is heterogeneous: pass edge_label_index as (edge type, ids); edge types are"
        f" {sorted(graph.manifest.edges)}"
    )


def _is_type(given: Any) -> bool:
    return isinstance(given, str) or _is_name_tuple(given)


def _is_name_tuple(given: Any) -> bool:
    return isinstance(given, (tuple, list)) and len(given) > 0 and all(isinstance(word, str) for word in given)


def _per_link(name: str, given: Any, count: int) -> Ids:
    values = as_array(given)
    if values.shape != (count,) or values.dtype.kind not in "iu":
        raise SettingsError(f"{name}: {values.dtype} {list(values.shape)}; expected whole numbers [{count}]")
    return values.astype(np.int64)
