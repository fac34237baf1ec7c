"""The ranks of a run: which one this process is, and what all of them agree on, add up and wait for."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from trainer.core.collectives import broadcast_value, gather_values
from trainer.core.errors import PeerError, SettingsError, TrainerError

T = TypeVar("T")

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_SETTLE = 10.0  #: seconds the ranks of a run that cannot start wait for each other at most

_BACKLOG = 4096  #: connections that may wait for rank 0's store

#: How gloo, NCCL and the store say that another process is gone or silent.
_PEER_GONE = re.compile(
    r"gloo|Connection (closed|reset)|Broken pipe|NCCL|monitoredBarrier|Timed out|wait timeout", re.I
)


@dataclass(frozen=True)
class Ranks:
    """Which process of a run this is; the defaults are a single process without torchrun."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    master_addr: str = ""
    master_port: int = 0
    host: str = ""

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Ranks:
        """Read RANK, WORLD_SIZE, … ; a single process when none is set. Raises ``SettingsError``."""
        if "RANK" not in environ and "WORLD_SIZE" not in environ:
            return cls(node_rank=_number(environ, "NODE_RANK"), host=socket.gethostname())
        missing = [name for name in _NEEDED if not environ.get(name)]
        if missing:
            raise SettingsError(f"{', '.join(missing)} not set; start the trainer by torchrun, or without RANK")
        ranks = cls(
            rank=_number(environ, "RANK"),
            world_size=_number(environ, "WORLD_SIZE"),
            local_rank=_number(environ, "LOCAL_RANK"),
            local_world_size=_number(environ, "LOCAL_WORLD_SIZE", 1),
            node_rank=_number(environ, "NODE_RANK" if "NODE_RANK" in environ else "GROUP_RANK"),
            master_addr=environ["MASTER_ADDR"],
            master_port=_number(environ, "MASTER_PORT"),
            host=socket.gethostname(),
        )
        if not 0 <= ranks.rank < ranks.world_size:
            raise SettingsError(f"RANK {ranks.rank} is not below WORLD_SIZE {ranks.world_size}")
        return ranks

    def __str__(self) -> str:
        return f"rank {self.rank} (node{self.node_rank}, {self.host})"


@dataclass(frozen=True)
class RankGroup:
    """The ranks that work together, as a process group on CPU tensors; without others nothing is communicated.

    Every method is a collective call: all ranks of the group must make it, in the same order.
    """

    ranks: Ranks
    device: torch.device = torch.device("cpu")
    timeout: float = 120.0  #: seconds any collective may take
    gradients: Any = None  #: process group for gradients; None: the default one
    members: tuple[int, ...] | None = None  #: ranks that are left of the run, ascending; None: all
    generation: int = 0  #: of ``members``: how often some have left
    group: Any = None  #: gloo process group; None: the default one

    @classmethod
    def of_process(cls, ranks: Ranks) -> RankGroup:
        """The ranks of an initialized torch.distributed, whatever its backend; else this rank alone. Collective."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls(ranks, members=(ranks.rank,))
        group = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        return cls(replace(ranks, rank=dist.get_rank(), world_size=dist.get_world_size()), group=group)

    @property
    def rank(self) -> int:
        """This process's place in the group; ``ranks.rank`` is its number in the run, which messages name."""
        return self.ranks.rank if self.members is None else self.members.index(self.ranks.rank)

    @property
    def size(self) -> int:
        return self.ranks.world_size if self.members is None else len(self.members)

    def sum(self, values: Tensor) -> Tensor:
        """Sum over ranks of a CPU tensor, in place; the same on every rank."""
        if self.size > 1:
            dist.all_reduce(values, group=self.group)
        return values

    def gather(self, value: T) -> list[T]:
        """Every rank's ``value``, by rank, on every rank: scalars, texts, and lists, tuples and dicts of them."""
        if self.size == 1:
            return [value]
        return gather_values(value, self.group)

    def from_first(self, value: T) -> T:
        """Rank 0's ``value``, as ``gather`` takes it or with tensors, on every rank."""
        return value if self.size == 1 else broadcast_value(value, self.group)

    def agree(self, work: Callable[[], T]) -> T:
        """Do ``work``, which must not communicate with other ranks, on every rank; if it fails on one, all raise.

        The failing ranks raise what they failed by, be it memory, a device or a bug, the others a ``PeerError`` that
        names the first of them.
        """
        result: T | None = None
        error: Exception | None = None
        try:
            result = work()
        except Exception as raised:
            error = raised
        try:
            failures = self.gather(f"{self.ranks}: {_in_words(error)}" if error else "")
        except Exception as lost:
            if error is None:
                raise
            raise error from lost  # a rank without memory may fail at this too
        if any(failures):
            self.settle()
        if error is not None:
            raise error
        if any(failures):
            raise PeerError(next(filter(None, failures)))
        return result  # type: ignore[return-value]

    def settle(self) -> None:
        """Before all ranks raise: wait until each has read the last answer, ten seconds at most.

        A process that ended before that would be a lost peer to the others, and its reason lost with it.
        """
        if self.size > 1:
            with suppress(RuntimeError):  # a rank that does not come: the caller has the better reason
                dist.monitored_barrier(self.group, timedelta(seconds=min(self.timeout, _SETTLE)))

    def barrier(self) -> None:
        """Wait for all ranks; raises ``RuntimeError`` naming those that do not come within the deadline."""
        if self.size > 1:
            dist.monitored_barrier(self.group, timedelta(seconds=self.timeout), wait_all_ranks=True)


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, TrainerError) else f"{type(error).__name__}: {error}"


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
def join_ranks(ranks: Ranks, device: torch.device, backend: str, timeout: float) -> Iterator[RankGroup]:
    """Yield the group of all ranks (gloo; NCCL for gradients where all have CUDA), and destroy it at the end.

    After an exception the group stays open until the process ends: closing it would reach the
    others before this rank has given its reason. Raises ``PeerError`` when a rank does not come or
    is lost later, and ``SettingsError`` for NCCL without CUDA.
    """
    check_backend(ranks, device, backend)
    if ranks.world_size == 1:
        yield RankGroup(ranks, device, timeout)
        return
    _meet(ranks, timeout)
    try:
        yield RankGroup(ranks, device, timeout, gradient_group(device, backend, ranks.world_size, timeout))
    except RuntimeError as error:
        if not says_peer_gone(error):
            raise
        raise lost_peer(ranks, timeout, error) from error
    dist.destroy_process_group()


def says_peer_gone(error: RuntimeError) -> bool:
    """Whether torch.distributed raised this because another process is gone or silent."""
    return _PEER_GONE.search(str(error)) is not None


def lost_peer(ranks: Ranks, timeout: float, error: Exception) -> PeerError:
    """The error of a rank that has lost another one."""
    return PeerError(
        f"{ranks} lost another rank, or waited {timeout:g} s in vain; the first failure of the run says why "
        f"({str(error).splitlines()[0]})"
    )


def check_backend(ranks: Ranks, device: torch.device, backend: str) -> None:
    """Make the rank's CUDA device, if it has one, the current one. Raises ``SettingsError`` for NCCL without CUDA."""
    if backend == "nccl" and device.type != "cuda":
        raise SettingsError(f"backend nccl needs a CUDA device, and {ranks} has none; use auto or gloo")
    if device.type == "cuda":
        torch.cuda.set_device(device)


def patience(timeout: float, environ: Mapping[str, str] = os.environ) -> float:
    """Seconds that the ranks' first meeting may take. In a run a rank comes to it once its node's graph server, which
    may have kernels to compile, is ready: GNNFLEET_START_TIMEOUT."""
    return max(timeout, float(environ.get("GNNFLEET_START_TIMEOUT") or 0))


def _meet(ranks: Ranks, timeout: float) -> None:
    limit = patience(timeout)
    store = run_store(ranks, limit, wait_for_workers=True)
    try:
        dist.init_process_group(
            "gloo", store=store, timeout=timedelta(seconds=limit), rank=ranks.rank, world_size=ranks.world_size
        )
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as error:
        raise not_met(ranks, limit, error) from error


def run_store(ranks: Ranks, timeout: float, *, wait_for_workers: bool) -> Store:
    """The run's store: torchrun's, which is the lead node's agent's, or else the one that rank 0 holds.

    Rank 0's listens on MASTER_ADDR alone where that is an address of this host: whoever reaches a store may write to
    it.
    Raises ``PeerError``.
    """
    of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    listener = None if of_agent or ranks.rank else _listener(ranks.master_addr, ranks.master_port)
    try:
        return TCPStore(
            ranks.master_addr, ranks.master_port, ranks.world_size, not of_agent and ranks.rank == 0,
            timedelta(seconds=timeout), wait_for_workers=wait_for_workers, multi_tenant=not of_agent,
            master_listen_fd=listener.detach() if listener else None,
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        raise not_met(ranks, timeout, error) from error


def _listener(address: str, port: int) -> socket.socket | None:
    """A socket that listens on ``address`` alone. None, for all addresses, where it is a name, which other hosts may
    resolve to another of them, stands for this host (NAT), or is in use, which the store itself reports."""
    try:
        literal = ipaddress.ip_address("127.0.0.1" if address == "localhost" else address)
        return socket.create_server(
            (str(literal), port), family=socket.AF_INET6 if literal.version == 6 else socket.AF_INET, backlog=_BACKLOG
        )
    except (ValueError, OSError):
        return None


def not_met(ranks: Ranks, timeout: float, error: Exception) -> PeerError:
    """The error of a rank that did not meet the others within ``timeout`` seconds."""
    where = f"{ranks.master_addr}:{ranks.master_port}"
    return PeerError(
        f"{ranks} could not meet the other {ranks.world_size - 1} ranks at {where} within {timeout:g} s: "
        f"{str(error).splitlines()[0]}. Look whether all nodes have started, whether {where} can be reached "
        f"from this host, and whether GLOO_SOCKET_IFNAME ({os.environ.get('GLOO_SOCKET_IFNAME', 'not set')}) "
        "is the interface the nodes share"
    )


def gradient_group(device: torch.device, backend: str, size: int, timeout: float) -> Any:
    """The process group for gradients: NCCL's where all ranks have CUDA; None: the default one."""
    kinds = gather_values(device.type) if size > 1 else [device.type]
    if backend == "gloo" or (backend == "auto" and set(kinds) != {"cuda"}):
        return None
    return dist.new_group(backend="nccl", timeout=timedelta(seconds=timeout))


def _number(environ: Mapping[str, str], name: str, default: int = 0) -> int:
    text = environ.get(name) or str(default)
    try:
        return int(text)
    except ValueError:
        raise SettingsError(f"{name}={text!r} in the environment is not a whole number") from None
