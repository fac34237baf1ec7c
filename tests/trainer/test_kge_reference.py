"""Embeddings of a knowledge graph beside benchmarks/kge_reference.py, plain PyTorch in one process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from train_kit import job
from trainer.partition.make import PartitionSpec, make_partition
from trainer.train.job import train

REFERENCE = Path(__file__).parents[2] / "benchmarks" / "kge_reference.py"
ENTITIES, STEPS = 400, (1, 7, 30, 99, 150)


def facts(folder: Path) -> Path:
    """Write relations that add a number to an entity, and their sums: what is held out follows from the others."""
    rng = np.random.default_rng(0)
    lines = ["source,target,relation,split"]
    for step in STEPS:
        for source in range(ENTITIES):
            split = rng.choice(["train", "val", "test"], p=[0.8, 0.05, 0.15])
            lines.append(f"{source},{(source + step) % ENTITIES},plus{step},{split}")
    folder.mkdir()
    (folder / "pointers.csv").write_text("\n".join(lines) + "\n")
    (folder / "synsets.csv").write_text("id\n" + "\n".join(map(str, range(ENTITIES))) + "\n")
    return folder


@pytest.mark.slow
def test_the_filtered_mrr_is_that_of_a_plain_program(tmp_path: Path) -> None:
    source = facts(tmp_path / "facts")
    options = {
        "nodes": {"synset": {"files": "synsets.csv", "id": "id"}},
        "edges": {
            "synset__adds__synset": {
                "files": "pointers.csv", "source": "source", "target": "target", "relation": "relation",
                "split": "split",
            }
        },
    }  # fmt: skip
    make_partition(PartitionSpec("tables", str(tmp_path / "parts"), str(source), options, num_parts=2), say=str)
    words = ["--decoder", "rotate", "--dim", "32", "--batch", "128", "--negatives", "64", "--lr", "0.05"]
    ended = subprocess.run(
        [sys.executable, str(REFERENCE), str(source), *words, "--epochs", "20", "--every", "20"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    plain = float(re.search(r"test mrr ([\d.]+)", ended.stdout)[1])
    result = train(
        job(tmp_path / "parts", tmp_path / "run", model="embedding", task="link", decoder="rotate", hidden=32,
            batch_size=128, negatives=64, epochs=20, lr=0.05, eval_negatives="all", eval_every=0, metrics=("mrr",))
    )  # fmt: skip
    assert result.test["mrr"] == pytest.approx(plain, rel=0.05) and plain > 0.3
