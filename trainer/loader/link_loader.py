"""``DistLinkNeighborLoader``: torch_geometric's ``LinkNeighborLoader`` on a partitioned graph.

In this file, n is the number of positives (given links) of this rank in one step, k the number of their negatives
(drawn links).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.core.arrays import Ids
from trainer.core.errors import SettingsError
from trainer.core.schema import EdgeType, NodeType
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
from trainer.loader.link_seeds import given_or_reverse, labels_with_negatives, link_inputs, negative_rule, node_draws
from trainer.loader.negatives import NegativeRule, draw_negatives
from trainer.loader.pyg_batch import Output
from trainer.loader.pyg_loader import BatchSeeds, PyGLoader, trees_by_owner
from trainer.sampler.subgraph_sampler import SampledBatch
from trainer.sampler.types import SeedSet
from trainer.store.part_store import PartStore

ROLE = 1 << 32  #: the tree of a seed has the number place + role * 2^32, which no other seed of the global batch has


@dataclass(frozen=True)
class LinkShare(SeedShare):
    """The links of one rank in one global batch, and the ends of all links of that batch, as original ids."""

    src: Ids  #: int64 [global_seeds] sources of ``batch``
    dst: Ids  #: int64 [global_seeds]


@dataclass(frozen=True)
class LinkBatch:
    """The positives (given links) of this rank in one step and their negatives (drawn links), as original ids."""

    edge_type: EdgeType
    src: Ids  #: int64 [n]
    dst: Ids  #: int64 [n]
    places: Ids  #: int64 [n] places in the global batch
    owner: Ids  #: int64 [k] index of each negative's positive
    neg_j: Ids  #: int64 [k] number of the negative among those of its positive; sorted by (neg_j, owner)
    neg_src: Ids  #: int64 [k]; unused for triplets, whose source is that of the positive
    neg_dst: Ids  #: int64 [k]
    times: Ids | None = None  #: int64 [n]


@dataclass(frozen=True)
class LinkIndex:
    """For each link: the index of its source, and of its target, among the batch's nodes of the same type."""

    src: Ids  #: int64: positives, followed by binary negatives
    dst: Ids  #: int64, same length as ``src``
    neg: Ids | None  #: int64 [n] or [n, amount]: targets of triplet negatives
    owners: Mapping[NodeType, Ids]  #: index of each seed's positive, by node type; for disjoint batches only


@dataclass(frozen=True)
class _LinkEnd:
    ids: Ids  #: original ids
    trees: Ids  #: int64: keys of their trees, when disjoint
    owner: Ids  #: int64: index of each seed's positive


def seeds_of(
    links: LinkBatch, rule: NegativeRule | None, store: PartStore, disjoint: bool
) -> tuple[SeedSet, LinkIndex]:
    """Return the seed nodes of a batch of links, and for each link the positions of its ends among the seeds.

    Seeds are the distinct ends, by ascending original id. In disjoint batches, every end of every link is a separate
    seed.
    """
    triplet = rule is not None and rule.triplet
    src, dst = _ends(links, triplet)
    ends = {links.edge_type[0]: [src], links.edge_type[2]: [dst]}
    if links.edge_type[0] == links.edge_type[2]:
        ends = {links.edge_type[0]: [src, dst]}
    nodes, trees, times, where = {}, {}, {}, []
    for of, group in ends.items():
        ids = np.concatenate([end.ids for end in group])
        if disjoint:
            places = np.arange(len(ids))
            trees[of] = np.concatenate([end.trees for end in group])
            if links.times is not None:
                times[of] = links.times[np.concatenate([end.owner for end in group])]
        else:
            ids, inverse = np.unique(ids, return_inverse=True)
            places = inverse.astype(np.int64)
        nodes[of] = store.to_global(of, ids)
        where += np.split(places, [len(group[0].ids)])[: len(group)]
    neg = None
    if triplet:
        assert rule is not None
        table = where[1][len(links.src) :].reshape(rule.most, len(links.src)).T
        neg = np.ascontiguousarray(table[:, 0] if rule.most == 1 else table)
        where[1] = where[1][: len(links.src)]
    owners = {of: np.concatenate([end.owner for end in group]) for of, group in ends.items()}
    return SeedSet(nodes, trees, times), LinkIndex(where[0], where[1], neg, owners)


def excluded(
    edge_type: EdgeType, reverse: EdgeType | None, src: Ids, dst: Ids, store: PartStore
) -> dict[EdgeType, tuple[Ids, Ids]]:
    """Return the edges that sampling must leave out: the links ``src`` -> ``dst`` of type ``edge_type``.

    If ``reverse`` is given, also returns the edges ``dst`` -> ``src`` of type ``reverse``. ``src``, ``dst``: original
    ids. The result has for each edge type two arrays of global ids: targets and sources.
    """
    sources, targets = store.to_global(edge_type[0], src), store.to_global(edge_type[2], dst)
    pairs = {edge_type: [(targets, sources)]}
    if reverse is not None:
        pairs.setdefault(reverse, []).append((sources, targets))
    pairs = {
        of: group for of, group in pairs.items() if of in store.manifest.edges
    }  # the links' type may have no edges in the graph
    return {
        of: (np.concatenate([pair[0] for pair in group]), np.concatenate([pair[1] for pair in group]))
        for of, group in pairs.items()
    }


def _ends(links: LinkBatch, triplet: bool) -> tuple[_LinkEnd, _LinkEnd]:
    owner = np.arange(len(links.src))
    src_role, dst_role = (2, 2) if triplet else (2, 3)
    step = dst_role - 1  # binary negatives have two roles each, triplets one
    neg = links.places[links.owner]
    dst = _LinkEnd(
        np.concatenate([links.dst, links.neg_dst]),
        np.concatenate([links.places + ROLE, neg + (dst_role + step * links.neg_j) * ROLE]),
        np.concatenate([owner, links.owner]),
    )
    if triplet:
        return _LinkEnd(links.src, links.places, owner), dst
    src = _LinkEnd(
        np.concatenate([links.src, links.neg_src]),
        np.concatenate([links.places, neg + (src_role + step * links.neg_j) * ROLE]),
        np.concatenate([owner, links.owner]),
    )
    return src, dst


_NONE = np.empty(0, np.int64)


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
        if neighbor_sampler is not None:
            raise SettingsError(
                "neighbor_sampler: not supported, as the hosts of the graph's parts draw the neighbours; leave it out"
            )
        if (edge_label_time is None) != (time_attr is None):
            unset = "edge_label_time" if edge_label_time is None else "time_attr"
            raise SettingsError(
                f"'{unset}' is not set: pass edge_label_time (the links' times) and time_attr (an attribute) together"
            )
        options = load_options(kwargs, seed=seed, threads=threads, prefetch=prefetch, deadline=deadline)
        kind = subgraph_kind(subgraph_type, directed)
        graph = as_graph(data, time_attr=time_attr, weight_attr=weight_attr)
        settings = sample_settings(
            graph, num_neighbors, replace=replace, subgraph_type=kind, disjoint=disjoint,
            temporal_strategy=temporal_strategy, time_attr=time_attr, weight_attr=weight_attr, neighbors=neighbors,
        )  # fmt: skip
        self.rule, given = negative_rule(neg_sampling, neg_sampling_ratio, avoid_links)
        self.inputs = link_inputs(graph, edge_label_index, edge_label, edge_label_time, input_id)
        self._label = labels_with_negatives(self.inputs.label, self.rule)
        self._draws = None if self.rule is None else node_draws(graph, self.inputs.edge_type, given, settings)
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

    def share(self, item: GlobalBatch) -> LinkShare:
        src, dst = self.inputs.ends.ends_of(item.positions)
        share = item.share(self._part_of_targets(dst), self.rank, self.layout)
        return LinkShare(**vars(share), src=src, dst=dst)

    def seeds(self, share: SeedShare) -> BatchSeeds:
        if not isinstance(share, LinkShare):  # the share of a ``DistZipLoader``, or of ``loader(index)``
            src, dst = self.inputs.ends.ends_of(share.batch)
            share = LinkShare(**vars(share), src=src, dst=dst)
        links = self._links(share)
        seeds, index = seeds_of(links, self.rule, self.graph.store, self.settings.disjoint)
        if self._exclude:
            seeds = seeds.without(excluded(links.edge_type, self._reverse, share.src, share.dst, self.graph.store))
        return BatchSeeds(seeds, self._metadata(share, links, index), index)

    def output(self, sampled: SampledBatch, seeded: BatchSeeds) -> Output:
        out = super().output(sampled, seeded)
        if out.batch is not None:
            out.batch = trees_by_owner(out.batch, seeded.extra.owners)
        return out

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

    def _links(self, share: LinkShare) -> LinkBatch:
        inputs, src, dst = self.inputs, share.src[share.places], share.dst[share.places]
        times = None if inputs.times is None else inputs.times[share.positions]
        if self.rule is None or self._draws is None:
            return LinkBatch(inputs.edge_type, src, dst, share.places, _NONE, _NONE, _NONE, _NONE, times)
        owner, j = self.rule.owners(share.places, share.global_seeds)
        neg_src, neg_dst = draw_negatives(
            self.rule, share.key, share.places, owner, j, (src, dst), self._draws, self._is_link, times
        )
        return LinkBatch(inputs.edge_type, src, dst, share.places, owner, j, neg_src, neg_dst, times)

    def _is_link(self, src: Ids, dst: Ids) -> npt.NDArray[np.bool_]:
        of, store = self.inputs.edge_type, self.graph.store
        if of not in self.graph.manifest.edges:
            return np.zeros(len(src), np.bool_)
        return self.graph.access.has_edges(of, store.to_global(of[0], src), store.to_global(of[2], dst))

    def _metadata(self, share: SeedShare, links: LinkBatch, index: LinkIndex) -> tuple[Any, ...]:
        input_id = self.inputs.input_id
        ids = torch.from_numpy(share.positions if input_id is None else input_id[share.positions])
        times = None if links.times is None else torch.from_numpy(links.times)
        if self.rule is not None and self.rule.triplet:
            assert index.neg is not None
            # In the form that torch_geometric's ``edge_sample`` returns.
            return ids, *map(torch.from_numpy, (index.src, index.dst, index.neg)), times
        if times is not None:
            times = torch.cat([times, times[torch.from_numpy(links.owner)]])
        where = torch.from_numpy(np.stack([index.src, index.dst]))
        return ids, where, self._labels(share, len(links.owner)), times

    def _labels(self, share: SeedShare, num_negatives: int) -> Tensor | None:
        label = None if self._label is None else self._label[torch.from_numpy(share.positions)]
        if self.rule is None:
            return label
        label = torch.ones(len(share.positions)) if label is None else label
        return torch.cat([label, label.new_zeros((num_negatives, *label.shape[1:]))])


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
