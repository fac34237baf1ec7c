"""torch_geometric's own loaders with a sampler in plain Python, for machines without pyg-lib and torch-sparse."""

from __future__ import annotations

import random
from collections import defaultdict

import torch
from torch_geometric.data import Data
from torch_geometric.loader import LinkLoader, NodeLoader
from torch_geometric.sampler import BaseSampler, HeteroSamplerOutput, NegativeSampling, SamplerOutput
from torch_geometric.sampler.neighbor_sampler import edge_sample, node_sample

HOMO = ("", "", "")


class PlainSampler(BaseSampler):
    def __init__(
        self, data, num_neighbors, *, replace=False, disjoint=False, subgraph_type="directional",
        temporal_strategy="uniform", time_attr=None, weight_attr=None, seed=0,
    ):  # fmt: skip
        self.homo = isinstance(data, Data)
        stores = {HOMO: data} if self.homo else {e: data[e] for e in data.edge_types}
        self.nodes = {"": data} if self.homo else {t: data[t] for t in data.node_types}
        self.num_neighbors = {e: num_neighbors[e] if isinstance(num_neighbors, dict) else num_neighbors for e in stores}
        self.replace, self.disjoint = replace, disjoint or time_attr is not None
        self.subgraph_type, self.last = subgraph_type, temporal_strategy == "last"
        self.random = random.Random(seed)
        self.rows = {e: self._rows_of(store) for e, store in stores.items()}
        self.sources = {e: store.edge_index[0].tolist() for e, store in stores.items()}
        self.weight = {e: s[weight_attr].tolist() for e, s in stores.items()} if weight_attr else None
        self.node_time = {
            t: s[time_attr] for t, s in self.nodes.items() if time_attr in s and s.is_node_attr(time_attr)
        }
        by_edge = time_attr and not self.node_time
        self.edge_time = {e: s[time_attr].tolist() for e, s in stores.items() if by_edge and time_attr in s}

    @staticmethod
    def _rows_of(store):
        rows = defaultdict(list)
        for e, target in enumerate(store.edge_index[1].tolist()):
            rows[target].append(e)
        return rows

    def sample_from_nodes(self, inputs):
        out = node_sample(inputs, self._sample)
        return out.to_bidirectional() if self.subgraph_type == "bidirectional" else out

    def sample_from_edges(self, inputs, neg_sampling=None):
        sizes = {t: s.num_nodes for t, s in self.nodes.items()}
        times = self.node_time or None
        if self.homo:
            sizes, times = sizes[""], times and times[""]
        out = edge_sample(inputs, self._sample, sizes, self.disjoint, times, neg_sampling)
        return out.to_bidirectional() if self.subgraph_type == "bidirectional" else out

    def _sample(self, seed, seed_time=None):
        seeds = {"": seed} if self.homo else seed
        found = _Found(self, seeds, self._times(seeds, {"": seed_time} if self.homo else seed_time))
        found.grow()
        return found.output()

    def _times(self, seeds, given):
        if not self.node_time and not self.edge_time:
            return {}
        own = {t: given[t] if given and given.get(t) is not None else self.node_time[t][s] for t, s in seeds.items()}
        return {t: times.tolist() for t, times in own.items()}

    def take(self, edge_type, target, fanout, bound):
        edges = self.rows[edge_type].get(target, [])
        if bound is not None:
            edges = [e for e in edges if self._time(edge_type, e) is None or self._time(edge_type, e) <= bound]
            edges.sort(key=lambda e: self._time(edge_type, e) or 0)  # the order in torch_geometric's CSC
        if self.weight:
            edges = [e for e in edges if self.weight[edge_type][e] > 0]
        if fanout < 0 or (len(edges) <= fanout and not self.replace) or not edges:
            return edges
        if self.last and bound is not None:
            return edges[-fanout:]
        weights = [self.weight[edge_type][e] for e in edges] if self.weight else None
        if self.replace:
            return self.random.choices(edges, weights, k=fanout)
        if weights is None:
            return self.random.sample(edges, fanout)
        return sorted(edges, key=lambda e: -(self.random.random() ** (1 / self.weight[edge_type][e])))[:fanout]

    def _time(self, edge_type, edge):
        if edge_type in self.edge_time:
            return self.edge_time[edge_type][edge]
        times = self.node_time.get(edge_type[0])
        return None if times is None else int(times[self.sources[edge_type][edge]])


class _Found:
    """A subgraph under construction: nodes per type in order of appearance."""

    def __init__(self, sampler, seeds, times):
        self.sampler, self.num_hops = sampler, max(map(len, sampler.num_neighbors.values()))
        self.node = {t: [] for t in sampler.nodes}
        self.place = {t: {} for t in sampler.nodes}
        self.edges = {e: [] for e in sampler.rows}  # (row, col, edge id)
        self.num_nodes = {t: [] for t in sampler.nodes}
        self.num_edges = {e: [] for e in sampler.rows}
        self.bounds = [bound for t in seeds for bound in times.get(t, [])]
        tree = 0
        for t, ids in seeds.items():
            for node in ids.tolist():
                self.node[t].append((tree, node))
                self.place[t].setdefault(self._key(tree, node), len(self.node[t]) - 1)
                tree += 1
        for t in self.node:
            self.num_nodes[t].append(len(self.node[t]))

    def _key(self, tree, node):
        return (tree, node) if self.sampler.disjoint else node

    def grow(self):
        begin = dict.fromkeys(self.node, 0)
        for hop in range(self.num_hops):
            end = {t: len(nodes) for t, nodes in self.node.items()}
            for e in self.edges:
                self._grow_type(e, hop, range(begin[e[2]], end[e[2]]))
            for t, nodes in self.node.items():
                self.num_nodes[t].append(len(nodes) - end[t])
            begin = end

    def _grow_type(self, e, hop, frontier):
        before = len(self.edges[e])
        for col in frontier:
            tree, target = self.node[e[2]][col]
            bound = self.bounds[tree] if self.bounds else None
            for edge in self.sampler.take(e, target, self.sampler.num_neighbors[e][hop], bound):
                source = self.sampler.sources[e][edge]
                key = self._key(tree, source)
                if key not in self.place[e[0]]:
                    self.place[e[0]][key] = len(self.node[e[0]])
                    self.node[e[0]].append((tree, source))
                self.edges[e].append((self.place[e[0]][key], col, edge))
        self.num_edges[e].append(len(self.edges[e]) - before)

    def output(self):
        node = {t: _ids(node for _, node in nodes) for t, nodes in self.node.items()}
        batch = (
            {t: _ids(tree for tree, _ in nodes) for t, nodes in self.node.items()} if self.sampler.disjoint else None
        )
        row, col, edge = ({e: _ids(item[k] for item in found) for e, found in self.edges.items()} for k in range(3))
        if self.sampler.homo:
            return SamplerOutput(
                node[""], row[HOMO], col[HOMO], edge[HOMO], batch and batch[""],
                self.num_nodes[""], self.num_edges[HOMO],
            )  # fmt: skip
        return HeteroSamplerOutput(node, row, col, edge, batch, self.num_nodes, self.num_edges)


def _ids(values):
    return torch.tensor(list(values), dtype=torch.int64)


def node_loader(data, num_neighbors, input_nodes=None, input_time=None, *, batch_size=1, transform=None, **how):
    sampler = PlainSampler(data, num_neighbors, **how)
    return NodeLoader(data, sampler, input_nodes, input_time, transform=transform, batch_size=batch_size)


def link_loader(
    data, num_neighbors, edge_label_index=None, edge_label=None, edge_label_time=None, neg_sampling=None, *,
    batch_size=1, **how,
):  # fmt: skip
    sampler = PlainSampler(data, num_neighbors, **how)
    cast = NegativeSampling.cast(neg_sampling)
    return LinkLoader(data, sampler, edge_label_index, edge_label, edge_label_time, cast, batch_size=batch_size)
