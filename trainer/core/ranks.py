"""The ranks of a run: this process's rank and world size, and collective calls over all ranks."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import astuple, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from trainer.core.collectives import broadcast_value, gather_values
from trainer.core.errors import PeerError, SettingsError, TrainerError, Wait
from trainer.core.launchers import has_own_devices, number, torchrun_variables

T = TypeVar("T")

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_SETTLE = 10.0  #: longest wait in seconds for the other ranks before all ranks raise

_PIECE = 1 << 22  #: bytes of a file that are sent at once

_BACKLOG = 4096  #: listen backlog of rank 0's store, in connections

#: Error texts of gloo, NCCL and the store for a process that is gone or does not answer.
_PEER_GONE = re.compile(
    r"gloo|Connection (closed|reset)|Broken pipe|NCCL|monitoredBarrier|Timed out|wait timeout", re.I
)


@dataclass(frozen=True)
class Ranks:
    """Rank, world size and rendezvous address of this process, as torchrun sets them.

    The defaults describe a single process.

    Args:
        rank: Rank of this process in the run, from 0 (``RANK``).
        world_size: Number of processes in the run (``WORLD_SIZE``).
        local_rank: Rank among the processes of this node (``LOCAL_RANK``).
        local_world_size: Number of processes on this node (``LOCAL_WORLD_SIZE``).
        node_rank: Rank of this node in the run (``NODE_RANK``, else ``GROUP_RANK``).
        master_addr: Host name or address of the rendezvous (``MASTER_ADDR``).
        master_port: Port of the rendezvous (``MASTER_PORT``).
        host: Host name of this machine, for messages.

    Example:
        ```python
        import os

        import gnnfleet as gf

        ranks = gf.Ranks.from_env(os.environ)
        if ranks.rank == 0:
            print(f"{ranks.world_size} processes")
        ```
    """

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
        """Read the environment variables of torchrun, or of another launcher that ``launchers`` knows.

        Args:
            environ: Environment variables, usually ``os.environ``.

        Returns:
            The ranks of this process; a single process if no launcher has set a rank and a world size.

        Raises:
            SettingsError: A variable is missing or is not a whole number, or ``RANK`` is not below ``WORLD_SIZE``.
        """
        environ = torchrun_variables(environ)
        if "RANK" not in environ and "WORLD_SIZE" not in environ:
            return cls(node_rank=number(environ, "NODE_RANK"), host=socket.gethostname())
        missing = [name for name in _NEEDED if not environ.get(name)]
        if missing:
            raise SettingsError(
                f"{', '.join(missing)} not set; start the trainer with torchrun, srun or mpirun, or unset RANK and "
                "WORLD_SIZE"
            )
        ranks = cls(
            rank=number(environ, "RANK"),
            world_size=number(environ, "WORLD_SIZE"),
            local_rank=number(environ, "LOCAL_RANK"),
            local_world_size=number(environ, "LOCAL_WORLD_SIZE", 1),
            node_rank=number(environ, "NODE_RANK" if "NODE_RANK" in environ else "GROUP_RANK"),
            master_addr=environ["MASTER_ADDR"],
            master_port=number(environ, "MASTER_PORT"),
            host=socket.gethostname(),
        )
        if not 0 <= ranks.rank < ranks.world_size:
            raise SettingsError(f"RANK {ranks.rank} is not below WORLD_SIZE {ranks.world_size}")
        return ranks

    def __str__(self) -> str:
        return f"rank {self.rank} (node{self.node_rank}, {self.host})"


@dataclass(frozen=True)
class RankGroup:
    """The ranks that train together, with collective calls on CPU values over a gloo process group.

    All ranks of the group must call the same methods in the same order.

    Args:
        ranks: Rank and world size of this process.
        device: Device that this rank trains on.
        timeout: Seconds that a collective call may take.
        gradients: Process group for gradients. None: the default process group.
        group: Gloo process group of the collective calls. None: the default process group.

    Example:
        ```python
        import os

        import gnnfleet as gf
        import torch

        group = gf.RankGroup.of_process(gf.Ranks.from_env(os.environ))
        correct, seen = 90, 100  # of this rank
        correct, seen = group.sum(torch.tensor([correct, seen])).tolist()
        ```
    """

    ranks: Ranks
    device: torch.device = torch.device("cpu")
    timeout: float = 120.0
    gradients: Any = None
    group: Any = None

    @classmethod
    def of_process(cls, ranks: Ranks) -> RankGroup:
        """Return the group of all ranks of ``torch.distributed``, or of this rank alone if it is not initialised.

        All ranks must call this, because it creates a gloo group if the default backend is not gloo.

        Args:
            ranks: Describes this process. Its rank and world size are replaced by those of the group.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return cls(replace(ranks, rank=0, world_size=1))
        group = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        return cls(replace(ranks, rank=dist.get_rank(), world_size=dist.get_world_size()), group=group)

    @property
    def rank(self) -> int:
        """Rank of this process in the group."""
        return self.ranks.rank

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self.ranks.world_size

    def sum(self, values: Tensor) -> Tensor:
        """Sum a CPU tensor over all ranks, in place, and return it.

        Args:
            values: Tensor of the same shape and dtype on every rank.
        """
        if self.size > 1:
            dist.all_reduce(values, group=self.group)
        return values

    def gather(self, value: T) -> list[T]:
        """Collect ``value`` from every rank, and return all values, in rank order, on every rank.

        Args:
            value: None, a scalar, str or bytes, or lists, tuples and dicts of these.

        Raises:
            PeerError: The bytes of another rank cannot be decoded.
        """
        if self.size == 1:
            return [value]
        return gather_values(value, self.group)

    def from_first(self, value: T) -> T:
        """Return on every rank the ``value`` that the first rank of the group passed.

        Args:
            value: As in ``gather``, but it may contain tensors. Values on other ranks than the first are ignored.

        Raises:
            PeerError: The bytes of the first rank cannot be decoded.
        """
        return value if self.size == 1 else broadcast_value(value, self.group)

    def copy_to_first(self, owner: int, source: Path, target: Path, size: int) -> None:
        """Copy the file ``source`` of rank ``owner``, which has ``size`` bytes, to ``target`` of the first rank.

        All ranks must call this with the same ``owner`` and ``size``.
        """
        assert owner != 0
        with ExitStack() as stack:
            file: Any = None
            if self.rank == owner:
                file = stack.enter_context(source.open("rb"))
            elif self.rank == 0:
                file = stack.enter_context(target.open("wb"))
            for begin in range(0, size, _PIECE):
                piece = torch.empty(min(_PIECE, size - begin), dtype=torch.uint8)
                if self.rank == owner:
                    file.readinto(piece.numpy())
                    dist.send(piece, 0, group=self.group)
                elif self.rank == 0:
                    dist.recv(piece, owner, group=self.group)
                    file.write(piece.numpy())
        self.barrier()  # others wait no longer than one file takes

    def agree(self, work: Callable[[], T]) -> T:
        """Call ``work`` on every rank. If the call raises on any rank, all ranks raise.

        Args:
            work: Function without arguments. It must not communicate with other ranks.

        Returns:
            The result of ``work`` on this rank.

        Raises:
            PeerError: ``work`` failed on other ranks only; names the first of them and its error.
            Exception: The exception of ``work`` on this rank.
        """
        result: T | None = None
        error: Exception | None = None
        try:
            result = work()
        except Exception as raised:
            error = raised
        name = "" if isinstance(error, TrainerError) else f"{type(error).__name__}: "
        try:
            wait = error.wait if isinstance(error, TrainerError) else None
            failures = self.gather((f"{self.ranks}: {name}{error}", wait and astuple(wait)) if error else None)
        except Exception as lost:
            if error is None:
                raise
            raise error from lost  # a rank that is out of memory may fail in ``gather`` as well
        if any(failures):
            self.settle()
        if error is not None:
            raise error
        if any(failures):
            rank, (text, fields) = next((rank, failure) for rank, failure in enumerate(failures) if failure)
            raise PeerError(text, wait=replace(Wait(*fields), rank=rank) if fields else None)
        return result  # type: ignore[return-value]

    def settle(self) -> None:
        """Wait, at most ten seconds, until every rank has received the result of the last collective call.

        Call this before all ranks raise. Otherwise some ranks might report a lost connection instead of the first
        error.
        """
        if self.size > 1:
            with suppress(RuntimeError):  # raised if a rank is missing; the caller's own error says more
                dist.monitored_barrier(self.group, timedelta(seconds=min(self.timeout, _SETTLE)))

    def barrier(self) -> None:
        """Wait for all ranks.

        Raises:
            RuntimeError: Ranks did not arrive within ``timeout`` seconds; names them.
        """
        if self.size > 1:
            dist.monitored_barrier(self.group, timedelta(seconds=self.timeout), wait_all_ranks=True)


def pick_device(ranks: Ranks, environ: Mapping[str, str] = os.environ) -> torch.device:
    """Return ``cuda:LOCAL_RANK`` when this node has a CUDA device for each of its processes, else the CPU.

    A process to which its launcher gave own devices (``has_own_devices``) uses the first of them. Raises
    ``SettingsError`` when CUDA_VISIBLE_DEVICES names devices that torch does not find, or fewer devices than processes.
    Warns when the node has devices, but fewer than processes.
    """
    devices, given = torch.cuda.device_count(), environ.get("CUDA_VISIBLE_DEVICES", "")
    if (devices and has_own_devices(environ)) or (devices == 1 and _one_instance(given)):
        return torch.device("cuda", 0)
    if devices >= ranks.local_world_size:
        return torch.device("cuda", ranks.local_rank)
    where = f"node{ranks.node_rank} ({ranks.host})"
    if devices and given:
        raise SettingsError(
            f"{where}: {ranks.local_world_size} processes share {devices} CUDA devices; "
            "list one device per process in CUDA_VISIBLE_DEVICES, or set it to '' to train on the CPU"
        )
    if given and given != "-1" and "GNNFLEET_RUN_ID" in environ:  # elsewhere it may be set for other programs
        why = "finds no such device" if torch.version.cuda else f"{torch.__version__} is built without CUDA"
        raise SettingsError(f"{where}: CUDA_VISIBLE_DEVICES is {given}, but torch {why}; correct `devices`")
    if devices and ranks.local_rank == 0:
        warnings.warn(
            f"{where} has {devices} CUDA device{'s' * (devices > 1)} for {ranks.local_world_size} processes, so they "
            f"run on the CPU; start at most {devices} per node to use GPUs, or set CUDA_VISIBLE_DEVICES to ''",
            stacklevel=2,
        )
    return torch.device("cpu")


def _one_instance(visible: str) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES names one MIG instance, as the launcher sets it for each process."""
    return visible.startswith("MIG") and "," not in visible


@contextmanager
def join_ranks(ranks: Ranks, device: torch.device, backend: str, timeout: float) -> Iterator[RankGroup]:
    """Create the gloo process group of all ranks for the ``with`` block, and destroy it at the end.

    If all ranks have CUDA and ``backend`` is not gloo, also creates a NCCL group for gradients. After an exception the
    groups stay open until the process ends. Raises ``PeerError`` when a rank does not connect or is lost later, and
    ``SettingsError`` for NCCL without a CUDA device.
    """
    if backend == "nccl" and device.type != "cuda":
        raise SettingsError(f"backend nccl needs a CUDA device, and {ranks} has none; use auto or gloo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if ranks.world_size == 1:
        yield RankGroup(ranks, device, timeout)
        return
    _rendezvous(ranks, timeout)
    keep_process_group()
    try:
        yield RankGroup(ranks, device, timeout, _gradient_group(device, backend, ranks.world_size, timeout))
    except RuntimeError as error:
        if not _PEER_GONE.search(str(error)):
            raise
        raise PeerError(
            f"{ranks} lost another rank, or got no answer within {timeout:g} s; see the first failure of the run for "
            f"the cause ({str(error).splitlines()[0]})"
        ) from error
    # Not after an exception: other ranks would fail before this rank has reported its error.
    dist.destroy_process_group()


_kept: list[object] = []  #: the process group that ``keep_process_group`` keeps


def keep_process_group() -> None:
    """Keep the default process group, if there is one, until the process ends or another group is kept.

    Without this call the last owner of a destroyed group may be a ``DistributedDataParallel``. When it is deleted,
    torch 2.13 waits for the threads of gloo while it holds the GIL, and hangs if one of them needs the GIL.
    """
    if dist.is_available() and dist.is_initialized():
        _kept[:] = [dist.group.WORLD]


def _rendezvous(ranks: Ranks, timeout: float) -> None:
    # A rank connects only after its graph server is ready, which may first have to compile kernels.
    limit = max(timeout, float(os.environ.get("GNNFLEET_START_TIMEOUT") or 0))
    store = run_store(ranks, limit)
    try:
        dist.init_process_group(
            "gloo", store=store, timeout=timedelta(seconds=limit), rank=ranks.rank, world_size=ranks.world_size
        )
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as error:
        raise _rendezvous_error(ranks, limit, error) from error


def run_store(ranks: Ranks, timeout: float) -> Store:
    """Connect to the key-value store of the run: torchrun's store or, without torchrun, a store that rank 0 creates.

    Raises ``PeerError`` when the store cannot be reached.
    """
    of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # A store has no authentication, so it listens on as few addresses as possible: on all of them for a host name, and
    # for an address that is not this host's (NAT). For a port in use, the store raises an error later.
    listener = None
    if not of_agent and ranks.rank == 0:
        with suppress(ValueError, OSError):
            own = ipaddress.ip_address("127.0.0.1" if ranks.master_addr == "localhost" else ranks.master_addr)
            family = socket.AF_INET6 if own.version == 6 else socket.AF_INET
            listener = socket.create_server((str(own), ranks.master_port), family=family, backlog=_BACKLOG)
    try:
        return TCPStore(
            ranks.master_addr, ranks.master_port, ranks.world_size, not of_agent and ranks.rank == 0,
            timedelta(seconds=timeout), wait_for_workers=True, multi_tenant=not of_agent,
            master_listen_fd=listener.detach() if listener else None,
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        raise _rendezvous_error(ranks, timeout, error) from error


def _rendezvous_error(ranks: Ranks, timeout: float, error: Exception) -> PeerError:
    where = f"{ranks.master_addr}:{ranks.master_port}"
    return PeerError(
        f"{ranks} could not connect to the other {ranks.world_size - 1} ranks at {where} within {timeout:g} s: "
        f"{str(error).splitlines()[0]}. Check that all nodes have started, that {where} can be reached "
        f"from this host, and that GLOO_SOCKET_IFNAME ({os.environ.get('GLOO_SOCKET_IFNAME', 'not set')}) "
        "names the interface of the network that the nodes share"
    )


def _gradient_group(device: torch.device, backend: str, size: int, timeout: float) -> Any:
    """Return a NCCL process group for gradients, or None to use the default process group.

    All ranks must call this function.
    """
    # NCCL refuses several ranks on one GPU, and MIG instances may be on one
    own = "mig" if _one_instance(os.environ.get("CUDA_VISIBLE_DEVICES", "")) else device.type
    kinds = gather_values(own) if size > 1 else [own]
    if backend == "gloo" or (backend == "auto" and set(kinds) != {"cuda"}):
        return None
    return dist.new_group(backend="nccl", timeout=timedelta(seconds=timeout))
