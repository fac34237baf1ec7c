"""All ranks of a run as one value: what they agree on, add up and wait for."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.errors import PeerError, SettingsError, TrainerError
from trainer.ranks import Ranks

T = TypeVar("T")

_SETTLE = 10.0  #: seconds the ranks of a run that cannot start wait for each other at most

#: How gloo, NCCL and the store say that another process is gone or silent.
_PEER_GONE = re.compile(
    r"gloo|Connection (closed|reset)|Broken pipe|NCCL|monitoredBarrier|Timed out|wait timeout", re.I
)


@dataclass(frozen=True)
class Team:
    """The ranks of a run. With one process nothing is communicated."""

    ranks: Ranks
    device: torch.device
    timeout: float = 120.0  #: seconds any collective may take
    gradients: Any = None  #: process group for gradients; None: the default one
    members: tuple[int, ...] | None = None  #: who is left of the run, ascending; None: all
    generation: int = 0  #: of ``members``: how often some have left

    @property
    def rank(self) -> int:
        """This process's place among the members; ``ranks.rank`` is its number in the run, which messages name."""
        return self.ranks.rank if self.members is None else self.members.index(self.ranks.rank)

    @property
    def size(self) -> int:
        return self.ranks.world_size if self.members is None else len(self.members)

    def sum(self, values: Tensor) -> Tensor:
        """Sum over ranks of a CPU tensor, in place; the same on every rank."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def gather(self, value: T) -> list[T]:
        """Every rank's ``value``, by rank, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def from_first(self, value: T) -> T:
        """Rank 0's ``value``, on every rank."""
        values: list[Any] = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, src=0)
        result: T = values[0]
        return result

    def agree(self, work: Callable[[], T]) -> T:
        """Do ``work``, which must not communicate, on every rank; if it fails on one, all raise.

        The failing ranks raise their own ``TrainerError``, the others one that names the first of them.
        """
        result, error = None, None
        try:
            result = work()
        except TrainerError as raised:
            error = raised
        failures = self.gather(f"{self.ranks} could not start: {error}" if error else "")
        if any(failures):
            self.settle()
        if error is not None:
            raise error
        if any(failures):
            raise PeerError(next(filter(None, failures)))
        return result  # type: ignore[return-value]

    def settle(self) -> None:
        """Before all ranks raise: wait until each has read the last answer, for a short time at most.

        A process that ended before that would be a lost peer to the others, and its reason lost with it.
        """
        if self.size > 1:
            with suppress(RuntimeError):  # a rank that does not come: the caller has the better reason
                dist.monitored_barrier(timeout=timedelta(seconds=min(self.timeout, _SETTLE)))

    def barrier(self) -> None:
        """Wait for all ranks; raises ``RuntimeError`` naming those that do not come within the deadline."""
        if self.size > 1:
            dist.monitored_barrier(timeout=timedelta(seconds=self.timeout), wait_all_ranks=True)


def pick_device(ranks: Ranks, environ: Mapping[str, str] = os.environ) -> torch.device:
    """``cuda:LOCAL_RANK`` where this node has a device for each of its processes, else the CPU.

    Raises ``SettingsError`` when devices were given (CUDA_VISIBLE_DEVICES) but too few.
    """
    devices = torch.cuda.device_count()
    if devices >= ranks.local_world_size:
        return torch.device("cuda", ranks.local_rank)
    if devices and environ.get("CUDA_VISIBLE_DEVICES"):
        raise SettingsError(
            f"node{ranks.node_rank} ({ranks.host}): {ranks.local_world_size} processes share {devices} CUDA devices; "
            "give one device per process, or none"
        )
    return torch.device("cpu")


@contextmanager
def join_team(ranks: Ranks, device: torch.device, backend: str, timeout: float) -> Iterator[Team]:
    """Meet the other ranks (gloo; NCCL for gradients where all have CUDA) and part from them at the end.

    After an exception the group is left open until the process ends: closing it would tell the
    others before this rank has given its reason. Raises ``PeerError`` when a rank does not come or
    is lost later, and ``SettingsError`` for NCCL without CUDA.
    """
    check_backend(ranks, device, backend)
    if ranks.world_size == 1:
        yield Team(ranks, device, timeout)
        return
    _meet(ranks, timeout)
    try:
        yield Team(ranks, device, timeout, gradient_group(device, backend, ranks.world_size, timeout))
    except RuntimeError as error:
        if not says_peer_gone(error):
            raise
        raise lost_peer(ranks, timeout, error) from error
    dist.destroy_process_group()


def says_peer_gone(error: RuntimeError) -> bool:
    """Whether it is torch.distributed that says that another process is gone or silent."""
    return _PEER_GONE.search(str(error)) is not None


def lost_peer(ranks: Ranks, timeout: float, error: Exception) -> PeerError:
    """What a rank that has lost another one tells."""
    return PeerError(
        f"{ranks} lost another rank, or waited {timeout:g} s in vain; the first failure of the run says why "
        f"({str(error).splitlines()[0]})"
    )


def check_backend(ranks: Ranks, device: torch.device, backend: str) -> None:
    """Take the rank's CUDA device, if it has one. Raises ``SettingsError`` for NCCL without CUDA."""
    if backend == "nccl" and device.type != "cuda":
        raise SettingsError(f"backend nccl needs a CUDA device, and {ranks} has none; use auto or gloo")
    if device.type == "cuda":
        torch.cuda.set_device(device)


def patience(timeout: float, environ: Mapping[str, str] = os.environ) -> float:
    """Seconds the first meeting of the ranks may take: in a run a rank meets the others once its node's graph server,
    which may have kernels to compile, is ready."""
    return max(timeout, float(environ.get("GNNFLEET_START_TIMEOUT") or 0))


def _meet(ranks: Ranks, timeout: float) -> None:
    limit = patience(timeout)
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=limit), rank=ranks.rank, world_size=ranks.world_size)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as error:
        raise not_met(ranks, limit, error) from error


def not_met(ranks: Ranks, timeout: float, error: Exception) -> PeerError:
    """What a rank tells that did not find the others."""
    where = f"{ranks.master_addr}:{ranks.master_port}"
    return PeerError(
        f"{ranks} could not meet the other {ranks.world_size - 1} ranks at {where} within {timeout:g} s: "
        f"{str(error).splitlines()[0]}. Look whether all nodes have started, whether {where} can be reached "
        f"from this host, and whether GLOO_SOCKET_IFNAME ({os.environ.get('GLOO_SOCKET_IFNAME', 'not set')}) "
        "is the interface the nodes share"
    )


def gradient_group(device: torch.device, backend: str, size: int, timeout: float) -> Any:
    """The process group for gradients: NCCL's where all ranks have CUDA; None: the default one."""
    kinds: list[Any] = [None] * size
    dist.all_gather_object(kinds, device.type)
    if backend == "gloo" or (backend == "auto" and set(kinds) != {"cuda"}):
        return None
    return dist.new_group(backend="nccl", timeout=timedelta(seconds=timeout))
