"""Tests of launches from config files and scripts of other launchers, on hosts in network namespaces."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from launching import REPOSITORY, Launched, launch
from netns import NetCluster
from ssh_nodes import WORKDIR
from waiting import DEADLINE

KERNELS = f"GNNFLEET_KERNELS={os.environ['GNNFLEET_KERNELS']}"  # hosts use the tests' compiled kernels
GLT = """\
# IP addresses for all nodes.
# Note: The first 3 params are expected to form usernames@nodes:ports
nodes:
  - {0}
  - {1}

# ssh ports for each node.
ports: [22, 22]

# username for remote IPs.
usernames:
  - root
  - root

# path to python with GLT env for each node.
python_bins:
  - {python}
  - {python}

# dataset name, eg. products, papers100M
dataset: {graph}

# in_channel and out_channel for the dataset
in_channel: 8
out_channel: 3

# path to GLT directory
dst_paths:
  - {folder}
  - {folder}

# node ranks setup
node_ranks: [0, 1]

# cuda visible devices for each node.
visible_devices:
  - 0,1,2,3
  - 0,1,2,3
"""
RUN_DIST = """\
#!/bin/bash
PYG_WORKSPACE=$PWD
PY_EXEC={python}
EXEC_SCRIPT={folder}/e2e_homo.py
NUM_NODES=2
DATASET_ROOT_DIR="{folder}/products"
NUM_TRAINING_PROCS=1
DATASET={graph}
EPOCHS=2
BATCH_SIZE=64
NUM_WORKERS=2
CONCURRENCY=2
PART_CONFIG="{folder}/products/ogbn-products-partitions/META.json"
NUM_NEIGHBORS="15,10,5"
IP_CONFIG=${{PYG_WORKSPACE}}/ip_config.yaml

{launch} --workspace ${{PYG_WORKSPACE}} --num_nodes ${{NUM_NODES}} --num_neighbors ${{NUM_NEIGHBORS}} \
--num_training_procs ${{NUM_TRAINING_PROCS}} --dataset_root_dir ${{DATASET_ROOT_DIR}} --dataset ${{DATASET}} \
--epochs ${{EPOCHS}} --batch_size ${{BATCH_SIZE}} --num_workers ${{NUM_WORKERS}} --concurrency ${{CONCURRENCY}} \
--part_config ${{PART_CONFIG}} --ip_config ${{IP_CONFIG}} "cd {folder}; ${{PY_EXEC}} ${{EXEC_SCRIPT}}"
"""


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    folder, rng = tmp_path / "my_graph", np.random.default_rng(0)
    folder.mkdir()
    labels = rng.integers(3, size=600)
    arrays = {
        "edge_index": rng.integers(600, size=(2, 4000)),
        "x": (np.eye(3)[labels] @ rng.normal(size=(3, 8)) + 0.1 * rng.normal(size=(600, 8))).astype(np.float32),
        "y": labels,
        "train_idx": np.arange(400),
        "val_idx": np.arange(400, 500),
        "test_idx": np.arange(500, 600),
    }
    for name, values in arrays.items():
        np.save(folder / f"{name}.npy", values)
    return folder


def on_these_hosts(cluster: NetCluster, text: str, graph: Path) -> str:
    addresses = [host.address for host in cluster.hosts[:2]]
    launcher = shlex.join([sys.executable, str(REPOSITORY / "launch.py"), "--extra_envs", KERNELS])
    return text.format(*addresses, python=sys.executable, folder=WORKDIR, graph=graph, launch=launcher)


@pytest.mark.slow  # tests/launcher/test_foreign.py tests its plan
def test_a_graphlearn_torch_yaml_launches_unchanged(cluster: NetCluster, tmp_path: Path, graph: Path) -> None:
    # The file asks for four GPUs per node; the hosts have none, so the command line overrides this.
    config = tmp_path / "dist_train_sage_sup_config.yml"
    config.write_text(on_these_hosts(cluster, GLT, graph))
    words = "--epochs 2 --batch_size 64 --master_addr 0.0.0.0 --master_port 11345 --set nodes.*.devices=[]"
    done = launch(config, *words.split(), "--set", f"nodes.*.setup=export {KERNELS}", env=cluster.environment())
    assert done.status == 0, done.output
    assert "recognised as GLT's YAML (2 hosts)" in done.output
    assert len(done.step_losses(2)) == 4, "400 seeds in global batches of 2 x 64"
    assert done.result["metrics"]["test_accuracy"] > 0.5


@pytest.mark.slow
def test_torch_geometrics_run_dist_launches_unchanged(cluster: NetCluster, tmp_path: Path, graph: Path) -> None:
    (tmp_path / "ip_config.yaml").write_text("".join(f"- {host.address} 1234\n" for host in cluster.hosts[:2]))
    script = tmp_path / "run_dist.sh"
    script.write_text(on_these_hosts(cluster, RUN_DIST, graph))
    done = subprocess.run(
        ["bash", str(script)], cwd=tmp_path, env=cluster.environment(), capture_output=True, text=True, timeout=DEADLINE
    )
    ended = Launched(done.returncode, done.stdout + done.stderr, tmp_path)
    assert ended.status == 0, ended.output
    assert "e2e_homo.py is an example of torch_geometric.distributed" in ended.output
    assert len(ended.step_losses(2)) == 4
    assert {path.parent.name for path in ended.run_dir.glob("logs/*/rank*.log")} == {"node0", "node1"}
