"""Tests of ``gnnfleet rehearse``: its config, and faults in real processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from launcher.cli.main import run
from launcher.config.loader import load_config, to_yaml
from launcher.config.resolve import resolve_run
from launcher.config.schema import ClusterConfig, DataConfig, NodeConfig, RunConfig
from launcher.errors import UsageError
from launcher.rehearse.faults import Fault
from launcher.rehearse.local_config import local_config, smaller_graph_options
from launching import REPOSITORY, SYNTHETIC, TRAIN, Launched
from plan_kit import cluster
from trainer.core.train_config import TrainConfig

#: A training script that reports steps of 10 ms as the bundled trainer does.
SCRIPT = """
import json, os, time
rank, folder = os.environ["RANK"], os.environ["GNNFLEET_RUN_DIR"]
lines = open(f"{folder}/metrics-rank{rank}.jsonl", "a")
progress = open(f"{folder}/progress-rank{rank}", "w")
for epoch in (1, 2, 3):
    for step in range(40):
        time.sleep(0.01)
        if step == 0:
            line = {"t": time.time(), "kind": "step", "epoch": epoch, "step": step, "steps": 40, "loss": 0.5}
            print(json.dumps(line), file=lines, flush=True)
        os.pwrite(progress.fileno(), f"{epoch} {step + 1} load".ljust(39).encode() + bytes([10]), 0)
"""


def rehearse(folder: Path, *words: str, timeout: float = 200) -> Launched:
    command = [sys.executable, str(REPOSITORY / "launch.py"), "rehearse", "--config", "cluster.yml", "--folder", "work"]
    state = {"TMUX_TMPDIR": str(folder), "XDG_STATE_HOME": str(folder / "state")}
    done = subprocess.run(
        [*command, *words], cwd=folder, env={**os.environ, **state, "COLUMNS": "200"}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    return Launched(done.returncode, done.stdout, folder)


def write_cluster(folder: Path, nodes: list[dict], **sections: dict) -> None:
    env = {"GNNFLEET_KERNELS": os.environ["GNNFLEET_KERNELS"]}
    config = {"nodes": nodes, "defaults": {"env": env, "venv": "/opt/of/the/host"}, "train": TRAIN, **sections}
    config["data"] = {"dataset": "synthetic", "options": SYNTHETIC, "mode": "verify", "folder": "/shared/parts"}
    (folder / "cluster.yml").write_text(yaml.safe_dump(config))


def test_a_rehearsal_has_the_nodes_ranks_and_settings_of_the_cluster(tmp_path: Path) -> None:
    config = cluster(
        NodeConfig("gnn1", user="alice", devices=(0, 1), env={"NCCL_DEBUG": "INFO", "MINE": "1"}, venv="/venv"),
        NodeConfig("gnn2", port=2222, procs=3, batch_share=2.0, setup=("module load cuda",), address="10.0.0.2"),
        NodeConfig("store", role="server", workdir="/data"),
        data=DataConfig("synthetic", store="s3://bucket/parts", num_parts=6, topology="partitioned", cache="5%"),
        train=TrainConfig(backend="nccl", sampling="cuda", device_cache="10%", lr=0.5, resume="old"),
        run=RunConfig(master_port=1234, service_port=1235, control_port=1236, restarts=2),
    )
    made = local_config(config, tmp_path, 500)
    (tmp_path / "cluster.yml").write_text(to_yaml(made))
    read = load_config(tmp_path / "cluster.yml")
    assert read == made, "a user can launch the same file"
    assert [(node.role, node.nproc, node.batch_share) for node in read.nodes] == [
        ("worker", 2, 1.0), ("worker", 3, 2.0), ("server", 0, 1.0)
    ]  # fmt: skip
    assert {node.host for node in read.nodes} == {"localhost"} and read.nodes[0].env == {"MINE": "1"}
    assert (read.num_parts, read.data.topology, read.data.cache) == (6, "partitioned", "5%")
    assert (read.train.lr, read.train.backend, read.train.sampling, read.train.resume) == (0.5, "gloo", "cpu", None)
    assert (read.run.restarts, read.run.encrypt, read.run.master_port) == (2, "on", "auto")
    assert (read.data.mode, read.data.store) == ("sync", None)
    other = local_config(config, tmp_path, 600)
    assert other.data.folder != made.data.folder, "parts of another graph are not replaced"


@pytest.mark.parametrize(
    ("dataset", "options", "smaller"),
    [
        ("synthetic", {}, {"num_nodes": 1000}),
        ("synthetic", {"num_nodes": 300, "train": 40}, {"num_nodes": 300, "train": 40}),
        ("synthetic", {"num_nodes": 100_000, "train": 4000, "val": 0.1},
         {"num_nodes": 1000, "train": 40, "val": 0.1}),
        ("ogbn-products", {"undirected": True}, {"undirected": True, "subset": 1000}),
        ("file", {"subset": 50}, {"subset": 50}),
    ],
)  # fmt: skip
def test_options_make_the_graph_smaller(dataset: str, options: dict, smaller: dict) -> None:
    assert smaller_graph_options(DataConfig(dataset, options=options), 1000) == smaller


@pytest.mark.parametrize("data", [DataConfig("partition"), DataConfig("synthetic", serving="products")])
def test_graphs_that_cannot_be_made_smaller_are_refused(data: DataConfig, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be (made smaller|rehearsed); .*--dataset"):
        local_config(cluster(data=data), tmp_path, 1000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank1", "expected rankR or serverK"),
        ("rank1:burn@step3", "as rank1:kill@step20"),
        ("rank2:kill@step3", "the run has ranks 0 to 1"),
        ("server1:kill@step3", "that node has no graph server; the run has server0"),
    ],
)
def test_a_wrong_fault_is_refused(text: str, message: str) -> None:
    config = resolve_run(ClusterConfig((NodeConfig("a"), NodeConfig("b", role="client")), DataConfig("synthetic")))
    with pytest.raises(UsageError, match=re.escape(message)):
        Fault.parse(text).check(config)


@pytest.mark.slow
def test_a_killed_rank_is_reported_as_in_a_real_run(tmp_path: Path) -> None:
    write_cluster(tmp_path, [{"host": "gnn1", "procs": 2}])
    (tmp_path / "steps.py").write_text(SCRIPT)
    done = rehearse(tmp_path, "--vertices", "200", "--fault", "rank1:kill@step50", "--", "python", "steps.py")
    assert done.status == 137 and "Traceback" not in done.output, done.output
    sent = re.search(r"fault: SIGKILL sent to rank1 \(pid \d+\) after (\d+) steps", done.output)
    assert sent and 50 <= int(sent[1]) <= 55, done.output
    assert "node0 stands for gnn1" in done.output
    assert "rank 1 on node0 (local) was killed by signal 9 (SIGKILL)" in done.output
    assert done.result["state"] == "failed" and done.result["exit_status"] == 137


@pytest.mark.slow
def test_a_fault_that_did_not_happen_is_an_error(tmp_path: Path) -> None:
    write_cluster(tmp_path, [{"host": "gnn1", "procs": 2}])
    (tmp_path / "steps.py").write_text(SCRIPT)
    late = rehearse(tmp_path, "--vertices", "200", "--fault", "rank1:kill@step121", "--", "python", "steps.py")
    assert late.status == 1, late.output
    assert "error: the fault rank1:kill@step121 did not happen: the run ended after 120 steps" in late.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        ("rank1:kill@step10", 137, "rank 1 on node1 (local) was killed by signal 9 (SIGKILL)"),
        (
            "rank1:freeze@step10",
            1,
            "rank 1 on node1 (local) is stopped (SIGSTOP or a debugger): no process has trained a step for ",
        ),
        ("server1:kill@step10", 0, "server of node1 (local) was killed by signal 9 (SIGKILL); restart 1 of 3"),
    ],
)
def test_faults_of_the_bundled_trainer(fault: str, status: int, words: str, tmp_path: Path) -> None:
    train = {**TRAIN, "epochs": 60}
    stall_after = 8 if "freeze" in fault else 100  # a server that is started again on a busy machine is no stall
    write_cluster(tmp_path, [{"host": "gnn1"}, {"host": "gnn2"}], train=train, run={"stall_after": stall_after})
    done = rehearse(tmp_path, "--vertices", "2000", "--fault", fault)
    assert done.status == status, done.output
    assert words in done.output
    assert f"sent to {fault.split(':')[0]} (pid" in done.output
    assert json.loads((done.run_dir / "result.json").read_text())["exit_status"] == status


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_cluster(tmp_path, [{"host": "gnn1"}])
    (tmp_path / "file").touch()
    assert run(["rehearse", "--config", str(tmp_path / "cluster.yml"), "--folder", str(tmp_path / "file")]) == 2
    assert "choose another folder for the rehearsal with --folder" in capsys.readouterr().err
