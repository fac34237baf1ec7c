"""Tests of examples on two ranks that the launcher starts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launching import REPOSITORY, launch, local_config
from waiting import DEADLINE

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


@pytest.mark.slow
def test_train_hetero_resumes_with_its_rows(tmp_path, local_workdirs):
    config = local_config(
        tmp_path, [1, 1], local_workdirs, data={"dataset": "synthetic-hetero", "options": {"num_nodes": 1000}}
    )
    script = ["python", str(EXAMPLES / "train_hetero.py"), "--batch-size", "64", "--epochs"]
    whole = launch(config, "--run-id", "whole", "--", *script, "2")
    first = launch(config, "--run-id", "first", "--", *script, "1")
    assert whole.status == first.status == 0, whole.output + first.output
    words = [sys.executable, str(REPOSITORY / "launch.py"), "resume", "first"]
    refused = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE)
    assert refused.returncode == 2 and "first is done at epoch 1" in refused.stderr
    words += ["--run-id", "again", "--", *script, "2"]
    again = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE)
    assert again.returncode == 0, again.stdout + again.stderr
    losses = {name: losses_of(tmp_path / "runs" / name) for name in ("whole", "first", "again")}
    assert losses["first"] | losses["again"] == pytest.approx(losses["whole"], rel=1e-4)
    assert sorted(losses["again"]) == [2]


def losses_of(run_dir: Path) -> dict[int, float]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {line["epoch"]: line["loss"] for line in lines if line["kind"] == "epoch" and line["rank"] == 0}
