"""Runs a real Slurm on the hosts of a ``NetCluster``: one slurmd per host, slurmctld and munged on the test machine.

::

    with NetCluster(2, shared_folder=folder) as cluster, SlurmHosts(cluster) as slurm:
        slurm.run("srun", "-N2", "hostname").stdout

The test machine is the login node: with the environment variables ``slurm.environment``, commands on it can submit
jobs. The cluster needs a shared folder for the output of jobs. Partitions: ``main`` (default) and ``urgent``. A job in
``urgent`` preempts jobs in ``main``, and Slurm requeues the preempted jobs.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from netns import Host, NetCluster
from netns_tools import SEARCH_PATH
from ports import free_port

PROGRAMS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "munged": "munge",
}

_CONFIG = """\
ClusterName={name}
SlurmctldHost={login}({address})
SlurmctldPort={port}
SlurmdPort={node_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
KillWait=30
SlurmdTimeout=10
InactiveLimit=0
ReturnToService=2
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2
"""


def slurm_unavailable() -> str:
    """Return the reason why Slurm cannot run here, or '' if it can."""
    missing = {package for program, package in PROGRAMS.items() if not shutil.which(program, path=SEARCH_PATH)}
    return f"apt install {' '.join(sorted(missing))}" if missing else ""


class SlurmHosts:
    """Slurm on the hosts of ``cluster``. A context manager that ends slurmctld, slurmd and munged at its end.

    ``cpus``: processors of each host according to Slurm.
    """

    def __init__(self, cluster: NetCluster, *, cpus: int = 4):
        self.cluster, self.cpus = cluster, cpus
        # not below the cluster's folder, which every host replaces by its own, nor below the pytest folder, which
        # user munge cannot enter
        self.folder = Path("/var/tmp") / f"{cluster.name}-slurm"
        self.config = self.folder / "slurm.conf"
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a user on the login node."""
        return self.cluster.environment(SLURM_CONF=str(self.config))

    def __enter__(self) -> SlurmHosts:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        for name in ("munge", "state"):
            (self.folder / name).mkdir(parents=True, mode=0o755)
        self._start_munged()
        nodes = "\n".join(
            f"NodeName={host.name} NodeAddr={host.address} CPUs={self.cpus} RealMemory=4000 State=UNKNOWN"
            for host in self.cluster.hosts
        )
        self.config.write_text(
            _CONFIG.format(
                name=self.cluster.name,
                login=socket.gethostname().partition(".")[0],
                address=f"{self.cluster.prefix}.1",
                port=free_port(),
                node_port=free_port(),
                folder=self.folder,
                nodes=nodes,
            )
        )
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self._spawn(["slurmctld", "-D", "-i", "-f", str(self.config)], "slurmctld")
        for host in self.cluster.hosts:
            self.start_slurmd(host)
        self._await_nodes()

    def _start_munged(self) -> None:
        folder, user = self.folder / "munge", pwd.getpwnam("munge")
        (folder / "key").write_bytes(secrets.token_bytes(128))
        (folder / "key").chmod(0o400)
        for path in (folder, folder / "key"):
            os.chown(path, user.pw_uid, user.pw_gid)
        files = {name: f"--{name}={folder / file}" for name, file in _MUNGE_FILES.items()}
        self._spawn(
            ["munged", "--foreground", "--force", *files.values()], "munged", user=user.pw_uid, group=user.pw_gid
        )
        _await(lambda: (folder / "socket").exists(), "munged")

    def start_slurmd(self, host: Host) -> None:
        """Start slurmd on a host, also after a power cut."""
        (self.folder / f"spool-{host.name}").mkdir(exist_ok=True)
        enter = ["nsenter", "-t", str(host.init_pid), "-m", "-u", "-p", "-n", "-r", "--", "env", f"HOME={host.home}"]
        self._spawn([*enter, "slurmd", "-D", "-N", host.name, "-f", str(self.config)], f"slurmd-{host.name}.out")

    def _spawn(self, argv: list[str], log: str, *, user: int | None = None, group: int | None = None) -> None:
        with open(self.folder / f"{log}.out", "ab") as out:
            self._processes.append(
                subprocess.Popen(
                    argv,
                    env={"PATH": SEARCH_PATH, "HOME": "/root"},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    user=user,
                    group=group,
                    extra_groups=[] if user else None,
                )
            )

    def _await_nodes(self) -> None:
        def ready() -> bool:
            return self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%t", check=False).stdout.split() == [
                "idle"
            ] * len(self.cluster.hosts)

        try:
            _await(ready, "the nodes of Slurm")
        except TimeoutError as error:
            logs = "\n".join(f"{path.name}:\n{path.read_text()[-1500:]}" for path in self.folder.glob("*.out"))
            raise TimeoutError(f"{error}\n{self.run('sinfo', '-R', check=False).stdout}\n{logs}") from None

    def run(
        self,
        *argv: str,
        check: bool = True,
        timeout: float = 60,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node. ``environment``: in place of ``self.environment``."""
        env = self.environment if environment is None else environment
        return subprocess.run(argv, env=env, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=check)

    def job(self, job_id: str) -> dict[str, str]:
        """Return the fields of ``scontrol show job``; {} if Slurm no longer knows the job."""
        shown = self.run("scontrol", "show", "job", job_id, "--oneliner", check=False).stdout
        return dict(word.partition("=")[::2] for word in shown.split() if "=" in word)

    def jobs(self) -> list[str]:
        """Return the ids of the jobs that are pending or running."""
        return self.run("squeue", "-h", "-o", "%A").stdout.split()

    def cancel_all(self) -> None:
        """Cancel all jobs and wait for their end."""
        for job in self.jobs():
            self.run("scancel", job, check=False)
        _await(lambda: not self.jobs(), "the end of all jobs", 60)

    def close(self) -> None:
        """End all jobs and daemons. May be called twice."""
        for process in reversed(self._processes):
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait()
        self._processes.clear()
        shutil.rmtree(self.folder, ignore_errors=True)


_MUNGE_FILES = {
    "key-file": "key",
    "socket": "socket",
    "pid-file": "pid",
    "log-file": "log",
    "seed-file": "seed",
}


def _await(holds: Callable[[], bool], what: str, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not ready after {seconds:g} s")
        time.sleep(0.05)


__all__ = ["SlurmHosts", "slurm_unavailable"]
