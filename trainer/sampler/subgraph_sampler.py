"""Makes batches: samples a subgraph around seeds, and gathers the attributes of its nodes and edges."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from trainer.core.arrays import Array, Columns, Ids
from trainer.core.batch_cost import Cost
from trainer.core.schema import AnyType, EdgeType, NodeType
from trainer.sampler.multi_hop import HopSource, sample_multi_hop
from trainer.sampler.relabel import RelabelTables
from trainer.sampler.requests import GraphAccess
from trainer.sampler.types import GraphSchema, RowRequest, SampledSubgraph, SampleSettings, SeedSet

if TYPE_CHECKING:
    from trainer.sampler.in_edges import InEdgesOf


class CountedAccess(GraphAccess, Protocol):
    """A ``GraphAccess``, such as ``DistGraph``, that counts bytes and rows from other hosts for each thread."""

    def take_cost(self) -> Cost: ...


@dataclass(frozen=True)
class BatchWork:
    """The arguments for making one batch from a graph."""

    settings: SampleSettings
    seeds: SeedSet
    key: int  #: uint64
    attrs: Mapping[AnyType, tuple[str, ...]]  #: attributes to gather besides ``orig_id``
    labels: tuple[NodeType, tuple[str, ...]] = ("", ())  #: a node type, and attributes to gather of its seeds only


@dataclass(frozen=True)
class SampledBatch:
    subgraph: SampledSubgraph
    rows: Mapping[AnyType, Columns]  #: attributes of all node types, and of edge types with edge ids
    labels: Columns  #: rows of the seeds, if requested
    cost: Cost = Cost()
    #: int32 [n] slots of the nodes in ``SubgraphSampler.kept``
    kept: Mapping[NodeType, Array] = field(default_factory=dict)


@dataclass
class SubgraphSampler:
    """Samples batches. Thread-safe."""

    access: CountedAccess
    schema: GraphSchema
    settings: SampleSettings
    attrs: Mapping[AnyType, tuple[str, ...]]  #: attributes to gather besides ``orig_id``
    labels: tuple[NodeType, tuple[str, ...]] = ("", ())  #: a node type, and attributes to gather of its seeds only
    #: int32 [num_nodes] slots, -1 for none, of nodes whose ``x`` is already on the device; it is not gathered.
    kept: Mapping[NodeType, Array] = field(default_factory=dict)
    in_edges: InEdgesOf | None = None  #: of the graph, for a rule
    _local: threading.local = field(default_factory=threading.local, repr=False)

    @cached_property
    def _orig_edges(self) -> tuple[EdgeType, ...]:
        """Edge types of which only ids are needed, if at all: they are sampled with original ids."""
        return tuple(of for of in self.schema.edges if not self.attrs.get(of))

    def sample(self, seeds: SeedSet, key: int) -> SampledBatch:
        """Sample the neighbours of ``seeds``, and bring the attributes of all nodes and edges found.

        ``key``: random key of the batch. Raises ``ServiceError``.
        """
        access = self.access
        access.take_cost()  # what this thread has asked for before does not count
        began = time.perf_counter()

        # Nodes and edges, hop by hop.
        subgraph = self.subgraph(seeds, key)
        sampling, found_at = access.take_cost(), time.perf_counter()

        # Their attributes, and last the labels of the seeds.
        kept = self._slots(subgraph)
        requests, labels = self._requests(subgraph, kept), self._label_requests(seeds)
        answers = access.gather([*requests, *labels])
        rows: dict[AnyType, dict[str, Array]] = {request.of: {} for request in requests}
        for of in self._orig_edges:
            if of in subgraph.edges and (edge := subgraph.edges[of].edge) is not None:
                rows[of] = {"orig_id": edge}
        for request, answer in zip(requests, answers, strict=False):
            rows[request.of] |= answer
        found = answers[-1] if labels else {}
        gathering = access.take_cost()
        seconds = Cost(
            sample_s=found_at - began - sampling.wait_s, gather_s=time.perf_counter() - found_at - gathering.wait_s
        )
        return SampledBatch(subgraph, rows, found, sampling + gathering + seconds, kept)

    def subgraph(self, seeds: SeedSet, key: int) -> SampledSubgraph:
        return self.multi_hop(seeds, self.settings, key)

    def requests(self, seeds: SeedSet, key: int) -> list[RowRequest]:
        """Sample a subgraph and return the requests for its attributes, unsent. Raises ``ServiceError``."""
        self.access.take_cost()
        subgraph = self.subgraph(seeds, key)
        return [*self._requests(subgraph, self._slots(subgraph)), *self._label_requests(seeds)]

    def multi_hop(self, seeds: SeedSet, settings: SampleSettings, key: int) -> SampledSubgraph:
        if not hasattr(self._local, "tables"):
            self._local.tables = RelabelTables(self.schema)
        graph: HopSource = self.access
        if settings.rule is None:
            return sample_multi_hop(graph, self.schema, seeds, settings, key, self._local.tables, self._orig_edges)
        from trainer.sampler.ruled_hops import RuledHops

        assert self.in_edges is not None
        graph = RuledHops(self.access, self.in_edges, self.schema, settings, seeds.exclude)
        chosen = replace(settings, induced=False)
        found = sample_multi_hop(graph, self.schema, seeds, chosen, key, self._local.tables)
        if not settings.induced:
            return found
        # All edges between these nodes: none is added by a further hop.
        joined = replace(settings, rule=None, fanouts=dict.fromkeys(self.schema.edges, (0,)), weight=None)
        ids = SeedSet({of: nodes.ids for of, nodes in found.nodes.items()}, exclude=seeds.exclude)
        whole = self.multi_hop(ids, joined, key)
        return replace(whole, num_hops=found.num_hops, nodes=found.nodes)

    def _slots(self, subgraph: SampledSubgraph) -> dict[NodeType, Array]:
        return {of: slots[subgraph.nodes[of].ids] for of, slots in self.kept.items()}

    def _label_requests(self, seeds: SeedSet) -> list[RowRequest]:
        return [RowRequest(of, seeds.nodes[of], names) for of, names in [self.labels] if names]

    def _requests(self, subgraph: SampledSubgraph, kept: Mapping[NodeType, Array]) -> list[RowRequest]:
        found: dict[AnyType, Ids] = {of: nodes.ids for of, nodes in subgraph.nodes.items()}
        for edge_type, edges in subgraph.edges.items():
            if edges.edge is not None and edge_type not in self._orig_edges:
                found[edge_type] = edges.edge
        plain = []
        for of, ids in found.items():
            names = (name for name in self.attrs.get(of, ()) if name != "x" or of not in self.kept)
            plain.append(RowRequest(of, ids, ("orig_id", *names)))
        # rows of ``x`` that are not on the device
        return plain + [RowRequest(of, subgraph.nodes[of].ids[slots < 0], ("x",)) for of, slots in kept.items()]
