"""Tests of ``gnnfleet export --to slurm`` on a real Slurm: the exported batch script, and a job that is requeued."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launching import REPOSITORY
from netns import NetCluster
from waiting import DEADLINE, stretched, wait_until

slurm_hosts = pytest.importorskip("slurm_hosts", reason="tests/cluster/slurm_hosts.py starts Slurm")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(slurm_hosts.slurm_unavailable()), reason=str(slurm_hosts.slurm_unavailable())),
]

CONFIG = """
name: toy
nodes: [a, b]
defaults: {{venv: {venv}, cpus: 1, memory: 1GB, env: {{GNNFLEET_KERNELS: {kernels}}}}}
data:
  dataset: synthetic
  options: {{num_nodes: 4000, avg_degree: 10, num_features: 16, num_classes: 4}}
  folder: parts
train: {{hidden: 32, fanouts: [5, 5], batch_size: 64, epochs: 6, dropout: 0.1}}
"""


class Jobs:
    """Exports a run into a folder that all hosts see, and submits the batch script."""

    def __init__(self, slurm: slurm_hosts.SlurmHosts, folder: Path) -> None:
        self.slurm, self.folder = slurm, folder
        text = CONFIG.format(venv=sys.prefix, kernels=os.environ["GNNFLEET_KERNELS"])
        (folder / "cluster.yml").write_text(text)

    def export(self, *overrides: str, options: str = "time=10,requeue") -> None:
        words = ["export", "-c", "cluster.yml", "--to", "slurm", "--slurm", options, "-o", "toy.sbatch"]
        words += [word for override in overrides for word in ("--set", override)]
        self.call(sys.executable, str(REPOSITORY / "launch.py"), *words, "--run-id", "exported")

    def call(self, *argv: str) -> str:
        return self.slurm.run(*argv, cwd=self.folder, timeout=DEADLINE).stdout.strip()

    def submit(self) -> str:
        return self.call("sbatch", "--parsable", "toy.sbatch")

    def begin_now(self, job: str) -> None:
        """Start a requeued job after three seconds. Slurm itself would wait two minutes."""

        def begins() -> bool:
            self.slurm.run("scontrol", "update", f"jobid={job}", "StartTime=now", check=False)
            return self.state(job) != "PENDING"

        wait_until(lambda: self.state(job) == "PENDING")
        time.sleep(3)  # slurmd refuses a job that starts in the second in which it was requeued
        wait_until(begins)

    def state(self, job: str) -> str:
        return self.slurm.job(job).get("JobState", "")

    def wait(self, job: str, seconds: float) -> str:
        wait_until(lambda: self.state(job) not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"), seconds)
        return self.state(job)

    def log(self, job: str) -> str:
        return (self.folder / f"toy-{job}.log").read_text()

    def path(self, job: str, name: str) -> Path:
        return self.folder / f"runs/exported-{job}" / name

    def losses(self, job: str) -> dict[int, float]:
        lines = map(json.loads, self.path(job, "node0/metrics-rank0.jsonl").read_text().splitlines())
        return {line["epoch"]: line["loss"] for line in lines if line["kind"] == "epoch"}


@pytest.fixture
def jobs(tmp_path: Path, make_cluster: Callable[..., NetCluster]) -> Iterator[Jobs]:
    cluster = make_cluster(2, shared_folder=tmp_path)
    with slurm_hosts.SlurmHosts(cluster) as slurm:
        yield Jobs(slurm, tmp_path)


def test_a_requeued_job_has_the_losses_of_an_undisturbed_one(jobs: Jobs) -> None:
    jobs.export()
    first = jobs.submit()
    assert jobs.wait(first, 200) == "COMPLETED", jobs.log(first)
    port = 20002 + int(first) % 4000 * 3
    assert f"serving parts 1 at tcp://0.0.0.0:{port}" in jobs.path(first, "node1/server.log").read_text()

    job = jobs.submit()
    wait_until(lambda: jobs.path(job, "node0/checkpoints/epoch-0002.pt").exists())
    jobs.call("scontrol", "requeue", job)
    wait_until(lambda: jobs.slurm.job(job)["Restarts"] == "1")
    jobs.begin_now(job)
    assert jobs.wait(job, 240) == "COMPLETED", jobs.log(job)
    assert jobs.log(job).count("epoch 1/6") == 1
    assert len(jobs.losses(first)) == 6
    assert jobs.losses(job) == pytest.approx(jobs.losses(first), abs=1e-5)


def test_a_job_that_slurm_warns_requeues_itself_with_a_new_checkpoint(jobs: Jobs) -> None:
    jobs.export(
        "train.epochs=4000", "train.checkpoint_every=0", "train.checkpoint_seconds=600", options="time=2,requeue"
    )
    began, job = time.monotonic(), jobs.submit()  # Slurm warns it 12 to 72 seconds before its limit of two minutes
    wait_until(lambda: jobs.slurm.job(job)["Restarts"] == "1")
    assert time.monotonic() - began < stretched(125)
    assert "toy: Slurm ends the job soon: saving a checkpoint" in jobs.log(job)
    assert [path.name for path in jobs.path(job, "node0/checkpoints").glob("*.pt")] != []
    trained = max(jobs.losses(job))
    jobs.begin_now(job)
    wait_until(lambda: max(jobs.losses(job)) > trained + 2)
    assert jobs.log(job).count("epoch 1/4000") == 1
    assert not jobs.path(job, "node0/control/checkpoint").exists()
