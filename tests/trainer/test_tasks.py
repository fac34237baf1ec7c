"""Tests of the tasks of the bundled trainer: regression, several labels per node, and links."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from graphs import graph
from kill_kit import killed_run
from train_kit import curve, job, metrics, run_ranks, write_parts
from trainer.core.batch import LinkEnds
from trainer.core.errors import DataError, SettingsError
from trainer.core.graph_attrs import encode_texts
from trainer.core.ranks import RankGroup, Ranks
from trainer.core.schema import HOMO_NODE
from trainer.core.train_config import METRICS
from trainer.graph.open import open_graph
from trainer.graph.seed_order import RankLayout
from trainer.loader.block_loader import LoaderSettings
from trainer.loader.link_block_loader import LinkBlockLoader, LinkBlockSettings
from trainer.loader.link_seeds import link_inputs
from trainer.partition.methods.assign import assign_parts
from trainer.partition.write import write_partition
from trainer.sources.load import load_dataset
from trainer.train.checkpoint import load_checkpoint
from trainer.train.job import train
from trainer.train.loaders import check_link_settings, link_loaders
from trainer.train.settings import TrainSettings
from trainer.train.tasks.choose import node_task, of_record
from trainer.train.tasks.choose_target import pick_target
from trainer.train.tasks.classification import Classification
from trainer.train.tasks.link import LinkPrediction
from trainer.train.tasks.multilabel import MultiLabel
from trainer.train.tasks.ranking import SplitScores, in_order
from trainer.train.tasks.regression import Regression
from trainer.train.tasks.task import Labels, Metric

ALONE = RankGroup(Ranks(), torch.device("cpu"))
NODES = 300
RNG = np.random.default_rng(0)
X = RNG.standard_normal((NODES, 4)).astype(np.float32)
SPLITS = {"train": np.arange(0, 180), "val": np.arange(180, 240), "test": np.arange(240, NODES)}

#: Edges (u, v) from 5 random nodes to each node, and the mean of the first feature of a node's neighbours.
EDGES = [(int(u), v) for v in range(NODES) for u in RNG.choice(NODES, 5, replace=False)]
MEAN = np.array([X[[u for u, w in EDGES if w == v], 0].mean() for v in range(NODES)])

PRICE = (5000 + 800 * (MEAN + X[:, 1])).astype(np.float32)  # a target of a scale that a model without scaling misses
LABELS = np.stack([MEAN > 0, X[:, 1] > 0, X[:, 2] > X[:, 3]], 1).astype(np.int8)
SOME = np.where(RNG.random(LABELS.shape) < 0.1, -1, LABELS).astype(np.int8)  # one label in ten is missing

SETTINGS: dict[str, Any] = {"epochs": 12, "fanouts": (5, 5), "hidden": 32, "lr": 0.01, "batch_size": 60, "dropout": 0.0}
LINKS: dict[str, Any] = {
    "task": "link", "model": "rsage", "epochs": 2, "fanouts": (4, 4), "lr": 0.01, "batch_size": 150, "negatives": 50,
    "eval_negatives": 100, "eval_batch_size": 64,
}  # fmt: skip
TIMED = {**LINKS, "time_attr": "edge_time", "temporal_strategy": "last"}


def parts_of(folder: Path, y: np.ndarray, splits: dict[str, np.ndarray] = SPLITS) -> Path:
    """Partition the graph of ``EDGES`` with the labels ``y``. Integer labels of shape [n] are classes."""
    data = graph(EDGES, NODES, {"x": X, "y": y}, splits=splits)
    classes = int(y.max()) + 1 if y.ndim == 1 and y.dtype.kind == "i" else 0
    data = replace(data, nodes={HOMO_NODE: replace(data.nodes[HOMO_NODE], num_classes=classes)})
    write_partition(data, assign_parts(data, 2, "hash"), folder)
    return folder


@pytest.fixture(scope="module")
def links(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("links") / "parts"
    options = {"hold_out": "paper__cites__paper", "homophily": 0.95, "noise": 0.3, "num_nodes": 300}
    return write_parts(folder, 2, "synthetic-hetero", **options)


# --- the choice of a task ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("y", "kind", "outputs"),
    [
        (np.arange(NODES) % 3, "classification", 3),
        (PRICE, "regression", 1),
        (np.stack([PRICE, MEAN], 1), "regression", 2),
        (LABELS, "multilabel", 3),
        (SOME, "multilabel", 3),
        (SOME.astype(np.float32), "regression", 3),  # -1 is missing only in integers
        (np.where(SOME < 0, np.nan, SOME).astype(np.float32), "multilabel", 3),
        (LABELS.astype(bool), "multilabel", 3),
    ],
)
def test_the_task_follows_from_the_labels(y: np.ndarray, kind: str, outputs: int, tmp_path: Path) -> None:
    with open_graph(parts_of(tmp_path / "parts", y)) as opened:
        target = pick_target(opened)
        assert target == HOMO_NODE
        task, why, _ = node_task(opened, target, TrainSettings(), tuple(SPLITS), ALONE)
    assert (task.kind, task.outputs) == (kind, outputs) and why.startswith("y is ")
    assert of_record(task.record()) == task


@pytest.mark.parametrize(
    ("y", "task", "message"),
    [
        (PRICE, "classification", "y must be one class per node for task classification, not float32"),
        (np.stack([PRICE, MEAN], 1), "multilabel", r"y must be a matrix of 0, 1 and missing .* with other values"),
        (np.where(np.arange(NODES) == 7, np.nan, PRICE), "auto", "1 seeds of the train split have no y, .* node 7;"),
        (np.where(np.arange(NODES) == 185, np.inf, PRICE), "auto", "1 seeds of the val split have an infinite y"),
        (np.arange(NODES) % 3, "link", "target is 'node'; task link needs an edge type"),
    ],
)
def test_labels_that_do_not_fit_the_task_are_refused(y: np.ndarray, task: str, message: str, tmp_path: Path) -> None:
    target = "node" if task == "link" else None
    with pytest.raises((DataError, SettingsError), match=message):
        train(job(parts_of(tmp_path / "parts", y), tmp_path / "run", task=task, target=target), Ranks())


# --- losses and metrics --------------------------------------------------------------------------------------


def test_regression_equals_numpy_and_leaves_out_missing_values() -> None:
    y = np.array([[1.0, 50.0], [np.nan, 70.0], [3.0, np.nan]])
    out = torch.tensor([[0.5, -1.0], [9.0, 0.0], [0.0, 9.0]])
    task = Regression((2.0, 60.0), (1.0, 10.0))
    labels = Labels(torch.from_numpy(y))
    predicted = out.numpy() * [1, 10] + [2, 60]
    error = predicted - y
    found = task.metrics(task.metric_sums(out, labels).tolist())
    assert found["mae"] == pytest.approx(np.nanmean(np.abs(error)))
    assert found["rmse"] == pytest.approx(math.sqrt(np.nanmean(error**2)))
    assert [found["mae_0"], found["mae_1"]] == pytest.approx(np.nanmean(np.abs(error), 0))
    squares = (out.numpy() - (y - [2, 60]) / [1, 10]) ** 2
    assert float(task.loss_sum(out, labels)) == pytest.approx(np.nanmean(squares, 1).sum())


def f1(right: np.ndarray, predicted: np.ndarray, true: np.ndarray) -> np.ndarray:
    return np.asarray(2 * right / np.maximum(predicted + true, 1))


def pairwise(scores: np.ndarray, true: np.ndarray) -> tuple[float, float]:
    """Return ROC-AUC over all pairs, and the mean precision among the seeds with at least a true seed's score."""
    pairs = scores[true][:, None] - scores[~true][None]
    precision = [true[scores >= score].mean() for score in scores[true]]
    return float((pairs > 0).mean() + (pairs == 0).mean() / 2), float(np.mean(precision))


def scored(task: Classification | MultiLabel, out: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
    """Return the metrics of two batches."""
    scores, sums = SplitScores(task), torch.zeros(task.num_sums, dtype=torch.float64)
    for some in (slice(0, 7), slice(7, None)):
        sums += task.metric_sums(out[some], Labels(y[some]))
        scores.add(out[some], Labels(y[some]))
    return in_order(task, task.metrics(sums.tolist()), scores.metrics(ALONE))


@pytest.mark.parametrize("classes", [2, 5])
def test_metrics_of_classes_equal_numpy(classes: int) -> None:
    y, names = RNG.integers(0, min(classes, 4), 60), METRICS["classification"][::-1]  # class 4 has no seed
    out = RNG.integers(-2, 3, (60, classes)).astype(np.float32)  # with equal scores
    out[:, 4:] -= 9  # never predicted
    found = scored(Classification(classes, names=names), torch.from_numpy(out), torch.from_numpy(y))
    assert [*found] == [*names]
    guess, present = torch.from_numpy(out).argmax(1).numpy(), [*range(min(classes, 4))]
    each = [f1(((guess == k) & (y == k)).sum(), (guess == k).sum(), (y == k).sum()) for k in present]
    assert found["macro_f1"] == pytest.approx(np.mean(each))
    assert found["micro_f1"] == found["accuracy"] == pytest.approx((guess == y).mean())
    p = torch.from_numpy(out).double().softmax(1).float().numpy()  # equal ones are equal, whatever was rounded before
    columns = [1] if classes == 2 else present
    area, precision = np.mean([pairwise(p[:, k], y == k) for k in columns], 0)
    assert (found["roc_auc"], found["average_precision"]) == pytest.approx((area, precision))


@pytest.mark.parametrize("classes", [2, 3])
def test_classes_are_ranked_beyond_the_digits_of_a_probability(classes: int) -> None:
    out, y = torch.tensor([[0.0, 20.0, 0.0], [0.0, 30.0, 0.0]])[:, :classes], torch.tensor([0, 1])
    assert out.softmax(1)[:, 1].tolist() == [1, 1]  # in float32
    task = Classification(classes, names=("roc_auc", "average_precision"))
    assert scored(task, out, y) == {"roc_auc": 1.0, "average_precision": 1.0}


def test_metrics_of_labels_equal_numpy_and_leave_out_missing_labels() -> None:
    y, names = RNG.integers(-1, 2, (60, 3)), METRICS["multilabel"]
    y[:, 2] = 1  # has no false seed, so its curve is undefined
    out = RNG.integers(-2, 3, (60, 3)).astype(np.float32)
    found = scored(MultiLabel(3, names), torch.from_numpy(out), torch.from_numpy(y))
    guess, known, true = out > 0, y >= 0, y == 1
    counts = [(guess & true).sum(0), (guess & known).sum(0), true.sum(0)]
    assert found["macro_f1"] == pytest.approx(f1(*counts).mean())
    assert found["micro_f1"] == pytest.approx(f1(*(np.array(count.sum()) for count in counts)))
    expected = np.mean([pairwise(out[known[:, k], k], true[known[:, k], k]) for k in (0, 1)], 0)
    assert (found["roc_auc"], found["average_precision"]) == pytest.approx(tuple(expected))
    assert math.isnan(scored(MultiLabel(3, ("roc_auc",)), torch.from_numpy(out), torch.ones(60, 3).long())["roc_auc"])
    assert Metric("roc_auc", "higher").improves(0.5, math.nan)


def test_an_output_of_nan_is_wrong_in_every_metric() -> None:
    y, nan = torch.tensor([0, 1, 0, 1]), torch.full((4, 2), math.nan)
    for task, labels in (
        (Classification(2, names=METRICS["classification"]), y),
        (MultiLabel(2, METRICS["multilabel"]), torch.stack([y, 1 - y], 1)),
    ):
        found = scored(task, nan, labels)
        assert found["average_precision"] == 0.5  # positives are last
        assert all(value == 0 for name, value in found.items() if name != "average_precision")
        one = scored(task, torch.tensor([[math.nan, 2.0], [2.0, -1.0], [2.0, -1.0], [-1.0, 2.0]]), labels)
        assert one["accuracy"] == 0.5 if isinstance(task, Classification) else one["accuracy"] < 0.75
    no_value = torch.tensor([[1.0, math.nan], [2.0, math.nan]])
    found = Regression((0.0, 0.0), (1.0, 1.0)).metrics(
        Regression((0.0, 0.0), (1.0, 1.0)).metric_sums(no_value.nan_to_num(), Labels(no_value)).tolist()
    )
    assert found["mae"] == found["mae_0"] == 0 and math.isnan(found["mae_1"])


def test_scores_that_do_not_fit_into_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.train.tasks.choose._MOST_SCORES", 100)
    message = "roc_auc: the scores of a split would take 0 MB on each process, more than 0 MB; leave them out"
    with pytest.raises(SettingsError, match=message):
        folder = parts_of(tmp_path / "parts", np.arange(NODES) % 3)
        train(job(folder, tmp_path / "run", metrics=("accuracy", "roc_auc")), Ranks())


def test_the_weighted_loss_equals_numpy() -> None:
    out, y, weights, smoothing = torch.randn(6, 3), torch.tensor([0, 2, 1, 1, 2, 0]), np.array([1.0, 0.5, 3.0]), 0.2
    wanted = np.eye(3)[y] * (1 - smoothing) + smoothing / 3
    expected = -(wanted * weights * out.double().log_softmax(1).numpy()).sum()
    task = Classification(3, tuple(weights), smoothing)
    assert float(task.loss_sum(out, Labels(y))) == pytest.approx(expected, rel=1e-5)
    assert float(task.loss_sum(out[:0], Labels(y[:0]))) == 0


def test_balanced_weights_are_inverse_shares_of_the_train_seeds(tmp_path: Path) -> None:
    y = np.where(np.arange(NODES) < 30, 0, 1 + np.arange(NODES) % 2)
    y[-1] = 4  # class 3 has no seed, class 4 no train seed
    with open_graph(parts_of(tmp_path / "parts", y)) as opened:
        settings = TrainSettings(class_weights="balanced")
        task, _, _ = node_task(opened, HOMO_NODE, settings, tuple(SPLITS), ALONE)
        assert isinstance(task, Classification)
        assert task.weights == pytest.approx((180 / 3 / 30, 180 / 3 / 75, 180 / 3 / 75, 1, 1))
        with pytest.raises(SettingsError, match="class_weights has 2 numbers, but .* has 5 classes"):
            node_task(opened, HOMO_NODE, TrainSettings(class_weights=(1.0, 2.0)), tuple(SPLITS), ALONE)


def test_multilabel_equals_numpy_and_leaves_out_missing_labels() -> None:
    logits, y = RNG.standard_normal((20, 3)), SOME[:20]
    task, labels = MultiLabel(3), Labels(torch.from_numpy(y))
    known, true, said = y >= 0, y == 1, logits > 0
    hits, wrong = (true & said & known).sum(), ((true != said) & known).sum()
    found = task.metrics(task.metric_sums(torch.from_numpy(logits), labels).tolist())
    assert found["micro_f1"] == pytest.approx(2 * hits / (2 * hits + wrong))
    assert found["accuracy"] == pytest.approx(1 - wrong / known.sum())
    each = np.where(true, np.log1p(np.exp(-logits)), np.log1p(np.exp(logits)))
    loss = sum(row[of].mean() for row, of in zip(each, known, strict=True) if of.any())
    assert float(task.loss_sum(torch.from_numpy(logits), labels)) == pytest.approx(loss)


def test_a_lower_error_and_a_higher_score_are_better() -> None:
    mae, f1 = Metric("mae", "lower"), Metric("micro_f1", "higher")
    assert mae.improves(0.1, 0.2) and not mae.improves(0.2, 0.1) and mae.improves(0.2, None)
    assert f1.improves(0.2, 0.1) and not f1.improves(0.1, 0.2)


def test_of_links_held_out_of_several_types_a_run_has_those_of_its_target(tmp_path: Path) -> None:
    data = load_dataset("synthetic-hetero", None, {"num_nodes": 200})
    cites, writes = "paper__cites__paper", "author__writes__paper"
    attrs = {
        "val_links": np.array([[1, 2, 3], [4, 5, 6]]), "val_link_types": np.array([0, 0, 1]),
        "test_links": np.array([[7], [8]]), "test_link_types": np.array([1]),
        "held_out_type": encode_texts([cites, writes]),
    }  # fmt: skip
    write_partition(replace(data, graph_attrs=attrs), assign_parts(data, 2, "hash"), tmp_path / "parts")
    with open_graph(tmp_path / "parts") as opened:
        assert pick_target(opened, task="link") == (("paper", "cites", "paper"), ("author", "writes", "paper"))
        target = pick_target(opened, writes)
        assert target == ("author", "writes", "paper")
        loaders = link_loaders(
            TrainSettings(fanouts=(2,)), opened, target, ("val", "test"), False, 0, RankLayout.single(2)
        )
        seen = {}
        for split, loader in loaders.items():
            (batch,) = loader.epoch(0)
            ends = batch.n_id["author"][batch.links.src], batch.n_id["paper"][batch.links.dst]
            seen[split] = [each.tolist() for each in ends]
        assert seen == {"val": [[3], [6]], "test": [[7], [8]]}
        with pytest.raises(DataError, match=f"links of {cites}, {writes} are held out, and target is paper__disputes"):
            check_link_settings(TrainSettings(), opened, ("paper", "disputes", "paper"))


def test_link_metrics_equal_numpy(links: Path) -> None:
    with open_graph(links) as opened:
        held_out = np.asarray(opened.store.graph_attrs["test_links"])
        inputs = link_inputs(opened, (("paper", "cites", "paper"), held_out))
        settings = LoaderSettings("test", (2,), 40, shuffle=False)
        batch = next(
            LinkBlockLoader(opened, settings, inputs, LinkBlockSettings(30, False), 0, RankLayout.single(2)).epoch(0)
        )
    ends, n_id = batch.links, batch.n_id["paper"].numpy()
    assert np.array_equal(np.stack([n_id[ends.src], n_id[ends.dst]]), held_out[:, :40])
    table = RNG.integers(0, 6, (300, 300))  # scores with ties
    src, dst, negatives = n_id[ends.src], n_id[ends.dst], n_id[ends.negatives]
    out = np.concatenate([table[src, dst][:, None], table[src[:, None], negatives]], 1).astype(np.float32)
    ranks, beaten = [], []
    for own, others, target in zip(out[:, 0], out[:, 1:], dst, strict=True):
        others = others[negatives != target]
        ranks.append(1 + (others > own).sum() + (others == own).sum() / 2)
        beaten.append((others < own).mean() + (others == own).mean() / 2)
    task = LinkPrediction(8)
    found = task.metrics(task.metric_sums(torch.from_numpy(out), batch).tolist())
    assert found["mrr"] == pytest.approx((1 / np.array(ranks)).mean())
    assert found["hits@10"] == pytest.approx((np.array(ranks) <= 10).mean())
    assert found["auc"] == pytest.approx(np.mean(beaten))


@pytest.mark.parametrize(("targets", "auc"), [([0, 1], 0.5), ([0], None)])
def test_a_link_s_own_target_is_no_negative(targets: list[int], auc: float | None) -> None:
    ends = LinkEnds("user", "item", *(torch.tensor([*range(len(targets))]) for _ in range(3)))
    task = LinkPrediction(8)
    found = task.metrics(task.metric_sums(torch.zeros(len(targets), 1 + len(targets)), Labels(links=ends)).tolist())
    assert found.get("auc") == auc and found["mrr"] == 1 / (1 + (len(targets) - 1) / 2)


# --- runs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "y"), [("regression", PRICE), ("multilabel", SOME)])
def test_a_node_task_learns_more_than_a_constant(
    name: str, y: np.ndarray, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(job(parts_of(tmp_path / "parts", y), tmp_path / "run", **SETTINGS), Ranks())
    assert result.test is not None and result.val is not None
    truth = y[SPLITS["test"]]
    if name == "regression":
        constant = np.abs(truth - np.median(y[SPLITS["train"]])).mean()
        assert result.test["mae"] < 0.6 * constant
        evals = [line["mae"] for line in metrics(tmp_path / "run", "eval") if line["split"] == "val"]
        assert result.val["mae"] == min(evals) == evals[result.best_epoch - 1]
    else:
        always = 2 * (truth == 1).sum() / ((truth == 1).sum() + (truth >= 0).sum())  # all labels predicted
        assert result.test["micro_f1"] > always + 0.1
    said = capsys.readouterr().out
    assert said.startswith(f"task {name}: y is ") and f"val {'MAE' if name == 'regression' else 'micro-F1'} " in said


@pytest.fixture(scope="module")
def one_process(links: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    train(job(links, folder / "link", **LINKS), Ranks())
    timed = {"time": True, "hold_out": "author__writes__paper", "hold_out_time": "edge_time", "num_nodes": 200}
    write_parts(folder / "timed-parts", 2, "synthetic-hetero", **timed)
    train(job(folder / "timed-parts", folder / "timed", **TIMED), Ranks())
    for name, y in (("regression", PRICE), ("multilabel", SOME)):
        train(job(parts_of(folder / f"{name}-parts", y), folder / name, **{**SETTINGS, "epochs": 2}), Ranks())
    return folder


def test_two_processes_train_and_score_as_one(links: Path, one_process: Path, tmp_path: Path) -> None:
    jobs = [job(links, tmp_path / "link", **LINKS), job(one_process / "timed-parts", tmp_path / "timed", **TIMED)]
    for name in ("regression", "multilabel"):
        jobs.append(job(one_process / f"{name}-parts", tmp_path / name, **{**SETTINGS, "epochs": 2}))
    for ended in run_ranks(2, *jobs):
        assert ended.returncode == 0, ended.output
    for name in ("link", "timed", "regression", "multilabel"):
        np.testing.assert_allclose(curve(tmp_path / name), curve(one_process / name), rtol=1e-4, err_msg=name)
        for ours, theirs in zip(metrics(tmp_path / name, "eval"), metrics(one_process / name, "eval"), strict=True):
            if ours["epoch"] == theirs["epoch"]:  # the best epoch may be another one if two scores are nearly equal
                assert ours[ours["metric"]] == pytest.approx(theirs[theirs["metric"]], abs=0.02, rel=1e-3)
            else:
                assert ours["split"] == theirs["split"] == "test"


def test_links_are_learned_better_than_by_chance(links: Path, tmp_path: Path) -> None:
    result = train(job(links, tmp_path, **{**LINKS, "epochs": 8}), Ranks())
    assert result.test is not None and result.metric.name == "mrr"
    assert result.test["auc"] > 0.75
    assert result.test["mrr"] > 2 * np.mean(1 / np.arange(1, 102))  # expected of a random rank among 101
    assert load_checkpoint(tmp_path / "checkpoints" / "last.pt").graph["target"] == "paper__cites__paper"


def test_links_resume_at_the_step(links: Path, one_process: Path, tmp_path: Path) -> None:
    newest = killed_run(job(links, tmp_path / "killed", **LINKS), 1, every=2, last=7)
    saved = load_checkpoint(newest)
    assert saved.partial is not None or saved.epoch
    train(job(links, tmp_path / "resumed", **LINKS, resume=str(newest)), Ranks())
    final = load_checkpoint(tmp_path / "resumed" / "checkpoints" / "last.pt")
    assert torch.cat(final.step_loss).tolist() == pytest.approx(curve(one_process / "link"), rel=1e-4)


def test_links_of_a_batch_are_no_edges_of_it(links: Path) -> None:
    of = ("paper", "cites", "paper")
    with open_graph(links) as opened:
        inputs = link_inputs(opened, (of, None))
        settings = LoaderSettings("train", (-1,), 50)
        loader = LinkBlockLoader(opened, settings, inputs, LinkBlockSettings(10, True), 0, RankLayout.single(2))
        batch = next(loader.epoch(1))
    ends, n_id = batch.links, batch.n_id["paper"].numpy()
    hidden = set(zip(n_id[ends.src].tolist(), n_id[ends.dst].tolist(), strict=True))
    for edge_type, back in ((of, False), (("paper", "rev_cites", "paper"), True)):
        block = batch.blocks[0][edge_type]
        targets = np.repeat(np.arange(block.num_dst), np.diff(block.indptr.numpy()))
        pairs = zip(n_id[block.indices.numpy()].tolist(), n_id[targets].tolist(), strict=True)
        assert not hidden & {(v, u) if back else (u, v) for u, v in pairs}
    assert len(hidden) == 50 == batch.num_seeds


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"disjoint": True}, "disjoint cannot be used with task link"),
        (
            {"target": "author__writes__paper"},
            "paper__cites__paper are held out, and target is author__writes__",
        ),
        ({"target": "author"}, "target is 'author'; task link needs an edge type of synthetic-hetero: "),
    ],
)
def test_settings_that_do_not_fit_links_are_refused(
    settings: dict[str, Any], message: str, links: Path, tmp_path: Path
) -> None:
    with pytest.raises((DataError, SettingsError), match=message):
        train(job(links, tmp_path, **{**LINKS, **settings}), Ranks())


def test_negatives_are_at_least_one() -> None:
    with pytest.raises(SettingsError, match="negatives is 0; it must be at least 1"):
        TrainSettings(negatives=0)
