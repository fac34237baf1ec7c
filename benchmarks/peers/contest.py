"""Lists the systems that `make bench-peers` compares in each section, and runs them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from graphs import BATCH, CACHE, FANOUTS, PEER_SIZES, peer_partition
from peers.envs import DGL, GLT, PeerEnv, peer_python
from peers.jobs import HostDone, run_hosts
from peers.plain import peer_graph

HERE = Path(__file__).resolve().parent
FOLDER = CACHE / "peers"
HOSTS = 2
SECTIONS = ("loader", "parts", "train", "partition")
WITH_REPLACEMENT = "draws with replacement, so fewer distinct edges"
AS_SHIPPED = "as shipped"  #: settings that are ten times slower than others; run in the first turn only

#: DGL uses the same names in /dev/shm on both hosts, which would clash on one machine.
OWN_SHM = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh")
#: graphlearn-torch leaves its 1 GB ring buffers behind when it is killed; an IPC namespace deletes them at its end.
OWN_IPC = ("unshare", "--ipc")
ON_LOOPBACK = {"TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}


@dataclass(frozen=True, eq=False)
class Contender:
    """One system with one choice of settings, in one section of the benchmark."""

    section: str
    system: str
    script: str  #: file name in this folder
    env: PeerEnv | None  #: Python environment of the system; None for the environment of this process
    task: str
    hosts: int = 1
    told: Mapping[str, Any] = field(default_factory=dict)  #: settings in addition to those that all systems get
    note: str = ""
    once: bool = False  #: run in the first turn only, with few epochs
    wrapped: tuple[str, ...] = ()  #: wrapper of each host's command, such as ``unshare --ipc``
    make_parts: Callable[[], Path] | None = None  #: returns the partition folder; the first call makes it
    copied: bool = False  #: copy the partition for each host: a page shared by two hosts would count half for each

    @property
    def parts(self) -> Path | None:
        """Folder of the partition that the system reads, made at the first access; None if the system reads none."""
        return self.make_parts() if self.make_parts else None

    @property
    def ours(self) -> bool:
        return self.script in ("our_job.py", "our_train.py")

    @property
    def cut(self) -> str:
        """Name of the partition method."""
        return "METIS" if "METIS" in self.system else "random"


@dataclass(frozen=True)
class Run:
    seconds: tuple[float, ...]  #: seconds of each epoch, or of partitioning once, on the slowest host
    cpu: float | None  #: processor seconds of all hosts in the median epoch
    memory: int  #: peak memory in bytes, on the host that used most
    edges: int | None
    nodes: int | None
    complete: bool  #: whether each epoch loaded every seed exactly once
    loss: float | None
    accuracy: float | None
    more: Mapping[str, Any]  #: the JSON that the first host printed

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def contenders(sections: Sequence[str], size: str, peers: bool = True, without: Sequence[str] = ()) -> list[Contender]:
    """Return the contenders of ``sections`` that can run here, with their environments and partitions.

    Prints why a contender cannot run.

    peers: if false, return only gnnfleet. without: leave out systems whose name contains one of these texts.
    """
    everybody = [*_ours(size), *(_dgl(size) + _glt(size) if peers else [])]
    wanted = [one for name in sections for one in everybody if one.section == name]
    wanted = [one for one in wanted if not any(text in one.system for text in without)]
    failed: set[PeerEnv | None] = set()
    for one in wanted:
        if one.env not in failed and not _prepared(one):
            failed.add(one.env)
    can = [one for one in wanted if one.env not in failed]
    if any(one.wrapped == OWN_SHM for one in can) and not _permitted(OWN_SHM):
        print("peers: DGL on two hosts is left out: each host needs its own /dev/shm, which only root can mount")
        can = [one for one in can if one.wrapped != OWN_SHM]
    return can


def _prepared(one: Contender) -> bool:
    """Make the contender's Python environment and partition. If that fails, print why and return False."""
    try:
        if one.env and _python(one.env) is None:
            return False
        if one.wrapped != OWN_SHM or _permitted(OWN_SHM):
            one.parts  # noqa: B018  makes the partition
    except (OSError, subprocess.SubprocessError) as error:
        stderr = getattr(error, "stderr", None) or b""
        print(f"peers: left out: {error}\n{stderr.decode(errors='replace')[-600:]}")
        return False
    return True


@cache
def _python(env: PeerEnv | None) -> Path | None:
    return peer_python(env) if env else Path(sys.executable)


@cache
def _permitted(wrapper: tuple[str, ...]) -> bool:
    """Return whether this user may run commands prefixed by ``wrapper``, such as ``unshare --ipc``."""
    return subprocess.run([*wrapper, "true"], capture_output=True).returncode == 0


def run_once(one: Contender, size: str, epochs: int) -> Run:
    """Run a contender on all its hosts. Raises ``RuntimeError`` with the end of a failed host's output."""
    with tempfile.TemporaryDirectory(dir=FOLDER) as name:
        folder = Path(name)
        ports = free_ports(4)
        argvs = [_argv(one, size, rank, ports, folder, epochs) for rank in range(one.hosts)]
        threads = str(max(1, (os.cpu_count() or 1) // one.hosts))
        env = {"OMP_NUM_THREADS": threads, **(ON_LOOPBACK if one.hosts > 1 else {})}
        return _together(one, size, run_hosts(argvs, HERE.parent, folder, env))


def _argv(one: Contender, size: str, rank: int, ports: list[int], folder: Path, epochs: int) -> list[str | Path]:
    parts = one.parts or folder / "made"
    if one.copied:
        shutil.copytree(parts, folder / f"parts{rank}")
        parts = folder / f"parts{rank}"
    elif one.parts:  # files of the run are written next to this link
        (folder / f"parts{rank}").symlink_to(parts)
        parts = folder / f"parts{rank}"
    told = {
        "folder": str(parts), "fanouts": FANOUTS, "batch": BATCH if size != "small" else 256, "warm": 1, "rank": rank,
        "ports": ports, "hidden": 256, "lr": 0.004, "classes": PEER_SIZES[size]["num_classes"], "epochs": epochs,
    }  # fmt: skip
    if one.once:  # one timed epoch; training first has one that is not timed
        told |= {"warm": 0, "epochs": 2 if one.section == "train" else 1}
    python = _python(one.env)
    assert python, "contenders() leaves out systems without an environment"
    command = [python, HERE / one.script, one.task, peer_graph(size), json.dumps(told | dict(one.told))]
    return [*one.wrapped, *command]


def _together(one: Contender, size: str, done: Sequence[HostDone]) -> Run:
    results = [host.result for host in done]
    seconds = [max(each) for each in zip(*(result["seconds"] for result in results), strict=True)]
    if one.section == "train" and len(seconds) > 1:
        seconds = seconds[1:]  # the first epoch compiles kernels, connects and fills caches
    seeds = [sum(each) for each in zip(*(result["seeds"] for result in results), strict=True)] if _loads(one) else []
    complete = all(count == PEER_SIZES[size]["train"] for count in seeds) and all(
        result.get("complete", True) for result in results
    )
    scored = sum(result.get("scored", 0) for result in results)
    accuracy = sum(result.get("right", 0) for result in results) / scored if scored else results[0].get("accuracy")
    loss = statistics.fmean(result["loss"][-1] for result in results) if "loss" in results[0] else None
    return Run(
        tuple(seconds), _median_sum(results, "cpu"), max(host.memory for host in done), _sum(results, "edges"),
        _sum(results, "nodes"), complete, loss, accuracy, results[0],
    )  # fmt: skip


def _loads(one: Contender) -> bool:
    return one.section in ("loader", "parts")


def _sum(results: Sequence[Mapping[str, Any]], name: str) -> int | None:
    return sum(result[name] for result in results) if all(name in result for result in results) else None


def _median_sum(results: Sequence[Mapping[str, Any]], name: str) -> float | None:
    if not all(name in result for result in results):
        return None
    return statistics.median(sum(each) for each in zip(*(result[name] for result in results), strict=True))


def free_ports(count: int) -> list[int]:
    holders = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [int(holder.getsockname()[1]) for holder in holders]
    finally:
        for holder in holders:
            holder.close()


# -- systems ------------------------------------------------------------------


def _ours(size: str) -> list[Contender]:
    def one(
        section: str, name: str, hosts: int = 1, make_parts: Callable[[], Path] | None = None, **told: Any
    ) -> Contender:
        return Contender(
            section, f"gnnfleet, {name}", "our_train.py" if section == "train" else "our_job.py", None,
            section, hosts, told, make_parts=make_parts, copied=hosts > 1,
        )  # fmt: skip

    whole = partial(peer_partition, size, 1)
    random, metis = (partial(peer_partition, size, HOSTS, method) for method in ("random", "metis"))
    apart, close = {"topology": "partitioned", "cache": "0"}, {"topology": "replicated", "cache": "10%"}
    return [
        one("loader", "BatchLoader, 1 thread", make_parts=whole, threads=1),
        one("loader", "BatchLoader, 2 threads", make_parts=whole, threads=2),
        one("loader", "DistNeighborLoader, 2 threads", make_parts=whole, threads=2, kind="data"),
        one("parts", "random, partitioned, no cache", HOSTS, random, **apart),
        one("parts", "random, replicated, cache 10%", HOSTS, random, **close),
        one("parts", "METIS, replicated, cache 10%", HOSTS, metis, **close),
        one("train", "random, replicated, cache 10%", HOSTS, random, **close),
        one("train", "random, replicated, cache 10%, bfloat16", HOSTS, random, precision="bfloat16", **close),
        one("partition", "METIS", method="metis"),
        one("partition", "random", method="random"),
    ]


def _dgl(size: str) -> list[Contender]:
    def one(section: str, name: str, task: str = "", cut: str = "", **told: Any) -> Contender:
        """Return a contender. With ``cut``, it runs on two hosts with parts made by this method."""
        make_parts = partial(_dgl_parts, size, cut) if cut else None
        return Contender(
            section, f"DGL 2.1.0, {name}", "dgl_job.py", DGL, task or section, HOSTS if cut else 1, told,
            make_parts=make_parts, wrapped=OWN_SHM if cut else (),
        )  # fmt: skip

    return [
        one("loader", "0 workers", workers=0),
        one("loader", "2 workers", workers=2),
        one("loader", "GraphBolt, 0 workers", "graphbolt", workers=0),
        one("partition", "METIS", method="metis"),
        one("partition", "random", method="random"),
        one("parts", "random", cut="random"),
        one("parts", "METIS", cut="metis"),
        one("train", "random, documented loop", cut="random"),
    ]


def _dgl_parts(size: str, method: str) -> Path:
    folder = FOLDER / f"{size}-dgl-{method}"
    told = json.dumps({"folder": str(folder), "method": method})
    return _made_by(DGL, folder, HERE / "dgl_job.py", "partition", peer_graph(size), told)


def _glt_parts(size: str) -> Path:
    folder = FOLDER / f"{size}-glt"
    return _made_by(GLT, folder, HERE / "glt_job.py", "cut", peer_graph(size), folder, str(HOSTS))


def _made_by(env: PeerEnv, folder: Path, *words: str | Path) -> Path:
    """Return ``folder``. If it is incomplete, first fill it with the command ``words`` and the Python of ``env``."""
    python = _python(env)
    if python and not (folder / "ready").exists():
        subprocess.run([python, *words], check=True, capture_output=True)
        (folder / "ready").touch()
    return folder


def _glt_note(section: str, name: str) -> str:
    few = "; 2 epochs only, so loss and accuracy are those of a beginning"
    more = few if section == "train" and AS_SHIPPED in name else ""
    return "" if section == "partition" else WITH_REPLACEMENT + more


def _glt(size: str) -> list[Contender]:
    def one(section: str, name: str, hosts: int = 1, **told: Any) -> Contender:
        return Contender(
            section, f"graphlearn-torch 0.2.4, {name}", "glt_hosts.py", GLT, section, hosts, told,
            _glt_note(section, name), AS_SHIPPED in name, OWN_IPC if hosts > 1 and _permitted(OWN_IPC) else (),
            partial(_glt_parts, size) if hosts > 1 else None,
        )  # fmt: skip

    def pyg(workers: int) -> Contender:
        name = f"torch_geometric + torch-sparse, {workers} workers"
        return Contender("loader", name, "pyg_job.py", GLT, "loader", told={"workers": workers})

    return [
        pyg(0),
        pyg(2),
        one("loader", "with its seed set", seed=1),
        one("loader", AS_SHIPPED, seed=None),
        one("parts", "random, with its seed set", HOSTS, seed=1),
        one("parts", f"random, {AS_SHIPPED}", HOSTS, seed=None),
        one("train", "random, trimmed, with its seed set", HOSTS, seed=1, trim=True),
        one("train", f"random, documented loop, {AS_SHIPPED}", HOSTS, seed=None, trim=False),
        one("partition", "random"),
    ]
