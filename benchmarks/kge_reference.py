"""Embeddings of a knowledge graph in plain PyTorch, in one process: the reference of docs/LOG.md.

``python benchmarks/kge_reference.py FOLDER --decoder complex`` reads ``synsets.csv`` (id) and ``pointers.csv`` (source,
target, relation, split) in FOLDER, trains rows of the entities, and prints the filtered MRR and Hits@k of the heads and
tails of val and test. It has nothing of gnnfleet's code: the scores are written out, links are ranked batch by batch.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional


def read_links(folder: Path) -> tuple[dict[str, Tensor], int, int]:
    """Return the links of each split, int64 [n, 3] (head, relation, tail); numbers of entities and of relations."""
    with (folder / "synsets.csv").open(newline="") as file:
        entities = {row["id"]: k for k, row in enumerate(csv.DictReader(file))}
    with (folder / "pointers.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    relations = {name: k for k, name in enumerate(sorted({row["relation"] for row in rows}))}
    splits: dict[str, list[tuple[int, int, int]]] = {"train": [], "val": [], "test": []}
    for row in rows:
        splits[row["split"]].append((entities[row["source"]], relations[row["relation"]], entities[row["target"]]))
    return {name: torch.tensor(links) for name, links in splits.items()}, len(entities), len(relations)


class Scorer:
    """Scores of tails for (head, relation), and of heads for (tail, relation)."""

    def __init__(self, decoder: str, num_relations: int, dim: int):
        self.decoder, half = decoder, dim // 2
        if decoder == "rotate":
            self.relation = torch.empty(num_relations, half).uniform_(-math.pi, math.pi)
        elif decoder == "transe":
            self.relation = torch.empty(num_relations, dim).uniform_(-1, 1) * math.sqrt(3 / dim)
        else:
            self.relation = torch.nn.init.xavier_uniform_(torch.empty(num_relations, dim))
        self.relation.requires_grad_()

    def query(self, rows: Tensor, relation: Tensor, heads: bool) -> Tensor:
        r = self.relation[relation]
        if self.decoder == "distmult":
            return rows * r
        if self.decoder == "transe":
            return rows - r if heads else rows + r
        re, im = rows.chunk(2, 1)
        c, d = (r.cos(), r.sin()) if self.decoder == "rotate" else r.chunk(2, 1)
        d = -d if heads else d
        return torch.cat([re * c - im * d, re * d + im * c], 1)

    def scores(self, query: Tensor, candidates: Tensor) -> Tensor:
        if self.decoder in ("distmult", "complex"):
            return query @ candidates.t()
        square = query.square().sum(1)[:, None] + candidates.square().sum(1) - 2 * query @ candidates.t()
        return -square.clamp(min=1e-12).sqrt()


@torch.no_grad()
def ranks(links: Tensor, known: list[Tensor], table: Tensor, scorer: Scorer) -> np.ndarray:
    """Return the ranks of tails, then heads; of equal scores each has the mean of their ranks."""
    every, found = torch.cat(known), []
    for heads in (False, True):
        given, answer = (2, 0) if heads else (0, 2)
        answers: dict[tuple[int, int], list[int]] = {}
        for h, r, t in every.tolist():
            answers.setdefault(((t if heads else h), r), []).append(h if heads else t)
        for part in links.split(512):
            query = scorer.query(table[part[:, given]], part[:, 1], heads)
            scores = scorer.scores(query, table)
            own = scores.gather(1, part[:, answer][:, None])[:, 0].clone()
            for i, (e, r) in enumerate(part[:, [given, 1]].tolist()):
                scores[i, answers[e, r]] = -math.inf
            found.append(1 + (scores > own[:, None]).sum(1) + (scores == own[:, None]).sum(1) / 2)
    return torch.cat(found).numpy()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--decoder", choices=("distmult", "complex", "transe", "rotate"), default="complex")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--negatives", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--every", type=int, default=10, help="epochs between evaluations")
    parser.add_argument("--splits", default="test", help="what is evaluated")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    links, count, num_relations = read_links(given.folder)
    print(
        f"{count:,} entities, {num_relations} relations, { ({name: len(of) for name, of in links.items()}) }",
        flush=True,
    )
    table = torch.nn.Embedding(count, given.dim, sparse=True)
    table.weight.data.uniform_(-1, 1).mul_(math.sqrt(3 / given.dim))
    scorer = Scorer(given.decoder, num_relations, given.dim)
    rows, weights = (
        torch.optim.SparseAdam([table.weight], lr=given.lr),
        torch.optim.Adam([scorer.relation], lr=given.lr),
    )
    started = time.monotonic()
    for epoch in range(1, given.epochs + 1):
        total = 0.0
        for batch in links["train"][torch.randperm(len(links["train"]))].split(given.batch):
            negatives = torch.randint(count, (given.negatives,))
            ends, loss = table(torch.cat([batch[:, 0], batch[:, 2], negatives])), torch.tensor(0.0)
            head, tail, others = ends.split([len(batch), len(batch), len(negatives)])
            for of, answer, index, heads in ((head, tail, batch[:, 2], False), (tail, head, batch[:, 0], True)):
                query = scorer.query(of, batch[:, 1], heads)
                if given.decoder in ("distmult", "complex"):
                    own = (query * answer).sum(1)
                else:
                    own = -(query - answer).norm(dim=1)
                wrong = scorer.scores(query, others).masked_fill(index[:, None] == negatives, -math.inf)
                scores = torch.cat([own[:, None], wrong], 1)
                loss = loss + functional.cross_entropy(scores, torch.zeros(len(batch), dtype=torch.int64)) / 2
            rows.zero_grad(), weights.zero_grad()
            loss.backward()
            rows.step(), weights.step()
            total += float(loss.detach()) * len(batch)
        text = f"epoch {epoch} loss {total / len(links['train']):.4f} {time.monotonic() - started:.0f} s"
        if epoch % given.every == 0 or epoch == given.epochs:
            for split in given.splits.split(","):
                found = ranks(links[split], list(links.values()), table.weight.detach(), scorer)
                hits = ", ".join(f"hits@{k} {float((found <= k).mean()):.4f}" for k in (1, 3, 10))
                text += f"; {split} mrr {float((1 / found).mean()):.4f}, {hits}"
        print(text, flush=True)


if __name__ == "__main__":
    main()
