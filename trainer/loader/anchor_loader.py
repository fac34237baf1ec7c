"""``DistAnchorNeighborLoader``: batches of anchors with their positives and negatives, on a partitioned graph.

In this file, a is the number of anchors of this rank in one step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainer.core.arrays import Ids
from trainer.core.errors import DataError, SettingsError
from trainer.core.rng import GOLDEN, hashed
from trainer.core.schema import HOMO_EDGE, EdgeType, NodeType
from trainer.graph.in_memory import as_graph
from trainer.graph.open import Graph
from trainer.graph.seed_order import SeedShare
from trainer.loader.arguments import Fanouts, whole_number
from trainer.loader.edge_endpoints import StoredEndpoints, edges_in_order
from trainer.loader.link_ends import ROLE, excluded
from trainer.loader.link_seeds import canonical, given_or_reverse, node_draw
from trainer.loader.negatives import NegativeRule, draw_negatives, linked_in_step
from trainer.loader.neighbor_loader import DistNeighborLoader
from trainer.loader.node_links import Pairs, leading_type, links_of
from trainer.loader.pyg_batch import Output
from trainer.loader.pyg_loader import BatchSeeds
from trainer.sampler.types import RowRequest, SeedSet

RANDOM, IN_BATCH = "random", "in-batch"  #: kinds of negatives that are neither an edge type nor an attribute

_IN_BATCH = int(hashed(np.uint64(2)))  #: salt of a batch's key, for the draws of in-batch negatives


@dataclass(frozen=True)
class _Anchors:
    """Some anchors of a global batch."""

    nodes: Ids  #: int64 [a] global ids
    ids: Ids  #: int64 [a] original ids
    places: Ids  #: int64 [a] places in the global batch
    times: Ids | None  #: int64 [a]


class DistAnchorNeighborLoader(DistNeighborLoader):
    """Yield mini-batches of anchors (as users) with their positives and negatives (as items), for retrieval.

    Where ``DistLinkNeighborLoader`` yields single links, this loader yields nodes with all links that they have: the
    seeds are anchors, the sources of links of one edge type. Neighbours are sampled around the anchors, their positives
    and their negatives. The order of the anchors, and their shares of the ranks, are those of ``DistNeighborLoader``.
    The positives and negatives of an anchor do not depend on the number of ranks and parts.

    With ``time_attr``, an anchor has a time (``input_time``, or its attribute), and no positive, negative or neighbour
    is later: neither the edge that makes it one nor, with times of nodes, the node. Each anchor, and each of its
    positives and negatives, then has a subgraph of its own, up to the anchor's time.

    Args:
        data: An opened graph (``gnnfleet.open``), a ``Data`` or ``HeteroData`` in memory, or a ``(feature_store,
            graph_store)`` pair.
        num_neighbors: Number of neighbours per hop, starting at the seeds, as in ``DistNeighborLoader``.
        edge_type: Edge type from anchors to positives, as ``("user", "likes", "item")``. Not for homogeneous graphs.
            The links are read from the edges that lead back, ``reverse_type``.
        input_nodes: Anchors: None (all nodes of the type), ids, a boolean mask, or the name of a split.
        input_time: Times of the anchors, instead of the ``time_attr`` of their nodes.
        num_positives: Largest number of positives per anchor, drawn from all without replacement; -1 takes all.
        negatives: Kind of negatives, or a mapping of kinds to the number of negatives per anchor, -1 for all that
            there are:

            - ``"random"``: drawn nodes, by default one
            - ``"in-batch"``: positives of the other anchors of the global batch, by default all; each of the chosen
              ones once, and none that is a positive of the anchor in the batch, or the anchor
            - an edge type between anchors and negatives, in any direction, by default all; if there are more than
              the number, they are drawn
            - the name of an integer attribute of the anchors, ``[nodes]`` or ``[nodes, k]``: original ids of negatives,
              by default all, else the first; -1 stands for none
        power: The chance of a node as random negative is its number of ``edge_type`` edges to this power; 0: uniform.
            Any other number reads all edges of the type once.
        avoid_links: No random or in-batch negative is an edge of ``edge_type``.
        exclude: ``"self"`` removes the positives of the global batch from the sampled edges of ``edge_type``,
            ``"both"`` also from their reverses. Default: they can be sampled, so the model can see what it has to
            predict.
        reverse_type: Type of the edges from positives to anchors. Default: ``rev_<relation>`` if the graph has this
            type, else ``edge_type`` itself if both ends have one node type.
        **kwargs: All other arguments of ``DistNeighborLoader``.

    Shapes:
        - ``pos_edge_label_index``: int64 ``[2, positives]``, of the edge type: for each positive the position of its
          anchor and its own, in the ``n_id`` of their types; sorted by anchor
        - ``neg_edge_label_index``: int64 ``[2, negatives]``; the kinds of an anchor's negatives in the given order
        - ``batch_size``: number of anchors, which are the first nodes of their type; ``input_id``: int64 ``[anchors]``
        - ``batch``: in disjoint batches, for each node the position of its anchor
        - ``n_id``, ``x``, ``edge_index`` and others: as in ``DistNeighborLoader``

    Raises:
        SettingsError: Arguments contradict each other or do not fit the graph.
        ServiceError: Another host fails while the loader is created or iterated.
        DataError: No random negative can be drawn for an anchor, or an attribute has ids of no node.

    Example:
        ```python
        import gnnfleet as gf

        graph = gf.open("parts")
        loader = gf.DistAnchorNeighborLoader(
            graph, [10, 5], num_positives=5, negatives={"random": 20}, batch_size=128, shuffle=True, exclude="both"
        )
        for batch in loader:
            anchor, positive = batch.pos_edge_label_index
            users = batch.n_id[: batch.batch_size]
        ```
    """

    _by_owner = True

    def __init__(
        self, data: Any, num_neighbors: Fanouts, edge_type: Any = None, input_nodes: Any = None, input_time: Any = None,
        *, num_positives: int = -1, negatives: Any = None, power: float = 0.0, avoid_links: bool = False,
        exclude: str | None = None, reverse_type: Any = None, time_attr: str | None = None,
        weight_attr: str | None = None, **kwargs: Any,
    ):  # fmt: skip
        graph = as_graph(data, time_attr=time_attr, weight_attr=weight_attr)
        self.edge_type = _edge_type(graph, edge_type, reverse_type)
        if exclude not in (None, "self", "both"):
            raise SettingsError(f"exclude {exclude!r}; expected None, 'self' or 'both'")
        self._leading = given_or_reverse(graph, self.edge_type, reverse_type, "positives are read from reverse edges")
        self._exclude, self._num_positives = exclude, _amount("num_positives", num_positives)
        self._negatives = _kinds(graph, self.edge_type, negatives)
        self._avoid_links = avoid_links
        if avoid_links and not {RANDOM, IN_BATCH} & self._negatives.keys():
            raise SettingsError("avoid_links has no effect without 'random' or 'in-batch' negatives; leave it out")
        if power and RANDOM not in self._negatives:
            raise SettingsError("power has no effect without 'random' negatives; leave it out")
        self._pairing = f"{self._leading} {num_positives} {self._negatives} {power} {avoid_links} {exclude}"
        if graph.manifest.hetero and not (isinstance(input_nodes, tuple) and input_nodes[:1] == self.edge_type[:1]):
            input_nodes = self.edge_type[0], input_nodes
        super().__init__(
            graph, num_neighbors, input_nodes, input_time, time_attr=time_attr, weight_attr=weight_attr, **kwargs
        )
        if RANDOM in self._negatives:
            weight = None
            if power:
                weight = np.zeros(graph.manifest.nodes[self._leading[0]].num_nodes)
                for _, src, _ in edges_in_order(StoredEndpoints(graph, self._leading)):
                    weight += np.bincount(src, minlength=len(weight))
                weight **= power
            self._draw = node_draw(graph, self.edge_type[2], weight, self.settings)

    def inputs_digest(self) -> str:
        return f"{super().inputs_digest()} {self.edge_type} {self._pairing}"

    @property
    def num_requests(self) -> int:
        return super().num_requests + 3 + len(self._negatives) + 64 * self._avoid_links

    def seeds(self, share: SeedShare) -> BatchSeeds:
        anchors = self._anchors(share.positions, share.places)
        if self._exclude is None and IN_BATCH not in self._negatives:
            positives = self._linked(self._leading, anchors, self._num_positives, share.key)
            everyone = anchors, positives
        else:  # the other ranks' anchors count, too
            all_anchors = self._anchors(share.batch, np.arange(share.global_seeds))
            everyone = all_anchors, self._linked(self._leading, all_anchors, self._num_positives, share.key)
            positives = everyone[1].of(share.places)
        found = [
            self._negatives_of(kind, amount, anchors, everyone, share.key) for kind, amount in self._negatives.items()
        ]
        owner = np.concatenate([np.empty(0, np.int64), *(pairs.owner for pairs in found)])
        ids = np.concatenate([np.empty(0, np.int64), *(pairs.ids for pairs in found)])
        order = np.argsort(owner, kind="stable")
        negatives = Pairs(owner[order], ids[order])

        seeds, ends = self._seed_set(anchors, positives, negatives)
        if self._exclude is not None:
            sources, pairs = everyone[0].ids[everyone[1].owner], everyone[1]
            reverse = self._leading if self._exclude == "both" else None
            seeds = seeds.without(excluded(self.edge_type, reverse, sources, pairs.ids, self.graph.store))
        label_index = [
            torch.from_numpy(np.stack(rows)) for rows in zip((positives.owner, negatives.owner), ends, strict=True)
        ]
        metadata = (*self._metadata(self.inputs.split(share.positions)), *label_index)
        return BatchSeeds(seeds, metadata)

    def annotate(self, data: Any, out: Output) -> None:
        super().annotate(data, out)
        link = data[self.edge_type] if self.graph.manifest.hetero else data
        link.pos_edge_label_index = out.metadata[2]
        if self._negatives:
            link.neg_edge_label_index = out.metadata[3]

    def _anchors(self, positions: Ids, places: Ids) -> _Anchors:
        of = self.edge_type[0]
        split = self.inputs.split(positions)
        nodes = {of: self.inputs.of[of].nodes[positions]}
        (rows,) = self.graph.access.gather([RowRequest(of, nodes[of], ("orig_id",))])
        return _Anchors(nodes[of], rows["orig_id"].astype(np.int64), places, self._times(split, nodes).get(of))

    def _linked(self, leading: EdgeType, anchors: _Anchors, most: int, key: int) -> Pairs:
        """Return the links of anchors by one edge type, up to ``most`` per anchor, none later than it."""
        rule = self.settings.time
        return links_of(self.graph, leading, anchors.nodes, anchors.places, most, key, rule, anchors.times)

    def _negatives_of(
        self, kind: str | EdgeType, amount: int, anchors: _Anchors, everyone: tuple[_Anchors, Pairs], key: int
    ) -> Pairs:  # fmt: skip
        if not isinstance(kind, str):
            return self._linked(kind, anchors, amount, key)
        if kind == IN_BATCH:
            return self._in_batch(anchors, everyone, amount, key)
        if kind != RANDOM:
            return self._in_column(kind, anchors, amount)
        count = len(anchors.ids)
        owner, number = np.repeat(np.arange(count), amount), np.tile(np.arange(amount), count)
        rule, positives = NegativeRule(True, amount, self._avoid_links), (anchors.ids, anchors.ids)
        return Pairs(
            owner,
            draw_negatives(
                rule, key, anchors.places, owner, number, positives, (self._draw, self._draw), self._is_link,
                anchors.times,
            )[1],
        )  # fmt: skip

    def _in_batch(self, anchors: _Anchors, everyone: tuple[_Anchors, Pairs], amount: int, key: int) -> Pairs:
        """Return positives of the other anchors that no link of the step makes one of the anchor's own, each once."""
        others, pairs = everyone
        candidates, which = np.unique(pairs.ids, return_inverse=True)
        allowed = ~linked_in_step(anchors.ids, candidates, others.ids[pairs.owner], pairs.ids)
        if self.edge_type[0] == self.edge_type[2]:
            allowed &= candidates != anchors.ids[:, None]
        if pairs.times is not None and anchors.times is not None:
            earliest = np.full(len(candidates), np.iinfo(np.int64).max)
            np.minimum.at(earliest, which, pairs.times)
            allowed &= earliest <= anchors.times[:, None]
        if self._avoid_links:
            owner, at = np.nonzero(allowed)
            allowed[owner, at] = ~self._is_link(anchors.ids[owner], candidates[at])
        if amount >= 0:  # those of the smallest random numbers
            with np.errstate(over="ignore"):
                row = hashed(anchors.places.astype(np.uint64) * GOLDEN + np.uint64(key ^ _IN_BATCH))
                numbers = hashed(row[:, None] ^ hashed(candidates.astype(np.uint64) + GOLDEN))
            numbers = np.where(allowed, numbers, np.iinfo(np.uint64).max)
            chosen = np.argsort(numbers, axis=1, kind="stable")[:, :amount]
            kept = np.zeros_like(allowed)
            np.put_along_axis(kept, chosen, True, axis=1)
            allowed &= kept
        owner, at = np.nonzero(allowed)
        return Pairs(owner, candidates[at])

    def _in_column(self, name: str, anchors: _Anchors, amount: int) -> Pairs:
        of, num_nodes = self.edge_type[2], self.graph.manifest.nodes[self.edge_type[2]].num_nodes
        (rows,) = self.graph.access.gather([RowRequest(self.edge_type[0], anchors.nodes, (name,))])
        values = rows[name].astype(np.int64).reshape(len(anchors.ids), -1)
        if (bad := np.flatnonzero((values >= num_nodes).any(1))).size:
            raise DataError(
                f"negatives: {name!r} of {self.edge_type[0]!r} node {anchors.ids[bad[0]]} has"
                f" {values[bad[0]].max()}, but ids of {of!r} nodes go from 0 to {num_nodes - 1}; -1 stands for none"
            )
        usable, rule = values >= 0, self.settings.time
        if rule is not None and rule.on == "node" and rule.attr in self.graph.manifest.nodes[of].attrs:
            assert anchors.times is not None
            nodes = self.graph.store.to_global(of, values[usable])
            (rows,) = self.graph.access.gather([RowRequest(of, nodes, (rule.attr,))])
            usable[usable] = rows[rule.attr] <= np.broadcast_to(anchors.times[:, None], values.shape)[usable]
        if amount >= 0:
            usable &= np.cumsum(usable, axis=1) <= amount
        return Pairs(np.nonzero(usable)[0], values[usable])

    def _is_link(self, src: Ids, dst: Ids) -> npt.NDArray[np.bool_]:
        (source, _, target), store = self.edge_type, self.graph.store
        found = self.graph.access.has_edges(self._leading, store.to_global(target, dst), store.to_global(source, src))
        return found

    def _seed_set(self, anchors: _Anchors, positives: Pairs, negatives: Pairs) -> tuple[SeedSet, list[Ids]]:
        """Return the seeds, and the positions of positives and of negatives among those of their type.

        The anchors are the first seeds. In disjoint batches, every positive and negative is a separate seed; else each
        node is one only once, by ascending original id, unless it is an anchor.
        """
        source, _, target = self.edge_type
        ids = np.concatenate([positives.ids, negatives.ids])
        owner = np.concatenate([positives.owner, negatives.owner])
        seen = anchors.ids if source == target else np.empty(0, np.int64)

        def by_type(of_anchors: Ids, of_others: Ids) -> dict[NodeType, Ids]:
            if source == target:
                return {source: np.concatenate([of_anchors, of_others])}
            return {source: of_anchors, target: of_others}

        if self.settings.disjoint:
            # the anchor has the role 0, its j-th positive and negative have the roles 1 + 2j and 2 + 2j
            roles = np.concatenate([1 + 2 * positives.numbers(), 2 + 2 * negatives.numbers()])
            where, others = np.arange(len(ids)) + len(seen), ids
            trees = by_type(anchors.places, anchors.places[owner] + roles * ROLE)
            times = {} if anchors.times is None else by_type(anchors.times, anchors.times[owner])
        else:
            others, trees, times = np.setdiff1d(ids, seen), {}, {}
            order = np.argsort(known := np.concatenate([seen, others]), kind="stable")
            where = order[np.searchsorted(known[order], ids)]
        nodes = by_type(anchors.nodes, self.graph.store.to_global(target, others))
        return SeedSet(nodes, trees, times), np.split(where, [len(positives.ids)])


def _edge_type(graph: Graph, given: Any, reverse_type: Any) -> EdgeType:
    if not graph.manifest.hetero:
        if given not in (None, HOMO_EDGE):
            raise SettingsError(f"edge_type {given!r}, but the graph is homogeneous; leave it out")
        return HOMO_EDGE
    if given is None:
        raise SettingsError(
            f"the graph is heterogeneous: pass edge_type, from anchors to positives; it has {sorted(graph.edge_types)}"
        )
    return canonical(graph, given, with_ids=reverse_type is not None, where="edge_type")


def _kinds(graph: Graph, edge_type: EdgeType, given: Any) -> dict[str | EdgeType, int]:
    """Return the number of negatives by kind. An edge type is the one that leads from the negatives to the anchors."""
    if given is None:
        return {}
    if isinstance(given, (list, set, frozenset)):
        raise SettingsError(f"negatives: {given!r}; pass several kinds as a mapping to their numbers, {{kind: number}}")
    source, _, target = edge_type
    attrs, found = graph.manifest.nodes[source].attrs, dict[str | EdgeType, int]()
    asked = given if isinstance(given, Mapping) else {given: 1 if given == RANDOM else -1}
    for kind, amount in asked.items():
        number = _amount(f"negatives, {kind!r}", amount)
        if kind == RANDOM and number < 0:
            raise SettingsError("negatives: the number of 'random' negatives per anchor must be at least 0")
        if isinstance(kind, tuple):
            of = canonical(graph, kind, where="negatives")
            found[leading_type(graph, of, source, target, "negatives")] = number
        elif kind in (RANDOM, IN_BATCH):
            found[kind] = number
        elif kind not in attrs or np.dtype(attrs[kind].dtype).kind not in "iu" or len(attrs[kind].shape) > 2:
            raise SettingsError(
                f"negatives: {kind!r} is none of 'random', 'in-batch', an edge type, and an integer attribute [nodes]"
                f" or [nodes, k] of {source!r} nodes, which have {sorted(attrs)}"
            )
        else:
            found[kind] = number
    return found


def _amount(name: str, given: Any) -> int:
    return whole_number(name, given, -1)
