"""The links of each split that are given by their ends: held-out ones, and those in the lists of a task table."""

from __future__ import annotations

import numpy as np

from trainer.core.arrays import Array, Ids
from trainer.core.errors import SettingsError
from trainer.core.graph_attrs import held_out_links, is_task_table
from trainer.core.schema import HOMO_EDGE, EdgeType, NodeType
from trainer.graph.open import Graph
from trainer.loader.edge_endpoints import EDGES_AT_ONCE, StoredEndpoints, edges_in_order
from trainer.loader.link_seeds import LinkInputs, link_inputs
from trainer.sampler.types import RowRequest


def split_links(graph: Graph, edge_type: EdgeType, time_attr: str | None) -> dict[str, LinkInputs]:
    """Return the links of each split that has some; of ``train`` only those in the lists of a task table.

    Otherwise the links of ``train`` are the edges of the graph. Links have times if there is a ``time_attr``; those in
    lists have the time of their row. Raises ``SettingsError`` for rows without times, and ``ServiceError``.
    """
    found = {}
    if is_task_table(edge_type[0], graph.store.graph_attrs):
        stored = edges_in_order(StoredEndpoints(graph, edge_type))
        rows, targets = np.concatenate([np.empty((2, 0), np.int64), *(np.stack(ends) for _, *ends in stored)], axis=1)
        row_time = row_times(graph, edge_type[0], time_attr)
        for split, own in rows_of_splits(graph, edge_type[0]).items():
            some = own[rows]
            if some.any():
                listed = np.stack([rows[some], targets[some]])
                found[split] = _given(graph, edge_type, listed, None if row_time is None else row_time[listed[0]])
        return found
    for split in ("val", "test"):
        ends, times = held_out_links(graph.store.graph_attrs, edge_type, split)
        if ends is not None and ends.shape[1]:
            found[split] = _given(graph, edge_type, ends, None if time_attr is None else times)
    return found


def _given(graph: Graph, edge_type: EdgeType, ends: Array, times: Array | None) -> LinkInputs:
    return link_inputs(graph, ends if edge_type == HOMO_EDGE else (edge_type, ends), edge_label_time=times)


def rows_of_splits(graph: Graph, of: NodeType) -> dict[str, Array]:
    """Return which rows of a task table are in each split, bool [rows] by original id."""
    spec, found = graph.manifest.nodes[of], {}
    for split in spec.splits:
        found[split] = np.zeros(spec.num_nodes, np.bool_)
        seeds = np.asarray(graph.store.seeds(of, split), np.int64)
        for first in range(0, len(seeds), EDGES_AT_ONCE):
            wanted = RowRequest(of, seeds[first : first + EDGES_AT_ONCE], ("orig_id",))
            found[split][graph.access.gather([wanted])[0]["orig_id"]] = True
    return found


def row_times(graph: Graph, of: NodeType, time_attr: str | None) -> Ids | None:
    """Return the time of each row of a task table, int64 [rows] by original id; None without ``time_attr``.

    Raises ``SettingsError`` if the rows have no times.
    """
    if time_attr is None:
        return None
    spec = graph.manifest.nodes[of]
    name = time_attr if time_attr in spec.attrs else "time"
    if name not in spec.attrs:
        raise SettingsError(f"time_attr: the rows of {of} have no time; give its table the key time, or leave it out")
    times = np.empty(spec.num_nodes, np.int64)
    for first in range(0, spec.num_nodes, EDGES_AT_ONCE):
        ids = np.arange(first, min(first + EDGES_AT_ONCE, spec.num_nodes))
        (rows,) = graph.access.gather([RowRequest(of, ids, ("orig_id", name))])
        times[rows["orig_id"]] = rows[name]
    return times
