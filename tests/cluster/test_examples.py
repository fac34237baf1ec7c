"""Tests of two examples on three SSH hosts without a shared folder: a heterogeneous graph, and link prediction."""

from __future__ import annotations

import re

import pytest

from launching import REPOSITORY, launch, write_config
from ssh_nodes import ssh_nodes

EXAMPLES = REPOSITORY / "examples"
PAPERS = {"num_nodes": 2000, "homophily": 0.9, "noise": 0.5, "hold_out": "paper__cites__paper"}
LINKS = ["--relation", "paper__cites__paper", "--fanouts", "6,3", "--lr", "0.01", "--batch-size", "90", "--epochs", "2"]


@pytest.mark.parametrize(
    "script,words,pattern,bar",
    [
        pytest.param(
            "hetero_classification",
            ["--fanouts", "4,4", "--batch-size", "50"],
            r"test accuracy ([\d.]+)",
            0.5,
            marks=pytest.mark.slow,
        ),  # fmt: skip
        # tests/trainer/test_examples_launched.py runs it on two nodes of this machine
        pytest.param("link_prediction", LINKS, r"test, model: .*AUC ([\d.]+)", 0.8, marks=pytest.mark.slow),
    ],
)
def test_an_example_on_three_hosts(cluster, tmp_path, script, words, pattern, bar):
    config = write_config(
        tmp_path, ssh_nodes(cluster), data={"dataset": "synthetic-hetero", "options": PAPERS},
        run={"files": [str(EXAMPLES / "common.py")]},
    )  # fmt: skip
    done = launch(
        config, "--", "python", str(EXAMPLES / f"{script}.py"), *words, env=cluster.environment(), timeout=280
    )
    assert done.status == 0, done.output
    (found,) = re.findall(pattern, done.output)
    assert float(found) > bar
    assert [process for host in cluster.hosts for process in host.processes()] == []
