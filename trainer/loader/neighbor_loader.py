"""torch_geometric's ``NeighborLoader`` on a partitioned graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from trainer.core.arrays import Ids
from trainer.core.errors import SettingsError
from trainer.core.schema import NodeType
from trainer.graph.in_memory import as_graph
from trainer.graph.seed_order import OTHER_STREAM, STREAMS, RankLayout, SeedShare
from trainer.loader.arguments import (
    AttrNames,
    Fanouts,
    OutputOptions,
    load_options,
    sample_settings,
    subgraph_kind,
    wanted_attrs,
)
from trainer.loader.node_seeds import node_inputs, split_name
from trainer.loader.pyg_batch import Output
from trainer.loader.pyg_loader import BatchSeeds, PyGLoader
from trainer.sampler.types import RowRequest, SeedSet


class DistNeighborLoader(PyGLoader):
    """Mini-batches by neighbour sampling, with torch_geometric's arguments, meaning, defaults and batches.

    Every rank passes the same arguments, all seeds included; the loader shares each global batch
    (``batch_size`` × world size) out over the ranks, seeds first to a rank beside their part. All ranks get
    equally many batches. A last global batch with fewer seeds than ranks joins the one before; only with
    fewer seeds than ranks in all are there batches without seeds (a warning says so).

    Args:
        data: an opened graph (``gnnfleet.open``), a ``Data`` or ``HeteroData`` in memory, or a
            ``(feature_store, graph_store)`` pair.
        num_neighbors: neighbours per hop, seeds outward, -1 takes all: a list, a mapping over all edge
            types, or torch_geometric's ``NumNeighbors``.
        input_nodes: None (all nodes), ids, a boolean mask, or the name of a split (``"train"``); for a
            heterogeneous graph a node type, ``(type, one of these)``, or a mapping of types to these:
            then seeds of all types are one sequence, and a batch notes those of each type at that type.
        input_time: times of the seeds instead of their own ``time_attr``.
        replace, subgraph_type, disjoint, temporal_strategy, time_attr, weight_attr, transform,
            transform_sampler_output, custom_cls, input_id: as in torch_geometric.
        is_sorted: no effect; rows are always sorted.
        filter_per_worker: True lets the sampler threads call the transforms (they must be thread-safe then);
            else they run in the iterating thread, in order.
        neighbor_sampler: refused; the graph's owners sample.
        directed: deprecated; False means ``subgraph_type="induced"``.
        attrs: names of the attributes to bring, or a mapping of types to names; default: all.
        seed: of order and samples. threads, prefetch: sampler threads, and batches under way.
        deadline: seconds that one request to another host may take.
        rank, layout: this process, and the ranks beside each part; default: those of the graph.
        local: True for a loader that is this process's alone: it gives all seeds, shared with no other rank
            (``batch_size`` is the whole batch). Without it every rank has to iterate the loader.
        kwargs: of torch's ``DataLoader``: batch_size, shuffle, drop_last, pin_memory, num_workers (sampler
            threads), prefetch_factor, timeout, generator (its seed is used). persistent_workers has no
            effect: there are no worker processes.

    Batches also have ``blocks``, one per layer, outermost first (a mapping over edge types when
    heterogeneous), except for bidirectional and induced subgraphs and with ``transform_sampler_output``.
    Each iteration is the next epoch; ``set_epoch`` chooses one; ``loader(index)`` samples the inputs at
    given positions. Raises ``SettingsError`` for arguments that make no sense, ``ServiceError`` while
    iterating when another host fails.
    """

    def __init__(
        self, data: Any, num_neighbors: Fanouts, input_nodes: Any = None, input_time: Any = None,
        replace: bool = False, subgraph_type: Any = "directional", disjoint: bool = False,
        temporal_strategy: str = "uniform", time_attr: str | None = None, weight_attr: str | None = None,
        transform: Callable[[Any], Any] | None = None,
        transform_sampler_output: Callable[[Any], Any] | None = None, is_sorted: bool = False,
        filter_per_worker: bool | None = None, neighbor_sampler: None = None, directed: bool = True,
        custom_cls: Callable[[], Any] | None = None, input_id: Any = None, *, attrs: AttrNames | None = None,
        seed: int | None = None, threads: int | None = None, prefetch: int | None = None, deadline: float = 120.0,
        rank: int | None = None, layout: RankLayout | None = None, **kwargs: Any,
    ):  # fmt: skip
        if neighbor_sampler is not None:
            raise SettingsError("neighbor_sampler: neighbours are drawn by the owners of the graph's parts")
        if input_time is not None and time_attr is None:
            raise SettingsError("input_time is given without time_attr; name the attribute that holds times")
        options = load_options(kwargs, seed=seed, threads=threads, prefetch=prefetch, deadline=deadline)
        kind = subgraph_kind(subgraph_type, directed)
        graph = as_graph(data, time_attr=time_attr, weight_attr=weight_attr)
        settings = sample_settings(
            graph, num_neighbors, replace=replace, subgraph_type=kind, disjoint=disjoint,
            temporal_strategy=temporal_strategy, time_attr=time_attr, weight_attr=weight_attr,
        )  # fmt: skip
        self.inputs = node_inputs(graph, input_nodes, input_time, input_id)
        self._several = isinstance(input_nodes, Mapping)
        super().__init__(
            graph, len(self.inputs), self.inputs.digest(), settings, wanted_attrs(graph, attrs), options,
            OutputOptions(kind, transform, transform_sampler_output, bool(filter_per_worker), custom_cls),
            stream=STREAMS.get(split_name(input_nodes) or "", OTHER_STREAM), rank=rank, layout=layout,
        )  # fmt: skip
        self._check_times()
        if 0 < len(self.inputs) < self.layout.world_size:
            warnings.warn(
                f"{len(self.inputs)} seeds for {self.layout.world_size} ranks: some batches have no seed, and a mean"
                " over none is NaN; start fewer ranks, or sum the loss and divide",
                stacklevel=2,
            )

    def _check_times(self) -> None:
        time = self.settings.time
        if time is None:
            return
        for of, inputs in self.inputs.of.items():
            own = time.on == "node" and time.attr in self.graph.manifest.nodes[of].attrs
            if inputs.times is None and not own:
                raise SettingsError(f"{of!r} nodes have no time {time.attr!r} of their own; give input_time")

    def part_of(self, positions: Ids) -> Ids:
        parts = np.empty(len(positions), np.int64)
        for of, (rows, own) in self.inputs.split(positions).items():
            parts[rows] = self.graph.store.books[of].part_of(self.inputs.of[of].nodes[own])
        return parts

    def seeds(self, share: SeedShare) -> BatchSeeds:
        split = self.inputs.split(share.positions)
        nodes = {of: self.inputs.of[of].nodes[own] for of, (_, own) in split.items()}
        trees = {of: share.places[rows] for of, (rows, _) in split.items()} if self.settings.disjoint else {}
        seeds = SeedSet(nodes, trees, self._times(split, nodes))
        return BatchSeeds(seeds, self._metadata(split))

    def _times(self, split: dict[NodeType, tuple[Ids, Ids]], nodes: dict[NodeType, Ids]) -> dict[NodeType, Ids]:
        """Times of the seeds: as given, or the nodes' own."""
        time = self.settings.time
        if time is None:
            return {}
        given = {of: self.inputs.of[of].times for of in split}
        times = {of: values[split[of][1]] for of, values in given.items() if values is not None}
        asked = [of for of in split if of not in times]
        rows = self.graph.access.gather([RowRequest(of, nodes[of], (time.attr,)) for of in asked]) if asked else []
        own = {of: answer[time.attr].astype(np.int64) for of, answer in zip(asked, rows, strict=True)}
        return {of: times.get(of, own.get(of)) for of in split}  # type: ignore[misc]

    def _metadata(self, split: dict[NodeType, tuple[Ids, Ids]]) -> tuple[Any, Any]:
        """(input_id, seed_time); mappings of types with several input types."""
        ids, times = {}, {}
        for of, (_, own) in split.items():
            inputs = self.inputs.of[of]
            ids[of] = torch.from_numpy(own if inputs.input_id is None else inputs.input_id[own])
            times[of] = None if inputs.times is None else torch.from_numpy(inputs.times[own])
        if self._several:
            return ids, times
        (of,) = split
        return ids[of], times[of]

    def annotate(self, data: Any, out: Output) -> None:
        ids, times = out.metadata
        if not self._several:
            (of,) = self.inputs.of
            ids, times = {of: ids}, {of: times}
        for of, input_id in ids.items():
            store = data[of] if self.graph.manifest.hetero else data
            store.input_id, store.seed_time, store.batch_size = input_id, times[of], len(input_id)
