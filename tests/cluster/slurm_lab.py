"""A user of Slurm on the hosts of a ``NetCluster``, who submits runs with ``--slurm``."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from launching import REPOSITORY, SYNTHETIC, Launched, Running
from slurm_hosts import SlurmHosts
from waiting import DEADLINE, wait_until

#: The undisturbed run takes a few seconds, with several steps per epoch.
TRAIN = {"hidden": 32, "fanouts": [5, 5], "batch_size": 64, "epochs": 60, "seed": 3, "dropout": 0.2, "eval_every": 20}


class Lab:
    """A Slurm cluster, and a user with a folder on the file system that all hosts share."""

    def __init__(self, slurm: SlurmHosts, folder: Path):
        self.slurm, self.folder = slurm, folder
        self.env = slurm.environment | {"HOME": str(folder / "home")}
        (folder / "home").mkdir(exist_ok=True)

    def config(self, name: str, **sections: dict) -> Path:
        """Write a cluster.yml into a new folder."""
        path = self.folder / name / "cluster.yml"
        path.parent.mkdir()
        defaults = {
            "workdir": f"{self.folder}/nodes/node{{node_rank}}",
            "env": {"GNNFLEET_KERNELS": os.environ["GNNFLEET_KERNELS"], "OMP_NUM_THREADS": "1"},
        }
        data = {"dataset": "synthetic", "options": SYNTHETIC, "folder": str(self.folder / "parts")}
        tree = {"transport": "slurm", "defaults": defaults, "data": data, "train": TRAIN, **sections}
        path.write_text(yaml.safe_dump(tree))
        return path

    def gnnfleet(self, config: Path, *words: str) -> Launched:
        """Run ``gnnfleet`` with the arguments ``words`` on the login node, in the folder of ``config``."""
        done = self.slurm.run(
            *(sys.executable, str(REPOSITORY / "launch.py"), *words),
            check=False,
            timeout=DEADLINE,
            environment=self.env,
            cwd=config.parent,
        )
        return Launched(done.returncode, done.stdout + done.stderr, config.parent)

    def submit(self, config: Path, run_id: str, *words: str, options: str = "nodes=2,time=10:00") -> Running:
        return Running(config, "--slurm", options, "--run-id", run_id, *words, env=self.env)

    def job_of(self, config: Path, run_id: str) -> str:
        """Return the id of the job that a submitted run waits for or runs in."""
        path = config.parent / "runs" / run_id / "launch.json"
        return str(wait_until(lambda: path.exists() and json.loads(path.read_text())["slurm_job"], 30))

    def result(self, config: Path, run_id: str) -> dict:
        return json.loads((config.parent / "runs" / run_id / "result.json").read_text())

    def curve(self, config: Path, *run_ids: str) -> list[float]:
        """Return the loss of every step. ``run_ids``: a run and then the runs that resumed it."""
        losses: dict[int, list[float]] = {}
        for run_id in run_ids:
            for text in (config.parent / "runs" / run_id / "metrics.jsonl").read_text().splitlines():
                line = json.loads(text)
                if line["kind"] == "epoch" and "step_loss" in line:
                    losses[line["epoch"]] = line["step_loss"]
        return [loss for epoch in sorted(losses) for loss in losses[epoch]]

    def epochs(self, config: Path, run_id: str) -> int:
        """Return how many epochs a running run has trained, by the metrics on its lead node."""
        found = list((self.folder / "nodes/node0/runs" / run_id).glob("node0/metrics-rank0.jsonl"))
        return found[0].read_text().count('"kind": "epoch"') if found else 0

    @contextmanager
    def releasing(self) -> Iterator[None]:
        """Let requeued jobs start after three seconds; Slurm would wait two minutes."""
        # slurmd refuses a job that starts in the second in which it was requeued: "Job credential revoked".
        over, seen = threading.Event(), dict[str, float]()

        def release() -> None:
            while not over.wait(0.5):
                for job in self.slurm.jobs():
                    waits = self.slurm.job(job).get("Reason") == "BeginTime"
                    if waits and time.monotonic() - seen.setdefault(job, time.monotonic()) > 3:
                        del seen[job]
                        self.slurm.run("scontrol", "update", f"jobid={job}", "StartTime=now", check=False)

        thread = threading.Thread(target=release)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
