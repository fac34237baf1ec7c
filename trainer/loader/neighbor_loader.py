"""``DistNeighborLoader``: torch_geometric's ``NeighborLoader`` on a partitioned graph."""

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
from trainer.graph.open import Graph
from trainer.graph.seed_order import OTHER_STREAM, STREAMS, RankLayout, SeedShare
from trainer.loader.arguments import (
    AttrNames,
    Fanouts,
    LoadOptions,
    OutputOptions,
    load_options,
    sample_settings,
    subgraph_kind,
    wanted_attrs,
)
from trainer.loader.node_seeds import node_inputs, split_name
from trainer.loader.pyg_batch import Output
from trainer.loader.pyg_loader import BatchSeeds, PyGLoader
from trainer.sampler.types import RowRequest, SampleSettings, SeedSet


class NodeLoader(PyGLoader):
    """A loader whose seeds are nodes."""

    def __init__(
        self, graph: Graph, settings: SampleSettings, input_nodes: Any, input_time: Any, input_id: Any,
        attrs: AttrNames | None, options: LoadOptions, output: OutputOptions, rank: int | None,
        layout: RankLayout | None,
    ):  # fmt: skip
        if input_time is not None and settings.time is None:
            raise SettingsError("input_time is given without time_attr; name the attribute that holds times")
        self.inputs = node_inputs(graph, input_nodes, input_time, input_id)
        self._several = isinstance(input_nodes, Mapping)
        super().__init__(
            graph, len(self.inputs), self.inputs_digest(), settings, wanted_attrs(graph, attrs), options, output,
            stream=STREAMS.get(split_name(input_nodes) or "", OTHER_STREAM), rank=rank, layout=layout,
        )  # fmt: skip
        if (time := settings.time) is not None:
            for of, inputs in self.inputs.of.items():
                own = time.on == "node" and time.attr in graph.manifest.nodes[of].attrs
                if inputs.times is None and not own:
                    raise SettingsError(
                        f"{of!r} nodes have no attribute {time.attr!r} with their times; pass input_time"
                    )
        if 0 < len(self.inputs) < self.layout.world_size:
            warnings.warn(
                f"{len(self.inputs)} seeds for {self.layout.world_size} ranks: some batches have no seed, and a mean"
                " over none is NaN; start fewer ranks, or sum the loss and divide",
                stacklevel=2,
            )

    def inputs_digest(self) -> str:
        """Return a digest of what all ranks must be given alike, besides the settings of sampling and order."""
        return self.inputs.digest()

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
        ids, times = out.metadata[:2]
        if not self._several:
            (of,) = self.inputs.of
            ids, times = {of: ids}, {of: times}
        for of, input_id in ids.items():
            store = data[of] if self.graph.manifest.hetero else data
            store.input_id, store.seed_time, store.batch_size = input_id, times[of], len(input_id)


class DistNeighborLoader(NodeLoader):
    """Yield mini-batches of sampled neighbours from a partitioned graph, like torch_geometric's ``NeighborLoader``.

    Arguments, defaults and batches are those of ``NeighborLoader``. Every rank must pass the same arguments, with the
    seeds of all ranks. The loader divides the seeds into global batches of ``batch_size`` × world size and splits each
    over the ranks. If possible, a seed goes to a rank on a host that stores the seed's part. All ranks get the same
    number of batches. A last global batch with fewer seeds than ranks is merged into the previous batch.

    Each iteration is the next epoch; ``set_epoch`` sets the epoch of the next iteration. ``loader(index)`` returns one
    batch of the seeds at the positions ``index``, for this rank alone.

    Batches also have ``blocks``, a tuple with one CSR block per layer, first layer first. In a heterogeneous graph, the
    tuple has a mapping from edge types to blocks for each layer. Bidirectional and induced subgraphs, and batches with
    ``transform_sampler_output``, have no ``blocks``.

    Args:
        data: An opened graph (``gnnfleet.open``), a ``Data`` or ``HeteroData`` in memory, or a ``(feature_store,
            graph_store)`` pair.
        num_neighbors: Number of neighbours per hop, starting at the seeds; -1 takes all. A list, a mapping over all
            edge types, or torch_geometric's ``NumNeighbors``.
        input_nodes: Seeds: None (all nodes), ids, a boolean mask, or the name of a split (``"train"``). For a
            heterogeneous graph a node type, ``(type, seeds)``, or a mapping of types to seeds.
        input_time: Times of the seeds, instead of the ``time_attr`` of their nodes.
        replace: Draw neighbours with replacement.
        subgraph_type: ``"directional"``, ``"bidirectional"`` or ``"induced"``.
        disjoint: Sample a separate subgraph for each seed. Implied by ``time_attr``.
        temporal_strategy: ``"uniform"`` or ``"last"``: with ``time_attr``, draw neighbours or take the latest ones.
        time_attr: Integer attribute of nodes or edges; neighbours later than their seed are not sampled.
        weight_attr: Edge attribute; neighbours are drawn with probability proportional to it.
        transform: Function called with each batch; its result is yielded instead.
        transform_sampler_output: Function called with each ``SamplerOutput`` or ``HeteroSamplerOutput``, before
            attributes are added.
        is_sorted: Has no effect; gnnfleet always stores edges sorted by target.
        filter_per_worker: If true, the sampler threads call the transforms, which must then be thread-safe. Default:
            the iterating thread calls them, in order.
        neighbor_sampler: Not supported; must be None.
        directed: Deprecated; False means ``subgraph_type="induced"``.
        custom_cls: Class of the batches, instead of ``Data`` or ``HeteroData``. Ignored if ``data`` is a ``Data`` or
            ``HeteroData`` in memory.
        input_id: Ids that batches report as ``input_id`` instead of the seeds' positions.
        neighbors: ``"fanout"`` draws neighbours; ``"top"`` takes those of the highest ``weight_attr``, or without it
            the latest ones by ``time_attr``.
        attrs: Names of the attributes that batches have, or a mapping of types to names. Default: all.
        seed: Random seed of the order and of all draws; the same on every rank. Default: 0.
        threads: Number of sampler threads. Default: ``num_workers``, at least 1.
        prefetch: Number of batches to make ahead. Default: ``prefetch_factor`` (3) per thread.
        deadline: Seconds that one request to another host may take.
        rank: Rank of this process in ``layout``. Default: the rank of the process group.
        layout: For each part, the ranks on hosts that store it. Default: taken from the cluster file and the process
            group.
        **kwargs: Arguments of torch's ``DataLoader``: ``batch_size`` (per rank), ``shuffle``, ``drop_last``,
            ``pin_memory``, ``num_workers`` (sampler threads), ``prefetch_factor``, ``worker_init_fn``, ``timeout``
            (replaces ``deadline``), ``generator`` (gives the seed). ``local=True`` makes a loader of this process
            alone: it yields all seeds, and other ranks need not iterate it.

    Shapes:
        - ``n_id``: int64 ``[nodes]``, original ids; the seeds come first
        - ``x``, ``y`` and other node attributes: ``[nodes, ...]``
        - ``edge_index``: int64 ``[2, edges]``, positions in ``n_id``; ``e_id``: int64 ``[edges]``
        - ``input_id``: int64 ``[seeds of this rank]``; ``batch_size``: their number

    Raises:
        SettingsError: Arguments contradict each other or do not fit the graph.
        ServiceError: Another host fails while the loader is created or iterated.

    Example:
        ```python
        import gnnfleet as gf

        graph = gf.open("parts")
        loader = gf.DistNeighborLoader(graph, [10, 5], "train", batch_size=256, shuffle=True)
        for batch in loader:
            seeds = batch.n_id[: batch.batch_size]
        ```
    """

    def __init__(
        self, data: Any, num_neighbors: Fanouts, input_nodes: Any = None, input_time: Any = None,
        replace: bool = False, subgraph_type: Any = "directional", disjoint: bool = False,
        temporal_strategy: str = "uniform", time_attr: str | None = None, weight_attr: str | None = None,
        transform: Callable[[Any], Any] | None = None,
        transform_sampler_output: Callable[[Any], Any] | None = None, is_sorted: bool = False,
        filter_per_worker: bool | None = None, neighbor_sampler: None = None, directed: bool = True,
        custom_cls: Callable[[], Any] | None = None, input_id: Any = None, *, neighbors: str = "fanout",
        attrs: AttrNames | None = None, seed: int | None = None, threads: int | None = None,
        prefetch: int | None = None, deadline: float = 120.0, rank: int | None = None,
        layout: RankLayout | None = None, **kwargs: Any,
    ):  # fmt: skip
        kwargs["neighbor_sampler"] = neighbor_sampler
        options = load_options(kwargs, seed=seed, threads=threads, prefetch=prefetch, deadline=deadline)
        kind = subgraph_kind(subgraph_type, directed)
        graph = as_graph(data, time_attr=time_attr, weight_attr=weight_attr)
        settings = sample_settings(
            graph, num_neighbors, replace=replace, subgraph_type=kind, disjoint=disjoint,
            temporal_strategy=temporal_strategy, time_attr=time_attr, weight_attr=weight_attr, neighbors=neighbors,
        )  # fmt: skip
        super().__init__(
            graph, settings, input_nodes, input_time, input_id, attrs, options,
            OutputOptions(kind, transform, transform_sampler_output, bool(filter_per_worker), custom_cls),
            rank, layout,
        )  # fmt: skip
