"""``RuledHops``: answers the requests of a hop by the neighbours that a rule chooses, in place of drawn ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trainer.core.arrays import Array, Ids, read_only
from trainer.core.rng import GOLDEN, fractions, hashed
from trainer.core.schema import EdgeType, NodeType, edge_salt
from trainer.sampler.in_edges import InEdgesOf, Walked
from trainer.sampler.push_kernels import UNIT, count_visits, push
from trainer.sampler.requests import PAIR_LOOKS, GraphAccess
from trainer.sampler.rule_types import PPR
from trainer.sampler.rules import metapath_of, walked_edges
from trainer.sampler.settings import bound_here
from trainer.sampler.types import GraphSchema, HopRequest, HopSample, RowRequest, SampleSettings, TimeBound

_SEEDS_AT_ONCE = 256  #: of one call of a kernel: bounds its memory, and the time until a closed connection is noticed

_CHOSEN_AT_ONCE = 1 << 19  #: neighbours for which there is room at once

_STEPS_AT_ONCE = 1 << 18  #: visits of walks in memory

_FIRST_BITS = 12  #: log2 of the number of nodes for which a push has room at first

_MOST_LACKING = 1 << 18  #: nodes whose rows are requested at once

Chosen = tuple[Array, Array, Array, Array]  #: global ids, scores, hops [n, columns, k], and counts [n, columns]


@dataclass(frozen=True)
class RuledHops:
    """A ``HopSource`` whose neighbours are those of ``settings.rule``. ``schema``: of the graph, without the rule."""

    access: GraphAccess
    in_edges: InEdgesOf
    schema: GraphSchema
    settings: SampleSettings
    exclude: Mapping[EdgeType, tuple[Ids, Ids]]  #: (targets, sources) of edges that are not followed

    def sample_hops(self, requests: Sequence[HopRequest]) -> list[HopSample]:
        choose = self._highest_rank if isinstance(self.settings.rule, PPR) else self._most_visited
        answers: dict[EdgeType, HopSample] = {}
        for target in dict.fromkeys(one.edge_type[2] for one in requests):  # all of its requests have the same nodes
            same = [one for one in requests if one.edge_type[2] == target]
            found: list[list[tuple[Array, ...]]] = [[] for _ in same]
            for ids, scores, hops, counts in choose(same):
                self.access.look(0, int(counts.sum()))
                taken = np.arange(ids.shape[2]) < counts[:, :, None]
                for number, own in enumerate(found):
                    of_seed = (each[:, number][taken[:, number]] for each in (ids, scores, hops))
                    own.append((counts[:, number], *of_seed))
            for one, own in zip(same, found, strict=True):
                counts, ids, scores, hops = map(np.concatenate, zip(*own, strict=True))
                answers[one.edge_type] = HopSample(counts, ids, None, scores.astype(np.float32), hops)
        return [answers[one.edge_type] for one in requests]

    def _highest_rank(self, requests: Sequence[HopRequest]) -> Iterator[Chosen]:
        rule, settings, first = self.settings.rule, self.settings, requests[0]
        assert isinstance(rule, PPR)
        edges = self.in_edges(Walked(tuple(walked_edges(rule, self.schema)), settings.weight, settings.time))
        types, sources = list(self.schema.nodes), [one.edge_type[0] for one in requests]
        excluded = sum(len(targets) for targets, _ in self.exclude.values())
        column = np.array([sources.index(of) if of in sources else -1 for of in types])
        bounds = np.empty(0, np.int64) if first.bound is None else first.bound.times
        bits = _FIRST_BITS
        at_once = max(1, min(_SEEDS_AT_ONCE, _CHOSEN_AT_ONCE // (len(requests) * first.fanout)))
        for begin in range(0, max(1, len(first.nodes)), at_once):
            nodes, until = (each[begin : begin + at_once] for each in (first.nodes, bounds))
            chosen, open_ = _room(len(nodes), len(requests), first.fanout), np.arange(len(nodes))
            begins = begin == 0
            while len(open_):
                self.access.look(PAIR_LOOKS * excluded)
                rows, hidden, roots, ids = edges.view(
                    self.access, first.edge_type[2], nodes[open_], begins, self.exclude
                )
                found, lacking = _room(len(open_), len(requests), first.fanout), np.empty(_MOST_LACKING, np.int64)
                ends = read_only(until[open_] if len(until) else until)
                known, full, number, looks = push(
                    rows, hidden, read_only(roots), ends, rule.alpha, rule.eps, rule.loops, column, bits, *found,
                    lacking,
                )  # fmt: skip
                self.access.look(looks)
                bits += full
                done = (found[-1][:, 0] >= 0) & (np.arange(len(open_)) < known)
                for c, of in enumerate(sources):
                    found[0][:, c] = edges.id_of(of, found[0][:, c], ids)
                for all_, some in zip(chosen, found, strict=True):
                    all_[open_[done]] = some[done]
                open_, begins = open_[~done], False
                if number:
                    lacking = np.unique(lacking[:number])
                    assert ids is not None
                    edges.add(self.access, ids[lacking], rows.kind[lacking])
            yield chosen[0], chosen[1] / UNIT, chosen[2], chosen[3]

    def _most_visited(self, requests: Sequence[HopRequest]) -> Iterator[Chosen]:
        rule, (request,) = self.settings.rule, requests
        assert rule is not None and not isinstance(rule, PPR)
        of: NodeType = request.edge_type[2]
        (rows,) = self.access.gather([RowRequest(of, request.nodes, ("orig_id",))])
        keys = hashed(np.uint64(request.key) ^ hashed(rows["orig_id"].astype(np.uint64) + GOLDEN))
        if request.trees is not None:
            keys = hashed(keys ^ hashed(request.trees.astype(np.uint64) + GOLDEN))
        seeds_at_once = max(1, _STEPS_AT_ONCE // (rule.num_walks * rule.length))
        for begin in range(0, max(1, len(request.nodes)), seeds_at_once):
            at = slice(begin, begin + seeds_at_once)
            seeds = np.repeat(request.nodes[at], rule.num_walks)
            times = None if request.bound is None else np.repeat(request.bound.times[at], rule.num_walks)
            visits, hops = self._walk(request, seeds, keys[at], times)
            chosen = _room(len(request.nodes[at]), 1, min(request.fanout, visits.shape[1]))
            flat = [each.reshape(len(each), *each.shape[2:]) for each in chosen]  # one column
            count_visits(read_only(request.nodes[at]), visits, hops, rule.loops, *flat)
            yield chosen

    def _walk(self, request: HopRequest, seeds: Ids, keys: Array, times: Ids | None) -> tuple[Array, Array]:
        """Return the visited nodes of the walks from each seed, and their distances from it: int64, int8 [n, visits].

        ``seeds``: int64 [n * num_walks]. A visit at a place where a walk could not go on is -1.
        """
        rule, settings = self.settings.rule, self.settings
        assert rule is not None and not isinstance(rule, PPR)
        path = metapath_of(rule, self.schema, request.edge_type[2])
        walks = np.tile(np.arange(rule.num_walks, dtype=np.uint64), len(keys))
        with np.errstate(over="ignore"):
            walkers = hashed(np.repeat(keys, rule.num_walks) + walks * GOLDEN)
        visits, hops = np.full((len(seeds), rule.length), -1), np.zeros((len(seeds), rule.length), np.int8)
        place, distance = seeds, np.zeros(len(seeds), np.int8)
        for step in range(rule.length):
            first = step * (1 + len(path))
            if step and rule.restart:
                home = fractions(_drawn(walkers, first)) < rule.restart
                place, distance = np.where(home, seeds, place), np.where(home, np.int8(0), distance)
            going = np.arange(len(seeds))
            for leg, of in enumerate(path):
                spec, bound = self.schema.edges[of], None
                if times is not None and settings.time is not None and bound_here(settings.time, spec):
                    bound = TimeBound(times[going], settings.time.attr, settings.time.on)
                trees = (_drawn(walkers[going], first + 1 + leg) >> np.uint64(1)).astype(np.int64)
                weight = settings.weight if settings.weight in spec.attrs else None
                asked = HopRequest(
                    of, place, 1, 0, request.key ^ edge_salt(of), trees=trees, bound=bound, weight=weight,
                    exclude=self.exclude.get(of),
                )  # fmt: skip
                (drawn,) = self.access.sample_hops([asked])
                going, place = going[drawn.counts > 0], drawn.src.astype(np.int64, copy=False)
            visits[going, step] = place
            distance = np.minimum(distance, 126) + np.int8(1)
            hops[:, step] = distance
            if len(going) < len(seeds):  # a walk that cannot go on returns to its seed
                stuck = visits[:, step] < 0
                place, distance = np.where(stuck, seeds, visits[:, step]), np.where(stuck, np.int8(0), distance)
        return visits.reshape(len(keys), -1), hops.reshape(len(keys), -1)


def _drawn(keys: Array, index: int) -> Array:
    with np.errstate(over="ignore"):
        return hashed(keys + np.uint64(index) * GOLDEN)


def _room(seeds: int, columns: int, k: int) -> Chosen:
    shape = seeds, columns, k
    return (
        np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.int8), np.zeros(shape[:2], np.int32)
    )  # fmt: skip
