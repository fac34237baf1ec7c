"""The main job on three sshd hosts: launch.py as a process, nothing shared unless a test says so."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from launching import launch, local_config, write_config
from netns import NetCluster
from ssh_nodes import ssh_nodes

SHARED_DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "debian"


def left_behind(cluster: NetCluster) -> list[str]:
    """Processes on the hosts besides the system's own, in words."""
    return [f"{host.name}: {process}" for host in cluster.hosts for process in host.processes()]


def test_from_nothing_to_a_collected_result_with_the_loss_curve_of_one_process(cluster3, tmp_path, local_workdirs):
    (tmp_path / "alone").mkdir()
    alone = launch(local_config(tmp_path / "alone", [1], local_workdirs))
    far = launch(write_config(tmp_path, ssh_nodes(cluster3, (1, 2, 1))), env=cluster3.environment())
    assert far.status == 0, far.output
    assert far.step_losses() == pytest.approx(alone.step_losses(), rel=1e-4)
    assert far.step_losses(2) == pytest.approx(alone.step_losses(2), rel=1e-4)
    logs = {path.relative_to(far.run_dir / "logs").as_posix() for path in far.run_dir.glob("logs/*/rank*.log")}
    assert logs == {"node0/rank0.log", "node1/rank1.log", "node1/rank2.log", "node2/rank3.log"}
    assert left_behind(cluster3) == []


@pytest.mark.slow
def test_a_second_launch_sends_no_part_again(cluster3, tmp_path):
    config = write_config(tmp_path, ssh_nodes(cluster3, (1, 1)))
    for run_id in ("first", "second"):
        done = launch(config, "--run-id", run_id, "--epochs", "1", env=cluster3.environment())
        assert done.status == 0, done.output
    first, second = (bytes_sent(tmp_path / "runs" / run_id) for run_id in ("first", "second"))
    parts = sum(path.stat().st_size for path in (tmp_path / "parts").rglob("*.npy"))
    assert sum(first.values()) > parts
    assert max(second.values()) < 20_000, "only the run's own small files are new"


def bytes_sent(run_dir: Path) -> dict[int, int]:
    """Bytes that sync sent to each node of a run."""
    events = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    return {event["node_rank"]: event["bytes"] for event in events if event["kind"] == "synced"}


def test_shared_folder_is_verified_in_place_and_a_flipped_byte_refused(make_cluster, tmp_path):
    cluster = make_cluster(2, shared_folder=tmp_path / "shared")
    config = write_config(
        tmp_path, ssh_nodes(cluster, (1, 1)), data={"folder": str(tmp_path / "shared/parts"), "mode": "verify"}
    )
    missing = launch(config, env=cluster.environment())
    assert missing.status == 3 and "gnnfleet partition make" in missing.output
    made = launch_partition(config, cluster)
    assert made.status == 0, made.output
    good = launch(config, "--run-id", "good", env=cluster.environment())
    assert good.status == 0, good.output
    flip_a_byte(tmp_path / "shared/parts/part1/nodes/node/attrs/x.npy")
    bad = launch(config, "--run-id", "bad", env=cluster.environment())
    assert bad.status != 0
    assert (
        "part1/nodes/node/attrs/x.npy" in bad.output
        and "node1" in bad.output
        and cluster.hosts[1].address in bad.output
    )
    assert left_behind(cluster) == []


def launch_partition(config: Path, cluster: NetCluster):
    import subprocess

    from launching import REPOSITORY, Launched

    command = [sys.executable, str(REPOSITORY / "launch.py"), "partition", "make", "--config", str(config)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env=cluster.environment(), cwd=config.parent
    )
    return Launched(done.returncode, done.stdout + done.stderr, config.parent)


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.slow
@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="the debian graph is not beside the repository")
@pytest.mark.timeout(1800)
def test_the_real_graph_reaches_the_reference_accuracy(cluster3, tmp_path, local_workdirs):
    """Global batch 1024, fanouts 15,10,5, at most twenty epochs: at least 0.77; and one process's first epoch."""
    train = {"hidden": 256, "fanouts": [15, 10, 5], "batch_size": 1024, "epochs": 20, "lr": 0.004, "dropout": 0.3}
    data = {"dataset": "file", "source": str(SHARED_DATA), "options": {}}
    done = launch(
        write_config(tmp_path, ssh_nodes(cluster3), data=data, train=train), env=cluster3.environment(), timeout=1500
    )
    assert done.status == 0, done.output
    (tmp_path / "alone").mkdir()
    alone = launch(local_config(tmp_path / "alone", [1], local_workdirs, data=data, train=train | {"epochs": 1}))
    assert alone.status == 0, alone.output
    assert done.step_losses() == pytest.approx(alone.step_losses(), rel=1e-4)
    assert done.result["metrics"]["test_accuracy"] >= 0.77
    assert left_behind(cluster3) == []
