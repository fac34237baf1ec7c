"""LightGCN on the published split of LastFM, from its files to predictions, on two SSH hosts."""

from __future__ import annotations

import csv
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launching import REPOSITORY, json_lines, write_config
from netns import NetCluster
from ssh_nodes import ssh_nodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

#: Measured with the published program on this split, with 300 epochs.
PUBLISHED = {"recall@20": 0.2616, "ndcg@20": 0.2014}
LIKES = {"files": "train.tsv", "test_files": "test.tsv", "columns": ["user", "artist"], "source": "user"}
TRUSTS = {"files": "trust.tsv", "columns": ["user", "friend"], "source": "user", "target": "friend"}


def pairs(path: Path) -> set[tuple[str, str]]:
    return {(user, artist) for user, artist in map(str.split, path.read_text().splitlines())}


def write_trust_features(lastfm: Path, path: Path, width: int = 16) -> None:
    """Write ``width`` features of each user: eigenvectors of the normalised matrix of who trusts whom.

    They belong to the eigenvalues of largest absolute value, and have mean square 1.
    """
    trust = pairs(lastfm / "trust.tsv")
    users = sorted({user for of in trust for user in of} | {user for user, _ in pairs(lastfm / "train.tsv")}, key=int)
    at = {user: k for k, user in enumerate(users)}
    matrix = np.zeros((len(users), len(users)))
    for one, other in trust:
        matrix[at[one], at[other]] = matrix[at[other], at[one]] = 1
    scale = 1 / np.sqrt(matrix.sum(1).clip(1))
    values, vectors = np.linalg.eigh(scale[:, None] * matrix * scale)
    features = vectors[:, np.argsort(-np.abs(values))[:width]] * math.sqrt(len(users))
    features *= np.sign(features[np.abs(features).argmax(0), np.arange(width)])  # the sign is free: the same everywhere
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["id", *(f"f{k}" for k in range(width))]])
        csv.writer(file).writerows([user, *row] for user, row in zip(users, features.tolist(), strict=True))


@pytest.mark.parametrize("trust", [False, True], ids=["plain", "trust"])
def test_the_published_figures_are_reached(
    trust: bool, three_hosts: NetCluster, shared_data: Path, tmp_path: Path
) -> None:
    lastfm = shared_data / "lastfm"
    nodes: dict[str, Any] = {"user": {}, "artist": {}}
    edges: dict[str, Any] = {"user__likes__artist": {**LIKES, "target": "artist"}}
    if trust:
        write_trust_features(lastfm, tmp_path / "users.csv")
        nodes["user"] = {
            "files": str(tmp_path / "users.csv"), "id": "id", "features": [f"f{k}" for k in range(16)],
        }  # fmt: skip
        edges["user__trusts__user"] = TRUSTS
    data: dict[str, Any] = {
        "dataset": "tables",
        "source": str(lastfm),
        "partition": {"method": "random"},
        "options": {"nodes": nodes, "edges": edges, "undirected": True},
    }
    train = {
        "task": "link", "target": "user__likes__artist", "model": "lightgcn", "hidden": 64, "fanouts": [-1, -1, -1],
        "batch_size": 2048, "epochs": 80 if trust else 40, "lr": 0.005 if trust else 0.01, "loss": "bpr",
        "negatives": 256, "eval_negatives": "all", "eval_every": 0,
    }  # fmt: skip
    write_config(tmp_path, ssh_nodes(three_hosts)[:2], data=data, train=train)

    def gnnfleet(*words: str) -> str:
        argv = [sys.executable, str(REPOSITORY / "launch.py"), *words]
        done = subprocess.run(
            argv, cwd=tmp_path, env=three_hosts.environment(), capture_output=True, text=True, timeout=1200
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run_id = "lastfm-trust" if trust else "lastfm"
    gnnfleet("--config", "cluster.yml", "--run-id", run_id)
    run = tmp_path / "runs" / run_id
    (result,) = (line for line in json_lines(run / "metrics.jsonl") if line["kind"] == "result")
    found = {name: result[f"test_{name}"] for name in PUBLISHED}
    assert all(found[name] >= value for name, value in PUBLISHED.items()), found
    assert result["baseline_test_recall@20"] < 0.05

    # The best new artists of each user stand under the ids of the files.
    gnnfleet("infer", run_id, "--top-k", "20")
    with (run / "predictions" / "source" / "predictions.csv").open() as file:
        rows = [(row["source"], row["target"]) for row in csv.DictReader(file)]
    known, tested = pairs(lastfm / "train.tsv"), pairs(lastfm / "test.tsv")
    users = known | tested | (pairs(lastfm / "trust.tsv") if trust else set())
    assert len(rows) == 20 * len({user for user, _ in users}) and not known.intersection(rows)
    precision = sum(row in tested for row in rows) / len({user for user, _ in tested}) / 20
    assert precision == pytest.approx(result["test_precision@20"], rel=1e-3)
