"""Reduces a ``Dataset`` to a subset of its nodes and the edges between them, for rehearsals and first tries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from trainer.core.errors import DataError
from trainer.core.graph_attrs import (
    HELD_OUT,
    TEST_LINKS,
    TEST_TIMES,
    TEST_TYPES,
    VAL_LINKS,
    VAL_TIMES,
    VAL_TYPES,
    held_out_names,
)
from trainer.core.row_sort import Scratch
from trainer.core.schema import EdgeType, NodeType, type_name
from trainer.data.dataset import Dataset, EdgeData
from trainer.data.work_arrays import kept_edges, kept_rows, slices

_Flags = npt.NDArray[np.bool_]

_SEED = 0  # the same subset everywhere

_FIRST_SHARE = 0.1  # share of the subset that is drawn before neighbours are added


def subset_of(dataset: Dataset, num_nodes: int | None, scratch: Scratch | None = None) -> Dataset:
    """Return the subgraph induced by a snowball sample of at most ``num_nodes`` nodes; None: the whole graph.

    Source: L. A. Goodman, "Snowball sampling", 1961. First draws a tenth of the sample at random: equally many nodes
    from each split or, if there are no splits, from each node type. Then adds in-neighbours of the sample, hop by hop;
    if there are no more, random nodes. Nodes in splits thus keep more neighbours than in an independent draw.

    The same graph and ``num_nodes`` always give the same sample. Nodes keep their order, and get new ids from 0. With
    ``scratch``, the arrays of the result are memory-mapped files in its folder.

    Raises:
        DataError: ``num_nodes`` is less than 1, or the graph has links of an unknown type (a graph attribute
            ``…_links`` without ``held_out_type``), whose nodes would be missing.
    """
    if num_nodes is None or 0 < dataset.num_nodes <= num_nodes:
        return dataset
    if num_nodes < 1:
        raise DataError(f"dataset {dataset.name}: option subset must be at least 1, not {num_nodes}")
    links = [name for name in dataset.graph_attrs if name.endswith("_links")]
    if links and HELD_OUT not in dataset.graph_attrs:
        raise DataError(
            f"dataset {dataset.name}: option subset cannot be used with {', '.join(links)}, as nodes of these links "
            "would be missing"
        )
    kept = _snowball(dataset, num_nodes)
    numbers = {of: np.cumsum(flags) - 1 for of, flags in kept.items()}
    nodes = {}
    for of, data in dataset.nodes.items():
        own, count, rows = kept[of], int(np.count_nonzero(kept[of])), {}
        for name, values in data.attrs.items():
            path = None if scratch is None else scratch.folder / f"subset-{of}-{name}.npy"
            rows[name] = kept_rows(values, own.__getitem__, count, path)
        splits = {name: numbers[of][ids[own[ids]]] for name, ids in data.splits.items()}
        nodes[of] = replace(data, num_nodes=count, attrs=rows, splits=splits)

    # Held-out links, without those of nodes that are left out.
    attrs, types = dict(dataset.graph_attrs), {type_name(of): of for of in dataset.edges}
    for names in ((VAL_LINKS, VAL_TIMES, VAL_TYPES), (TEST_LINKS, TEST_TIMES, TEST_TYPES)):
        if names[0] not in attrs:
            continue
        ends = np.array(attrs[names[0]])
        row = np.asarray(attrs.get(names[2], np.zeros(ends.shape[1], np.int64)))
        stay = np.zeros(len(row), bool)
        for k, name in enumerate(held_out_names(attrs)):
            source, _, target = types[name]
            at = np.flatnonzero(row == k)
            at = at[kept[source][ends[0, at]] & kept[target][ends[1, at]]]
            ends[:, at] = numbers[source][ends[0, at]], numbers[target][ends[1, at]]
            stay[at] = True
        for name in names:
            if name in attrs:
                attrs[name] = (ends if name == names[0] else np.asarray(attrs[name]))[..., stay]
    return replace(
        dataset,
        nodes=nodes,
        edges={of: _kept_edges(of, data, kept, numbers, scratch) for of, data in dataset.edges.items()},
        graph_attrs=attrs,
        notes=(*dataset.notes, f"a subset of {num_nodes:,} of {dataset.num_nodes:,} nodes (option subset)"),
    )


def _snowball(dataset: Dataset, num_nodes: int) -> dict[NodeType, _Flags]:
    """Return which nodes belong to the subset, bool [N] for each type; ``num_nodes`` of them are true."""
    rng = np.random.default_rng(_SEED)
    kept: dict[NodeType, _Flags] = {of: np.zeros(data.num_nodes, bool) for of, data in dataset.nodes.items()}
    pools = [(of, ids) for of, data in dataset.nodes.items() for ids in data.splits.values() if len(ids)]
    pools = pools or [(of, np.arange(data.num_nodes)) for of, data in dataset.nodes.items() if data.num_nodes]
    for of, ids in pools:
        wanted = max(1, int(num_nodes * _FIRST_SHARE / len(pools)))
        _add(kept, {of: ids}, min(wanted, _left(kept, num_nodes)), rng)
    while left := _left(kept, num_nodes):
        # Nodes outside the sample with an edge to a node inside; without any, all nodes outside.
        reached = {of: np.zeros(len(flags), bool) for of, flags in kept.items()}
        for (source, _, target), data in dataset.edges.items():
            for piece in slices(data.num_edges):
                sources, targets = data.edge_index[:, piece]
                reached[source][sources[kept[target][targets]]] = True
        near = {of: ids for of, flags in reached.items() if len(ids := np.flatnonzero(flags & ~kept[of]))}
        if not near:
            near = {of: np.flatnonzero(~flags) for of, flags in kept.items()}
        _add(kept, near, left, rng)
    return kept


def _left(kept: Mapping[NodeType, _Flags], num_nodes: int) -> int:
    return num_nodes - sum(int(np.count_nonzero(flags)) for flags in kept.values())


def _add(
    kept: Mapping[NodeType, _Flags],
    pools: Mapping[NodeType, npt.NDArray[np.int64]],
    number: int,
    rng: np.random.Generator,
) -> None:
    """Add at most ``number`` nodes, drawn at random from all ``pools`` together."""
    types = list(pools)
    ends = np.cumsum([len(pools[of]) for of in types])
    chosen = np.arange(ends[-1]) if ends[-1] <= number else rng.choice(ends[-1], number, replace=False)
    for k, of in enumerate(types):
        first = ends[k] - len(pools[of])
        kept[of][pools[of][chosen[(chosen >= first) & (chosen < ends[k])] - first]] = True


def _kept_edges(
    of: EdgeType,
    data: EdgeData,
    kept: Mapping[NodeType, _Flags],
    numbers: Mapping[NodeType, npt.NDArray[np.int64]],
    scratch: Scratch | None,
) -> EdgeData:
    def inside(piece: slice) -> _Flags:
        sources, targets = data.edge_index[:, piece]
        flags: _Flags = kept[of[0]][sources] & kept[of[2]][targets]
        return flags

    found = kept_edges(data, inside, scratch, f"subset-{type_name(of)}")
    for row, end in ((0, 0), (1, 2)):
        for piece in slices(found.num_edges):
            found.edge_index[row, piece] = numbers[of[end]][found.edge_index[row, piece]]
    return found
