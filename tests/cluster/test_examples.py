"""A test of an example with a heterogeneous graph on three SSH hosts without a shared folder."""

from __future__ import annotations

import re

import pytest

from launching import REPOSITORY, launch, write_config
from ssh_nodes import ssh_nodes

EXAMPLES = REPOSITORY / "examples"
PAPERS = {"num_nodes": 2000, "homophily": 0.9, "noise": 0.5, "hold_out": "paper__cites__paper"}
WORDS = ["--fanouts", "4,4", "--batch-size", "50"]


@pytest.mark.slow  # tests/trainer/test_examples_launched.py runs link_prediction on two nodes of this machine
def test_an_example_on_three_hosts(cluster, tmp_path):
    config = write_config(
        tmp_path, ssh_nodes(cluster), data={"dataset": "synthetic-hetero", "options": PAPERS},
        run={"files": [str(EXAMPLES / "common.py")]},
    )  # fmt: skip
    script = str(EXAMPLES / "hetero_classification.py")
    done = launch(config, "--", "python", script, *WORDS, env=cluster.environment())
    assert done.status == 0, done.output
    (found,) = re.findall(r"test accuracy ([\d.]+)", done.output)
    assert float(found) > 0.5
    assert [process for host in cluster.hosts for process in host.processes()] == []
