"""Tests that sharded embeddings train as one dense table does, for any number of processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sharded_kit import DIM, NODES, OPTIMIZERS, STEPS, run_sharded, train_dense, train_sharded
from trainer.core.errors import DataError
from trainer.nn.sharded_embedding import ShardedEmbedding, embedding_state, initial_rows

HALF, REST, WHOLE = range(STEPS // 2), range(STEPS // 2, STEPS), range(STEPS)
Trained = dict[tuple[str, int], Any]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return the saved states by (optimizer, number of processes).

    The state ("resumed", n) is from n processes that resumed from a checkpoint after half of the steps. Three
    processes saved this checkpoint.
    """
    three, two = (tmp_path_factory.mktemp(name) for name in ("three", "two"))
    runs = [(name, WHOLE, None) for name in OPTIMIZERS]
    found = {(name, 1): train_sharded(*run) for name, run in zip(OPTIMIZERS, runs, strict=True)}
    *whole, _ = run_sharded(three, 3, *runs, ("sparse_adam", HALF, None))
    found |= {(name, 3): run for name, run in zip(OPTIMIZERS, whole, strict=True)}
    half = three / f"run{len(runs)}.pt"
    *whole, resumed = run_sharded(two, 2, *runs, ("sparse_adam", REST, half))
    found |= {(name, 2): run for name, run in zip(OPTIMIZERS, whole, strict=True)}
    return found | {("resumed", 2): resumed, ("resumed", 1): train_sharded("sparse_adam", REST, half)}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_tables_and_losses_equal_those_of_one_dense_table(optimizer: str, size: int, trained: Trained) -> None:
    tables, losses = train_dense(optimizer)
    run = trained[optimizer, size]
    np.testing.assert_allclose(run["losses"], losses, rtol=1e-5)
    for of in NODES:
        torch.testing.assert_close(run["embedding"]["tables"][of], tables[of], atol=1e-5, rtol=1e-5, msg=of)


@pytest.mark.parametrize("size", [1, 2])
def test_a_run_resumes_with_another_number_of_processes(size: int, trained: Trained) -> None:
    resumed, whole = trained["resumed", size], trained["sparse_adam", 1]
    np.testing.assert_allclose(resumed["losses"], whole["losses"][STEPS // 2 :], rtol=1e-5)
    torch.testing.assert_close(resumed["embedding"], whole["embedding"], atol=1e-5, rtol=1e-5)


def test_rows_never_looked_up_do_not_change() -> None:
    embedding = ShardedEmbedding({"a": 50, "b": 2}, 3, seed=1)
    before = embedding.weight.detach().clone()
    optimizer = torch.optim.SparseAdam([embedding.weight], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        embedding.lookup({"a": torch.tensor([4, 40, 4]), "b": torch.tensor([1])})["a"].sum().backward()
        embedding.sync_gradients()
        optimizer.step()
    changed = (embedding.weight != before).any(1).nonzero().flatten().tolist()
    assert changed == [4, 40]  # b's row 1 was looked up, but its gradient is 0
    assert embedding.weight.grad is not None and embedding.weight.grad.values().tolist()[0] == [2.0, 2.0, 2.0]


def test_a_lookup_without_gradients_changes_nothing() -> None:
    embedding = ShardedEmbedding({"a": 5}, 3)
    with torch.no_grad():
        rows = embedding.lookup({"a": torch.tensor([3, 1])})["a"]
    embedding.sync_gradients()
    assert embedding.weight.grad is None and not rows.requires_grad
    assert torch.equal(rows, embedding.weight[[3, 1]])


def test_initial_rows_depend_only_on_seed_type_and_id() -> None:
    ids = np.arange(4000)
    rows = initial_rows(ids, 8, 1, "author")
    assert torch.equal(initial_rows(ids[[77, 5]], 8, 1, "author"), rows[[77, 5]])
    for other in (initial_rows(ids, 8, 2, "author"), initial_rows(ids, 8, 1, "venue")):
        assert abs(np.corrcoef(other.flatten(), rows.flatten())[0, 1]) < 0.02
    assert rows.var().item() == pytest.approx(1 / 8, rel=0.02) and abs(rows.mean().item()) < 0.01
    assert len(rows.flatten().unique()) > 0.99 * rows.numel()


def test_a_lookup_may_have_no_types_or_no_ids() -> None:
    empty = ShardedEmbedding({}, DIM)
    assert empty.lookup({}) == {} and embedding_state(empty) == {
        "tables": {}, "optimizer_rows": {}, "optimizer_rest": {},
    }  # fmt: skip
    some = ShardedEmbedding({"a": 2, "b": 0}, DIM)
    found = some.lookup({"b": torch.empty(0, dtype=torch.int64)})
    assert found["b"].shape == (0, DIM)


@pytest.mark.parametrize("n_id", [{"a": [5]}, {"a": [-1]}, {"c": [0]}])
def test_an_unknown_node_is_refused(n_id: dict[str, list[int]]) -> None:
    embedding = ShardedEmbedding({"a": 5, "b": 3}, DIM)
    with pytest.raises(DataError, match="node type|nodes range"):
        embedding.lookup({of: torch.tensor(ids) for of, ids in n_id.items()})
