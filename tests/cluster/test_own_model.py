"""Tests of model classes of users on three SSH hosts, and in Slurm jobs on them: trained as in one process, through a
kill or a requeue, and used again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import gnnfleet as gf
from launching import REPOSITORY, TRAIN, Running, json_lines, write_config
from netns import NetCluster
from own_models_kit import write_models
from slurm_hosts import SlurmHosts, slurm_unavailable
from slurm_lab import Lab
from ssh_nodes import ssh_nodes
from trainer.core.ranks import Ranks
from trainer.train.checkpoint import load_checkpoint
from trainer.train.fit import FitResult
from trainer.train.job import train
from trainer.train.settings import TrainJob, TrainSettings
from waiting import DEADLINE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

NEAR = {"rtol": 2e-3, "atol": 1e-4}
OPTIONS = {"num_nodes": 1500, "avg_degree": 8, "num_classes": 5, "num_features": 16, "homophily": 0.8}


@dataclass(frozen=True)
class Case:
    model: str
    dataset: str = "synthetic"
    more: dict[str, Any] = field(default_factory=dict)  #: further settings

    @property
    def own(self) -> bool:
        return ":" in self.model

    def data(self, folder: Path) -> dict[str, Any]:
        """Return the section ``data``: the first launch makes the parts in ``folder``, which all tests share."""
        return {"dataset": self.dataset, "options": OPTIONS, "folder": str(folder / self.dataset), "num_parts": 3}

    def train(self, **more: Any) -> dict[str, Any]:
        """Return the section ``train``."""
        common = {"model": self.model, "dropout": 0.3, "heads": 2, "epochs": 10, "batch_size": 32, "fanouts": [3, 3]}
        return {**TRAIN, **common, "hidden": 16, "lr": 0.02, **self.more, **more}

    def alone(self, config: Path, parts: Path, **more: Any) -> FitResult:
        """Train in this process. The model class is beside ``config``."""
        settings = self.train(**more)
        settings["model"] = f"{config.parent}/{self.model}" if self.own else self.model
        settings["fanouts"] = tuple(settings["fanouts"])
        return train(TrainJob(TrainSettings(**settings), parts / self.dataset, config.parent / "alone"), Ranks())

    def use(self, run: Path, told: str) -> None:
        """Check what ``infer`` has told and written, and the model of a run folder."""
        assert ("was run on sampled neighbours (3, 3), as in evaluation" in told) == self.own, told
        assert len((run / "predictions" / "predictions.csv").read_text().splitlines()) == 1501
        loaded = gf.load_model(run)
        assert not loaded.training and loaded.built_from["settings"]["model"].endswith(self.model)


#: Some amplify the rounding of sums, which differs between numbers of ranks: at lr 0.02 the typed class from 1e-7 in
#: the first steps to 2e-5 after 30.
CASES = {
    "sage": Case("torch_geometric.nn.GraphSAGE"),
    "gat": Case("torch_geometric.nn.GAT"),
    "gin": Case("torch_geometric.nn.GIN", more={"lr": 0.001}),
    "pna": Case("torch_geometric.nn.PNA", more={"lr": 0.001}),
    "own": Case("own_models.py:Own", more={"keep": 3}),
    "typed": Case("own_models.py:Own", "synthetic-hetero", {"lr": 0.002}),
}
EARLY_END = {"early_stop": {"patience": 3, "metric": "loss"}, "epochs": 40}


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for the parts of all tests: the first launch of each graph makes them."""
    return tmp_path_factory.mktemp("graphs")


@pytest.mark.parametrize("case", CASES)
def test_a_class_trains_on_three_hosts_as_in_one_process_through_a_kill(
    case: str, cluster: NetCluster, graphs: Path, tmp_path: Path
) -> None:
    of = CASES[case]
    write_models(tmp_path)
    early = EARLY_END if case == "sage" else {}

    def gnnfleet(*words: str) -> str:
        argv = [sys.executable, str(REPOSITORY / "launch.py"), *words]
        done = subprocess.run(
            argv, cwd=tmp_path, env=cluster.environment(), capture_output=True, text=True, timeout=DEADLINE
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    # Three ranks, of which one is killed.
    settings = of.train(checkpoint_seconds=0.05, **early)
    config = write_config(tmp_path, ssh_nodes(cluster), data=of.data(graphs), train=settings, run={"grace": 2})
    running = Running(config, "--run-id", f"{case}-killed", env=cluster.environment()).await_epoch(3, cluster.path_on)
    ranks = [process for process in cluster.hosts[2].processes() if "trainer train" in process.cmdline]
    cluster.hosts[2].kill(ranks[-1].pid)
    killed = running.end()
    assert killed.status != 0, killed.output
    kept = {path.name for path in (killed.run_dir / "files").iterdir()} if of.own else set()
    assert kept == ({"own_models.py", "helpers_of_mine.py"} if kept else set())
    checkpoints = {path.name for path in (killed.run_dir / "checkpoints").iterdir()}
    assert "last.pt" in checkpoints and ("epoch-0001.pt" in checkpoints or len(checkpoints) > 3) == ("keep" in of.more)

    # Two ranks continue after the last step that was saved.
    saved = load_checkpoint(killed.run_dir / "checkpoints" / "last.pt")
    gnnfleet("resume", f"{case}-killed", "--run-id", f"{case}-resumed", "--exclude", cluster.hosts[2].address)
    run = tmp_path / "runs" / f"{case}-resumed"
    lines = json_lines(run / "metrics.jsonl")
    assert {line["rank"] for line in lines if line["kind"] == "step"} == {0, 1}
    first = min((line["epoch"], line["step"]) for line in lines if line["kind"] == "step")
    assert first == (saved.epoch + 1, saved.position[1])

    # The curve, and the epoch in which it ends, are those of one process.
    wanted = of.alone(config, graphs, **early)
    assert bool(wanted.ended_early) == bool(early)
    (result,) = (line for line in lines if line["kind"] == "result")
    assert result["epochs"] == wanted.epochs
    found = load_checkpoint(run / "checkpoints" / "last.pt").step_loss
    torch.testing.assert_close(torch.cat(found), torch.cat(wanted.step_loss), **NEAR)

    # The run is used again.
    of.use(run, gnnfleet("infer", f"{case}-resumed", "--parts", str(graphs / of.dataset)))


@pytest.fixture(scope="module")
def lab(three_hosts: NetCluster) -> Iterator[Lab]:
    if reason := slurm_unavailable():
        pytest.skip(f"no Slurm here: {reason}")
    assert three_hosts.shared_folder is not None
    folder = three_hosts.shared_folder / "slurm"
    folder.mkdir()
    with SlurmHosts(three_hosts) as slurm:
        yield Lab(slurm, folder)


@pytest.mark.parametrize("case", CASES)
def test_a_class_trains_in_a_slurm_job_as_in_one_process_through_a_requeue(case: str, lab: Lab) -> None:
    of = CASES[case]
    # the only checkpoint before the end of training is that of the warning
    settings = of.train(epochs=6, checkpoint_seconds=600, checkpoint_every=0)
    config = lab.config(case, data=of.data(lab.folder), train=settings)
    write_models(config.parent)
    host = lab.slurm.cluster.hosts[0]
    with lab.releasing():
        running = lab.submit(config, case, options="nodes=3,time=20:00,requeue").await_epoch(1)
        job = lab.job_of(config, case)
        host.slow_link("4mbit")  # the warning must come before the last epoch
        try:
            lab.slurm.run("scancel", "--batch", "--signal=USR1", job)
            running.await_line(f"job {job} was requeued: resuming from")
        finally:
            host.full_speed()
        done = running.end()
    assert done.status == 0, done.output

    # The next start of the job continues after the last step that was saved.
    runs = config.parent / "runs"
    saved = load_checkpoint(runs / case / "checkpoints" / "last.pt")
    lines = json_lines(runs / f"{case}-r1" / "metrics.jsonl")
    steps = [(line["epoch"], line["step"]) for line in lines if line["kind"] == "step"]
    assert min(steps) == (saved.epoch + 1, saved.position[1]), done.output
    assert {line["rank"] for line in lines if line["kind"] == "step"} == {0, 1, 2}
    wanted = of.alone(config, lab.folder, epochs=6)
    found = load_checkpoint(runs / f"{case}-r1" / "checkpoints" / "last.pt").step_loss
    torch.testing.assert_close(torch.cat(found), torch.cat(wanted.step_loss), **NEAR)

    told = lab.gnnfleet(config, "infer", f"{case}-r1")
    assert told.status == 0, told.output
    of.use(runs / f"{case}-r1", told.output)
