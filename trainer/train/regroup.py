"""Continues training without lost ranks: the remaining ranks form a new group.

The node's supervisor writes the remaining ranks into ``team.json`` in the node's run folder:
``{"generation": 1, "ranks": [0, 1, 4, 5], "lost": [{"node_rank": 2, "ranks": [2, 3], "why": "…"}]}``.
A rank detects a loss in one of two ways. Either a collective fails, which happens at once when a process died; or the
file has a newer team, which also covers a host that is unreachable. A thread then shuts down the group's connections,
so that running collectives fail at both ends. The ranks of a team rendezvous in the run's store, under a prefix with
the team's generation. If a rank is lost during the rendezvous, the next generation replaces the team.

Connections are shut down because gloo's ``ProcessGroup.abort()`` does not end running collectives (torch 2.13), which
would then wait for the group's timeout.
"""

from __future__ import annotations

import copy
import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from trainer.core.batch_cost import Cost
from trainer.core.errors import PeerError, TrainingError
from trainer.core.ranks import (
    RankGroup,
    Ranks,
    check_backend,
    gradient_group,
    join_ranks,
    lost_peer,
    patience,
    run_store,
    says_peer_gone,
)
from trainer.train.checkpoint import BestEpoch
from trainer.train.epoch import EpochReport, EpochSums
from trainer.train.optimize import Optimizers


@dataclass(frozen=True)
class Connections:
    """TCP connections of this process, as (descriptor, inode): the inode detects that a descriptor was reused."""

    sockets: frozenset[tuple[int, int]] = frozenset()

    def cut(self) -> None:
        """Shut down the connections that are still open. Idempotent and thread-safe."""
        for descriptor, inode in self.sockets:
            with suppress(OSError), _duplicate(descriptor) as connection:  # closed here or by the other end
                if os.fstat(connection.fileno()).st_ino == inode:
                    connection.shutdown(socket.SHUT_RDWR)


def connections_made_by(connect: Callable[[], T], store_port: int) -> tuple[T, Connections]:
    """Call ``connect``; return its result and the connections opened meanwhile, except those to ``store_port``.

    Connections that other threads open meanwhile are included; the graph service reopens its own when they break.
    """
    before = set(_connections(store_port))
    made = connect()
    return made, Connections(frozenset(_connections(store_port)) - before)


def _connections(excluded_port: int) -> Iterator[tuple[int, int]]:
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), _duplicate(int(name)) as found:  # not a socket, or not connected
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                if excluded_port not in (found.getsockname()[1], found.getpeername()[1]):
                    yield int(name), os.fstat(found.fileno()).st_ino


@contextmanager
def _duplicate(descriptor: int) -> Iterator[socket.socket]:
    """Yield a duplicate of a descriptor's socket: closing the original meanwhile does no harm.

    Raises ``OSError`` if the descriptor is not a socket.
    """
    copy = os.dup(descriptor)
    try:
        duplicate = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with duplicate:
        yield duplicate


T = TypeVar("T")

LOOK = 0.5  #: seconds between reads of team.json

_CONNECT = 15.0  #: seconds that connecting may take at most, once all ranks of a team have arrived

_POLL = 0.05  #: seconds between reads of the store

_LEAVE = 10.0  #: seconds that the first rank, which may serve the store, waits for the others to finish


class CannotRegroup(PeerError):
    """The run cannot continue without the lost ranks."""


@dataclass(frozen=True)
class Team:
    """The remaining ranks of a run."""

    generation: int  #: 0: all ranks
    ranks: tuple[int, ...]  #: ascending


@dataclass(frozen=True)
class RegroupOptions:
    """Settings of a run that may continue without some of its ranks."""

    file: Path  #: team.json
    patience: float = 16.0  #: seconds from a failed collective until the file must name the lost ranks

    @classmethod
    def from_env(cls, environ: Mapping[str, str], run_dir: Path) -> RegroupOptions | None:
        """Read the options from environment variables; None unless GNNFLEET_ON_CLIENT_LOSS is ``go-on``."""
        if environ.get("GNNFLEET_ON_CLIENT_LOSS") != "go-on":
            return None
        folder = Path(environ.get("GNNFLEET_RUN_DIR") or run_dir)
        return cls(folder / "team.json", float(environ.get("GNNFLEET_PEER_TIMEOUT") or 6.0) + 10.0)

    def newest(self) -> Team | None:
        """Read ``team.json``; None if it does not exist. Raises ``TrainingError`` if it is invalid or unreadable."""
        try:
            team = json.loads(self.file.read_text(encoding="utf-8"))
            return Team(int(team["generation"]), tuple(sorted(map(int, team["ranks"]))))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TrainingError(f"{self.file} does not list the remaining ranks: {error!r}; resume the run") from error


def with_team(
    work: Callable[[RankGroup], T], ranks: Ranks, device: torch.device, backend: str, timeout: float,
    regroup: RegroupOptions | None,
) -> T:  # fmt: skip
    """Run ``work`` with all ranks; with ``regroup``, run it again with the remaining ranks after each loss.

    Returns once all ranks have finished, since this node's graph server must outlive the slowest rank. Raises as
    ``join_ranks`` does.
    """
    if regroup is not None and ranks.world_size > 1:
        check_backend(ranks, device, backend)
        return _RegroupingRank(ranks, device, backend, timeout, regroup).run(work)
    with join_ranks(ranks, device, backend, timeout) as team:
        result = work(team)
        team.barrier()
    return result


class _TeamWatch:
    """A thread that shuts down a team's connections when ``team.json`` names a newer team or cannot be read.

    If the file cannot be read, the main thread raises the error: it reads the file after a failed collective.
    """

    def __init__(self, regroup: RegroupOptions):
        self._regroup, self._lock, self._over = regroup, threading.Lock(), threading.Event()
        self._members: Team | None = None
        self._cuts: tuple[Callable[[], None], ...] = ()

    def guard(self, members: Team, *cuts: Callable[[], None]) -> None:
        """Call ``cuts``, which shut down connections of the team ``members``, when a newer team is known."""
        with self._lock:
            self._members, self._cuts = members, cuts

    def cut(self) -> None:
        """Call the functions ``cuts`` of the last ``guard``, unless they were already called."""
        with self._lock:
            cuts, self._cuts = self._cuts, ()
        for cut in cuts:
            cut()

    def superseded(self, members: Team) -> bool:
        """Whether ``team.json`` names a newer team than ``members``."""
        return (self._regroup.newest() or members).generation > members.generation

    def __enter__(self) -> _TeamWatch:
        threading.Thread(target=self._run, name="team-watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(LOOK):
            members = self._members
            try:
                over = members is not None and self.superseded(members)
            except TrainingError:
                self.cut()
                return
            if over:
                self.cut()


class _RegroupingRank:
    """One rank of a run that continues after the loss of others."""

    def __init__(self, ranks: Ranks, device: torch.device, backend: str, timeout: float, regroup: RegroupOptions):
        self.ranks, self.device, self.backend, self.timeout, self.regroup = (
            ranks,
            device,
            backend,
            timeout,
            regroup,
        )
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # else NCCL's watchdog ends this process too
        self.store: Store = PrefixStore("gnnfleet", run_store(ranks, timeout, wait_for_workers=False))
        self.watch = _TeamWatch(regroup)

    def run(self, work: Callable[[RankGroup], T]) -> T:
        """Run ``work`` with one team after the other until it succeeds."""
        members = self.regroup.newest() or Team(0, tuple(range(self.ranks.world_size)))
        with self.watch:
            while isinstance(outcome := self._attempt(work, members), PeerError):
                self.watch.cut()
                _destroy_groups()
                members = self._next(members, outcome)
        _destroy_groups()
        return outcome.result

    def _attempt(self, work: Callable[[RankGroup], T], members: Team) -> _WorkResult[T] | PeerError:
        """Return the result of ``work``, or an error that says which loss of ranks broke the team.

        The error is a new object: a traceback would keep the team's process groups alive.
        """
        try:
            result = work(self._meet(members))
            self._await_all(members)
            return _WorkResult(result)
        except CannotRegroup:
            raise
        except PeerError as error:
            return PeerError(str(error))
        except (RuntimeError, TrainingError) as error:
            peer_gone = isinstance(error, RuntimeError) and says_peer_gone(error)
            if not peer_gone and not self.watch.superseded(members):  # a cut may cause any kind of error
                raise
            return lost_peer(self.ranks, self.timeout, error)

    def _next(self, members: Team, reason: PeerError) -> Team:
        """Wait until ``team.json`` names a newer team than ``members``. Raises ``reason`` if that takes too long."""
        until = time.monotonic() + self.regroup.patience
        while time.monotonic() < until:
            newest = self.regroup.newest()
            if newest is not None and newest.generation > members.generation:
                return newest
            time.sleep(_POLL)
        raise reason

    def _meet(self, members: Team) -> RankGroup:
        """Wait for all ranks of a team, then connect them; returns their group."""
        if self.ranks.rank not in members.ranks:
            raise CannotRegroup(f"{self.ranks} was reported lost, and the other ranks continued without it")
        self.watch.guard(members)
        self.store.delete_key(_done(self.ranks.rank))
        self._await_arrival(members)
        team = RankGroup(self.ranks, self.device, self.timeout, None, members.ranks, members.generation)
        if team.size == 1:
            return team
        _, connections = connections_made_by(lambda: self._connect(members, team), self.ranks.master_port)
        self.watch.guard(members, connections.cut)
        gradients = gradient_group(self.device, self.backend, team.size, self.timeout)
        if gradients is not None:
            self.watch.guard(members, connections.cut, gradients.abort)
        return replace(team, gradients=gradients)

    def _connect(self, members: Team, team: RankGroup) -> None:
        store = PrefixStore(f"team{members.generation}", self.store)
        limit = timedelta(seconds=min(_CONNECT, self.timeout))
        dist.init_process_group("gloo", store=store, rank=team.rank, world_size=team.size, timeout=limit)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=self.timeout))

    def _await_arrival(self, members: Team) -> None:
        """Wait until all members have arrived."""
        key = f"team{members.generation}/here"
        self.store.set(f"{key}/{self.ranks.rank}", "")
        until = time.monotonic() + (self.timeout if members.generation else patience(self.timeout))
        while missing := self._without(members, lambda rank: f"{key}/{rank}"):
            if self.watch.superseded(members):
                raise PeerError(f"{self.ranks}: other ranks were lost while this rank waited for them")
            self._pause(missing, until)

    def _await_all(self, members: Team) -> None:
        """Wait until all remaining ranks have finished. Raises ``PeerError`` if this rank has to join a newer team."""
        own = self.ranks.rank
        self.store.set(_done(own), "")
        until = time.monotonic() + self.timeout
        while missing := self._without(newest := self.regroup.newest() or members, _done):
            if newest.generation > members.generation:
                break
            self._pause(missing, until)
        if self._decide(members, "again" if missing else "over") == "again":
            raise PeerError(f"{self.ranks}: other ranks were lost while this rank waited for them")
        self.store.set(f"left/{own}", "")
        until = time.monotonic() + _LEAVE
        while own == members.ranks[0] and time.monotonic() < until:
            if not self._without(self.regroup.newest() or members, lambda rank: f"left/{rank}"):
                return
            time.sleep(_POLL)

    def _decide(self, members: Team, end: str) -> str:
        """Return how this team ends: ``over``, all ranks have finished, or ``again``, they form a newer team.

        The ``end`` of the first rank that calls this counts for all, so that no rank leaves while others wait.
        """
        return self.store.compare_set(f"team{members.generation}/end", "", end).decode()

    def _without(self, members: Team, key: Callable[[int], str]) -> list[int]:
        """The ranks of ``members`` whose key, ``key(rank)``, is not in the store."""
        return [rank for rank in members.ranks if not self.store.check([key(rank)])]

    def _pause(self, missing: list[int], until: float) -> None:
        """Sleep for ``_POLL``. Raises ``PeerError`` after the time ``until``."""
        if time.monotonic() > until:
            names = ", ".join(map(str, missing))
            raise PeerError(f"{self.ranks} timed out after {self.timeout:g} s, waiting for ranks {names}")
        time.sleep(_POLL)


@dataclass(frozen=True)
class _WorkResult(Generic[T]):
    result: T


def _done(rank: int) -> str:
    """Key that ``rank`` sets in the run's store when it has finished."""
    return f"done/{rank}"


def _destroy_groups() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


SNAPSHOT_STEPS = 20  #: training steps between snapshots; at most that many are repeated

KEPT = 2  #: ranks are at most one step apart, so they have one of the last two snapshots in common

RunPosition = tuple[int, bool, int]  #: epochs done, whether the last one is evaluated, steps done of the next one


@dataclass(frozen=True)
class Progress:
    """Results of a run so far, without the weights. Immutable, so a snapshot need not copy it."""

    done: int = 0  #: epochs trained
    scored: bool = True  #: whether epoch ``done`` has been evaluated, if an evaluation is due
    step_loss: tuple[Tensor, ...] = ()  #: float64 [steps] per epoch done
    best: BestEpoch | None = None
    seconds: tuple[float, ...] = ()  #: of each epoch that this process trained
    cost: Cost = Cost()  #: of this rank's batches in those epochs
    report: EpochReport | None = None  #: of epoch ``done``; None if a checkpoint was resumed there
    tally: EpochSums | None = None  #: of the current epoch; None at its start

    @property
    def position(self) -> RunPosition:
        """Where the run is; later positions compare greater."""
        return self.done, self.scored, self.tally.steps if self.tally else 0


@dataclass(frozen=True)
class Snapshot:
    """Copy of a run's state at one position; shares no tensors with the model."""

    progress: Progress
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]

    @classmethod
    def of(cls, progress: Progress, model: nn.Module, optimizers: Optimizers) -> Snapshot:
        """Copy the state, on the model's device."""
        weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        return cls(progress, weights, copy.deepcopy(optimizers.model.state_dict()))

    def restore(self, model: nn.Module, optimizers: Optimizers) -> None:
        """Load the weights and the optimizer's state; the snapshot can be restored again."""
        model.load_state_dict(dict(self.model))
        optimizers.model.load_state_dict(copy.deepcopy(dict(self.optimizer)))


class Snapshots:
    """A rank's newest snapshots."""

    def __init__(self) -> None:
        self._kept: deque[Snapshot] = deque(maxlen=KEPT)

    def keep(self, progress: Progress, model: nn.Module, optimizers: Optimizers) -> None:
        """Take a snapshot, unless the newest one has the same position."""
        if not self._kept or self._kept[-1].progress.position != progress.position:
            self._kept.append(Snapshot.of(progress, model, optimizers))

    def positions(self) -> tuple[RunPosition, ...]:
        """Positions from which this rank can continue."""
        return tuple(kept.progress.position for kept in self._kept)

    def rewind_to(self, position: RunPosition) -> Snapshot:
        """Return the snapshot of a position, and drop later ones."""
        while self._kept[-1].progress.position != position:
            self._kept.pop()
        return self._kept[-1]


def newest_common(positions: Iterable[tuple[RunPosition, ...]]) -> RunPosition:
    """The last position that occurs in the lists of all ranks; ``positions``: for each rank, those of its snapshots."""
    return max(set.intersection(*(set(own) for own in positions)))
