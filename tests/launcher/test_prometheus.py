"""Tests of ``run.prometheus``: the figures of a node as a file for node_exporter."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from node_kit import MakeFolder, python
from waiting import wait_until

prometheus_client = pytest.importorskip("prometheus_client")

TRAIN = """
import json, os, time
with open("metrics-rank0.jsonl", "w") as file:
    line = {"kind": "step", "loss": 0.5, "epoch": 2, "step": 3, "steps": 9, "seeds": 1, "remote_share": None}
    print(json.dumps({"t": time.time(), **line, "device": {"used_bytes": 7e9, "total_bytes": 8e9}}), file=file)
while not os.path.exists("go"):
    time.sleep(0.05)
"""


@pytest.mark.slow
def test_a_file_has_the_figures_while_the_run_lives(folder: MakeFolder, tmp_path: Path) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    left, other = (tmp_path / f"gnnfleet-{name}-node0.prom" for name in ("killed", "alive"))
    left.touch()
    other.touch()
    os.utime(left, (0, 0))
    run = folder(prometheus=str(tmp_path)).rank(python(TRAIN)).start()
    file = tmp_path / "gnnfleet-test-node0.prom"
    wait_until(lambda: file.exists() and "gnnfleet_loss" in file.read_text())
    families = text_string_to_metric_families(file.read_text())
    found = {sample.name: (sample.labels, sample.value) for family in families for sample in family.samples}
    of_rank = {"run": "test", "node": "0", "rank": "0"}
    assert found["gnnfleet_loss"] == (of_rank, 0.5) and found["gnnfleet_epoch"] == (of_rank, 2)
    assert found["gnnfleet_gpu_memory_used_bytes"] == (of_rank, 7e9) and "gnnfleet_remote_row_ratio" not in found
    assert found["gnnfleet_node_state"] == ({"run": "test", "node": "0", "state": "training"}, 1)
    (run.path / "go").touch()
    assert run.end()["findings"] == [] and list(tmp_path.glob("*.prom*")) == [other], (
        "left is that of a killed supervisor"
    )


def test_a_folder_that_is_missing_is_a_finding_and_ends_nothing(folder: MakeFolder, tmp_path: Path) -> None:
    run = folder(prometheus=str(tmp_path / "none")).rank(python(TRAIN)).start()
    wait_until(lambda: (run.path / "state.json").exists() and run.json("state.json")["findings"])
    (run.path / "go").touch()
    (finding,) = run.end()["findings"]
    assert finding["text"] == f"{tmp_path}/none/gnnfleet-test-node0.prom cannot be written: No such file or directory"
