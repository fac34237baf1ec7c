"""Reference implementation of sampling in plain Python, on an unpartitioned graph in original ids.

Slow, and independent of ``trainer.sampler``. A sampled node is named ``(tree, id)``; tree is None unless sampling is
disjoint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from partitions import typed_store
from trainer.core.schema import edge_salt

MASK, GOLDEN = 2**64 - 1, 0x9E3779B97F4A7C15


@dataclass
class PlainGraph:
    num_nodes: dict
    edges: dict  #: edge type -> [2, E]
    node_attrs: dict = field(default_factory=dict)
    edge_attrs: dict = field(default_factory=dict)

    def store(self, num_parts=1, assignment=None):
        return typed_store(
            self.num_nodes, self.edges, num_parts, node_attrs=self.node_attrs, edge_attrs=self.edge_attrs,
            assignment=assignment,
        )  # fmt: skip

    def time(self, e, edge, rule):
        """Return the time of an edge, or with ``rule.on`` = "node" that of its source node; None without times."""
        attrs, of = (self.edge_attrs.get(e, {}), edge) if rule.on == "edge" else (
            self.node_attrs.get(e[0], {}), self.edges[e][0][edge],
        )  # fmt: skip
        return int(attrs[rule.attr][of]) if rule.attr in attrs else None

    def weight(self, e, edge, name):
        attrs = self.edge_attrs.get(e, {})
        return float(attrs[name][edge]) if name in attrs else None


@dataclass(frozen=True)
class Rule:
    fanout: int
    shuffle: int = 0
    replace: bool = False
    weight: str | None = None
    top: bool = False
    time: object = None  #: TimeRule
    until: int = 0  #: latest time allowed, used with ``time``
    barred: frozenset = frozenset()  #: excluded sources
    allowed: frozenset | None = None


def mix(z):
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def number(key, i):
    return mix((key + i * GOLDEN) & MASK)


def draw(key, i, bound):
    return ((number(key, i) >> 32) * bound) >> 32


def fraction(key, i):
    return (number(key, i) >> 11) / 2**53


def row_key(key, e, node, tree_key):
    drawn = mix(key ^ edge_salt(e) ^ mix((node + GOLDEN) & MASK))
    return drawn if tree_key is None else mix(drawn ^ mix((tree_key + GOLDEN) & MASK))


def pick(graph, e, node, rule, key, tree_key=None):
    """Sample in-edges of ``node`` of edge type ``e``, by the settings ``rule``, with the random numbers of ``key``.

    Returns edge ids in the order drawn, and whether all candidates were taken.
    """
    # with a time bound, unshuffled edges are sorted by time if all candidates are taken
    row = [int(edge) for edge in np.flatnonzero(graph.edges[e][1] == node)]
    candidates = [edge for edge in row if passes(graph, e, edge, rule)]
    drawn, n = row_key(key, e, node, tree_key), len(candidates)
    weights = [graph.weight(e, edge, rule.weight) for edge in candidates] if rule.weight else []
    weighted = bool(weights) and weights[0] is not None
    bounded = bool(candidates) and rule.time is not None and graph.time(e, candidates[0], rule.time) is not None
    last = bounded and rule.time.last
    if rule.replace and rule.fanout >= 0 and n:
        if weighted:
            sums = np.cumsum(weights)
            places = [min(int((sums <= fraction(drawn, j) * sums[-1]).sum()), n - 1) for j in range(rule.fanout)]
        else:
            places = [draw(drawn, j, n) for j in range(rule.fanout)]
        return [candidates[place] for place in places], False
    whole = rule.fanout < 0 or n <= rule.fanout
    steps = min(rule.shuffle, n - 1) if whole else rule.fanout
    if whole and bounded and rule.shuffle == 0:
        return sorted(candidates, key=lambda c: (graph.time(e, c, rule.time), c)), True
    if weighted or last:
        if weighted and rule.top:
            race = {c: (-w, c) for c, w in zip(candidates, weights, strict=True)}
        elif weighted:
            race = {
                c: -math.log1p(-fraction(drawn, row.index(c))) / w for c, w in zip(candidates, weights, strict=True)
            }
        else:
            race = {c: (-graph.time(e, c, rule.time), -c) for c in candidates}
        order = sorted(candidates, key=lambda c: race[c])
        return (candidates if whole and rule.shuffle == 0 else order if whole else order[: rule.fanout]), whole
    for j in range(steps):
        other = j + draw(drawn, j, n - j)
        candidates[j], candidates[other] = candidates[other], candidates[j]
    return (candidates if whole else candidates[: rule.fanout]), whole


def passes(graph, e, edge, rule):
    source = int(graph.edges[e][0][edge])
    time = None if rule.time is None else graph.time(e, edge, rule.time)
    weight = graph.weight(e, edge, rule.weight) if rule.weight else None
    return (
        (time is None or time <= rule.until)
        and (weight is None or weight > 0)
        and source not in rule.barred
        and (rule.allowed is None or source in rule.allowed)
    )


@dataclass
class PlainBatch:
    levels: dict  #: type -> one list of names per hop, seeds first; order within a hop is not defined
    rows: dict  #: (edge type, hop) -> {name: (edge ids, whole)}

    def names_until(self, of, hop):
        return [name for level in self.levels[of][: hop + 1] for name in level]


def plain_sample(graph, seeds, settings, key):
    """Return the batch that ``sample_multi_hop`` should find.

    seeds: a ``SeedSet`` in original ids.
    """
    disjoint = settings.disjoint or settings.time is not None
    levels, tree_keys, untils = {of: [[]] for of in graph.num_nodes}, [], []
    for of, ids in seeds.nodes.items():
        for place, node in enumerate(ids):
            levels[of][0].append((len(tree_keys) if disjoint else None, int(node)))
            tree_keys.append(int(seeds.trees[of][place]) if of in seeds.trees else len(tree_keys))
            untils.append(int(seeds.times[of][place]) if of in seeds.times else 0)
    batch = PlainBatch(levels, {})
    for hop in range(settings.num_hops):
        known = {of: {name for level in levels[of] for name in level} for of in levels}
        found = {of: [] for of in levels}
        for e, fanouts in settings.fanouts.items():
            asked = batch.names_until(e[2], hop) if settings.ask_again else levels[e[2]][hop]
            rows = {}
            for tree, node in asked if fanouts[hop] else []:
                rule = Rule(
                    fanouts[hop], max((f for f in fanouts[hop + 1 :] if f >= 0), default=0), settings.replace,
                    settings.weight, settings.top, settings.time, untils[tree] if tree is not None else 0,
                    barred(seeds.exclude.get(e), node),
                )  # fmt: skip
                rows[tree, node] = pick(graph, e, node, rule, key, tree_keys[tree] if disjoint else None)
                found[e[0]] += [(tree, int(graph.edges[e][0][edge])) for edge in rows[tree, node][0]]
            batch.rows[e, hop] = rows
        for of in levels:
            levels[of].append(sorted(set(found[of]) - known[of]))
    return batch


def barred(exclude, node):
    if exclude is None:
        return frozenset()
    return frozenset(exclude[1][exclude[0] == node].tolist())
