"""Loaders whose neighbours are chosen by a rule: personalised PageRank, or random walks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from trainer.core.errors import SettingsError
from trainer.core.schema import EdgeType
from trainer.graph.in_memory import as_graph
from trainer.graph.seed_order import RankLayout
from trainer.loader.arguments import (
    AttrNames,
    LoadOptions,
    OutputOptions,
    load_options,
    time_level,
    whole_number,
)
from trainer.loader.block_loader import block_of
from trainer.loader.neighbor_loader import NodeLoader
from trainer.loader.node_seeds import node_inputs
from trainer.loader.pyg_batch import Output
from trainer.loader.pyg_loader import BatchSeeds
from trainer.sampler.rule_types import PPR, Direction, Rule, Walks
from trainer.sampler.rules import check_rule, rule_edges
from trainer.sampler.settings import check_settings
from trainer.sampler.subgraph_sampler import SampledBatch
from trainer.sampler.types import SampleSettings, TimeRule

_OUTPUTS = ("edges", "subgraph", "tokens")


class _RuleLoader(NodeLoader):
    def __init__(
        self, data: Any, rule: Rule, k: int | Sequence[int], input_nodes: Any, input_time: Any, output: str,
        weight_attr: str | None, time_attr: str | None, transform: Callable[[Any], Any] | None,
        attrs: AttrNames | None, options: LoadOptions, rank: int | None, layout: RankLayout | None,
    ):  # fmt: skip
        if output not in _OUTPUTS:
            raise SettingsError(f"output {output!r}; expected one of {', '.join(_OUTPUTS)}")
        graph = as_graph(data, time_attr=time_attr, weight_attr=weight_attr)
        per_layer = tuple(whole_number("k", each, 1) for each in (k if isinstance(k, Sequence) else [k]))
        if not per_layer:
            raise SettingsError("k is empty; give the number of neighbours of each layer")
        self._kind, targets = output, tuple(node_inputs(graph, input_nodes).of)
        check_rule(graph.manifest, rule, targets)
        settings = SampleSettings(
            dict.fromkeys(rule_edges(rule, graph.manifest, targets, len(per_layer)), per_layer),
            disjoint=time_attr is not None, weight=weight_attr,
            time=None if time_attr is None else TimeRule(time_attr, time_level(graph.manifest, time_attr)),
            induced=output == "subgraph", edge_ids=output == "subgraph", ask_again=False, rule=rule,
        )  # fmt: skip
        check_settings(graph.manifest, settings)
        super().__init__(
            graph, settings, input_nodes, input_time, None, attrs, options,
            OutputOptions("induced" if settings.induced else "directional", transform), rank, layout,
        )  # fmt: skip

    def output(self, sampled: SampledBatch, seeded: BatchSeeds) -> Output:
        out = super().output(sampled, seeded)
        if not self.settings.induced and self.graph.manifest.hetero:
            none = torch.empty(0, dtype=torch.int64)  # the edges of the graph, which ``annotate`` removes
            for ends in (out.row, out.col):
                ends |= {of: none for of in self.graph.manifest.edges if of not in ends}
        out.metadata = out.metadata, sampled.subgraph
        return out

    def annotate(self, data: Any, out: Output) -> None:
        out.metadata, subgraph = out.metadata
        super().annotate(data, out)
        if self.settings.induced:
            return
        hetero = self.graph.manifest.hetero
        for of in self.graph.manifest.edges:
            if hetero:
                del data[of]
            elif "adj_t" in data:
                del data.adj_t
        for of, edges in subgraph.edges.items():
            to = data[of] if hetero else data
            if self._kind == "tokens":
                if of[2] not in self.inputs.of:
                    continue
                tokens = block_of(subgraph, of, 0).tokens(self.settings.fanouts[of][0])
                if not hetero:
                    del data.edge_index
                to.token, to.token_mask, to.token_score, to.token_hops = (
                    tokens.node, tokens.mask, tokens.scores, tokens.hops
                )  # fmt: skip
                continue
            to.edge_index = torch.from_numpy(edges.ends())
            to.edge_weight, to.hops = torch.from_numpy(edges.scores), torch.from_numpy(edges.hops).long()


class DistPPRLoader(_RuleLoader):
    """Yield seeds with the nodes of the highest personalised PageRank around them.

    The score of a node is the probability that a random walk from the seed ends there: before each step it ends with
    probability ``alpha``, else it goes to the source of an in-edge, chosen by weight. A walk at a node without in-edges
    is lost. Scores are computed by forward push, as by torch_geometric's ``get_ppr`` for the reversed edges: each is
    too low by at most what the push has left over, less than ``eps`` times the number of in-edges, summed over all
    nodes. In a heterogeneous graph a walk chooses among the in-edges of all types, and each node type has its own
    ``k`` neighbours.

    Equal arguments give equal batches for every number of parts and ranks, and where the graph is partitioned, in
    memory or behind graph servers.

    Args:
        data: An opened graph (``gnnfleet.open``), or ``Data``, ``HeteroData`` or stores in memory.
        k: Number of neighbours of each seed and node type. A list has the number for each layer: the neighbours'
            neighbours are found in the same way.
        input_nodes: Seeds, as in ``DistNeighborLoader``.
        input_time: Times of the seeds, instead of the ``time_attr`` of their nodes.
        alpha: Probability of the end before each step.
        eps: A node is pushed while its residual is at least ``eps`` times its number of in-edges. Time and number of
            scores grow with 1 / (``alpha`` · ``eps``).
        edge_types: Edge types that walks follow. Default: all.
        direction: ``"in"``: walks go from the target of an edge to its source, ``"out"``: from source to target,
            ``"both"``. The last two need the reverse edges in the graph (option ``undirected``). Default: along all of
            ``edge_types`` from target to source, which are both directions if reverse edges are among them.
        weight_attr: Edge attribute; a step's chance is proportional to it.
        time_attr: Integer attribute of nodes or edges; edges later than the seed are not followed.
        loops: Whether the seed itself is one of its neighbours.
        output: ``"edges"``: edges from each neighbour to its seed. ``"subgraph"``: the edges of the graph between seeds
            and neighbours. ``"tokens"``: the neighbours as a matrix.
        transform: Function called with each batch; its result is yielded instead.
        attrs: Names of the attributes that batches have, or a mapping of types to names. Default: all.
        seed: Random seed of the order of the seeds. Default: 0.
        threads: Number of sampler threads. Default: ``num_workers``, at least 1.
        prefetch: Number of batches to make ahead. Default: ``prefetch_factor`` (3) per thread.
        deadline: Seconds that one request to another host may take.
        rank: Rank of this process in ``layout``. Default: the rank of the process group.
        layout: For each part, the ranks on hosts that store it. Default: taken from the cluster file and the process
            group.
        **kwargs: Arguments of torch's ``DataLoader``, as in ``DistNeighborLoader``.

    Shapes:
        - ``n_id``: int64 ``[nodes]``, original ids; the seeds come first
        - ``x``, ``y`` and other node attributes: ``[nodes, ...]``
        - output ``"edges"``: ``edge_index`` int64 ``[2, edges]``, positions in ``n_id``, from neighbour to seed, the
          highest score first; ``edge_weight`` float32 ``[edges]``, the scores; ``hops`` int64 ``[edges]``, the number
          of steps after which the push first met the neighbour. The edge types of a heterogeneous graph are
          ``(neighbour's type, "ppr", seed's type)``
        - output ``"tokens"``: ``token`` int64 ``[seeds, k]``, positions in ``n_id``; ``token_mask`` bool, False after
          the last neighbour; ``token_score`` float32; ``token_hops`` int64
        - ``input_id``: int64 ``[seeds of this rank]``; ``batch_size``: their number

    Raises:
        SettingsError: Arguments contradict each other or do not fit the graph.
        ServiceError: Another host fails while the loader is created or iterated.

    Example:
        ```python
        import gnnfleet as gf

        graph = gf.open("parts")
        loader = gf.DistPPRLoader(graph, 32, "train", alpha=0.2, eps=1e-4, batch_size=256, output="tokens")
        for batch in loader:
            sequences = batch.x[batch.token]
        ```
    """

    def __init__(
        self, data: Any, k: int | Sequence[int] = 64, input_nodes: Any = None, input_time: Any = None, *,
        alpha: float = 0.15, eps: float = 1e-4, edge_types: Sequence[EdgeType] | None = None,
        direction: Direction | None = None,
        weight_attr: str | None = None, time_attr: str | None = None, loops: bool = False, output: str = "edges",
        transform: Callable[[Any], Any] | None = None, attrs: AttrNames | None = None, seed: int | None = None,
        threads: int | None = None, prefetch: int | None = None, deadline: float = 120.0, rank: int | None = None,
        layout: RankLayout | None = None, **kwargs: Any,
    ):  # fmt: skip
        super().__init__(
            data, PPR(alpha, eps, tuple(edge_types or ()), direction, loops), k, input_nodes, input_time, output,
            weight_attr, time_attr, transform, attrs,
            load_options(kwargs, seed=seed, threads=threads, prefetch=prefetch, deadline=deadline), rank, layout,
        )  # fmt: skip


class DistWalkLoader(_RuleLoader):
    """Yield seeds with the nodes that random walks from them visit most often, as PinSAGE does.

    Each of ``num_walks`` walks takes ``length`` steps to the source of an in-edge, or traverses ``metapath`` so many
    times. Before each step but the first it returns to the seed with probability ``restart``; also after a node
    without in-edges. The neighbours of a seed are the ``k`` nodes with the most visits. Walks are drawn by a hash of
    ``seed``, epoch, step, seed node, walk and step: equal arguments give equal batches for every number of parts and
    ranks.

    Args:
        data: An opened graph (``gnnfleet.open``), or ``Data``, ``HeteroData`` or stores in memory.
        k: Number of neighbours of each seed. A list has the number for each layer.
        input_nodes: Seeds, as in ``DistNeighborLoader``.
        input_time: Times of the seeds, instead of the ``time_attr`` of their nodes.
        num_walks: Number of walks from each seed.
        length: Steps of each walk.
        restart: Probability that a walk returns to the seed before a step.
        metapath: Edge types of a step, from the seed outwards: each is walked from its target to its source, and the
            last ends at the type where the first began. Seeds of another type on it walk round from there. Needed if
            the graph has several edge types.
        weight_attr: Edge attribute; a step's chance is proportional to it.
        time_attr: Integer attribute of nodes or edges; edges later than the seed are not followed.
        loops: Whether the seed itself may be one of its neighbours.
        output: ``"edges"``, ``"subgraph"`` or ``"tokens"``, as in ``DistPPRLoader``.
        transform: Function called with each batch; its result is yielded instead.
        attrs: Names of the attributes that batches have, or a mapping of types to names. Default: all.
        seed: Random seed of the order of the seeds and of all draws; the same on every rank. Default: 0.
        threads: Number of sampler threads. Default: ``num_workers``, at least 1.
        prefetch: Number of batches to make ahead. Default: ``prefetch_factor`` (3) per thread.
        deadline: Seconds that one request to another host may take.
        rank: Rank of this process in ``layout``. Default: the rank of the process group.
        layout: For each part, the ranks on hosts that store it. Default: taken from the cluster file and the process
            group.
        **kwargs: Arguments of torch's ``DataLoader``, as in ``DistNeighborLoader``.

    Shapes:
        - as in ``DistPPRLoader``; ``edge_weight`` and ``token_score`` are numbers of visits, ``hops`` the lowest number
          of steps since the seed. The edge type of a heterogeneous graph is ``(seed's type, "walks", seed's type)``

    Raises:
        SettingsError: Arguments contradict each other or do not fit the graph.
        ServiceError: Another host fails while the loader is created or iterated.

    Example:
        ```python
        import gnnfleet as gf

        graph = gf.open("parts")
        loader = gf.DistWalkLoader(graph, [10, 5], "train", num_walks=50, length=4, batch_size=256)
        for batch in loader:
            neighbours, seeds = batch.edge_index
        ```
    """

    def __init__(
        self, data: Any, k: int | Sequence[int] = 10, input_nodes: Any = None, input_time: Any = None, *,
        num_walks: int = 50, length: int = 4, restart: float = 0.15, metapath: Sequence[EdgeType] | None = None,
        weight_attr: str | None = None, time_attr: str | None = None, loops: bool = False, output: str = "edges",
        transform: Callable[[Any], Any] | None = None, attrs: AttrNames | None = None, seed: int | None = None,
        threads: int | None = None, prefetch: int | None = None, deadline: float = 120.0, rank: int | None = None,
        layout: RankLayout | None = None, **kwargs: Any,
    ):  # fmt: skip
        super().__init__(
            data, Walks(num_walks, length, restart, tuple(metapath or ()), loops), k, input_nodes, input_time, output,
            weight_attr, time_attr, transform, attrs,
            load_options(kwargs, seed=seed, threads=threads, prefetch=prefetch, deadline=deadline), rank, layout,
        )  # fmt: skip
