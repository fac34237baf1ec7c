"""Tests of neighbours by personalised PageRank and by random walks, beside NetworkX, torch_geometric and a walker."""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise

import networkx as nx
import numpy as np
import pytest
import scipy
import torch
from torch_geometric.data import Data
from torch_geometric.utils import ppr as pyg_ppr
from torch_geometric.utils import sort_edge_index, to_undirected

from fast_cases import fast_cases
from load_kit import CITES, REV, WRITES, assert_same, hetero_data, homo_data, parts_of
from partitions import typed_store
from samplers_kit import TWO_HOSTS, assert_same_everywhere, over_the_wire
from train_kit import curve, job, run_ranks, write_parts
from trainer import DistPPRLoader, DistWalkLoader
from trainer.core.errors import DataError, SettingsError
from trainer.core.ranks import Ranks
from trainer.core.schema import HOMO_EDGE
from trainer.infer.infer import infer
from trainer.sampler import ruled_hops
from trainer.sampler.dist_graph import DistGraph
from trainer.sampler.in_edges import InEdgesOf, Walked
from trainer.sampler.local_graph import LocalGraph
from trainer.sampler.rule_types import PPR
from trainer.sampler.rules import rule_edges
from trainer.sampler.types import SampleSettings, SeedSet, TimeRule
from trainer.train.job import train
from trainer.train.model import load_model
from trainer.train.settings import InferJob, TrainSettings

SEEDS = torch.tensor([7, 3, 12, 3, 40])


def in_edges_of(data, edge_types=None, weight=None):
    """Return source -> weight of the in-edges of each node. A node is (type, id)."""
    found = defaultdict(Counter)
    typed = not isinstance(data, Data)
    for store in data.edge_stores:
        of = store._key if typed else ("node", "to", "node")
        if edge_types and of not in edge_types:
            continue
        weights = store[weight].tolist() if weight else [1.0] * store.num_edges
        for (u, v), w in zip(store.edge_index.T.tolist(), weights, strict=True):
            found[of[2], v][of[0], u] += w
    return found


def exact_ranks(edges, seed, alpha):
    """Return NetworkX's PageRank of all nodes. It sends walks at nodes without in-edges back to the seed: a factor."""
    steps = nx.DiGraph()
    steps.add_node(seed)
    for v, sources in edges.items():
        steps.add_weighted_edges_from((v, u, w) for u, w in sources.items() if w > 0)
    return nx.pagerank(steps, 1 - alpha, {seed: 1}, max_iter=10_000, tol=1e-14)


def scores_of(batch, hetero):
    """Return node -> score for each seed, by its position in the batch."""
    found = defaultdict(dict)
    for of in batch.edge_types if hetero else [("node", "to", "node")]:
        store, nodes = (batch[of], batch[of[0]].n_id) if hetero else (batch, batch.n_id)
        for source, seed, score in zip(*store.edge_index.tolist(), store.edge_weight.tolist(), strict=True):
            found[seed][of[0], int(nodes[source])] = score
    return found


GRAPHS = {
    "directed": (homo_data(), {}),
    "weighted": (homo_data(), {"weight_attr": "edge_weight"}),
    "typed": (hetero_data(), {}),
    "typed, weighted": (hetero_data(), {"weight_attr": "edge_weight"}),
    "typed, some edges": (hetero_data(), {"edge_types": [CITES, WRITES]}),
}


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("alpha, eps", [(0.15, 1e-3), (0.5, 1e-6)])
def test_scores_are_below_those_of_networkx_by_less_than_the_bound(kind, alpha, eps):
    data, options = GRAPHS[kind]
    hetero = not isinstance(data, Data)
    inputs = ("paper", SEEDS) if hetero else SEEDS
    loader = DistPPRLoader(
        parts_of(data, 3), 500, inputs, alpha=alpha, eps=eps, loops=True, batch_size=len(SEEDS), **options
    )
    (batch,) = loader
    edges = in_edges_of(data, options.get("edge_types"), options.get("weight_attr"))
    degree = sum(store.num_edges for store in data.edge_stores)
    for position, found in scores_of(batch, hetero).items():
        seed = ("paper" if hetero else "node", int(SEEDS[position]))
        exact = exact_ranks(edges, seed, alpha)
        # the share of walks that are not lost, from the seed's own equation
        kept = alpha / (alpha + (1 - alpha) * sum(rank for v, rank in exact.items() if not sum(edges[v].values())))
        missing = {v: rank * kept - found.get(v, 0.0) for v, rank in exact.items()}
        assert min(missing.values()) > -1e-6 and sum(missing.values()) < eps * degree + 1e-5
        assert found.keys() <= exact.keys()
        if eps < 1e-5:
            mine = sorted(found.values(), reverse=True)[:20]
            assert np.allclose(mine, np.array(sorted(exact.values(), reverse=True)[: len(mine)]) * kept, atol=1e-4)


def test_scores_and_best_neighbours_equal_those_of_get_ppr():
    data, seeds, eps = homo_data(60, 150), torch.tensor([7, 40]), 1e-4
    del data.edge_attr, data.edge_weight, data.edge_time
    data.edge_index = to_undirected(data.edge_index, num_nodes=60)
    index = sort_edge_index(data.edge_index, num_nodes=60)
    degree = np.bincount(index[0], minlength=60)
    rowptr = np.concatenate([[0], np.cumsum(degree)])
    their_nodes, their_scores = pyg_ppr._get_ppr(rowptr, index[1].numpy(), 0.2, eps, seeds.numpy())
    (batch,) = DistPPRLoader(parts_of(data, 2), 60, seeds, alpha=0.2, eps=eps, loops=True, batch_size=2)
    bound = eps * degree.max()  # of an undirected graph: both scores are too low by less than this
    for position, found in scores_of(batch, False).items():
        theirs = dict(zip(their_nodes[position], their_scores[position], strict=True))
        assert all(abs(found.get(("node", v), 0) - theirs.get(v, 0)) < bound for v in range(60))
        best = sorted(theirs, key=theirs.get, reverse=True)[:10]
        for (_, mine), other in zip(list(found)[:10], best, strict=True):  # the same node, or of equal score
            assert abs(theirs[mine] - theirs[other]) < bound


def test_a_chain_has_the_scores_and_distances_of_its_formula():
    chain = Data(x=torch.zeros(5, 1), edge_index=torch.tensor([[1, 2, 3], [0, 1, 2]]), num_nodes=5)
    (batch,) = DistPPRLoader(chain, 9, torch.tensor([0, 4]), alpha=0.25, eps=1e-5, loops=True, batch_size=2)
    assert batch.n_id[batch.edge_index[0]].tolist() == [0, 1, 2, 3, 4] and batch.edge_index[1].tolist() == [
        0,
        0,
        0,
        0,
        1,
    ]
    assert torch.allclose(batch.edge_weight, torch.tensor([0.25, 0.1875, 0.140625, 0.10546875, 0.25]))
    assert batch.hops.tolist() == [0, 1, 2, 3, 0]
    (batch,) = DistPPRLoader(chain, 2, torch.tensor([0, 4]), alpha=0.25, eps=1e-5, batch_size=2, output="tokens")
    assert batch.n_id[batch.token].tolist() == [[1, 2], [0, 0]] and batch.token_mask.tolist() == [
        [True] * 2,
        [False] * 2,
    ]
    assert batch.token_hops.tolist() == [[1, 2], [0, 0]] and "edge_index" not in batch


EVERYWHERE = {
    "ppr": (DistPPRLoader, homo_data(), {"k": 6}),
    "ppr, weighted, two layers": (
        DistPPRLoader, homo_data(), {"k": [5, 3], "weight_attr": "edge_weight", "loops": True},
    ),
    "ppr, times of nodes": (DistPPRLoader, homo_data(), {"k": 6, "time_attr": "time"}),
    "ppr, times of edges": (
        DistPPRLoader, homo_data(), {"k": 6, "time_attr": "edge_time", "input_time": torch.arange(60) % 50},
    ),
    "ppr, tokens": (DistPPRLoader, homo_data(), {"k": 6, "output": "tokens"}),
    "ppr, subgraph": (DistPPRLoader, homo_data(), {"k": 6, "output": "subgraph"}),
    "ppr, typed": (DistPPRLoader, hetero_data(), {"k": [4, 2], "input_nodes": "paper", "weight_attr": "edge_weight"}),
    "ppr, typed, times": (DistPPRLoader, hetero_data(), {"k": 4, "input_nodes": "paper", "time_attr": "time"}),
    "walks": (DistWalkLoader, homo_data(), {"k": 6}),
    "walks, weighted, two layers": (DistWalkLoader, homo_data(), {"k": [4, 2], "weight_attr": "edge_weight"}),
    "walks, times": (DistWalkLoader, homo_data(), {"k": 6, "time_attr": "time", "output": "tokens"}),
    "walks, typed": (
        DistWalkLoader, hetero_data(), {"k": 4, "input_nodes": "paper", "metapath": [WRITES, REV], "num_walks": 9},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", EVERYWHERE)
@pytest.mark.filterwarnings("ignore")
def test_neighbours_are_bit_identical_everywhere(case):
    loader, data, options = EVERYWHERE[case]
    arguments = {"batch_size": 23, "shuffle": True, "seed": 4, **options}
    batches = assert_same_everywhere(lambda graph, **more: loader(graph, **more), data, **arguments)
    if case == "ppr, times of nodes":  # no neighbour is later than its seed
        for batch in batches:
            source, seed = batch.time[batch.edge_index]
            assert len(source) and (source <= seed).all()


REV_CITES = ("paper", "rev_cites", "paper")


def test_directions_are_those_of_the_edges_and_their_reverses():
    data = hetero_data()
    data[REV_CITES].edge_index = data[CITES].edge_index.flip(0)
    options = {"k": 300, "input_nodes": ("paper", SEEDS), "alpha": 0.3, "eps": 1e-6, "batch_size": len(SEEDS)}
    named = {"in": [WRITES, CITES], "out": [REV, REV_CITES], "both": [WRITES, CITES, REV, REV_CITES]}
    for direction, types in named.items():
        (expected,) = DistPPRLoader(data, edge_types=types, **options)
        for edge_types in (None, [CITES, WRITES]):
            (batch,) = DistPPRLoader(data, direction=direction, edge_types=edge_types, **options)
            assert_same(batch, expected)
    (batch,) = DistPPRLoader(data, direction="out", **options)
    cited = {v: {of[1] for of in sources} for (_, v), sources in in_edges_of(data, [REV_CITES]).items()}
    for position, found in scores_of(batch, True).items():
        nearest = {node for (_, node), _ in found.items()} & cited[int(SEEDS[position])]
        assert nearest == cited[int(SEEDS[position])] - {int(SEEDS[position])}


def test_a_direction_without_reverse_edges_names_the_option_that_makes_them():
    with pytest.raises(SettingsError, match="'rev_cites', 'paper'.* undirected: true and reverse_types: true"):
        DistPPRLoader(hetero_data(), 5, "paper", direction="both")
    with pytest.raises(SettingsError, match="partition it with option undirected: true, and leave direction out"):
        DistPPRLoader(homo_data(), 5, direction="out")


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("bounded", [False, True])
def test_edges_between_hidden_pairs_are_not_followed(typed, bounded):
    data, of = (hetero_data(), CITES) if typed else (homo_data(40, 300), HOMO_EDGE)
    store, node = (data[of], data["paper"]) if typed else (data, data)
    hidden = store.edge_index[:, ::3]
    pairs = {*zip(*hidden.tolist(), strict=True)}
    target, stays = of[2], torch.tensor([pair not in pairs for pair in zip(*store.edge_index.tolist(), strict=True)])
    left = data.edge_subgraph({of: stays} if typed else stays)
    seeds, time = np.arange(20), TimeRule("time", "node") if bounded else None
    rule = PPR(alpha=0.3, eps=1e-6)

    def scores(graph, exclude):
        types = rule_edges(rule, graph.manifest, [target], 1)
        settings = SampleSettings(
            dict.fromkeys(types, (200,)),
            weight=None if bounded else "edge_weight",
            time=time,
            disjoint=bounded,
            ask_again=False,
            rule=rule,
        )
        sampler = graph.sampler(settings, {}, ("", ()))
        ids = graph.store.to_global(target, seeds)
        times = {target: node.time[seeds].numpy()} if bounded else {}
        wrong = np.array([10**9])
        exclude = (wrong, wrong) if exclude is None else [graph.store.to_global(of[0], ends) for ends in exclude]
        exclude = {of: tuple(exclude)} if len(exclude) else {}
        found = sampler.sample(SeedSet({target: ids}, {target: seeds}, times, exclude), 5)
        return {
            (int(seed), each[0], int(found.rows[each[0]]["orig_id"][source])): float(score)
            for each, edges in found.subgraph.edges.items() if edges.scores is not None
            for source, seed, score in zip(edges.src, edges.dst(), edges.scores, strict=True)
        }  # fmt: skip

    expected = scores(parts_of(left, 2), ())
    exclude = hidden.flip(0).numpy()
    with over_the_wire(data) as wired:
        for graph in (parts_of(data, 3), wired):
            found = scores(graph, exclude)
            assert max(abs(found.get(key, 0) - expected.get(key, 0)) for key in {*found, *expected}) < 1e-3
        assert scores(parts_of(data, 3), exclude) == scores(wired, exclude)
        with pytest.raises(DataError, match="have ends that are no"):
            scores(wired, None)
    assert max(abs(value - expected.get(key, 0)) for key, value in scores(parts_of(data, 1), ()).items()) > 0.01


def test_a_push_that_meets_more_nodes_than_it_has_room_for_starts_again(monkeypatch):
    graph, options = parts_of(hetero_data(), 2), {"eps": 1e-5, "batch_size": 70}
    (expected,) = DistPPRLoader(graph, 5, "paper", **options)
    monkeypatch.setattr(ruled_hops, "_FIRST_BITS", 1)
    (batch,) = DistPPRLoader(graph, 5, "paper", **options)
    assert_same(batch, expected)


def test_a_graph_may_have_many_types_of_nodes():
    types = [f"t{number}" for number in range(130)]
    follows = [(source, "to", target) for source, target in pairwise(types)]
    store = typed_store(dict.fromkeys(types, 2), dict.fromkeys(follows, np.zeros((2, 1), np.int64)), 2)
    access = DistGraph(LocalGraph(store), {})
    nodes = np.arange(2)
    for opened in (store, replace(store, parts={0: store.parts[0]})):  # on one host, and as on one of two
        edges = InEdgesOf(opened)(Walked(tuple(follows), None, None))
        rows, _, numbers, _ = edges.view(access, "t129", nodes, True, {})
        assert rows.kind[numbers].tolist() == [129, 129] and rows.degree[numbers].tolist() == [1, 0]


@pytest.mark.parametrize("loader", [DistPPRLoader, DistWalkLoader])
def test_neighbours_do_not_depend_on_the_number_of_ranks(loader):
    graph, options = parts_of(homo_data(), 4), {"shuffle": True, "seed": 2}
    whole = list(loader(graph, 4, torch.arange(40), batch_size=9, **options))
    shares = [
        list(loader(graph, 4, torch.arange(40), batch_size=3, rank=rank, layout=TWO_HOSTS, **options))
        for rank in range(3)
    ]
    for batch, *own in zip(whole, *shares, strict=True):
        expected = {int(batch.n_id[v]): found for v, found in scores_of(batch, False).items()}
        assert expected == {int(each.n_id[v]): found for each in own for v, found in scores_of(each, False).items()}


def plain_walk(edges, seed, num_walks, length, restart, rng):
    """Return how often walks visit each node."""
    visits = Counter()
    for _ in range(num_walks):
        place = seed
        for step in range(length):
            if step and rng.random() < restart:
                place = seed
            sources = edges[place]
            if not sources:
                place = seed
                continue
            place = rng.choices(list(sources), list(sources.values()))[0]
            visits[place] += 1
    return visits


@pytest.mark.parametrize("weight", [None, "edge_weight"])
def test_visits_pass_a_chi_square_test_beside_a_plain_walker(weight):
    data, seed, walks = homo_data(30, 90), 3, 2000
    (batch,) = DistWalkLoader(
        data, 30, torch.tensor([seed]), num_walks=walks, length=3, restart=0.3, weight_attr=weight, loops=True, seed=5
    )
    found = Counter({v: int(count) for v, count in scores_of(batch, False)[0].items()})
    many = plain_walk(in_edges_of(data, None, weight), ("node", seed), 20 * walks, 3, 0.3, random.Random(1))
    assert found.keys() <= many.keys() and len(many) > 8
    # visits of one walk depend on each other, so compare fewer, independent ones: a third
    often = [v for v in many if many[v] > 300]
    mine, expected = (np.array([visits[v] for v in often], float) for visits in (found, many))
    assert scipy.stats.chisquare(mine / 3, expected * mine.sum() / expected.sum() / 3).pvalue > 1e-3
    share = sum(found.values()) / (walks * 3)
    assert abs(share - sum(many.values()) / (20 * walks * 3)) < 0.02  # of the steps that walks could take


def test_visits_of_a_metapath_are_nodes_of_its_first_type():
    data = hetero_data()
    loader = DistWalkLoader(
        data, 20, ("paper", torch.arange(10)), metapath=[WRITES, REV], num_walks=60, length=2, batch_size=10, loops=True
    )
    (batch,) = loader
    edges, reached = in_edges_of(data), defaultdict(set)
    for paper in range(10):
        new = {("paper", paper)}
        for _ in range(2):
            new = {end for author in {a for p in new for a in edges[p] if a[0] == "author"} for end in edges[author]}
            reached[paper] |= new
    assert batch.edge_types == [("paper", "walks", "paper")]
    scores = scores_of(batch, True)
    assert scores and all(found.keys() <= reached[int(batch["paper"].n_id[v])] for v, found in scores.items())


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda g: DistPPRLoader(g, 5, alpha=1.5), "alpha 1.5 and eps 0.0001; both must be above 0 and below 1"),
        (lambda g: DistPPRLoader(g, 5, eps=1e-9), "a seed could look at 7e+09 edges; use a larger eps"),
        (lambda g: DistPPRLoader(g, 5, alpha="x"), "ppr: alpha must be a number, not 'x'"),
        (lambda g: DistPPRLoader(g, 5, direction="inn"), "ppr: direction must be in, out, both or None, not 'inn'"),
        (lambda g: DistWalkLoader(g, 5, length=2.5), "walks: length must be a whole number, not 2.5"),
        (lambda g: DistPPRLoader(g, []), "k is empty; give the number of neighbours of each layer"),
        (lambda g: DistPPRLoader(g, 0), "k must be a whole number of at least 1"),
        (lambda g: DistPPRLoader(g, 5, weight_attr="cost"), "no edge type has the weight attribute 'cost'"),
        (lambda g: DistPPRLoader(g, 5, output="rows"), "expected one of edges, subgraph, tokens"),
        (lambda g: DistWalkLoader(g, 5, restart=1.0), "a restart from 0 to below 1"),
        (lambda g: DistWalkLoader(g, 5, num_walks=10**5), "400000 steps for each seed; at most 65536 are possible"),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be_are_refused(make, message):
    with pytest.raises(SettingsError, match=message.replace("+", r"\+")):
        make(parts_of(homo_data(), 2))


@pytest.mark.parametrize(
    "path, message",
    [
        (None, "several edge types; choose a metapath"),
        ([WRITES], "not a way back to its first node type"),
        ([CITES], "seeds are 'author' nodes, but the metapath has only 'paper'"),
    ],
)
def test_a_metapath_has_to_lead_back_to_the_seeds(path, message):
    with pytest.raises(SettingsError, match=message):
        DistWalkLoader(parts_of(hetero_data(), 2), 5, "author" if path == [CITES] else "paper", metapath=path)


def test_a_node_of_another_type_walks_round_the_metapath_from_its_type():
    graph, how = parts_of(hetero_data(), 2), {"input_nodes": "author", "num_walks": 9, "batch_size": 16}
    batches = zip(
        *(DistWalkLoader(graph, [4, 2], metapath=path, **how) for path in ([WRITES, REV], [REV, WRITES])), strict=True
    )
    for one, other in batches:
        assert one.edge_types == [("author", "walks", "author")] and one["author", "author"].edge_index.numel()
        assert_same(one, other)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"neighbors": "ppr", "model": "lightgcn"}, "neighbors: lightgcn does not read the scores that ppr gives"),
        ({"neighbors": {"name": "walks", "direction": "in"}}, "neighbors.direction: walks has no such key"),
        ({"neighbors": {"name": "ppr", "length": 3}}, "neighbors.length: ppr has no such key"),
        ({"neighbors": {"name": "ppr", "alpha": 1}}, "neighbors.alpha is 1.0; it must be less than 1"),
        ({"neighbors": "walks", "sampling": "cuda"}, "sampling: neighbours by walks are chosen by the CPU"),
        ({"model": "gcn", "time_attr": "at"}, "time_attr: model gcn divides messages by degrees in the whole graph"),
        ({"neighbors": "ppr", "replace": True}, "replace: has no effect with neighbors: ppr"),
    ],
)
def test_settings_of_training_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(SettingsError, match=re.escape(message)):
        TrainSettings(**settings)


def test_a_rule_lets_gcn_respect_times():
    assert TrainSettings(model="gcn", time_attr="at", neighbors="ppr").time_attr == "at"


MODELS_OF_SCORES = {
    "sage": {"neighbors": "ppr", "weight_attr": "edge_weight"},
    "torch_geometric.nn.GCN": {"neighbors": {"name": "walks", "num_walks": 20}},
    "gcn": {"neighbors": "ppr", "task": "link", "target": "node__to__node"},
}

PUSHED = {"name": "ppr", "eps": 1e-3}

AROUND = {
    "name": "walks", "num_walks": 10, "length": 2, "metapath": ("author__writes__paper", "paper__rev_writes__author"),
}  # fmt: skip

LEARNED = {
    "links": ("synthetic", "gat", {"task": "link", "neighbors": PUSHED, "eval_negatives": "all"}),
    "typed links": (
        "synthetic-hetero", "hgt",
        {"task": "link", "target": "paper__cites__paper,author__writes__paper", "neighbors": PUSHED},
    ),
    "links by walks": ("synthetic", "token-transformer", {"task": "link", "neighbors": {"name": "walks"}}),
    "links between two types by walks": (
        "synthetic-hetero", "rsage",
        {"task": "link", "target": "author__writes__paper", "epochs": 12, "neighbors": AROUND},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", fast_cases(LEARNED, "links"))
def test_links_are_learned_from_neighbours_by_a_rule(case, tmp_path):
    dataset, model, settings = LEARNED[case]
    of = "node__to__node" if dataset == "synthetic" else settings["target"].split(",")[0]
    parts = write_parts(tmp_path / "parts", 2, dataset, num_nodes=200, hold_out=of)
    result = train(
        job(parts, tmp_path / "run", model=model, lr=0.01, batch_size=400, **{"epochs": 4, **settings}), Ranks()
    )
    losses = curve(tmp_path / "run")
    assert result.test is not None and losses[-1] < losses[0]
    found = infer(InferJob(tmp_path / "run" / "checkpoints" / "last.pt", parts, tmp_path / "out"), Ranks())
    assert f"{model} was run on neighbours by {settings['neighbors']['name']} (5, 5)" in found.files
    if "walks" not in case:  # whose draws are those of another step
        assert found.metrics["test"] == pytest.approx(dict(result.test))
    loaded = load_model(tmp_path / "run")
    assert loaded.built_from["metrics"] and all(torch.isfinite(weight).all() for weight in loaded.parameters())


@pytest.mark.slow
def test_several_processes_train_on_the_same_neighbours_as_one(tmp_path):
    parts = write_parts(tmp_path / "parts", 2, edge_weight=True)
    for where in ("alone", "together"):
        jobs = [
            job(parts, tmp_path / where / model, model=model, epochs=2, **settings)
            for model, settings in MODELS_OF_SCORES.items()
        ]
        for ended in run_ranks(1 if where == "alone" else 2, *jobs):
            assert ended.returncode == 0, ended.output
    for model in MODELS_OF_SCORES:
        losses = curve(tmp_path / "alone" / model)
        np.testing.assert_allclose(curve(tmp_path / "together" / model), losses, rtol=1e-4)
        assert losses[-2] < losses[0]
