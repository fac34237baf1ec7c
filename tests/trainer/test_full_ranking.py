"""Links ranked among all targets, LightGCN, and the losses of links, against plain references."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import HeteroData
from torch_geometric.nn.models import LightGCN as ReferenceLightGCN

from fast_cases import fast_cases
from ports import free_port
from train_kit import curve, finish_all, infer_words, job, metrics, run_forked, run_ranks, start_words
from trainer.core.batch import LinkEnds
from trainer.core.errors import DataError, SettingsError
from trainer.core.graph_attrs import encode_texts
from trainer.core.ranks import Ranks, join_ranks
from trainer.data.memory import dataset_of
from trainer.graph.open import open_graph
from trainer.loader.block_loader import LoaderSettings
from trainer.loader.link_block_loader import LinkBlockLoader, LinkBlockSettings
from trainer.loader.link_seeds import link_inputs
from trainer.nn import link_embeddings
from trainer.nn.layerwise_inference import LayerRows, WholeGraph
from trainer.nn.link_embeddings import LinkEmbeddings
from trainer.partition.methods.assign import assign_parts
from trainer.partition.write import write_partition
from trainer.sampler.types import RowRequest
from trainer.train.checkpoint import load_checkpoint
from trainer.train.full_ranking import FullRanking, output_rows
from trainer.train.job import layout_of, one_host_layout, train
from trainer.train.model import trained_model
from trainer.train.settings import InferJob, TrainSettings
from trainer.train.tasks.link import LinkPrediction
from trainer.train.tasks.task import Labels

LIKES = ("user", "likes", "item")
USERS, ITEMS = 60, 45
NAMES = ("recall@5", "ndcg@5", "precision@5", "map@5", "mrr", "hits@3", "auc")
SMALL: dict[str, Any] = {
    "model": "lightgcn", "task": "link", "target": "user__likes__item", "hidden": 8, "fanouts": (-1, -1),
    "batch_size": 64, "eval_negatives": "all", "epochs": 2, "lr": 0.02,
}  # fmt: skip


def pairs_of(seed: int = 0, count: int = 700, repeats: bool = False) -> dict[str, np.ndarray]:
    """Random links by split. Some train links occur twice, and some users have links in one split only.

    repeats: whether test also has links of train and val, as of customers that buy again.
    """
    rng = np.random.default_rng(seed)
    users, items = rng.integers(0, USERS, count), np.minimum(rng.geometric(0.08, count) - 1, ITEMS - 1)
    links = np.unique(np.stack([users, items]), axis=1)
    links = links[:, rng.permutation(links.shape[1])]
    val, test, train = links[:, :60], links[:, 60:160], links[:, 160:]
    if repeats:
        test = np.concatenate([test, train[:, 20:40], val[:, :9]], axis=1)
    return {"train": np.concatenate([train, train[:, :9]], axis=1), "val": val, "test": test}


def shop(folder: Path, num_parts: int) -> Path:
    links = pairs_of(repeats=True)  # which are not ranked
    data = HeteroData()
    data["user"].num_nodes, data["item"].num_nodes = USERS, ITEMS
    data["user", "likes", "item"].edge_index = torch.from_numpy(links["train"])
    data["item", "rev_likes", "user"].edge_index = torch.from_numpy(links["train"][::-1].copy())
    dataset = dataset_of(data, "shop")
    held = {
        "val_links": links["val"],
        "test_links": links["test"],
        "held_out_type": encode_texts(["user__likes__item"]),
    }
    dataset = replace(dataset, graph_attrs={**dataset.graph_attrs, **held}, fingerprint="shop")
    write_partition(dataset, assign_parts(dataset, num_parts, "hash"), folder)
    return folder


def reference(scores: np.ndarray, split: str) -> dict[str, float]:
    """Compute the metrics link by link. scores: [USERS, ITEMS]."""
    links = {name: set(map(tuple, each.T.tolist())) for name, each in pairs_of().items()}
    seen = links["train"] | (links["val"] if split == "test" else set())
    every = links["train"] | links["val"] | links["test"]
    found: dict[str, list[float]] = {name: [] for name in NAMES}

    def rank(user: int, item: int, left_out: set[tuple[int, int]]) -> tuple[float, int]:
        others = [scores[user, j] for j in range(ITEMS) if j != item and (user, j) not in left_out]
        own = scores[user, item]
        return 1 + sum(s > own for s in others) + sum(s == own for s in others) / 2, len(others)

    for user in range(USERS):
        items = sorted(i for u, i in links[split] if u == user)
        ranks = sorted(rank(user, item, seen)[0] for item in items)
        near = [r for r in ranks if r <= 5]
        if items:
            found["recall@5"].append(len(near) / len(items))
            found["precision@5"].append(len(near) / 5)
            ideal = sum(1 / math.log2(2 + k) for k in range(min(5, len(items))))
            found["ndcg@5"].append(sum(1 / math.log2(1 + r) for r in near) / ideal)
            found["map@5"].append(sum((k + 1) / r for k, r in enumerate(near)) / min(5, len(items)))
        for item in items:
            r, others = rank(user, item, every)
            found["mrr"].append(1 / r)
            found["hits@3"].append(r <= 3)
            found["auc"].append((others + 1 - r) / others)
    return {name: float(np.mean(values)) for name, values in found.items()}


def given_scores(ties: bool) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    draw = (lambda *shape: rng.integers(-1, 2, shape)) if ties else (lambda *shape: rng.normal(size=shape))
    return draw(USERS, 4).astype(np.float32), draw(ITEMS, 4).astype(np.float32)


def _ranked(parts: str, out: str) -> None:
    """Rank given embeddings on all ranks, and write the metrics. A function of a process of its own."""
    link_embeddings._TARGETS, link_embeddings._RANKED = 13, 7  # several blocks
    ranks, found = Ranks.from_env(os.environ), []
    with join_ranks(ranks, torch.device("cpu"), "gloo", 60) as group, open_graph(parts) as graph:
        layout, settings = one_host_layout(graph, group), TrainSettings(**SMALL)
        whole = WholeGraph(graph, layout, group, Path(out))
        for ties in (False, True):
            rows = []
            for of, values in zip(("user", "item"), given_scores(ties), strict=True):
                own = [np.arange(piece.first, piece.last) for piece in whole.shares[of].own(group.rank)]
                wanted = RowRequest(of, np.concatenate([np.arange(0), *own]), ("orig_id",))
                ids = np.asarray(graph.access.gather([wanted])[0]["orig_id"], np.int64)
                rows.append(LayerRows(whole.shares[of], values[ids]))
            embeddings = LinkEmbeddings(graph, LIKES, group, *rows)
            for split in ("val", "test"):
                ranking = FullRanking(graph, LIKES, split, settings, layout, group, Path(out))
                found.append(ranking.metrics([embeddings], NAMES))
    if ranks.rank == 0:
        Path(out, "found.json").write_text(json.dumps(found))


@pytest.mark.parametrize(("num_parts", "ranks"), fast_cases([(1, 1), (4, 3)], (1, 1)))
def test_metrics_equal_a_reference_that_ranks_link_by_link(tmp_path: Path, num_parts: int, ranks: int) -> None:
    parts = shop(tmp_path / "parts", num_parts)
    for each in run_forked(_ranked, (str(parts), str(tmp_path)), ranks):
        assert each.returncode == 0, each.output
    found = iter(json.loads((tmp_path / "found.json").read_text()))
    for ties in (False, True):
        users, items = given_scores(ties)
        for split in ("val", "test"):
            assert next(found) == pytest.approx(reference(users @ items.T, split), abs=1e-12)


def test_metrics_of_sources_are_those_of_torch_geometric(tmp_path: Path) -> None:
    users, items = given_scores(ties=False)
    scores = torch.from_numpy(users @ items.T)
    links = pairs_of()
    for split in ("train", "val"):
        scores[tuple(torch.from_numpy(links[split]))] = -torch.inf
    test = torch.from_numpy(links["test"])
    some, row = test[0].unique(return_inverse=True)
    best, found = scores[some].topk(5).indices, reference(users @ items.T, "test")
    # here, as it loads scipy.signal, for which each worker of pytest would need a second
    from torch_geometric.metrics import LinkPredMAP, LinkPredNDCG, LinkPredPrecision, LinkPredRecall

    kinds = {"recall": LinkPredRecall, "ndcg": LinkPredNDCG, "precision": LinkPredPrecision, "map": LinkPredMAP}
    for name, kind in kinds.items():
        metric = kind(5)
        metric.update(best, torch.stack([row, test[1]]))
        assert float(metric.compute()) == pytest.approx(found[f"{name}@5"], abs=1e-6)


def test_lightgcn_is_that_of_torch_geometric_by_batch_and_by_layer(tmp_path: Path) -> None:
    parts = shop(tmp_path / "parts", 2)
    result = train(job(parts, tmp_path / "run", **{**SMALL, "epochs": 1}))
    saved = load_checkpoint(result.checkpoint)
    model, embedding = trained_model(saved)
    links = pairs_of()["train"]
    plain = ReferenceLightGCN(USERS + ITEMS, 8, num_layers=2)
    plain.embedding.weight.data = torch.cat([embedding.lookup({of: torch.arange(n)})[of] for of, n in
                                             (("user", USERS), ("item", ITEMS))]).detach()  # fmt: skip
    both = torch.from_numpy(np.stack([links[0], links[1] + USERS]))
    wanted = plain.get_embedding(torch.cat([both, both.flip(0)], 1)).detach()
    with open_graph(parts) as graph, join_ranks(Ranks.from_env({}), torch.device("cpu"), "gloo", 60) as group:
        layout = layout_of(graph, group)
        rows = output_rows(model, LIKES, graph, TrainSettings(**SMALL), layout, tmp_path, group)
        for of, first, count in (("user", 0, USERS), ("item", USERS, ITEMS)):
            ids = graph.store.to_global(of, np.arange(count))
            torch.testing.assert_close(rows[of].fetch(ids), wanted[first : first + count])
        inputs = link_inputs(graph, (LIKES, pairs_of()["test"]))
        loading = LoaderSettings("test", (-1, -1), 4096, target="item", want_degree=True)
        loader = LinkBlockLoader(graph, loading, inputs, LinkBlockSettings(100, hide=False), 0, layout)
        (batch,) = loader.epoch(0)
        seeds = model.encoder.seed_rows(batch)
        torch.testing.assert_close(seeds["user"], wanted[batch.n_id["user"][: len(seeds["user"])]])
        torch.testing.assert_close(seeds["item"], wanted[USERS + batch.n_id["item"][: len(seeds["item"])]])


@pytest.mark.parametrize("loss", [pytest.param("bpr", marks=pytest.mark.slow), "in-batch"])
def test_the_curve_and_the_metrics_are_those_of_one_rank(tmp_path: Path, loss: str) -> None:
    parts, runs = shop(tmp_path / "parts", 4), [tmp_path / "one", tmp_path / "three"]
    for ranks, run in zip((1, 3), runs, strict=True):
        for each in run_ranks(ranks, job(parts, run, loss=loss, metrics=("ndcg@5", "mrr"), **SMALL)):
            assert each.returncode == 0, each.output
    assert curve(runs[1]) == pytest.approx(curve(runs[0]), rel=1e-6)
    results = [metrics(run, "result")[0] for run in runs]
    for name in ("test_ndcg@5", "test_mrr", "val_ndcg@5", "baseline_test_ndcg@5"):
        assert results[1][name] == pytest.approx(results[0][name], rel=1e-4)
    evals = metrics(runs[0], "eval")
    assert [line["split"] for line in evals] == ["val", "val", "test"] and "loss" not in evals[0]
    assert not list(runs[0].glob(".ranking*"))
    # inference ranks the same
    given = InferJob(runs[0] / "checkpoints" / "last.pt", parts, tmp_path / "out")
    (ended,) = finish_all([start_words([infer_words(given)], 0, 1, free_port())])
    assert ended.returncode == 0, ended.output
    found = json.loads((tmp_path / "out" / "infer.json").read_text())["metrics"]
    assert found["test"]["ndcg@5"] == pytest.approx(results[0]["test_ndcg@5"], rel=1e-6)


def test_the_baseline_ranks_by_the_number_of_links(tmp_path: Path) -> None:
    parts = shop(tmp_path / "parts", 2)
    train(job(parts, tmp_path / "run", metrics=NAMES, **SMALL))
    popular = np.bincount(pairs_of()["train"][1], minlength=ITEMS)
    wanted, (line,) = reference(np.tile(popular, (USERS, 1)), "test"), metrics(tmp_path / "run", "result")
    assert {name: line[f"baseline_test_{name}"] for name in NAMES} == pytest.approx(wanted, abs=1e-12)


def test_in_batch_negatives_are_corrected_and_never_known_targets(tmp_path: Path) -> None:
    with open_graph(shop(tmp_path / "parts", 2)) as graph:
        layout = layout_of(graph, _alone())
        counts = np.bincount(pairs_of()["train"][1], minlength=ITEMS).clip(1)
        log_q = np.log(counts / counts.sum()).astype(np.float32)
        loading = LoaderSettings("train", (2, 2), 64, target="item", shuffle=True)
        link = LinkBlockSettings(5, hide=True, log_q=log_q)
        loader = LinkBlockLoader(graph, loading, link_inputs(graph, (LIKES, None)), link, 0, layout)
        for batch in loader.epoch(1):
            ends: LinkEnds = batch.links
            users = batch.n_id["user"][ends.src].tolist()
            items, negatives = batch.n_id["item"][ends.dst].tolist(), batch.n_id["item"][ends.negatives].tolist()
            assert sorted(set(items)) == negatives
            of_batch = set(zip(users, items, strict=True))
            known = [[(user, item) in of_batch for item in negatives] for user in users]
            assert ends.equal.tolist() == known
            assert ends.log_q.tolist() == log_q[[*items, *negatives]].tolist()
            out = torch.randn(len(users), 1 + len(negatives))
            rows = [
                torch.tensor([out[i, 0] - log_q[items[i]]] + [out[i, 1 + j] - log_q[item]
                             for j, item in enumerate(negatives) if not known[i][j]])
                for i in range(len(users))
            ]  # fmt: skip
            wanted = sum(row.logsumexp(0) - row[0] for row in rows)
            assert float(LinkPrediction(8, loss="in-batch").loss_sum(out, batch)) == pytest.approx(
                float(wanted), rel=1e-5
            )


def _alone() -> Any:
    with join_ranks(Ranks.from_env({}), torch.device("cpu"), "gloo", 60) as group:
        return group


@pytest.mark.parametrize(("loss", "wanted"), [("bpr", 0.3132617), ("bce", 0.3132617 + 0.6931472)])
def test_losses_leave_out_the_target(loss: str, wanted: float) -> None:
    # The score of the link is 1, that of the negative 0; the second negative is the target itself.
    ends = LinkEnds("user", "item", torch.tensor([0]), torch.tensor([0]), torch.tensor([1, 0]))
    out = torch.tensor([[1.0, 0.0, 9.0]])
    assert float(LinkPrediction(8, loss=loss).loss_sum(out, Labels(links=ends))) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"eval_negatives": 10, "metrics": ("recall@20",)}, "recall@20 needs eval_negatives: all"),
        ({"metrics": ("recall@0",)}, "no metric 'recall@0'"),
        ({"early_stop": {"patience": 1, "metric": "loss"}}, "there is no loss on val"),
        ({"time_attr": "at", "model": "rsage"}, "have no attribute 'at'"),
        ({"task": "classification", "target": "user"}, "lightgcn is for task link, not classification"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    parts = shop(tmp_path / "parts", 1)
    with pytest.raises((SettingsError, DataError), match=message):
        train(job(parts, tmp_path / "run", **{**SMALL, **given}))


def test_hits_at_any_k_among_drawn_negatives(tmp_path: Path) -> None:
    parts = shop(tmp_path / "parts", 1)
    names = ("hits@7", "mrr")
    train(job(parts, tmp_path / "run", **{**SMALL, "eval_negatives": 20, "metrics": names, "epochs": 1}))
    (line,) = metrics(tmp_path / "run", "result")
    assert line["metric"] == "hits@7" and 0 <= line["test_hits@7"] <= 1 and "test_hits@1" not in line
