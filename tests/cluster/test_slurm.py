"""Tests of runs in jobs of a real Slurm: submission, allocations, time limits, stops, and requeued jobs."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.command import Command
from launcher.errors import CommandTimeout
from launcher.transport.local import LocalTransport
from launcher.transport.slurm import SlurmTransport, open_job
from launching import REPOSITORY, Running, launch
from netns import NetCluster
from slurm_hosts import SlurmHosts, slurm_unavailable
from slurm_lab import TRAIN, Lab
from waiting import DEADLINE, wait_until

pytestmark = [
    pytest.mark.skipif(bool(slurm_unavailable()), reason=f"no Slurm here: {slurm_unavailable()}"),
    pytest.mark.timeout(600),
]

HELLO = "import os, socket\nprint('hello from rank', os.environ['RANK'], 'on', socket.gethostname(), flush=True)\n"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmHosts]:
    with NetCluster(2, shared_folder=tmp_path_factory.mktemp("slurm")) as cluster, SlurmHosts(cluster) as made:
        yield made


@pytest.fixture
def lab(slurm: SlurmHosts) -> Iterator[Lab]:
    assert slurm.cluster.shared_folder is not None
    made = Lab(slurm, slurm.cluster.shared_folder)
    yield made
    slurm.cancel_all()


def test_commands_and_files_of_job_steps(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", lab.env["SLURM_CONF"])
    lab.slurm.run("salloc", "-N2", "--no-shell")
    (job,) = lab.slurm.jobs()
    hosts = lab.slurm.cluster.hosts
    for host, transport in zip(hosts, open_job(job, [host.name for host in hosts]).values(), strict=True):
        assert isinstance(transport, SlurmTransport)
        done = transport.run(Command(("bash", "-c", "hostname; cat; exit 3")), stdin=b"in", timeout=DEADLINE)
        assert (done.returncode, done.stdout) == (3, f"{host.name}\nin".encode())
        transport.write(b"content", f"/tmp/{host.name}", mode=0o600)
        assert host.root_path(f"/tmp/{host.name}").read_bytes() == b"content"
        transport.download(f"/tmp/{host.name}", tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == b"content"
        with pytest.raises(CommandTimeout):
            transport.run(Command(("sleep", "77")), timeout=0.5)
        wait_until(lambda host=host: not any("sleep 77" in each.cmdline for each in host.processes()))
    lab.slurm.run("scancel", job)
    # the job is COMPLETING, and its nodes are unreachable, until slurmd has ended its processes
    wait_until(lambda: isinstance(open_job(job, ["any"])[0], LocalTransport))
    assert transport.run(Command(("hostname",)), timeout=DEADLINE).stdout.decode().strip() == socket.gethostname()


@pytest.mark.slow
def test_a_submitted_command_waits_runs_on_every_node_and_is_reported(lab: Lab) -> None:
    config = lab.config("hello")
    (config.parent / "hello.py").write_text(HELLO)
    other = lab.slurm.run("sbatch", "--parsable", "-N2", "--exclusive", "--output=/dev/null", "--wrap", "sleep 300")
    running = lab.submit(config, "hello", "--", "python", "hello.py")
    running.await_line("waits in the queue (Resources")
    status = lab.gnnfleet(config, "status", "hello")
    assert status.status == 0 and "waiting in the queue of Slurm since" in status.output, status.output
    lab.slurm.run("scancel", other.stdout.strip())
    done = running.end()
    assert done.status == 0, done.output
    names = [host.name for host in lab.slurm.cluster.hosts]
    for rank, name in enumerate(names):
        assert f"node{rank}/rank{rank} | hello from rank {rank} on {name}" in done.output, done.output
    status = lab.gnnfleet(config, "status", "hello")
    assert status.status == 0 and "run hello is done" in status.output
    assert lab.result(config, "hello")["notes"] == []


@pytest.mark.slow
def test_a_warned_job_is_requeued_and_resumes_with_the_same_losses(lab: Lab) -> None:
    config = lab.config("exact")
    undisturbed = lab.submit(config, "whole").end()
    assert undisturbed.status == 0, undisturbed.output
    wanted = lab.curve(config, "whole")
    longer = lab.config("longer", train={**TRAIN, "epochs": 2000, "checkpoint_seconds": 600, "checkpoint_every": 0})
    with lab.releasing():
        running = lab.submit(longer, "warned", options="nodes=2,time=20:00,requeue").await_epoch(3)
        job = lab.job_of(longer, "warned")
        # what Slurm does itself before the time limit, by the script's --signal
        lab.slurm.run("scancel", "--batch", "--signal=USR1", job)
        wait_until(lambda: lab.epochs(longer, "warned-r1") > 3)
        stopped = lab.gnnfleet(longer, "stop", "warned-r1")
        assert stopped.status == 0, stopped.output
        assert f"job {job} was requeued: resuming from" in running.end().output
    first = lab.result(longer, "warned")
    assert (first["state"], first["stopped_by"], first["notes"]) == ("stopped", f"Slurm (end of job {job})", [])
    assert lab.slurm.job(job)["Restarts"] == "1"
    curve = lab.curve(longer, "warned", "warned-r1")
    assert len(curve) > 100 and curve[: len(wanted)] == pytest.approx(wanted[: len(curve)], rel=1e-4)
    status = lab.gnnfleet(longer, "status", "warned")
    assert "gnnfleet status warned-r1" in status.output


@pytest.mark.slow
def test_the_time_limit_ends_a_run_before_slurm_does(lab: Lab) -> None:
    config = lab.config("limit")
    (config.parent / "wait.py").write_text("import time\nprint('waiting', flush=True)\ntime.sleep(600)\n")
    done = lab.submit(config, "limit", "--", "python", "wait.py", options="nodes=2,time=2,requeue").end()
    result = lab.result(config, "limit")
    assert result["state"] == "stopped" and result["stopped_by"].startswith("Slurm (end of job"), done.output
    assert done.status == result["exit_status"] == 130
    assert "not requeued, as the run has saved no checkpoint" in done.output
    assert not (config.parent / "runs/limit-r1").exists()


@pytest.mark.slow
def test_stop_and_scancel_leave_no_process_and_a_report(lab: Lab) -> None:
    # the only checkpoints are those that SIGTERM leads to
    train = {**TRAIN, "epochs": 5000, "checkpoint_seconds": 600, "checkpoint_every": 0}
    config = lab.config("ends", train=train, run={"grace": 10})
    running = lab.submit(config, "stopped").await_epoch(2)
    logs = lab.gnnfleet(config, "logs", "stopped", "-n", "2")
    assert logs.status == 0 and "/5000  loss" in logs.output
    stopped = lab.gnnfleet(config, "stop", "stopped")
    assert stopped.status == 0 and "no process of it is left on its 2 nodes" in stopped.output, stopped.output
    assert running.end().status == 130
    assert "gnnfleet stop" in lab.result(config, "stopped")["stopped_by"]
    assert (config.parent / "runs/stopped/checkpoints/last.pt").exists()
    running = lab.submit(config, "cancelled").await_epoch(2)
    lab.slurm.run("scancel", lab.job_of(config, "cancelled"))
    assert running.end().status == 130
    result = lab.result(config, "cancelled")
    assert (result["state"], result["notes"]) == ("stopped", [])
    assert (config.parent / "runs/cancelled/checkpoints/last.pt").exists()
    wait_until(lambda: not lab.slurm.jobs())
    for host in lab.slurm.cluster.hosts:
        assert [process for process in host.processes() if "slurmd" not in process.cmdline] == []
    resumed = lab.gnnfleet(config, "resume", "stopped", "--run-id", "again", "--detach")
    assert resumed.status == 0 and "submitted job" in resumed.output, resumed.output
    wait_until(lambda: lab.epochs(config, "again") > 1)
    assert lab.gnnfleet(config, "stop", "again").status == 0


def await_resumed_run(lab: Lab, config: Path, running: Running, run_id: str) -> None:
    """Wait until a requeued job trains the run ``run_id``, then stop it and wait for the end of ``running``."""
    wait_until(lambda: lab.epochs(config, run_id) > 1)
    assert lab.gnnfleet(config, "stop", run_id).status == 0
    output = running.end().output
    assert "was requeued: resuming from" in output and f"run {run_id}: connecting" in output


@pytest.mark.slow
def test_a_node_that_dies_is_replaced_by_requeueing_the_job(lab: Lab) -> None:
    config = lab.config("dies", train={**TRAIN, "epochs": 4000, "checkpoint_seconds": 2})
    host = lab.slurm.cluster.hosts[1]
    with lab.releasing():
        running = lab.submit(config, "dies", options="nodes=2,time=20:00,requeue").await_epoch(20)
        host.power_cut()
        running.await_line("no sign of life for 6 s")
        host.power_on()
        host.wait_until_up()
        host.restore_network()
        lab.slurm.start_slurmd(host)
        await_resumed_run(lab, config, running, "dies-r1")


@pytest.mark.slow
def test_a_preempted_job_resumes_from_the_checkpoint_of_its_end(lab: Lab) -> None:
    # the only checkpoint of the first start is the one that SIGTERM leads to
    train = {**TRAIN, "epochs": 4000, "checkpoint_seconds": 600, "checkpoint_every": 0}
    config = lab.config("preempted", train=train, run={"grace": 10})
    with lab.releasing():
        running = lab.submit(config, "preempted", options="nodes=2,time=20:00,partition=main,requeue")
        running.await_epoch(5)
        lab.slurm.run("sbatch", "-N2", "--exclusive", "--partition=urgent", "--output=/dev/null", "--wrap", "sleep 5")
        await_resumed_run(lab, config, running, "preempted-r1")


@pytest.mark.slow
def test_in_an_allocation_and_in_a_script_by_hand(lab: Lab) -> None:
    config = lab.config("inside")
    (config.parent / "hello.py").write_text(HELLO)
    program = f"{sys.executable} {REPOSITORY / 'launch.py'} --config {config} --plain"
    salloc = ["salloc", "-N2", "bash", "-c", f"cd {config.parent} && {program} --run-id inside -- python hello.py"]
    done = lab.slurm.run(*salloc, check=False, timeout=DEADLINE, environment=lab.env)
    assert done.returncode == 0 and "hello from rank 1" in done.stdout, done.stdout + done.stderr
    script = config.parent / "by-hand.sh"
    script.write_text(
        f"#!/bin/bash\n#SBATCH --nodes=2 --output={config.parent}/out\ncd {config.parent}\n"
        f"{program} --set nodes=1 --run-id by-hand-$SLURM_JOB_ID -- python hello.py\n"
    )
    job = lab.slurm.run("sbatch", "--parsable", str(script), environment=lab.env).stdout.strip()
    wait_until(lambda: lab.slurm.job(job)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"))
    output = (config.parent / "out").read_text()
    assert lab.slurm.job(job)["JobState"] == "COMPLETED", output
    assert "hello from rank 0" in output and "rank 1" not in output
    assert lab.result(config, f"by-hand-{job}")["state"] == "done"
    assert launch(config, env=lab.env).status == 2  # neither in a job nor with --slurm
