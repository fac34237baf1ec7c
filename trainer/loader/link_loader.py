"""``DistLinkNeighborLoader``: torch_geometric's ``LinkNeighborLoader`` on a partitioned graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch_geometric.sampler import NegativeSampling

from trainer.core.arrays import Ids
from trainer.core.errors import SettingsError
from trainer.core.schema import EdgeType
from trainer.graph.in_memory import as_graph
from trainer.graph.seed_order import OTHER_STREAM, GlobalBatch, RankLayout, SeedShare, global_batches
from trainer.loader.arguments import (
    AttrNames,
    Fanouts,
    OutputOptions,
    load_options,
    sample_settings,
    subgraph_kind,
    wanted_attrs,
)
from trainer.loader.link_ends import ROLE, Ends, excluded, seeds_of
from trainer.loader.link_seeds import given_or_reverse, link_inputs, node_draw
from trainer.loader.negatives import NegativeDraw, NegativeRule, draw_negatives
from trainer.loader.node_seeds import as_array
from trainer.loader.pyg_batch import Output
from trainer.loader.pyg_loader import BatchSeeds, PyGLoader


class DistLinkNeighborLoader(PyGLoader):
    """Yield mini-batches around links, as torch_geometric's ``LinkNeighborLoader`` on a partitioned graph.

    Arguments, defaults and batches are those of ``LinkNeighborLoader``. Every rank passes the same arguments, including
    all links; the loader splits global batches over the ranks as ``DistNeighborLoader`` does. Negatives do not depend
    on the number of ranks and parts.

    Args:
        data: An opened graph (``gnnfleet.open``), a ``Data`` or ``HeteroData`` in memory, or a ``(feature_store,
            graph_store)`` pair.
        num_neighbors: Number of neighbours per hop, starting at the links' ends; -1 takes all. A list, a mapping over
            all edge types, or torch_geometric's ``NumNeighbors``.
        edge_label_index: Seed links: None (all edges) or ids ``[2, num_links]``. For a heterogeneous graph an edge
            type, or ``(edge type, None | ids)``. With ``shuffle`` and 2^20 or more edges, the order of the links
            for None differs from that for the ids of all edges.
        edge_label: Labels of the links, ``[num_links, ...]``.
        edge_label_time: Times of the links, integer ``[num_links]``. Required with ``time_attr``, not allowed without
            it.
        replace: Draw neighbours with replacement.
        subgraph_type: ``"directional"``, ``"bidirectional"`` or ``"induced"``.
        disjoint: Sample a separate subgraph for each link end. Implied by ``time_attr``.
        temporal_strategy: ``"uniform"`` or ``"last"``: with ``time_attr``, draw neighbours or take the latest ones.
        neg_sampling: ``"binary"``, ``"triplet"``, a mapping with ``mode`` and ``amount``, or torch_geometric's
            ``NegativeSampling``. Default: no negatives.
        neg_sampling_ratio: Deprecated in torch_geometric; the amount of binary negatives per link.
        time_attr: Integer attribute of nodes or edges; neighbours later than their link are not sampled.
        weight_attr: Edge attribute; the chance of a neighbour is proportional to it.
        transform: Function called with each batch; its result is yielded instead.
        transform_sampler_output: Function called with each ``SamplerOutput`` or ``HeteroSamplerOutput``, before
            attributes are added.
        is_sorted: Has no effect; gnnfleet always stores edges sorted by target.
        filter_per_worker: If true, the sampler threads call the transforms, which must then be thread-safe. Default:
            the iterating thread calls them, in order.
        neighbor_sampler: Not supported; must be None.
        directed: Deprecated; False means ``subgraph_type="induced"``.
        custom_cls: Class of the batches of an opened graph or of stores, instead of ``Data`` or ``HeteroData``.
        input_id: Ids that batches report as ``input_id`` instead of the links' positions.
        neighbors: ``"fanout"`` draws neighbours; ``"top"`` takes those of the highest ``weight_attr``, or without it
            the latest ones by ``time_attr``.
        avoid_links: Draw no negative that is an edge of the links' type. torch_geometric can draw such negatives.
        exclude: ``"self"`` removes the links of the global batch from the sampled edges, ``"both"`` also removes their
            reverses. Default: they can be sampled, as in torch_geometric, so the model can see the edges that it has to
            predict.
        reverse_type: Edge type of the links' reverse edges, for ``exclude="both"``. Default: ``rev_<relation>`` if the
            graph has this type, else the links' own type if both ends have one node type.
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
            alone: it yields all links, and other ranks need not iterate it.

    Shapes:
        - ``edge_label_index``: int64 ``[2, links]``, positions in ``n_id``; positives first, then binary negatives
        - ``edge_label``: ``[links, ...]``; 0 for negatives
        - with triplet negatives, instead of these two: ``src_index`` and ``dst_pos_index``: int64 ``[positives]``,
          ``dst_neg_index``: int64 ``[positives]`` or ``[positives, amount]``
        - ``n_id``, ``x``, ``edge_index`` and others: as in ``DistNeighborLoader``

    Raises:
        SettingsError: Arguments contradict each other or do not fit the graph.
        ServiceError: Another host fails, while making the loader or iterating it.
        DataError: No negative can be drawn for a link.

    Example:
        ```python
        import gnnfleet as gf

        graph = gf.open("parts")
        loader = gf.DistLinkNeighborLoader(
            graph, [10, 5], neg_sampling="binary", batch_size=256, shuffle=True, avoid_links=True, exclude="both"
        )
        for batch in loader:
            src, dst = batch.edge_label_index
            label = batch.edge_label
        ```
    """

    _by_owner = True

    def __init__(
        self, data: Any, num_neighbors: Fanouts, edge_label_index: Any = None, edge_label: Any = None,
        edge_label_time: Any = None, replace: bool = False, subgraph_type: Any = "directional",
        disjoint: bool = False, temporal_strategy: str = "uniform", neg_sampling: Any = None,
        neg_sampling_ratio: float | None = None, time_attr: str | None = None, weight_attr: str | None = None,
        transform: Callable[[Any], Any] | None = None,
        transform_sampler_output: Callable[[Any], Any] | None = None, is_sorted: bool = False,
        filter_per_worker: bool | None = None, neighbor_sampler: None = None, directed: bool = True,
        custom_cls: Callable[[], Any] | None = None, input_id: Any = None, *, neighbors: str = "fanout",
        avoid_links: bool = False, exclude: str | None = None, reverse_type: Any = None, attrs: AttrNames | None = None,
        seed: int | None = None, threads: int | None = None, prefetch: int | None = None, deadline: float = 120.0,
        rank: int | None = None, layout: RankLayout | None = None, **kwargs: Any,
    ):  # fmt: skip
        if (edge_label_time is None) != (time_attr is None):
            unset = "edge_label_time" if edge_label_time is None else "time_attr"
            raise SettingsError(
                f"'{unset}' is not set: pass edge_label_time (the links' times) and time_attr (an attribute) together"
            )
        kwargs["neighbor_sampler"] = neighbor_sampler
        options = load_options(kwargs, seed=seed, threads=threads, prefetch=prefetch, deadline=deadline)
        kind = subgraph_kind(subgraph_type, directed)
        graph = as_graph(data, time_attr=time_attr, weight_attr=weight_attr)
        settings = sample_settings(
            graph, num_neighbors, replace=replace, subgraph_type=kind, disjoint=disjoint,
            temporal_strategy=temporal_strategy, time_attr=time_attr, weight_attr=weight_attr, neighbors=neighbors,
        )  # fmt: skip
        try:
            ratio = neg_sampling_ratio
            given = NegativeSampling("binary", ratio) if ratio else NegativeSampling.cast(neg_sampling)
        except (TypeError, ValueError, OverflowError) as error:
            raise SettingsError(f"neg_sampling: {error}") from None
        if given is not None and not math.isfinite(given.amount):
            raise SettingsError(f"neg_sampling: the amount of negatives per link is {given.amount}, no finite number")
        if given is None and avoid_links:
            raise SettingsError("avoid_links has no effect without neg_sampling; pass neg_sampling")
        self.inputs = link_inputs(graph, edge_label_index, edge_label, edge_label_time, input_id)
        self.rule: NegativeRule | None = None
        self._draws: tuple[NegativeDraw, NegativeDraw] | None = None
        self._label = label = self.inputs.label
        if given is not None:
            self.rule = NegativeRule(given.is_triplet(), given.amount, avoid_links)
            if label is not None and self.rule.triplet:
                raise SettingsError(
                    "edge_label cannot be used with triplet negatives, as batches then have src_index, dst_pos_index"
                    " and dst_neg_index instead of labels; leave edge_label out, or use neg_sampling='binary'"
                )
            if label is not None and not label.is_complex() and bool((label == 0).any()) and not (label < 0).any():
                self._label = label + 1  # negatives have label 0; NaN stays
            ends = (self.inputs.edge_type[0], given.src_weight), (self.inputs.edge_type[2], given.dst_weight)
            src, dst = (node_draw(graph, of, None if w is None else as_array(w), settings) for of, w in ends)
            self._draws = src, dst
        self._exclude = exclude is not None
        self._reverse = _reverse_type(graph, self.inputs.edge_type, exclude, reverse_type)
        super().__init__(
            graph, len(self.inputs), f"{self.inputs.digest()} {self.rule} {exclude} {self._reverse}", settings,
            wanted_attrs(graph, attrs), options,
            OutputOptions(kind, transform, transform_sampler_output, bool(filter_per_worker), custom_cls),
            stream=OTHER_STREAM, rank=rank, layout=layout, keyed=self.inputs.are_edges,
        )  # fmt: skip

    @property
    def num_requests(self) -> int:
        return super().num_requests + self.inputs.are_edges

    def part_of(self, positions: Ids) -> Ids:
        return self._part_of_targets(self.inputs.ends.ends_of(positions)[1])

    def work_items(self, epoch: int, first_step: int) -> Iterator[GlobalBatch]:
        # Sampler threads read the ends of the links, which may be on other hosts.
        return global_batches(self.order, epoch, first_step)

    def share(self, item: GlobalBatch) -> SeedShare:
        ends = self.inputs.ends.ends_of(item.positions)
        return replace(item.share(self._part_of_targets(ends[1]), self.rank, self.layout), ends=ends)

    def seeds(self, share: SeedShare) -> BatchSeeds:
        inputs, rule, store = self.inputs, self.rule, self.graph.store
        source, _, target = inputs.edge_type
        # the share of a ``DistZipLoader``, or of ``loader(index)``, has no ends
        all_src, all_dst = share.ends or inputs.ends.ends_of(share.batch)

        # The positives, and their negatives: ``owner`` is the positive of each, ``j`` its number among those of it.
        places, src, dst = share.places, all_src[share.places], all_dst[share.places]
        times = None if inputs.times is None else inputs.times[share.positions]
        owner = j = neg_src = neg_dst = np.empty(0, np.int64)
        if rule is not None and self._draws is not None:
            owner, j = rule.owners(places, share.global_seeds)
            neg_src, neg_dst = draw_negatives(
                rule, share.key, places, owner, j, (src, dst), self._draws, self._is_link, times
            )

        # The seeds. In disjoint batches, the ends of a positive have the roles 0 and 1, and those of its negatives
        # further ones: two each or, in triplets, where they have the source of the positive, one.
        triplet = rule is not None and rule.triplet
        drawn = (dst,) if triplet else (src, dst)
        neg_times = None if times is None else times[owner]
        roles = 2 + len(drawn) * j
        groups = [(source, src, places, times), (target, dst, places + ROLE, times)]
        if not triplet:
            groups.insert(1, (source, neg_src, places[owner] + roles * ROLE, neg_times))
        groups.append((target, neg_dst, places[owner] + (roles + len(drawn) - 1) * ROLE, neg_times))
        ends = [Ends(*group) if self.settings.disjoint else Ends(*group[:2]) for group in groups]
        seeds, where = seeds_of(ends, store)
        if self._exclude:
            seeds = seeds.without(excluded(inputs.edge_type, self._reverse, all_src, all_dst, store))

        # Their metadata, in the form that torch_geometric's ``edge_sample`` returns.
        ids = torch.from_numpy(share.positions if inputs.input_id is None else inputs.input_id[share.positions])
        seed_times = None if times is None else torch.from_numpy(times)
        if triplet:
            assert rule is not None
            table = where[2].reshape(rule.most, len(src)).T
            neg = np.ascontiguousarray(table[:, 0] if rule.most == 1 else table)
            return BatchSeeds(seeds, (ids, *map(torch.from_numpy, (where[0], where[1], neg)), seed_times))
        if seed_times is not None:
            seed_times = torch.cat([seed_times, seed_times[torch.from_numpy(owner)]])
        index = torch.from_numpy(np.concatenate([np.stack(where[::2]), np.stack(where[1::2])], 1))
        label = None if self._label is None else self._label[torch.from_numpy(share.positions)]
        if rule is not None:  # negatives have the label 0
            label = torch.ones(len(share.positions)) if label is None else label
            label = torch.cat([label, label.new_zeros((len(owner), *label.shape[1:]))])
        return BatchSeeds(seeds, (ids, index, label, seed_times))

    def annotate(self, data: Any, out: Output) -> None:
        hetero, edge_type = self.graph.manifest.hetero, self.inputs.edge_type
        link, src, dst = (data[of] if hetero else data for of in (edge_type, edge_type[0], edge_type[2]))
        link.input_id = out.metadata[0]
        if self.rule is not None and self.rule.triplet:
            src.src_index, dst.dst_pos_index, dst.dst_neg_index = out.metadata[1:4]
            src.seed_time = dst.seed_time = out.metadata[4]
            for name in ("edge_label_index", "edge_label_time"):  # attributes of the whole graph, if the data has them
                if name in link:
                    del link[name]
        else:
            link.edge_label_index, link.edge_label, link.edge_label_time = out.metadata[1:4]

    def _part_of_targets(self, dst: Ids) -> Ids:
        of, store = self.inputs.edge_type[2], self.graph.store
        return store.books[of].part_of(store.to_global(of, dst))

    def _is_link(self, src: Ids, dst: Ids) -> npt.NDArray[np.bool_]:
        of, store = self.inputs.edge_type, self.graph.store
        if of not in self.graph.manifest.edges:
            return np.zeros(len(src), np.bool_)
        return self.graph.access.has_edges(of, store.to_global(of[0], src), store.to_global(of[2], dst))


def _reverse_type(graph: Any, edge_type: EdgeType, exclude: str | None, given: Any) -> EdgeType | None:
    if exclude not in (None, "self", "both"):
        raise SettingsError(f"exclude {exclude!r}; expected None, 'self' or 'both'")
    if exclude != "both":
        if given is not None:
            raise SettingsError(
                "reverse_type has no effect without exclude='both'; set exclude too, or leave reverse_type out"
            )
        return None
    return given_or_reverse(graph, edge_type, given, "exclude='both'")
