"""Tests of ``gnnfleet.run``: the context of a user's own training loop."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gnnfleet as gf
from train_kit import run_script, write_parts
from trainer.core.errors import SettingsError

SCRIPT = """
import json, sys, torch, gnnfleet as gf
from torch_geometric.nn import GATv2Conv
parts, out, fails = sys.argv[1], sys.argv[2], int(sys.argv[3])

class Model(torch.nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.first = GATv2Conv(width, 8, dropout=0.3)
        self.second = GATv2Conv(8, classes, dropout=0.3)
        self.unused = torch.nn.Linear(2, 2)

    def forward(self, x, edge_index):
        return self.second(torch.nn.functional.dropout(self.first(x, edge_index), 0.5, self.training), edge_index)

with gf.run(parts) as run:
    world = run.group.size
    model = run.model(Model(run.graph.num_features, run.graph.num_classes))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    # 48, 48 and 4 seeds: ranks have different numbers of seeds in the last step
    train, val = (
        gf.DistNeighborLoader(run.graph, [4, 4], torch.arange(100), batch_size=48 // world, shuffle=shuffle)
        for shuffle in (True, False)
    )
    losses = []
    for epoch in run.epochs(2, optimizer=optimizer):
        for batch in run.train(train):
            if fails and (epoch, run.rank) == (2, 1):
                raise ValueError("a mistake on one rank")
            out_rows = model(batch.x, batch.edge_index)[: batch.batch_size]
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(out_rows, batch.y[: batch.batch_size])
            losses.append(run.backward(loss).item())
            assert model.unused.weight.grad is None
            optimizer.step()
        losses.append(run.loss)
        for batch in run.evaluate(val):
            out_rows = model(batch.x, batch.edge_index)[: batch.batch_size]
            run.score(val=torch.nn.functional.cross_entropy(out_rows, batch.y[: batch.batch_size]))
        losses.append(run.scores["val"])
    if run.rank == world - 1:
        with open(out, "w") as file:
            json.dump(losses, file)
"""


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_parts(tmp_path_factory.mktemp("data") / "parts", 2)


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("GNNFLEET_RUN_DIR", "GNNFLEET_RESUME", "GNNFLEET_CLUSTER", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_losses_and_scores_do_not_depend_on_the_number_of_ranks(parts: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SCRIPT)
    found = []
    for world in (1, 3):
        for ended in run_script(["own.py", str(parts), f"losses{world}", "0"], world, tmp_path):
            assert ended.returncode == 0, ended.output
        found.append(json.loads((tmp_path / f"losses{world}").read_text()))
    assert len(found[0]) == 10
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.slow
def test_after_an_exception_on_one_rank_no_other_rank_waits(parts: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SCRIPT)
    ends = run_script(["own.py", str(parts), "losses", "1"], 3, tmp_path)
    assert [ended.returncode for ended in ends] == [1, 1, 1]
    assert "ValueError: a mistake on one rank" in ends[1].output
    assert all("lost another rank" in ends[rank].output for rank in (0, 2))


def train(parts: Path, die: int = 0) -> tuple[list[float], dict[str, Any]]:
    """Train 3 epochs of 3 steps, with trainable rows. Returns all losses, and the best score and weights.

    ``die``: raise an error after so many steps.
    """
    losses = []
    with gf.run(parts, checkpoint_seconds=1e-9) as run:
        width = run.graph.num_features
        model = run.model(torch.nn.Linear(width, run.graph.num_classes))
        rows = gf.nn.ShardedEmbedding({"node": run.graph.num_nodes}, width, device=run.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        sparse = torch.optim.SparseAdam([rows.weight], lr=0.05)
        loader = gf.DistNeighborLoader(run.graph, [2], "train", batch_size=60, shuffle=True)
        val = gf.DistNeighborLoader(run.graph, [2], "val", batch_size=60)

        def scores(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            own = batch.x[: batch.batch_size] + rows.lookup({"node": batch.n_id[: batch.batch_size]})["node"]
            return model(torch.nn.functional.dropout(own, 0.3, model.training)), batch.y[: batch.batch_size]

        for _ in run.epochs(3, optimizer=optimizer, rows=rows, sparse=sparse):
            for batch in run.train(loader):
                optimizer.zero_grad()
                sparse.zero_grad()
                losses.append(float(run.backward(torch.nn.functional.cross_entropy(*scores(batch)))))
                optimizer.step()
                sparse.step()
                if len(losses) == die:
                    raise RuntimeError("the end")
            losses.append(run.loss)
            for batch in run.evaluate(val):
                out, y = scores(batch)
                run.score(val=out.argmax(1) == y)
        return losses, {**run.scores, "weight": model.weight.detach().clone(), "rows": rows.weight.detach().clone()}


def test_a_run_that_failed_continues_as_if_it_had_not(
    parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    losses, whole = train(parts)
    assert len(losses) == 12
    assert torch.load("output/model.pt")["weight"].equal(whole["weight"])
    monkeypatch.setenv("GNNFLEET_RUN_DIR", str(tmp_path / "failed"))
    with pytest.raises(RuntimeError, match="the end"):
        train(parts, die=6)  # in the second step of epoch 2, whose checkpoint is that after the first
    for thread in threading.enumerate():
        if thread.name == "checkpoint-writer":
            thread.join()
    monkeypatch.setenv("GNNFLEET_RESUME", str(tmp_path / "failed" / "checkpoints" / "last.pt"))
    monkeypatch.setenv("GNNFLEET_RUN_DIR", str(tmp_path / "resumed"))
    again, resumed = train(parts)
    assert 7 <= len(again) < 12 and again == losses[-len(again) :]
    assert resumed["val"] == whole["val"]
    assert resumed["weight"].equal(whole["weight"]) and resumed["rows"].equal(whole["rows"])
    lines = [json.loads(line) for line in Path("resumed/metrics-rank0.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines if line["kind"] == "epoch"] == [2, 3]
    assert lines[-1]["kind"] == "result" and lines[-1]["val_accuracy"] == whole["val"]


@pytest.mark.parametrize(
    "mistake,message",
    [
        ("no optimizer", "pass the model's optimizer"),
        ("loss.backward", r"step 0 of epoch 1: call run.backward\(loss\)"),
        ("no epoch", "has one loop over run.train"),
        ("twice", "makes the process group itself"),
        ("lazy", "weights without a shape"),
    ],
)
def test_a_mistake_is_named(mistake: str, message: str, parts: Path) -> None:
    with pytest.raises(SettingsError, match=message), gf.run(parts) as run:
        if mistake == "twice":
            with gf.run(parts):
                pass
        made = torch.nn.LazyLinear(2) if mistake == "lazy" else torch.nn.Linear(run.graph.num_features, 4)
        model = run.model(made)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = gf.DistNeighborLoader(run.graph, [1], "train", batch_size=64)
        for batch in run.train(loader) if mistake == "no epoch" else ():
            raise AssertionError(batch)
        for _ in run.epochs(1, **({} if mistake == "no optimizer" else {"optimizer": optimizer})):
            for batch in run.train(loader):
                model(batch.x).sum().backward()
    assert not dist.is_initialized()


def test_a_run_ends_early_with_its_best_weights(parts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with gf.run(parts) as run:
        model = run.model(torch.nn.Linear(run.graph.num_features, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = gf.DistNeighborLoader(run.graph, [1], "train", batch_size=64)
        weights = []
        for epoch in run.epochs(9, patience=2, metric="mae", better="lower", optimizer=optimizer):
            for batch in run.train(loader, steps=1):
                run.backward(model(batch.x).square().mean())
                optimizer.step()
            weights.append(model.weight.detach().clone())
            run.score(val=torch.tensor([4.0, 2.0, 3.0, 3.0, 1.0][epoch - 1]).expand(7))
        assert len(weights) == 4 and model.weight.equal(weights[1])
    assert capsys.readouterr().out.endswith("ended early: val has not improved for 2 epochs\nval mae 2.0000\n")


def test_an_evaluation_within_a_step_leaves_its_mode_and_a_first_score_may_be_nan(parts: Path) -> None:
    with gf.run(parts) as run:
        model = run.model(torch.nn.Linear(run.graph.num_features, run.graph.num_classes))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train, val = (gf.DistNeighborLoader(run.graph, [2], torch.arange(n), batch_size=20) for n in (40, 30))
        for epoch in run.epochs(3, optimizer=optimizer, patience=1):
            for batch in run.train(train):
                for _ in run.evaluate(val):
                    assert not model.training
                assert model.training and run._loader is train
                optimizer.zero_grad()
                run.backward(model(batch.x[:20]).logsumexp(1).mean())
                optimizer.step()
            run.score(val=float("nan") if epoch == 1 else 0.5 + epoch / 10)
        assert run.scores == {"val": pytest.approx(0.8)} and not model.training
        with pytest.raises(SettingsError, match="a run has one loop"):
            next(iter(run.epochs(1, optimizer=optimizer)))


def test_patience_needs_a_score(parts: Path) -> None:
    with gf.run(parts) as run:
        model = run.model(torch.nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(SettingsError, match=r"patience needs a score in each epoch: run.score\(val=…\)"):
            for _ in run.epochs(2, optimizer=optimizer, patience=1):
                run.score(test=0.5)
