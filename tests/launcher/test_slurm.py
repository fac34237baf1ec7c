"""Tests of ``transport: slurm`` with stand-ins for Slurm's commands: nodes, batch scripts, submission, job steps."""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from launcher.cli.main import run
from launcher.command import Command
from launcher.config.loader import load_config, to_yaml
from launcher.config.resolve import resolve_run
from launcher.errors import ConfigError, RemoteFileError, UsageError
from launcher.manage import submit
from launcher.plan.sbatch import sbatch_script, warning_seconds
from launcher.report.launch_file import LaunchFile
from launcher.run.batch_job import request_checkpoint
from launcher.run.config_of_options import slurm_overrides
from launcher.run.launch import LaunchContext
from launcher.run.options import LaunchOptions
from launcher.transport import slurm
from launcher.transport.local import LocalTransport
from launcher.transport.slurm import SlurmTransport, open_slurm
from launcher.transport.slurm_client import JobStatus, job_status
from run_kit import make_launch, make_node

CONFIG = "transport: slurm\ndata: {dataset: synthetic}\n"

#: Stand-ins for Slurm's commands. Jobs never start; ``srun`` runs its command here; $FAKE has the state of the job.
FAKE = {
    "sbatch": 'cp "$2" "$FAKE/submitted"; echo "PENDING Resources" >"$FAKE/state"; echo 7',
    "scancel": 'echo "CANCELLED None" >"$FAKE/state"',
    "scontrol": """[ -e "$FAKE/state" ] || { echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1; }
read -r state reason <"$FAKE/state"
echo "JobId=7 JobState=$state Reason=$reason Restarts=0 StartTime=2026-11-23T20:00:00 NodeList=gpu[1-2]" """,
    "srun": """read -r state reason <"$FAKE/state"
[ "$state" = RUNNING ] || { echo 'srun: error: Slurm job 7 has expired' >&2; exit 1; }
while [ "$1" != bash ]; do shift; done; exec "$@" """,
}


@pytest.fixture(autouse=True)
def outside_of_jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("SLURM_") or name == "ENVIRONMENT":
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put the fake Slurm on the PATH; return the function that sets the state of its job 7."""
    for name, script in FAKE.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE", str(tmp_path))
    monkeypatch.setattr(slurm, "_asked", {})

    def set_state(state: str) -> None:
        (tmp_path / "state").write_text(state + "\n")

    return set_state


@pytest.mark.parametrize("visible", ["GPU-1a2b,GPU-3c4d", "MIG-1a2b/7/0, MIG-3c4d"])
def test_uuids_of_an_allocation_are_kept(visible: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uuids = tuple(word.strip() for word in visible.split(","))
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu1", "SLURM_GPUS_ON_NODE": "2"}
    environ["CUDA_VISIBLE_DEVICES"] = visible
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    text = "transport: slurm\ndata: {dataset: synthetic}\n"
    assert [node.devices for node in loaded(tmp_path, text).nodes] == [uuids]
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[1-2]")
    with pytest.raises(ConfigError, match=r"c.yml:1: CUDA_VISIBLE_DEVICES names the GPUs of this host by UUID"):
        loaded(tmp_path, text)
    listed = text + "nodes: [{devices: [GPU-1a2b]}, {devices: [GPU-9]}]\n"
    assert [node.devices for node in loaded(tmp_path, listed).nodes] == [("GPU-1a2b",), ("GPU-9",)]


def loaded(tmp_path: Path, text: str, *overrides: str):  # type: ignore[no-untyped-def]
    (tmp_path / "c.yml").write_text(text)
    return load_config(tmp_path / "c.yml", overrides)


def inside_of_job(monkeypatch: pytest.MonkeyPatch, hosts: str = "gpu[08-10],big1", **more: str) -> None:
    for name, text in {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": hosts, **more}.items():
        monkeypatch.setenv(name, text)


def test_node_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for listed, hosts in {
        "a": "a",
        "gpu[08-10,12],login1,r[1-2]n[3,5]": "gpu08 gpu09 gpu10 gpu12 login1 r1n3 r1n5 r2n3 r2n5",
    }.items():
        inside_of_job(monkeypatch, listed)
        assert [node.host for node in loaded(tmp_path, CONFIG).nodes] == hosts.split()


def test_nodes_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside_of_job(monkeypatch, SLURM_GPUS_ON_NODE="2")
    config = loaded(tmp_path, CONFIG)
    assert [node.host for node in config.nodes] == ["gpu08", "gpu09", "gpu10", "big1"]
    assert {node.devices for node in config.nodes} == {(0, 1)} and config.slurm_job == "12"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")  # without cgroups for devices
    assert {node.devices for node in loaded(tmp_path, CONFIG).nodes} == {(2, 3)}
    fewer = loaded(tmp_path, CONFIG + "nodes: 2\ndefaults: {procs: 3}\n", "nodes.1.procs=4")
    assert [(node.host, node.procs, node.devices) for node in fewer.nodes] == [("gpu08", 3, ()), ("gpu09", 4, ())]
    # the config of a run that was launched in a job names its hosts, also in another job
    saved = tmp_path / "saved.yml"
    saved.write_text(to_yaml(fewer))
    monkeypatch.setenv("SLURM_JOB_ID", "13")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "other[1-2]")
    assert load_config(saved) == fewer
    again = load_config(saved, ("slurm_job=",))  # as `resume` does
    assert [(node.host, node.procs) for node in again.nodes] == [("other1", 3), ("other2", 4)]
    assert again.slurm_job == "13"


def test_nodes_of_a_job_to_submit(tmp_path: Path) -> None:
    config = loaded(tmp_path, CONFIG, *slurm_overrides("partition=gpu,nodes=3,time=2:0:0,nodelist=gpu[1,2-3],requeue"))
    assert len(config.nodes) == 3 and config.slurm_job is None
    assert config.slurm == {
        **{"partition": "gpu", "nodes": "3", "time": "2:0:0"},
        **{"nodelist": "gpu[1,2-3]", "requeue": "true"},
    }
    with pytest.raises(UsageError, match="--slurm =3: give long options of sbatch"):
        slurm_overrides("=3")
    given = slurm_overrides("mail-type=END,FAIL,requeue,exclude=gpu1,gpu[2-3],nodes=2")
    assert dict(given[1:]) == {
        **{"slurm.mail-type": "END,FAIL", "slurm.requeue": "true"},
        **{"slurm.exclude": "gpu1,gpu[2-3]", "slurm.nodes": "2"},
    }
    for word in ("nodes", "requeue,nodes"):
        with pytest.raises(UsageError, match="--slurm nodes: give its value, or nodes=true if it is an option without"):
            slurm_overrides(word)


@pytest.mark.parametrize(
    ("text", "hosts", "message"),
    [
        (CONFIG, "", "1: transport: slurm needs the nodes of a job"),
        (
            CONFIG + "slurm: {nodes: 2-4}\n",
            "",
            "3: slurm.nodes: expected a whole number of at least 1, found the text `2-4`",
        ),
        (CONFIG + "nodes: 3\n", "gpu[1-2]", "3: nodes: 3 wanted, but the job has 2"),
        (CONFIG, "gpu[1-", "SLURM_JOB_NODELIST or nodes: "),
    ],
)
def test_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, hosts: str, message: str) -> None:
    if hosts:
        inside_of_job(monkeypatch, hosts)
    with pytest.raises(ConfigError) as error:
        loaded(tmp_path, text)
    assert message in str(error.value) and len(error.value.problems) == 1


def test_batch_script(tmp_path: Path) -> None:
    options = {"nodes": "2", "partition": "gpu", "time": "0:30:00", "requeue": "true", "comment": "two words"}
    config = loaded(tmp_path, CONFIG + f"slurm: {json.dumps(options)}\nrun: {{restarts: 1}}\n")
    command = ("python", "launch.py", "launch", "--", "train.py", "a b")
    script = sbatch_script(config, run_id="r", command=command, cwd=Path("/a dir"), log=Path("/shared/log"))
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert lines == [
        *("job-name=run", "partition=gpu", "time=0:30:00", "requeue", 'comment="two words"', "nodes=2"),
        *("ntasks-per-node=1", "output=/shared/log", "open-mode=append", "signal=B:USR1@120", "no-kill"),
    ]
    assert script.splitlines()[-2:] == ["cd '/a dir'", "exec python launch.py launch -- train.py 'a b'"]
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("", 120), ("90", 120), ("10", 60), ("2:00", 12), ("1:00:00", 120), ("1-0", 120), ("0:5", 10), ("soon", 120)],
)
def test_warning_before_the_time_limit(time: str, seconds: int) -> None:
    assert warning_seconds({"time": time}) == seconds


def test_options_that_gnnfleet_sets_are_refused(tmp_path: Path) -> None:
    config = loaded(tmp_path, CONFIG + 'slurm: {nodes: "2", output: x}\n')
    with pytest.raises(UsageError, match="^slurm: "):
        sbatch_script(config, run_id="r", command=("x",), cwd=tmp_path, log=tmp_path)


@pytest.mark.parametrize("option", [{"Bad": "1"}, {"-N": "1"}, {"comment": "a\nb"}])
def test_options_that_are_refused(tmp_path: Path, option: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"c\.yml:\d+: slurm: expected "):
        loaded(tmp_path, CONFIG + f"slurm: {json.dumps({'nodes': '2', **option})}\n")


def test_a_submitted_run_waits_and_is_cancelled(
    tmp_path: Path, fake: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yml").write_text(CONFIG)
    words = ["--config", "c.yml", "--slurm", "partition=gpu,nodes=2", "--run-id", "mine", "--detach"]
    assert run(words) == 0
    assert "submitted job 7: run mine on 2 nodes" in capsys.readouterr().out
    assert (tmp_path / "submitted").read_text() == (tmp_path / "runs/mine/job.sh").read_text()
    launch = LaunchFile.read(tmp_path / "runs/mine")
    assert launch is not None and (launch.stage, launch.slurm_job, launch.alive()) == ("queue", "7", True)
    assert run(["status", "mine"]) == 0
    assert "Slurm job 7) has been waiting in the queue of Slurm since" in capsys.readouterr().out
    assert run(["logs", "mine"]) == 1
    assert "has started nothing on its nodes yet" in capsys.readouterr().err
    assert run(["stop", "mine"]) == 0
    assert "Slurm job 7 was cancelled" in capsys.readouterr().out
    assert run(["status", "mine"]) == 1
    assert "never started: its Slurm job 7, submitted by " in capsys.readouterr().out


def test_a_requeued_run_is_resumed_by_its_job_until_it_is_stopped(
    tmp_path: Path, fake: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs/mine"
    LaunchFile.mine("mine", "run", config="c.yml", slurm_job="7").at("end").write(folder)
    result = {"run_id": "mine", "state": "stopped", "exit_status": 130, "seconds": 90.0, "nodes": {}, "metrics": {}}
    result |= {"first_failure": None, "findings": [], "notes": [], "stopped_by": "Slurm (end of job 7)"}
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints/last.pt").touch()
    fake("PENDING BeginTime")
    run(["status", "mine"])
    shown = capsys.readouterr().out
    assert "Slurm job 7) waits in the queue of Slurm and will resume it" in shown and "gnnfleet resume" not in shown
    assert run(["stop", "mine"]) == 0
    assert "Slurm job 7 was cancelled, which would have resumed it" in capsys.readouterr().out
    run(["status", "mine"])
    assert "next: gnnfleet resume mine" in capsys.readouterr().out


def test_a_submitted_launch_keeps_the_name_of_the_users_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside_of_job(monkeypatch, ENVIRONMENT="BATCH")
    folder = tmp_path / "runs/mine"
    LaunchFile.mine("mine", "run", config="big.yml", slurm_job="7", stage="queue").write(folder)
    config = resolve_run(loaded(tmp_path, "nodes: [a]\ndata: {dataset: synthetic}\n"))
    context = LaunchContext(config, LaunchOptions(folder / "submitted.yml"), "mine", Console())
    found = LaunchFile.read(context.folder)
    assert found is not None and (found.config, found.stage) == ("big.yml", "connect")


def test_a_refused_job_leaves_no_folder(
    tmp_path: Path, fake: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bin/sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition' >&2\nexit 1\n")
    (tmp_path / "c.yml").write_text(CONFIG)
    assert run(["--config", "c.yml", "--slurm", "nodes=2", "--run-id", "mine"]) == 1
    assert "sbatch failed: sbatch: error: invalid partition" in capsys.readouterr().err
    assert not (tmp_path / "runs/mine").exists()


def test_dry_run_shows_the_batch_script(
    tmp_path: Path, fake: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yml").write_text(CONFIG)
    assert run(["--config", "c.yml", "--slurm", "partition=gpu,nodes=2", "--run-id", "mine", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "#SBATCH --partition=gpu" in shown and "slurm-node1" in shown
    assert not (tmp_path / "submitted").exists() and not (tmp_path / "runs").exists()


def test_without_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "c.yml").write_text(CONFIG)
    assert run(["--config", "c.yml", "--slurm", "nodes=2"]) == 1
    assert "sbatch is not installed on this machine" in capsys.readouterr().err


def test_job_states(fake: Callable[[str], None]) -> None:
    assert job_status("7").ended  # Slurm does not know it
    fake("PENDING Resources")
    status = job_status("7")
    assert (status.state, status.reason, status.start) == ("PENDING", "Resources", "2026-11-23 20:00:00")
    fake("RUNNING None")
    assert job_status("7").running and job_status("7").nodes == "gpu[1-2]"
    assert isinstance(open_slurm("7", "gpu1", 0), SlurmTransport)
    fake("TIMEOUT TimeLimit")
    assert job_status("7").ended
    assert isinstance(open_slurm("7", "gpu1", 0), LocalTransport)  # its files are read through the shared file system


def test_a_job_that_looks_cancelled_while_it_is_requeued_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each state lasts two questions to Slurm. The clock goes on by a second with each turn."""
    seconds = itertools.count()
    states = iter([*["RUNNING"] * 2, *["CANCELLED"] * 2, *["PENDING"] * 2, *["RUNNING"] * 2, *["FAILED"] * 20])
    shown: list[str] = []

    def ask(job: str) -> JobStatus:
        shown.append(next(states))
        return JobStatus(job, shown[-1], may_requeue=True)

    monkeypatch.setattr(submit, "job_status", ask)
    clock = SimpleNamespace(monotonic=lambda: float(next(seconds)), sleep=lambda _: None)
    monkeypatch.setattr(submit, "time", clock)
    monkeypatch.setattr(submit, "newest_result", lambda run: {"state": "failed"})
    console = Console(file=io.StringIO(), width=100)
    assert submit.follow_job(submit.SubmittedRun("r", tmp_path, "7"), console)["state"] == "failed"
    assert shown[:9] == [*["RUNNING"] * 2, *["CANCELLED"] * 2, *["PENDING"] * 2, *["RUNNING"] * 2, "FAILED"]
    assert 2 < shown.count("FAILED") < 20


def test_files_and_commands_of_a_step(tmp_path: Path, fake: Callable[[str], None]) -> None:
    fake("RUNNING None")
    transport = SlurmTransport("7", "gpu1", 0)
    done = transport.run(Command(("bash", "-c", "cat; echo err >&2; exit 3")), stdin=b"in", timeout=10)
    assert (done.returncode, done.stdout, done.stderr) == (3, b"in", b"err\n")
    source, there, back = tmp_path / "source", tmp_path / "a b/there", tmp_path / "back"
    source.write_bytes(os.urandom(3_000_000))
    counted: list[int] = []
    transport.upload(source, str(there), on_bytes=counted.append)
    assert there.read_bytes() == source.read_bytes() and sum(counted) == 3_000_000
    there.write_bytes(source.read_bytes()[:1_000_000] + b"damaged")
    transport.upload(source, str(there), offset=1_000_000)
    assert there.read_bytes() == source.read_bytes()
    transport.download(str(there), back)
    assert back.read_bytes() == source.read_bytes()
    transport.download(str(there), back, most=1000)
    assert back.read_bytes() == source.read_bytes()[:1000]
    transport.write(b"secret", str(there), mode=0o600)
    assert there.read_bytes() == b"secret" and there.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in there.parent.iterdir()] == ["there"]
    with pytest.raises(RemoteFileError, match="cannot read /nowhere: No such file or directory"):
        transport.download("/nowhere", back)
    with transport.talk(Command(("cat",))) as talk:
        talk.send("hello")
        assert talk.receive(10) == "hello"


def test_files_of_a_job_that_slurm_has_requeued_are_read_here(
    tmp_path: Path, fake: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    # as after the failure of a node, while the launcher of the job still collects
    fake("RUNNING None")
    transport = SlurmTransport("7", "gpu1", 0)
    assert transport.run(Command(("echo", "there")), timeout=10).stdout == b"there\n"
    fake("COMPLETING None")  # until this launcher, which is its batch script, has ended
    monkeypatch.setattr(slurm, "_ASK_AGAIN", 0.0)
    (tmp_path / "log").write_text("text")
    transport.download(str(tmp_path / "log"), tmp_path / "back")
    assert (tmp_path / "back").read_text() == "text"
    with transport.talk(Command((sys.executable, "-c", "print('here')"))) as talk:
        assert talk.receive(10) == "here"


def test_a_job_that_is_being_ended(tmp_path: Path, fake: Callable[[str], None]) -> None:
    # Slurm starts no more steps then; commands run here and see the files through the shared file system
    fake("CANCELLED None")
    transport = SlurmTransport("7", "gpu1", 0)
    assert transport.run(Command(("echo", "here")), timeout=10).stdout == b"here\n"
    with transport.talk(Command((sys.executable, "-c", "print('too')"))) as talk:
        assert talk.receive(10) == "too"


def test_names_of_jobs_may_be_in_any_encoding(tmp_path: Path, fake: Callable[[str], None]) -> None:
    fake("RUNNING None")
    script = tmp_path / "bin/scontrol"
    script.write_text(script.read_text().replace("JobId=7", "JobId=7 JobName=M$'\\xfc'ller"))
    assert job_status("7").running


def test_without_the_checkpoint_of_the_warning_the_run_is_stopped_nevertheless(tmp_path: Path) -> None:
    class Full(LocalTransport):
        def run(self, *_: Any, **more: Any) -> Any:
            raise OSError(errno.EMFILE, "Too many open files")

    said: list[str] = []
    request_checkpoint(make_launch([make_node(tmp_path, 0, [])]), {0: Full(0)}, said.append)
    assert "no checkpoint could be saved now" in said[-1] and "Too many open files" in said[-1]
