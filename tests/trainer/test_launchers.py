"""Tests of ``Ranks.from_env`` on the environment variables of torchrun, Open MPI, Slurm and Kubernetes.

The values of Open MPI are those of mpirun 5.0.11, the values of Slurm those of srun and sbatch 22.05.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ports import free_port
from trainer.core.errors import SettingsError
from trainer.core.launchers import first_host
from trainer.core.ranks import Ranks, pick_device
from waiting import DEADLINE

STEP = """SLURM_JOB_ID=1203 SLURM_STEP_ID=2 SLURM_STEP_NUM_TASKS=3 SLURM_STEP_TASKS_PER_NODE=2,1 SLURM_NTASKS=3
 SLURM_STEP_NODELIST=gpu[07-08] SLURM_JOB_NODELIST=gpu[07-09] SLURM_PROCID=2 SLURM_LOCALID=0 SLURM_NODEID=1"""
BATCH = """SLURM_JOB_ID=3 SLURM_JOB_NODELIST=h[0-1] SLURM_NTASKS=3 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0
 SLURM_TASKS_PER_NODE=2,1"""
MPI = """OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2
 OMPI_COMM_WORLD_NODE_RANK=1"""
POD = "JOB_COMPLETION_INDEX=2 WORLD_SIZE=3 MASTER_ADDR=job-0.net"
TORCHRUN = """RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=4000"""
ALONE = Ranks(host="")


def variables(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split())


@pytest.mark.parametrize(
    "text, expected",
    {
        "": ALONE,
        TORCHRUN: Ranks(1, 2, 1, 2, 0, "127.0.0.1", 4000),
        STEP: Ranks(2, 3, 0, 1, 1, "gpu07", 20000 + (1203 * 16 + 2) % 10000),
        f"{STEP} MASTER_ADDR=10.0.0.1 MASTER_PORT=77": Ranks(2, 3, 0, 1, 1, "10.0.0.1", 77),
        f"{STEP} {TORCHRUN}": Ranks(1, 2, 1, 2, 0, "127.0.0.1", 4000),
        STEP.replace("2,1", "2(x2)"): Ranks(2, 3, 0, 2, 1, "gpu07", 20000 + (1203 * 16 + 2) % 10000),
        STEP.replace("NUM_TASKS=3", "NUM_TASKS=1"): ALONE,
        BATCH: ALONE,
        f"{MPI} MASTER_ADDR=a": Ranks(3, 4, 1, 2, 1, "a", 29500),
        f"{MPI} {BATCH} MASTER_ADDR=a": Ranks(3, 4, 1, 2, 1, "a", 29500),
        MPI.replace("LOCAL_SIZE=2", "LOCAL_SIZE=4"): Ranks(3, 4, 1, 4, 0, "127.0.0.1", 29500),
        POD: Ranks(2, 3, 0, 1, 2, "job-0.net", 29500),
        "JOB_COMPLETION_INDEX=2": ALONE,
    }.items(),
)
def test_ranks_of_each_launcher(text: str, expected: Ranks) -> None:
    found = Ranks.from_env(variables(text))
    assert replace(found, host="") == expected
    assert found.host


@pytest.mark.parametrize(
    "text, message",
    {
        MPI: "mpirun -x MASTER_ADDR=HOST",
        POD.replace(" MASTER_ADDR=job-0.net", ""): "MASTER_ADDR not set: give it in the pod template",
        STEP.replace("=2,1", "=two"): "SLURM_STEP_TASKS_PER_NODE='two' in the environment is not a list",
        STEP.replace("=2,1", "=3"): "has no number of tasks for SLURM_NODEID=1",
        STEP.replace("SLURM_PROCID=2", "SLURM_PROCID=x"): "SLURM_PROCID='x' in the environment is not a whole number",
        STEP.replace("gpu[07-08]", ","): "is not a list of hosts",
        "WORLD_SIZE=2": "RANK, MASTER_ADDR, MASTER_PORT not set; start the trainer with torchrun, srun or mpirun",
    }.items(),
)
def test_missing_and_bad_variables(text: str, message: str) -> None:
    with pytest.raises(SettingsError) as raised:
        Ranks.from_env(variables(text))
    assert message in str(raised.value)


def test_first_host_of_slurm_lists() -> None:
    lists = {"a": "a", "a,b": "a", "n[001-3,7],x": "n001", "r[1-2]n[08,11].lab,z": "r1n08.lab"}
    assert {text: first_host(text) for text in lists} == lists


def test_a_task_with_devices_of_its_own_takes_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    second = Ranks(1, 2, 1, 2)
    assert pick_device(second, {"SLURM_GPUS_PER_TASK": "1", "CUDA_VISIBLE_DEVICES": "0"}) == torch.device("cuda", 0)
    with pytest.raises(SettingsError, match="list one device per process"):
        pick_device(second, {"CUDA_VISIBLE_DEVICES": "0"})


_GATHER = """
import os, sys, torch
from trainer.core.ranks import Ranks, join_ranks
ranks = Ranks.from_env(os.environ)
with join_ranks(ranks, torch.device("cpu"), "gloo", 60.0) as group:
    print(group.gather(ranks.rank), ranks.local_rank, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["slurm", "kubernetes"])
def test_ranks_connect_without_torchrun(launcher: str) -> None:
    port = str(free_port())
    each = {
        "slurm": "SLURM_JOB_ID=1 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2 SLURM_NODEID=0 "
        "SLURM_STEP_NODELIST=localhost SLURM_PROCID={k} SLURM_LOCALID={k}",
        "kubernetes": "WORLD_SIZE=2 MASTER_ADDR=localhost JOB_COMPLETION_INDEX={k}",
    }[launcher]
    env = {name: value for name, value in os.environ.items() if name != "RANK"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _GATHER], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
            env={**env, "MASTER_PORT": port, **variables(each.format(k=k))},
        )
        for k in range(2)
    ]  # fmt: skip
    printed = [process.communicate(timeout=DEADLINE)[0].strip() for process in started]
    local = [0, 1] if launcher == "slurm" else [0, 0]
    assert printed == [f"[0, 1] {rank}" for rank in local]
