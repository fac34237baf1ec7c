"""Tests of examples on two ranks that the launcher starts."""

from __future__ import annotations

import re

import pytest

from launching import REPOSITORY, launch, local_config

EXAMPLES = REPOSITORY / "examples"
PAPERS = {"num_nodes": 2000, "homophily": 0.9, "noise": 0.5, "hold_out": "paper__cites__paper"}


@pytest.mark.slow
def test_links_and_rows_of_featureless_types_over_two_ranks(tmp_path, local_workdirs):
    config = local_config(
        tmp_path, [1, 1], local_workdirs, data={"dataset": "synthetic-hetero", "options": PAPERS},
        run={"files": [str(EXAMPLES / "common.py")]},
    )  # fmt: skip
    words = ["--relation", "paper__cites__paper", "--fanouts", "6,3", "--lr", "0.01", "--batch-size", "128"]
    done = launch(config, "--", "python", str(EXAMPLES / "link_prediction.py"), *words, "--epochs", "2")
    assert done.status == 0, done.output
    (auc,) = re.findall(r"test, model: .*AUC ([\d.]+)", done.output)
    assert float(auc) > 0.8, "the AUC of all ranks, printed once"
