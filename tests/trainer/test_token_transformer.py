"""Tests of the transformer over tokens: the sequence of each seed, and what the model learns from the heaviest ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from graphs import graph
from nn_kit import NUM_NODES, typed_batch, typed_edges
from train_kit import job
from trainer.core.batch import HeteroBatch
from trainer.core.errors import SettingsError
from trainer.core.ranks import Ranks
from trainer.nn.token_transformer import TokenTransformer, seed_tokens
from trainer.partition.methods.assign import assign_parts
from trainer.partition.write import write_partition
from trainer.train.job import train

TYPES = ("paper", "author", "topic")  #: boards are left out


def scored_batch(seed: int) -> HeteroBatch:
    """Return a batch of three hops; some of its blocks have scores and distances as of a rule."""
    rng = np.random.default_rng(seed)
    batch: HeteroBatch = typed_batch(typed_edges(seed), np.array([3, 0, 29, 11]), (3, 2, 2), rng=rng)
    torch.manual_seed(seed)
    layers = []
    for blocks in batch.blocks:
        layer = dict(blocks)
        for of, block in blocks.items():
            if of[1] != "cites":
                size = len(block.indices)
                layer[of] = replace(block, edge_weight=torch.rand(size), hops=torch.randint(1, 4, (size,)))
        layers.append(layer)
    return replace(batch, blocks=tuple(layers))


def plain_tokens(batch: HeteroBatch, seed: int) -> dict[tuple[str, int], tuple[int, float]]:
    """Return distance and score of the nodes around a paper, by type and position."""
    found = last = {("paper", seed): (0, 1.0)}
    for blocks in reversed(batch.blocks):
        met: dict[tuple[str, int], tuple[int, float]] = {}
        for (of, node), (hops, score) in last.items():
            for (source, _, target), block in blocks.items():
                if target != of or source not in TYPES:
                    continue
                for edge in range(int(block.indptr[node]), int(block.indptr[node + 1])):
                    name = source, int(block.indices[edge])
                    far = hops + (1 if block.hops is None else int(block.hops[edge]))
                    best = score * (1 if block.edge_weight is None else float(block.edge_weight[edge]))
                    before = met.get(name, (far, best))
                    met[name] = min(before[0], far), max(before[1], best)
        last = {name: values for name, values in met.items() if name not in found}
        found = found | last
    return found


@pytest.mark.parametrize("seed", range(3))
def test_the_tokens_of_a_seed_are_the_nodes_around_it(seed: int) -> None:
    batch = scored_batch(seed)
    n_id = {of: batch.n_id[of] for of in TYPES}
    starts = dict(zip(TYPES, np.cumsum([0, *(len(ids) for ids in n_id.values())]), strict=False))
    tokens, short = (seed_tokens(batch.blocks, n_id, "paper", 4, most) for most in (200, 5))
    assert tokens.types is not None and tokens.mask.shape == tokens.types.shape and short.node.shape == (4, 5)
    for row in range(4):
        wanted = plain_tokens(batch, row)
        count = int(tokens.mask[row].sum())
        kinds = [TYPES[kind] for kind in tokens.types[row, :count].tolist()]
        places = [(of, int(node) - starts[of]) for of, node in zip(kinds, tokens.node[row, :count], strict=True)]
        assert places[0] == ("paper", row) and len(places) == len(wanted) == len(set(places))
        found = [(int(h), float(s)) for h, s in zip(tokens.hops[row, :count], tokens.scores[row, :count], strict=True)]
        np.testing.assert_allclose(found, [wanted[place] for place in places], rtol=1e-5)
        assert found == sorted(found, key=lambda each: (each[0], -each[1]))
        assert torch.equal(short.node[row], tokens.node[row, :5])


def test_masked_tokens_and_the_order_of_tokens_change_nothing() -> None:
    torch.manual_seed(0)
    model, rows = TokenTransformer(8, heads=2, num_layers=2, num_types=3), torch.randn(sum(NUM_NODES.values()), 8)
    batch = scored_batch(0)
    tokens = seed_tokens(batch.blocks, {of: batch.n_id[of] for of in TYPES}, "paper", 4)
    with torch.no_grad():
        out = model(rows, tokens)
        order = torch.cat([torch.zeros(1).long(), 1 + torch.randperm(tokens.node.shape[1] - 1)])
        mixed = replace(tokens, **{name: values[:, order] for name, values in vars(tokens).items()})
        torch.testing.assert_close(model(rows, mixed), out)
        longer = replace(tokens, **{name: torch.cat([values, torch.zeros_like(values)], 1)
                                    for name, values in vars(tokens).items()})  # fmt: skip
        torch.testing.assert_close(model(rows, longer), out)
    assert not torch.allclose(out[0], out[1])
    with pytest.raises(SettingsError, match="3 heads do not divide the width 8"):
        TokenTransformer(8, heads=3, num_layers=1)


@pytest.mark.slow
def test_the_class_of_the_heaviest_neighbour_is_learnt(tmp_path: Path) -> None:
    rng, count = np.random.default_rng(0), 500
    kind = rng.integers(3, size=count)
    sources, weights = (
        rng.integers(count, size=(count, 5)),
        rng.permuted(np.tile([1, 1, 1, 1, 100], (count, 1)), axis=1),
    )
    heaviest = sources[np.arange(count), weights.argmax(1)]
    ids = np.arange(count)
    attrs, splits = {"x": np.eye(3, dtype=np.float32)[kind], "y": kind[heaviest]}, (ids[::2], ids[1::4], ids[3::4])
    data = graph(
        np.stack([sources.flatten(), ids.repeat(5)], 1), count, attrs,
        dict(zip(("train", "val", "test"), splits, strict=True)), edge_attrs={"w": weights.flatten()},
    )  # fmt: skip
    write_partition(data, assign_parts(data, 2, "hash"), tmp_path / "parts")
    common: dict[str, Any] = {"model": "token-transformer", "lr": 0.01, "dropout": 0.0, "batch_size": 64}
    runs: dict[str, dict[str, Any]] = {
        "taken alone": {"fanouts": (1,), "neighbors": "top", "weight_attr": "w", "epochs": 6},
        "by its score": {"fanouts": (-1,), "edge_attr": "w", "epochs": 20},
    }
    for name, settings in runs.items():
        result = train(job(tmp_path / "parts", tmp_path / name, **common, **settings), Ranks())
        assert result.test is not None and result.test["accuracy"] > 0.9, name
