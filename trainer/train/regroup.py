"""Continues training without lost ranks: the remaining ranks form a new group.

Who is left says ``team.json`` in the node's run folder, which the node's supervisor writes:
``{"generation": 1, "ranks": [0, 1, 4, 5], "lost": [{"node_rank": 2, "ranks": [2, 3], "why": "…"}]}``.
A loss shows in one of two ways: a collective fails, at once where a process has died; or a newer team
is in the file, also when a host has vanished and nothing comes from it. Then a thread cuts the
connections, so that the collective fails here, and at the other ends. Teams meet in the run's store,
under their generation's prefix; a team that loses somebody while it meets gives way to the next.

gloo's ``ProcessGroup.abort()`` leaves collectives that are under way alone (torch 2.13), and they wait for the
group's timeout. A connection that is shut down fails them at once, here and at the other end.
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
    """TCP connections of this process: (descriptor, inode), so that a descriptor used anew is told from them."""

    sockets: frozenset[tuple[int, int]] = frozenset()

    def cut(self) -> None:
        """Shut down those that are still open; may be done twice, and from any thread."""
        for descriptor, inode in self.sockets:
            with suppress(OSError), _held(descriptor) as held:  # closed since, or by the other end
                if os.fstat(held.fileno()).st_ino == inode:
                    held.shutdown(socket.SHUT_RDWR)


def connections_made_by(connect: Callable[[], T], store_port: int) -> tuple[T, Connections]:
    """What ``connect`` returns, and the connections that are new after it; those of a store at ``store_port`` left out.

    A connection that another thread makes meanwhile counts as well. Those of the graph service are
    made anew when they break.
    """
    before = set(_connections(store_port))
    made = connect()
    return made, Connections(frozenset(_connections(store_port)) - before)


def _connections(but_port: int) -> Iterator[tuple[int, int]]:
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), _held(int(name)) as held:  # no socket, or not connected
            if held.family in (socket.AF_INET, socket.AF_INET6) and held.type == socket.SOCK_STREAM:
                if but_port not in (held.getsockname()[1], held.getpeername()[1]):
                    yield int(name), os.fstat(held.fileno()).st_ino


@contextmanager
def _held(descriptor: int) -> Iterator[socket.socket]:
    """A descriptor's socket, which stays the same meanwhile whatever is closed. Raises ``OSError`` if it is none."""
    copy = os.dup(descriptor)
    try:
        held = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with held:
        yield held


T = TypeVar("T")

LOOK = 0.5  #: seconds between looks at team.json

_CONNECT = 15.0  #: seconds that connecting may take at most, once all ranks of a team have come

_POLL = 0.05  #: seconds between looks at the store

_PART = 10.0  #: seconds that the first rank, which may hold the store, waits for the others to end


class CannotRegroup(PeerError):
    """The run cannot go on without the ranks that were lost."""


@dataclass(frozen=True)
class Team:
    """Who is left of a run."""

    generation: int  #: 0: everybody
    ranks: tuple[int, ...]  #: ascending


@dataclass(frozen=True)
class RegroupOptions:
    """That a run may go on without some of its ranks, and where it is said which."""

    file: Path  #: team.json
    patience: float = 16.0  #: seconds from a failed collective until the file tells who was lost

    @classmethod
    def from_env(cls, environ: Mapping[str, str], run_dir: Path) -> RegroupOptions | None:
        """None unless GNNFLEET_ON_CLIENT_LOSS is ``go-on``."""
        if environ.get("GNNFLEET_ON_CLIENT_LOSS") != "go-on":
            return None
        folder = Path(environ.get("GNNFLEET_RUN_DIR") or run_dir)
        return cls(folder / "team.json", float(environ.get("GNNFLEET_PEER_TIMEOUT") or 6.0) + 10.0)

    def newest(self) -> Team | None:
        """What the file says; None before it is there. Raises ``TrainingError`` where it cannot be read."""
        try:
            peer_gone = json.loads(self.file.read_text(encoding="utf-8"))
            return Team(int(peer_gone["generation"]), tuple(sorted(map(int, peer_gone["ranks"]))))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TrainingError(f"{self.file} does not say which ranks go on: {error!r}; resume the run") from error


def with_team(
    work: Callable[[RankGroup], T], ranks: Ranks, device: torch.device, backend: str, timeout: float,
    regroup: RegroupOptions | None,
) -> T:  # fmt: skip
    """``work`` done with all ranks, and with ``regroup`` again with those that are left each time some are lost.

    Returns when all have done it: this node's graph server must outlive the slowest rank. Raises as ``join_ranks``.
    """
    if regroup is not None and ranks.world_size > 1:
        check_backend(ranks, device, backend)
        return _RegroupingRank(ranks, device, backend, timeout, regroup).run(work)
    with join_ranks(ranks, device, backend, timeout) as team:
        result = work(team)
        team.barrier()
    return result


class _TeamWatch:
    """A thread that cuts a team's connections when ``team.json`` names a newer one, or cannot be read: then the rank
    meets the error itself as it looks for the reason."""

    def __init__(self, regroup: RegroupOptions):
        self._regroup, self._lock, self._over = regroup, threading.Lock(), threading.Event()
        self._members: Team | None = None
        self._cuts: tuple[Callable[[], None], ...] = ()

    def guard(self, members: Team, *cuts: Callable[[], None]) -> None:
        """From now on, these are the members; ``cuts`` end their connections."""
        with self._lock:
            self._members, self._cuts = members, cuts

    def cut(self) -> None:
        """End the connections, once."""
        with self._lock:
            cuts, self._cuts = self._cuts, ()
        for cut in cuts:
            cut()

    def superseded(self, members: Team) -> bool:
        """Whether there is a newer team."""
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
    """One rank of a run that may lose others."""

    def __init__(self, ranks: Ranks, device: torch.device, backend: str, timeout: float, regroup: RegroupOptions):
        self.ranks, self.device, self.backend, self.timeout, self.regroup = (
            ranks,
            device,
            backend,
            timeout,
            regroup,
        )
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # NCCL's watchdog would end this process too
        self.store: Store = PrefixStore("gnnfleet", run_store(ranks, timeout, wait_for_workers=False))
        self.watch = _TeamWatch(regroup)

    def run(self, work: Callable[[RankGroup], T]) -> T:
        """``work`` with one team after the other, until one has done it."""
        members = self.regroup.newest() or Team(0, tuple(range(self.ranks.world_size)))
        with self.watch:
            while isinstance(ended := self._attempt(work, members), PeerError):
                self.watch.cut()
                _destroy_groups()
                members = self._next(members, ended)
        _destroy_groups()
        return ended.result

    def _attempt(self, work: Callable[[RankGroup], T], members: Team) -> _WorkResult[T] | PeerError:
        """What ``work`` returns, or why the team has broken; whatever holds on to its groups ends with this call."""
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
            if not peer_gone and not self.watch.superseded(members):  # what fails beside a cut may look like anything
                raise
            return lost_peer(self.ranks, self.timeout, error)

    def _next(self, members: Team, reason: PeerError) -> Team:
        """The team after this one. Raises ``reason`` when nobody is said to have left."""
        until = time.monotonic() + self.regroup.patience
        while time.monotonic() < until:
            newest = self.regroup.newest()
            if newest is not None and newest.generation > members.generation:
                return newest
            time.sleep(_POLL)
        raise reason

    def _meet(self, members: Team) -> RankGroup:
        """All ranks of a team, connected."""
        if self.ranks.rank not in members.ranks:
            raise CannotRegroup(f"{self.ranks} was taken for lost, and the others went on without it")
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
        """Wait until all members have come."""
        key = f"team{members.generation}/here"
        self.store.set(f"{key}/{self.ranks.rank}", "")
        until = time.monotonic() + (self.timeout if members.generation else patience(self.timeout))
        while missing := self._without(members, lambda rank: f"{key}/{rank}"):
            if self.watch.superseded(members):
                raise PeerError(f"{self.ranks}: others were lost while it waited for them")
            self._pause(missing, until)

    def _await_all(self, members: Team) -> None:
        """Wait until all who are left have done their work, or need this rank again in a newer team."""
        own = self.ranks.rank
        self.store.set(_done(own), "")
        until = time.monotonic() + self.timeout
        while missing := self._without(newest := self.regroup.newest() or members, _done):
            if newest.generation > members.generation:
                break
            self._pause(missing, until)
        if self._decide(members, "again" if missing else "over") == "again":
            raise PeerError(f"{self.ranks}: others were lost while it waited for them")
        self.store.set(f"left/{own}", "")
        until = time.monotonic() + _PART
        while own == members.ranks[0] and time.monotonic() < until:
            if not self._without(self.regroup.newest() or members, lambda rank: f"left/{rank}"):
                return
            time.sleep(_POLL)

    def _decide(self, members: Team, what: str) -> str:
        """How this team ends, ``over`` or ``again``: for all of them what the first one says, or else some would leave
        while others wait for them."""
        return self.store.compare_set(f"team{members.generation}/end", "", what).decode()

    def _without(self, members: Team, key: Callable[[int], str]) -> list[int]:
        """The members whose key is not in the store."""
        return [rank for rank in members.ranks if not self.store.check([key(rank)])]

    def _pause(self, missing: list[int], until: float) -> None:
        """Raises ``PeerError`` when it makes no more sense to wait."""
        if time.monotonic() > until:
            names = ", ".join(map(str, missing))
            raise PeerError(f"{self.ranks} waited {self.timeout:g} s in vain for ranks {names}")
        time.sleep(_POLL)


@dataclass(frozen=True)
class _WorkResult(Generic[T]):
    result: T


def _done(rank: int) -> str:
    """Key of a rank that has done its work."""
    return f"done/{rank}"


def _destroy_groups() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


SNAPSHOT_STEPS = 20  #: training steps between snapshots: at most so many are done again

KEPT = 2  #: all ranks are in the same step or in the next, so one of the last two snapshots is everybody's

RunPosition = tuple[int, bool, int]  #: epochs done, whether the last of them is scored, steps of the next one


@dataclass(frozen=True)
class Progress:
    """What a run has to show so far, apart from the weights. Never changed, so a snapshot need not copy it."""

    done: int = 0  #: epochs
    scored: bool = True  #: whether epoch ``done`` has been evaluated where it is to be
    step_loss: tuple[Tensor, ...] = ()  #: float64 [steps] per epoch done
    best: BestEpoch | None = None
    seconds: tuple[float, ...] = ()  #: of the epochs of this process
    report: EpochReport | None = None  #: of epoch ``done``, if this process trained it
    tally: EpochSums | None = None  #: of the epoch under way; None at its start

    @property
    def place(self) -> RunPosition:
        """Ascends while a run goes on."""
        return self.done, self.scored, self.tally.steps if self.tally else 0


@dataclass(frozen=True)
class Snapshot:
    """A run at one place; the tensors are its own."""

    progress: Progress
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]

    @classmethod
    def of(cls, progress: Progress, model: nn.Module, optimizers: Optimizers) -> Snapshot:
        """A copy, on the model's device."""
        weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        return cls(progress, weights, copy.deepcopy(optimizers.model.state_dict()))

    def restore(self, model: nn.Module, optimizers: Optimizers) -> None:
        """Write the weights and the optimizer's state back; the snapshot can be used again."""
        model.load_state_dict(dict(self.model))
        optimizers.model.load_state_dict(copy.deepcopy(dict(self.optimizer)))


class Snapshots:
    """A rank's last snapshots."""

    def __init__(self) -> None:
        self._kept: deque[Snapshot] = deque(maxlen=KEPT)

    def keep(self, progress: Progress, model: nn.Module, optimizers: Optimizers) -> None:
        """Take one, unless the last is of the same place."""
        if not self._kept or self._kept[-1].progress.place != progress.place:
            self._kept.append(Snapshot.of(progress, model, optimizers))

    def places(self) -> tuple[RunPosition, ...]:
        """Where this rank could go on."""
        return tuple(kept.progress.place for kept in self._kept)

    def back_to(self, place: RunPosition) -> Snapshot:
        """The snapshot of a place, now the last one: later ones are of a past that did not happen."""
        while self._kept[-1].progress.place != place:
            self._kept.pop()
        return self._kept[-1]


def newest_common(places: Iterable[tuple[RunPosition, ...]]) -> RunPosition:
    """The furthest place that all ranks can go back to."""
    return max(set.intersection(*(set(own) for own in places)))
