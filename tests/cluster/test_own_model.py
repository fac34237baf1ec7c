"""Tests of model classes of users on three SSH hosts: trained as in one process, through a kill, and used again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launching import REPOSITORY, Running, launch, local_config, write_config
from netns import NetCluster
from own_models_kit import write_models
from ssh_nodes import ssh_nodes
from waiting import DEADLINE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


# The dropout of these does not amplify the rounding of sums, which differs between processes.
@pytest.mark.parametrize(("model", "dropout"), [("own", 0.0), ("torch_geometric.nn.GraphSAGE", 0.3)])
def test_a_class_trains_on_three_hosts_as_in_one_process_through_a_kill(
    model: str, dropout: float, cluster: NetCluster, tmp_path: Path, local_workdirs: Path
) -> None:
    folders = [tmp_path / "alone", tmp_path / "far"]
    for folder in folders:
        folder.mkdir()
        name = write_models(folder)
    train: dict[str, Any] = {"model": name if model == "own" else model, "dropout": dropout}
    train |= {"epochs": 8, "batch_size": 64}
    alone = launch(local_config(folders[0], [1], local_workdirs, train=train))
    assert alone.status == 0, alone.output

    running = Running(
        write_config(
            folders[1], ssh_nodes(cluster), train={**train, "checkpoint_seconds": 0.2}, run={"restarts": 1}
        ),
        env=cluster.environment(),
    )  # fmt: skip
    running.await_line("epoch 2/8")
    ranks = [process for process in cluster.hosts[2].processes() if "trainer train" in process.cmdline]
    cluster.hosts[2].kill(ranks[-1].pid)
    done = running.end()
    assert done.status == 0, done.output
    assert [one["generation"] for one in done.result["restarts"]] == [1]
    ours = {line["epoch"]: line["step_loss"] for line in done.metrics("epoch") if "step_loss" in line}
    wanted = {epoch: alone.step_losses(epoch) for epoch in range(1, 9)}
    assert ours[8] == pytest.approx(wanted[8], rel=1e-3), "the same steps after the restart"
    kept = {path.name for path in (done.run_dir / "files").iterdir()} if model == "own" else set()
    assert kept == ({"own_models.py", "helpers_of_mine.py"} if model == "own" else set())
    argv = [sys.executable, str(REPOSITORY / "launch.py"), "infer", done.run_dir.name]
    predicted = subprocess.run(argv, cwd=folders[1], capture_output=True, text=True, check=False, timeout=DEADLINE)
    assert predicted.returncode == 0, predicted.stderr
    assert ("sampled neighbours" in predicted.stdout) == (model == "own")
    assert (done.run_dir / "predictions" / "predictions.csv").is_file()
