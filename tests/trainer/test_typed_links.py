"""Links of several edge types: decoders with weights per relation, and filtered ranks, against plain references."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.nn import kge

from gateway_kit import cluster_file, serving_parts
from train_kit import curve, job, metrics, run_ranks
from trainer.core.errors import DataError, SettingsError
from trainer.core.graph_attrs import encode_texts
from trainer.core.ranks import Ranks, join_ranks
from trainer.data.memory import dataset_of
from trainer.graph.open import open_graph
from trainer.infer.infer import infer
from trainer.loader.block_loader import LoaderSettings
from trainer.loader.edge_endpoints import StoredEndpoints
from trainer.loader.typed_link_loader import TypedLinkLoader, TypedLinks
from trainer.nn.relation_decoders import RELATION_DECODERS
from trainer.partition.methods.assign import assign_parts
from trainer.partition.write import write_partition
from trainer.train.checkpoint import load_checkpoint
from trainer.train.job import layout_of, train
from trainer.train.model import trained_model
from trainer.train.settings import InferJob, TrainJob

#: Two types of nodes; two relations between the same nodes, and one between the types.
SIZES = {"drug": 40, "gene": 70}
TYPES = (("drug", "binds", "gene"), ("drug", "blocks", "gene"), ("gene", "acts", "gene"))
NAMES = ("mrr", "hits@1", "hits@3", "hits@10")
SMALL: dict[str, Any] = {
    "model": "embedding", "task": "link", "decoder": "complex", "hidden": 8, "batch_size": 64, "negatives": 20,
    "eval_negatives": "all", "epochs": 2, "lr": 0.05, "metrics": NAMES,
}  # fmt: skip


def links_of() -> dict[tuple[str, str, str], dict[str, np.ndarray]]:
    rng, found = np.random.default_rng(0), {}
    for of in TYPES:
        pairs = np.stack([rng.integers(0, SIZES[of[0]], 260), rng.integers(0, SIZES[of[2]], 260)])
        pairs = np.unique(pairs, axis=1)
        pairs = pairs[:, rng.permutation(pairs.shape[1])]
        found[of] = {"val": pairs[:, :30], "test": pairs[:, 30:90], "train": pairs[:, 90:]}
    return found


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    data, links, held = HeteroData(), links_of(), {}
    for of, count in SIZES.items():
        data[of].num_nodes = count
    for of in TYPES:
        data[of].edge_index = torch.from_numpy(links[of]["train"])
    for split in ("val", "test"):
        held[f"{split}_links"] = np.concatenate([links[of][split] for of in TYPES], axis=1)
        held[f"{split}_link_types"] = np.repeat(np.arange(3), [links[of][split].shape[1] for of in TYPES])
    held["held_out_type"] = encode_texts(["__".join(of) for of in TYPES])
    folders = {}
    for num_parts in (1, 4):
        dataset = dataset_of(data, "drugs")
        dataset = replace(dataset, graph_attrs={**dataset.graph_attrs, **held}, fingerprint="drugs")
        folders[num_parts] = tmp_path_factory.mktemp("drugs") / f"parts{num_parts}"
        write_partition(dataset, assign_parts(dataset, num_parts, "hash"), folders[num_parts])
    return folders


def filtered(score: Any, split: str) -> dict[str, float]:
    """Rank link by link. ``score``: from (relation, sources, targets), original ids, to scores."""
    ranks = []
    for number, of in enumerate(TYPES):
        links = links_of()[of]
        known = {tuple(pair) for each in links.values() for pair in each.T.tolist()}
        for src, dst in links[split].T.tolist():
            for side, size in ((1, SIZES[of[2]]), (0, SIZES[of[0]])):
                own = (src, dst)[side]
                every = [(src, k) if side else (k, dst) for k in range(size)]
                others = [pair for pair in every if pair[side] == own or pair not in known]
                values = score(number, torch.tensor(others))
                mine = values[[pair[side] for pair in others].index(own)]
                ranks.append(1 + float((values > mine).sum()) + float((values == mine).sum() - 1) / 2)
    found = np.array(ranks)
    return {"mrr": (1 / found).mean(), **{f"hits@{k}": (found <= k).mean() for k in (1, 3, 10)}}


@pytest.mark.parametrize("name", RELATION_DECODERS)
def test_scores_are_those_of_torch_geometric_from_both_ends(name: str) -> None:
    torch.manual_seed(0)
    decoder, rows = RELATION_DECODERS[name](3, 8), torch.randn(6, 8)
    head, relation, tail = torch.tensor([0, 1, 5]), torch.tensor([2, 0, 1]), torch.tensor([3, 4, 2])
    kinds: dict[str, Any] = {"distmult": kge.DistMult, "complex": kge.ComplEx, "rotate": kge.RotatE}
    if name == "transe":  # torch_geometric normalizes the rows
        wanted = decoder.margin - (rows[head] + decoder.relation[relation] - rows[tail]).norm(dim=1)
    else:
        arguments = {"margin": decoder.margin} if name == "rotate" else {}
        width = 8 if name == "distmult" else 4
        plain = kinds[name](6, 3, width, **arguments)
        plain.node_emb.weight.data = rows[:, :width].clone()
        plain.rel_emb.weight.data = decoder.relation.data[:, :width].clone()
        if name != "distmult":
            plain.node_emb_im.weight.data = rows[:, 4:].clone()
        if name == "complex":
            plain.rel_emb_im.weight.data = decoder.relation.data[:, 4:].clone()
        wanted = plain(head, relation, tail)
    torch.testing.assert_close(decoder.score(rows[head], rows[tail], relation), wanted)
    backward = decoder.pair_scores(decoder.query(rows[tail], relation + 3), rows[head])
    torch.testing.assert_close(backward, wanted)
    each = decoder.all_scores(decoder.query(rows[head], relation), rows)
    torch.testing.assert_close(each.gather(1, tail[:, None])[:, 0], wanted)
    torch.testing.assert_close(decoder.score(rows[head][:, None], rows[None, :3], relation), each[:, :3])


def test_ranks_resume_and_predictions(graphs: dict[int, Path], tmp_path: Path) -> None:
    given = {**SMALL, "decoder": "rotate"}
    result = train(job(graphs[4], tmp_path / "run", **given))
    trained, embedding = trained_model(load_checkpoint(result.checkpoint))
    rows = {
        of: each.double() for of, each in embedding.lookup({of: torch.arange(n) for of, n in SIZES.items()}).items()
    }

    def score(number: int, pairs: Tensor) -> Tensor:
        src, dst = rows[TYPES[number][0]][pairs[:, 0]], rows[TYPES[number][2]][pairs[:, 1]]
        return trained.decoder.score(src, dst, number).detach().float()

    # The ranks are those of scores that are computed link by link.
    assert result.test == pytest.approx(filtered(score, "test"), abs=1e-9)
    # Beside them stand those of the nodes with most links.
    (line,) = metrics(tmp_path / "run", "result")
    baseline = {name: line[f"baseline_test_{name}"] for name in NAMES}
    assert baseline == pytest.approx(filtered(popularity, "test"), abs=1e-9)
    assert line["baseline"] == "the nodes with most links"

    first = tmp_path / "run" / "checkpoints" / "epoch-0001.pt"
    again = train(job(graphs[1], tmp_path / "again", **given, resume=str(first)))
    assert again.step_loss[1].tolist() == pytest.approx(result.step_loss[1].tolist(), rel=1e-6)

    file, out = tmp_path / "facts.csv", tmp_path / "out"
    file.write_text("drug,gene,fact\n3,5,blocks\n3,5,drug__binds__gene\n9,2,acts\n")
    ended = infer(InferJob(result.checkpoint, graphs[4], out, top_k=4, pairs=file, parquet=False))
    assert ended.metrics["test"] == pytest.approx(result.test, abs=1e-9)
    with (out / "pairs.csv").open() as written:
        scores = [float(row["score"]) for row in csv.DictReader(written)]
    wanted = [float(score(number, torch.tensor([pair]))) for number, pair in ((1, (3, 5)), (0, (3, 5)), (2, (9, 2)))]
    assert scores == pytest.approx(wanted, abs=1e-4)
    known = set(map(tuple, links_of()[TYPES[2]]["train"].T.tolist()))
    with (out / "gene__acts__gene" / "predictions.csv").open() as written:
        best = [int(row["target"]) for row in csv.DictReader(written) if row["source"] == "7"]
    new = torch.tensor([(7, k) for k in range(SIZES["gene"]) if k != 7 and (7, k) not in known])
    assert best == new[score(2, new).argsort(descending=True)[:4], 1].tolist()
    assert np.load(out / "relations.npy").shape == (3, 4)
    file.write_text("3,5,heals\n")
    with pytest.raises(DataError, match="edge type 'heals' in row 1"):
        infer(InferJob(result.checkpoint, graphs[4], tmp_path / "none", pairs=file))


@pytest.mark.slow
def test_training_is_that_of_one_rank(graphs: dict[int, Path], tmp_path: Path) -> None:
    given = {**SMALL, "model": "rsage", "fanouts": (3,), "dropout": 0.2, "eval_negatives": 15, "epochs": 1}
    one = train(job(graphs[1], tmp_path / "one", **given))
    for each in run_ranks(3, job(graphs[4], tmp_path / "three", **given)):
        assert each.returncode == 0, each.output
    assert curve(tmp_path / "three") == pytest.approx(one.step_loss[0].tolist(), rel=1e-5)
    (result,) = metrics(tmp_path / "three", "result")
    assert {name: result[f"test_{name}"] for name in NAMES} == pytest.approx(one.test, rel=1e-3)
    (alone,) = metrics(tmp_path / "one", "result")
    for name in NAMES:
        assert result[f"baseline_test_{name}"] == pytest.approx(alone[f"baseline_test_{name}"], abs=1e-12)
    # Ranked among few that are drawn, an answer is nearer to the top than among all.
    assert alone["baseline_test_mrr"] > 1.5 * filtered(popularity, "test")["mrr"]


def popularity(number: int, pairs: Tensor) -> Tensor:
    """Return the number of train links of both ends; in a ranking, one of them is the same for all pairs."""
    of, links = TYPES[number], links_of()[TYPES[number]]["train"]
    counts = [np.bincount(links[end], minlength=SIZES[of[2 * end]]) for end in (0, 1)]
    return torch.from_numpy(counts[0][pairs[:, 0]] + counts[1][pairs[:, 1]]).double()


@pytest.mark.slow
def test_a_client_without_parts_trains_and_predicts_the_same(
    graphs: dict[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = train(job(graphs[1], tmp_path / "alone", **SMALL))
    with serving_parts(graphs[4]) as servers:
        cluster = cluster_file(tmp_path / "cluster.json", servers, {2: [0]})
        monkeypatch.setenv("NODE_RANK", "2")
        found = train(TrainJob(job(graphs[4], tmp_path, **SMALL).settings, None, tmp_path / "client", (), cluster))
        assert found.test == pytest.approx(alone.test, rel=1e-6)
        assert curve(tmp_path / "client") == pytest.approx(curve(tmp_path / "alone"), rel=1e-6)
        ended = infer(InferJob(found.checkpoint, None, tmp_path / "out", (), cluster, top_k=3))
        assert ended.metrics["test"] == pytest.approx(alone.test, rel=1e-6)


def test_queries_share_negatives_of_their_answers_type(graphs: dict[int, Path]) -> None:
    with open_graph(graphs[4]) as graph, join_ranks(Ranks.from_env({}), torch.device("cpu"), "gloo", 60) as group:
        ends = tuple(StoredEndpoints(graph, of) for of in TYPES)
        settings, layout = LoaderSettings("train", (2,), 64, shuffle=True), layout_of(graph, group)
        loader = TypedLinkLoader(graph, settings, TypedLinks(TYPES, ends), 50, True, True, 0, layout)
        edges = {of: set(map(tuple, links_of()[of]["train"].T.tolist())) for of in TYPES}
        seen = []
        for batch in loader.epoch(1):
            links = batch.links
            names = [(of, int(k)) for of in links.types for k in batch.n_id[of][: batch.num_nodes[of][0]]]
            assert len(links.src) == 2 * batch.num_seeds and links.per_link == 2
            for k, number in enumerate(links.relation.tolist()):
                of, back = TYPES[number % 3], number >= 3
                asked, answer = names[links.src[k]], names[links.dst[k]]
                source, target = (answer, asked) if back else (asked, answer)
                assert (source[0], target[0]) == of[::2] and (source[1], target[1]) in edges[of]
                others, left_out = links.negatives[links.group[k]].tolist(), links.equal[k].tolist()
                assert sum(left_out) >= (10 if answer[0] == "drug" else 0)  # there are 40 drugs, each once
                for other, out in zip(others, left_out, strict=True):
                    assert out or (names[other][0] == answer[0] and names[other] != answer)
                seen.append((number, source[1], target[1]))
            hidden = {(of, *pair) for of, pair in ((TYPES[n % 3], p) for n, *p in seen[-len(links.src) :])}
            for of, block in batch.blocks[0].items():
                to = torch.arange(block.num_dst).repeat_interleave(block.indptr.diff())
                src, dst = batch.n_id[of[0]][block.indices.long()], batch.n_id[of[2]][to]
                assert not hidden.intersection((of, s, t) for s, t in zip(src.tolist(), dst.tolist(), strict=True))
        wanted = [(n + back, *pair) for n, of in enumerate(TYPES) for pair in edges[of] for back in (0, 3)]
        assert sorted(seen) == sorted(wanted)


def test_several_types_with_dot_products_rank_targets_only(graphs: dict[int, Path], tmp_path: Path) -> None:
    given = {**SMALL, "decoder": "dot", "target": "drug__binds__gene,drug__blocks__gene", "epochs": 1}
    result = train(job(graphs[1], tmp_path / "run", **{**given, "metrics": ("mrr", "recall@5")}))
    _, embedding = trained_model(load_checkpoint(result.checkpoint))
    rows = embedding.lookup({of: torch.arange(n) for of, n in SIZES.items()})
    scores, found = (rows["drug"].double() @ rows["gene"].double().t()).float(), []
    for of in TYPES[:2]:
        links = links_of()[of]
        known = {tuple(pair) for each in links.values() for pair in each.T.tolist()}
        for src, dst in links["test"].T.tolist():
            others = [k for k in range(SIZES["gene"]) if k != dst and (src, k) not in known]
            found.append(1 / (1 + float((scores[src, others] > scores[src, dst]).sum())))
    assert result.test["mrr"] == pytest.approx(np.mean(found), abs=1e-9)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"decoder": "rotate", "hidden": 7}, "hidden must be even, not 7"),
        ({"decoder": "complex", "task": "classification"}, "scores links"),
        ({"loss": "in-batch"}, "is not for loss in-batch; use softmax"),
        ({"target": "drug__binds__gene,drug__heals__gene"}, "target is 'drug__heals__gene'"),
        ({"layers": 2}, "model embedding has none"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    graphs: dict[int, Path], tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        train(job(graphs[1], tmp_path / "run", **{**SMALL, **given}))
