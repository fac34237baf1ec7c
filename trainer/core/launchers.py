"""Environment variables of other launchers (Open MPI, Slurm, Kubernetes) as the variables that torchrun sets."""

from __future__ import annotations

import re
from collections.abc import Mapping

from trainer.core.errors import SettingsError

MASTER_PORT = 29500  #: port of the rendezvous if a launcher names none; the default of torchrun

_SLURM_PORTS = range(20000, 30000)  # below the ephemeral ports of Linux


def torchrun_variables(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return ``environ`` with ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``NODE_RANK``,
    ``MASTER_ADDR`` and ``MASTER_PORT`` as the launcher of this process defines them.

    ``environ`` is returned unchanged if it has ``RANK``, or if no known launcher started several processes. Launchers
    are tried in this order: Open MPI (``OMPI_COMM_WORLD_*``), Slurm's srun (``SLURM_STEP_NUM_TASKS``, ``SLURM_PROCID``
    …), an Indexed Job of Kubernetes (``WORLD_SIZE``, ``JOB_COMPLETION_INDEX``). The first whose variables are set is
    used. Values of ``MASTER_ADDR``, ``MASTER_PORT`` and ``NODE_RANK`` in ``environ`` are kept.

    Raises ``SettingsError`` if a variable of the launcher is missing or is not a number.
    """
    if "RANK" in environ:
        return environ
    for read in (_open_mpi, _slurm, _kubernetes):
        found = read(environ)
        if found:
            kept = {name: environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK") if environ.get(name)}
            return {**environ, **found, **kept}
    return environ


def has_own_devices(environ: Mapping[str, str]) -> bool:
    """Whether the launcher gives each process devices of its own, which are numbered from 0 (``--gpus-per-task``)."""
    return "RANK" not in environ and bool(environ.get("SLURM_GPUS_PER_TASK"))


def _open_mpi(environ: Mapping[str, str]) -> dict[str, str]:
    # OMPI_COMM_WORLD_NODE_RANK is the rank on the node, not the rank of the node.
    if "OMPI_COMM_WORLD_RANK" not in environ:
        return {}
    rank, size, local_rank, local_size = (
        number(environ, f"OMPI_COMM_WORLD_{name}") for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    )
    if local_size < size and not environ.get("MASTER_ADDR"):
        raise SettingsError(
            "MASTER_ADDR not set: Open MPI does not tell on which host rank 0 runs; start the trainer with mpirun -x "
            "MASTER_ADDR=HOST, where HOST is the first host of the hostfile"
        )
    return {
        **_ranks(rank, size, local_rank, local_size),
        "NODE_RANK": str(rank // max(1, local_size)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(MASTER_PORT),
    }


def _slurm(environ: Mapping[str, str]) -> dict[str, str]:
    # A batch script, one process, has SLURM_PROCID and SLURM_NTASKS as well. Only srun sets SLURM_STEP_NUM_TASKS.
    if "SLURM_STEP_NUM_TASKS" not in environ or "SLURM_PROCID" not in environ:
        return {}
    size = number(environ, "SLURM_STEP_NUM_TASKS")
    if size == 1:
        return {}
    node = number(environ, "SLURM_NODEID")
    job = number(environ, "SLURM_JOB_ID") * 16 + number(environ, "SLURM_STEP_ID")
    return {
        **_ranks(number(environ, "SLURM_PROCID"), size, number(environ, "SLURM_LOCALID"), _slurm_tasks(environ, node)),
        "NODE_RANK": str(node),
        "MASTER_ADDR": first_host(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")),
        "MASTER_PORT": str(_SLURM_PORTS[job % len(_SLURM_PORTS)]),  # jobs may share a host
    }


def _slurm_tasks(environ: Mapping[str, str], node: int) -> int:
    """Return how many tasks of this Slurm step run on the step's node number ``node``.

    Parses a text such as ``2(x3),1``: two tasks on each of three nodes, then one on the fourth.
    """
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if match is None:
            raise SettingsError(f"SLURM_STEP_TASKS_PER_NODE={text!r} in the environment is not a list such as 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    if node >= len(counts):
        raise SettingsError(f"SLURM_STEP_TASKS_PER_NODE={text!r} has no number of tasks for SLURM_NODEID={node}")
    return counts[node]


def first_host(hosts: str) -> str:
    """Return the first host of a Slurm host list: ``gpu03`` of ``gpu[03-05,07],login1``."""
    match = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", hosts)
    if match is None:
        raise SettingsError(f"SLURM_STEP_NODELIST={hosts!r} in the environment is not a list of hosts")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[0])


def _kubernetes(environ: Mapping[str, str]) -> dict[str, str]:
    # Kubernetes numbers the pods of an Indexed Job; the pod template must give WORLD_SIZE and MASTER_ADDR.
    if "JOB_COMPLETION_INDEX" not in environ or not environ.get("WORLD_SIZE"):
        return {}
    index = number(environ, "JOB_COMPLETION_INDEX")
    if not environ.get("MASTER_ADDR"):
        raise SettingsError("MASTER_ADDR not set: give it in the pod template of the Indexed Job, as JOB-0.SERVICE")
    return {
        **_ranks(index, number(environ, "WORLD_SIZE"), 0, 1),
        "NODE_RANK": str(index),
        "MASTER_PORT": str(MASTER_PORT),
    }


def _ranks(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    values = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size}
    return {name: str(value) for name, value in values.items()}


def number(environ: Mapping[str, str], name: str, default: int = 0) -> int:
    """Return a variable as a number, or ``default`` if it is missing or empty. Raises ``SettingsError``."""
    text = environ.get(name) or str(default)
    try:
        return int(text)
    except ValueError:
        raise SettingsError(f"{name}={text!r} in the environment is not a whole number") from None
