"""Tests of ``DistAnchorNeighborLoader`` against plain Python, for any number of ranks, parts, hosts and servers."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest
import torch

from fast_cases import fast_cases
from gateway_kit import client_graph, serving_parts, worker_graphs, written
from load_kit import COUNTS, REV, WRITES, hetero_data, homo_data, parts_of
from oracle import assert_identical, layout_of
from plain_sampler import GOLDEN, MASK, PlainGraph, Rule, mix, pick, plain_sample
from trainer import DistAnchorNeighborLoader
from trainer.core.errors import DataError, SettingsError
from trainer.loader.anchor_loader import _IN_BATCH
from trainer.loader.link_loader import ROLE
from trainer.loader.node_links import _LINKS
from trainer.sampler.types import SeedSet

SHOWN, FAR = ("paper", "shown", "author"), 1 << 62
AUTHORS = np.concatenate([np.arange(30), [3, 5, 3, 8]])  # repeated anchors
COMMON = {"num_neighbors": [3, 2], "edge_type": WRITES, "input_nodes": AUTHORS, "shuffle": True, "seed": 5}
CASES = {
    "all positives": {},
    "drawn": {"num_positives": 3, "negatives": {"random": 4, SHOWN: 1}, "exclude": "both"},
    "no links": {"negatives": {"random": 3, "in-batch": 2}, "avoid_links": True},
    "by degree": {"negatives": {"random": 5}, "power": 0.75, "num_positives": 1},
    "given": {"negatives": {"hard": 2, SHOWN: -1}},
    "in-batch": {"negatives": "in-batch", "num_positives": 2, "exclude": "self"},
    "disjoint": {"negatives": {"in-batch": 3, "hard": -1}, "disjoint": True, "exclude": "both"},
    "node times": {"negatives": {"random": 3, "in-batch": 4, "hard": 2, SHOWN: 2}, "num_positives": 4,
                   "time_attr": "time", "input_time": 30 + AUTHORS % 20, "power": 0.5},
    "edge times": {"negatives": {SHOWN: 2, "random": 2, "in-batch": 4, "hard": -1}, "num_positives": 2,
                   "time_attr": "edge_time", "input_time": 10 + AUTHORS, "exclude": "both"},
}  # fmt: skip


def typed_data():
    rng, data = np.random.default_rng(1), hetero_data()
    ends = [torch.from_numpy(rng.integers(0, COUNTS[of], 90)) for of in ("paper", "author")]
    data[SHOWN].edge_index, data[SHOWN].edge_time = torch.stack(ends), torch.from_numpy(rng.integers(0, 50, 90))
    data["author"].hard = torch.from_numpy(rng.integers(-1, COUNTS["paper"], (COUNTS["author"], 3)))
    return data


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    """Yield lists of opened graphs, one for each host that ranks can be on."""
    folder = written(tmp_path_factory.mktemp("typed"), typed_data())
    with ExitStack() as stack:
        servers = stack.enter_context(serving_parts(folder))
        client = stack.enter_context(client_graph(servers))
        yield {
            "1 part": [parts_of(typed_data(), 1)],
            "4 parts": [parts_of(typed_data(), 4)],
            "hosts": stack.enter_context(worker_graphs(servers)),
            "client": [client],
        }


@pytest.fixture(scope="module")
def plain():
    data = typed_data()
    return PlainGraph(
        dict(COUNTS), {of: data[of].edge_index.numpy() for of in data.edge_types},
        {of: {k: v.numpy() for k, v in data[of].items() if k in ("time", "hard")} for of in data.node_types},
        {of: {"edge_time": data[of].edge_time.numpy()} for of in data.edge_types},
    )  # fmt: skip


# The reference --------------------------------------------------------------------------------------------------------


def links(graph, of, anchor, place, until, most, key, rule):
    """Return (target, time) for the links of an anchor. The time is that of the node or of the edge."""
    how = Rule(most, time=rule, until=until)
    edges, _ = pick(graph, of, anchor, how, key ^ _LINKS, place)
    return [(int(graph.edges[of][0][e]), -FAR if rule is None else graph.time(of, e, rule)) for e in edges]


def random_target(graph, place, number, attempt, until, key, power, rule):
    """Return the draw of a random negative."""
    z = mix((place * GOLDEN + key) & MASK)
    z = mix(z ^ mix((number * GOLDEN + attempt + 1) & MASK))
    share = (mix((z + 2 * GOLDEN) & MASK) >> 11) / 2**53
    times = (
        graph.node_attrs["paper"]["time"] if rule is not None and rule.on == "node" else np.full(COUNTS["paper"], -FAR)
    )
    known = [v for v in np.argsort(times, kind="stable") if times[v] <= until]
    if not power:
        return int(known[int(share * len(known))])
    sums = np.cumsum([float((graph.edges[REV][0] == v).sum()) ** power for v in known])
    return int(known[int((sums <= share * sums[-1]).sum())])


def expected(graph, case, step, key, rule):
    """Return the positives and negatives of each anchor of a global batch. ``step``: (anchor, time) by place."""
    linked = [
        links(graph, REV, a, place, t, case.get("num_positives", -1), key, rule) for place, (a, t) in enumerate(step)
    ]
    edges = set(zip(*graph.edges[REV].tolist(), strict=True)) if case.get("avoid_links") else set()
    kinds = case.get("negatives", {})
    negatives = []
    for place, (anchor, until) in enumerate(step):
        found = []
        own = {v for (a, _), pairs in zip(step, linked, strict=True) if a == anchor for v, _ in pairs}
        for kind, most in ({kinds: -1} if isinstance(kinds, str) else kinds).items():
            if kind == "random":
                for number in range(most):
                    tries = (
                        random_target(graph, place, number, i, until, key, case.get("power"), rule) for i in range(64)
                    )
                    found.append(next(v for v in tries if (v, anchor) not in edges))
            elif kind == "in-batch":
                seen = {v for pairs in linked for v, time in pairs if time <= until} - own
                order = {
                    v: mix(mix((place * GOLDEN + (key ^ _IN_BATCH)) & MASK) ^ mix((v + GOLDEN) & MASK)) for v in seen
                }
                usable = sorted((v for v in seen if (v, anchor) not in edges), key=order.get)
                found += sorted(usable if most < 0 else usable[:most])
            elif kind == "hard":
                times = graph.node_attrs["paper"]["time"]
                row = [int(v) for v in graph.node_attrs["author"]["hard"][anchor] if v >= 0]
                row = [v for v in row if rule is None or rule.on == "edge" or times[v] <= until]
                found += row if most < 0 else row[:most]
            else:
                found += [v for v, _ in links(graph, kind, anchor, place, until, most, key, rule)]
        negatives.append(found)
    return [[v for v, _ in pairs] for pairs in linked], negatives


# The tests ------------------------------------------------------------------------------------------------------------


def loader_of(graph, case, world=1, rank=0):
    layout = {} if world == 1 else {"rank": rank, "layout": layout_of(world, graph.manifest.num_parts)}
    return DistAnchorNeighborLoader(graph, **COMMON, **case, batch_size=12 // world, **layout)


def pairs_of(batch, index):
    """Return the (anchor's position, other node) of positives or negatives."""
    return list(zip(index[0].tolist(), batch["paper"].n_id[index[1]].tolist(), strict=True))


@pytest.mark.parametrize("name", fast_cases(CASES, "drawn", "in-batch", "node times", "disjoint"))
def test_batches_equal_plain_python_for_any_ranks_and_hosts(graphs, plain, name):
    case = CASES[name]
    times = case.get("input_time", np.full(len(AUTHORS), FAR))
    for world in (1, 2, 3):
        places = []
        for rank in range(world):
            loader = loader_of(graphs["4 parts"][0], case, world, rank)
            batches, shares = list(loader), list(loader.shares(0))
            others = {1: ["1 part", "hosts", "client"], 2: ["client"], 3: ["hosts"]}[world]
            for graph in (graph for place in others for graph in graphs[place][: 1 if world > 1 else None]):
                assert_identical(list(loader_of(graph, case, world, rank)), batches)
            for share, batch in zip(shares, batches, strict=True):
                step = [(int(AUTHORS[p]), int(times[p])) for p in share.batch]
                check(plain, loader.settings, case, batch, share, step)
                places += [(share.step, place) for place in share.places.tolist()]
        assert sorted(places) == [(at // 12, at % 12) for at in range(len(AUTHORS))]


def check(plain, settings, case, batch, share, step):
    positives, negatives = expected(plain, case, step, share.key, settings.time)
    ids = [step[place][0] for place in share.places]
    assert batch["author"].batch_size == len(ids) and batch["author"].n_id[: len(ids)].tolist() == ids
    assert batch["author"].input_id.tolist() == share.positions.tolist()
    link = batch[WRITES]
    for found, index in ((positives, link.pos_edge_label_index), (negatives, link.get("neg_edge_label_index"))):
        rows = [(at, v) for at, place in enumerate(share.places) for v in found[place]]
        assert rows == ([] if index is None else pairs_of(batch, index))

    # the subgraph is that of the anchors, then the other nodes
    others = [(place, v, 1 + 2 * j + kind) for kind, found in enumerate((positives, negatives))
              for place in share.places for j, v in enumerate(found[place])]  # fmt: skip
    seeds = {"author": np.array(ids), "paper": np.array(sorted({v for _, v, _ in others}))}
    trees = when = {}
    if settings.disjoint:
        seeds["paper"] = np.array([v for _, v, _ in others])
        trees = {"author": share.places, "paper": np.array([place + role * ROLE for place, _, role in others])}
        when = {"author": [step[p][1] for p in share.places], "paper": [step[p][1] for p, _, _ in others]}
    barred = np.array([(v, a) for (a, _), found in zip(step, positives, strict=True) for v in found]).reshape(-1, 2).T
    exclude = {None: {}, "self": {WRITES: barred}, "both": {WRITES: barred, REV: barred[::-1]}}[case.get("exclude")]
    seed_set = SeedSet(seeds, trees, {of: np.array(t) for of, t in when.items()}, exclude)
    reference = plain_sample(plain, seed_set, settings, share.key)
    assert batch["paper"].n_id[: len(seeds["paper"])].tolist() == seeds["paper"].tolist()
    for of in ("author", "paper"):
        names = [node for level in reference.levels[of] for node in level]
        assert sorted(node for _, node in names) == sorted(batch[of].n_id.tolist())
        if settings.disjoint:
            owner = [*range(len(ids)), *(share.places.tolist().index(place) for place, _, _ in others)]
            known = sorted((owner[tree], node) for tree, node in names)
            assert known == sorted(zip(batch[of].batch.tolist(), batch[of].n_id.tolist(), strict=True))
    for of in plain.edges:
        rows = []
        for hop in range(2):
            for (tree, node), (edges, _) in reference.rows[of, hop].items():
                repeats = ids.count(node) if tree is None and hop == 0 and of[2] == "author" else 1
                rows += list(edges) * repeats
        assert sorted(rows) == sorted(batch[of].e_id.tolist())


def test_in_a_homogeneous_graph_positives_are_the_neighbours():
    data = homo_data()
    loader = DistAnchorNeighborLoader(data, [2], negatives={"in-batch": -1}, batch_size=9, exclude="both")
    for batch in loader:
        anchors = batch.n_id[: batch.batch_size].tolist()
        rows = batch.n_id[batch.pos_edge_label_index]
        src, dst = data.edge_index.tolist()
        edges = sorted((b, a) for a, b in zip(src, dst, strict=True) if b in anchors)
        assert sorted(zip(*rows.tolist(), strict=True)) == edges
        of_anchor = {a: {w for v, w in edges if v == a} for a in anchors}
        far, near = batch.n_id[batch.neg_edge_label_index].tolist()
        every = set().union(*of_anchor.values())
        assert sorted(zip(far, near, strict=True)) == sorted(
            (a, w) for a in anchors for w in every - of_anchor[a] - {a}
        )


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"edge_type": None}, "pass edge_type"),
        ({"edge_type": ("paper", "cites", "venue")}, "edge_type: .* is not an edge type"),
        ({"edge_type": SHOWN}, "pass the type of the reverse edges as reverse_type"),
        ({"reverse_type": ("paper", "cites", "paper")}, "does not lead from"),
        ({"exclude": "all"}, "'self' or 'both'"),
        ({"negatives": "hardest"}, "none of 'random', 'in-batch'"),
        ({"negatives": {("paper", "cites", "paper"): 2}}, "is not between 'author' and 'paper'"),
        ({"negatives": {"random": -1}}, "at least 0"),
        ({"negatives": ["random", "in-batch"]}, "several kinds as a mapping"),
        ({"power": 0.5}, "no effect without 'random'"),
        ({"avoid_links": True}, "no effect without"),
        ({"time_attr": "edge_time"}, "pass input_time"),
    ],
)
def test_invalid_arguments_are_refused(how, message):
    with pytest.raises(SettingsError, match=message):
        DistAnchorNeighborLoader(typed_data(), [2], **{"edge_type": WRITES, **how})


def test_given_negatives_that_are_no_nodes_are_an_error():
    data = typed_data()
    data["author"].hard[7, 1] = COUNTS["paper"]
    with pytest.raises(DataError, match="'hard' of 'author' node 7 has 70, but ids of 'paper' nodes go from 0 to 69"):
        next(iter(DistAnchorNeighborLoader(data, [2], WRITES, negatives="hard", batch_size=40)))
