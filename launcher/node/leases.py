"""Leases on CUDA devices, ports and CPUs of this machine, so that runs of all users do not use the same ones.

One file per lease, ``<resource>.<uid>.json``, in ``/tmp/gnnfleet-leases`` (or the folder in ``GNNFLEET_LEASES``). A
lease is valid while its process lives, if the user ``uid`` owns the file. The CPUs may have several holders, each with
a resource of its own, ``cpu:<run>-node<k>``: only a run that waits in line has them for itself.

A ticket, ``ticket:<run>-node<k>``, is the lease of a run that waits for what it names in ``wants``. The order of
tickets is the same on all hosts: the time of the launch, then the run id.

Python 3.8, standard library only: preflight runs this source on nodes.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pwd
import re
import stat
import time
from contextlib import contextmanager, suppress
from typing import Any, Iterable, Iterator, NamedTuple

from launcher.node import procs

_FOLDER = "/tmp/gnnfleet-leases"

_PATIENCE = 5.0  # seconds to wait for the lock on the folder

_BRIEF = 0.3  # the same, for what is tried again soon: a supervisor that waits longer would seem to be silent

_SIZE = 4096  # bytes; a longer file is not a lease

_NAME = re.compile(r"[A-Za-z0-9_.-]+\.(\d+)\.json")

_RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,100}")

_TICKET = "ticket:"


class Lease(NamedTuple):
    """One resource, and the process that holds it; or a ticket, and the process that waits."""

    resource: str  #: ``cuda:0``, ``port:29500``, ``cpu:<run>-node<k>`` or ``ticket:<run>-node<k>``
    run_id: str
    node_rank: int
    user: str  #: owner of the file
    pid: int
    start_ticks: int  #: clock ticks between boot and the process's start
    boot_id: str
    since: float  #: seconds since 1970 by this machine's clock
    host: str  #: user and machine that launched the run, ``alice@laptop``; '' when unknown
    ends: float = 0.0  #: when the run will have ended, as its supervisor estimates; 0: unknown
    wants: tuple[str, ...] = ()  #: of a ticket: the resources that the run waits for
    launched: float = 0.0  #: of a ticket: when the run was launched, by the launching machine's clock

    @property
    def waits(self) -> bool:
        """Whether this is a ticket."""
        return self.resource.startswith(_TICKET)

    @property
    def order(self) -> tuple[float, str, str]:
        """The place of a ticket in the line of each host: tickets with lower ones come first."""
        return self.launched, self.run_id, self.user

    @property
    def needs(self) -> set[str]:
        """What the lease takes, or the ticket will: ``cuda:0``, ``port:29500``, ``cpu``."""
        return {"cpu" if name.startswith("cpu:") else name for name in (self.wants if self.waits else [self.resource])}


class LeaseHolder(NamedTuple):
    """The process that holds a lease, described by the first fields of ``Lease`` without ``resource``."""

    run_id: str
    node_rank: int
    user: str
    pid: int
    start_ticks: int
    boot_id: str
    since: float
    host: str


class LeaseError(OSError):
    """Leases cannot be read or written on this machine. The run continues without them and logs the reason."""


def this_process(run_id: str, node_rank: int, host: str = "") -> LeaseHolder:
    """Return the calling process as a ``LeaseHolder``. host: user and machine that launched the run."""
    pid, user = os.getpid(), _user(os.geteuid())
    process = procs.look(pid)
    ticks = process.start_ticks if process else 0
    return LeaseHolder(run_id, node_rank, user, pid, ticks, procs.boot_id(), time.time(), host)


def held(resources: Iterable[str] | None = None) -> list[Lease]:
    """Return the valid leases on ``resources`` (None: on any resource), sorted by file name. Raises LeaseError.

    Removes this user's lease files of processes that have ended.
    """
    wanted = None if resources is None else set(resources)
    with _folder(create=False) as folder:
        found = [] if folder is None else _valid_leases(folder)
    return [lease for lease in found if wanted is None or lease.resource in wanted]


def take(resources: Iterable[str], holder: LeaseHolder) -> list[Lease]:
    """Take leases on all of ``resources``, or on none if another process has a lease on one of them.

    Returns the leases of the other processes; [] means success. Raises LeaseError if the leases cannot be written.
    """
    wanted = sorted(set(resources))
    with _folder(create=True) as folder:
        assert folder is not None
        theirs = [one for one in _valid_leases(folder) if one.resource in wanted and not _same(one, holder)]
        if not theirs:
            _write_all(folder, [Lease(resource, *holder) for resource in wanted])
        return theirs


def sharing_cpus(resources: Iterable[str], run_id: str) -> dict[str, Lease]:
    """Return a lease on the CPUs of each other run that holds them; {} if ``resources`` has no CPUs. Raises LeaseError.

    Runs that also hold devices do not count.
    """
    if not any(name.startswith("cpu:") for name in resources):
        return {}
    others = [lease for lease in held() if lease.run_id != run_id and not lease.waits]
    on_gpus = {lease.run_id for lease in others if lease.resource.startswith("cuda:")}
    return {lease.run_id: lease for lease in others if "cpu" in lease.needs and lease.run_id not in on_gpus}


def release(run_id: str, node_rank: int, resources: Iterable[str] | None = None) -> None:
    """Remove the leases on ``resources`` (None: all, and the ticket) of one node of a run of this user.

    Raises LeaseError.
    """
    wanted = None if resources is None else set(resources)
    with _folder(create=False) as folder:
        for lease in _valid_leases(folder) if folder is not None else ():
            if (lease.run_id, lease.node_rank) == (run_id, node_rank) and (wanted is None or lease.resource in wanted):
                _remove(folder, _name(lease.resource))


def expect_end(holder: LeaseHolder, ends: float) -> None:
    """Note in the leases of ``holder`` when its run is likely to end, in seconds since the epoch. Raises LeaseError."""
    with _folder(create=False, patience=_BRIEF) as folder:
        for lease in _valid_leases(folder) if folder is not None else ():
            if _same(lease, holder) and lease.user == holder.user and not lease.waits:
                name = _name(lease.resource)
                _remove(folder, name + ".new")
                _write(folder, name + ".new", _text(lease._replace(ends=ends)))
                os.rename(name + ".new", name, src_dir_fd=folder, dst_dir_fd=folder)


# -- waiting in line -------------------------------------------------------


def ticket(wants: Iterable[str], holder: LeaseHolder, launched: float) -> Lease:
    """Return the ticket of one node of a run: it waits for ``wants``. launched: seconds since the epoch."""
    name = "%s%s-node%d" % (_TICKET, holder.run_id, holder.node_rank)
    return Lease(name, *holder, wants=tuple(sorted(set(wants))), launched=launched)


def in_the_way(mine: Lease, found: Iterable[Lease]) -> list[Lease]:
    """Return those of ``found`` that the ticket ``mine`` waits for: leases of other runs on what it wants, then earlier
    tickets that want some of it, in their order.
    """
    others = [one for one in found if (one.run_id, one.user) != (mine.run_id, mine.user) and one.needs & mine.needs]
    earlier = [one for one in others if one.waits and one.order < mine.order]
    return [one for one in others if not one.waits] + sorted(earlier, key=lambda one: one.order)


def wait_in_line(mine: Lease, patience: float | None = _BRIEF) -> list[Lease]:
    """File the ticket ``mine``, unless it is there, and return what it waits for. Raises LeaseError.

    patience: seconds to wait for the lock on the folder; None: as for ``take``.
    """
    with _folder(create=True, patience=patience) as folder:
        assert folder is not None
        found = _valid_leases(folder)
        if not any(one.resource == mine.resource and _same(one, mine) for one in found):
            _write_all(folder, [mine])
        return in_the_way(mine, found)


def take_turn(mine: Lease, holder: LeaseHolder) -> list[Lease]:
    """Take leases on all that the ticket ``mine`` wants, or on none if something is in the way.

    Returns what is in the way; [] means success. The ticket stays. Raises LeaseError if leases cannot be written.
    """
    with _folder(create=True, patience=_BRIEF) as folder:
        assert folder is not None
        theirs = in_the_way(mine, _valid_leases(folder))
        if not theirs:
            _write_all(folder, [Lease(resource, *holder) for resource in mine.wants])
        return theirs


# -- words -----------------------------------------------------------------


def describe(lease: Lease) -> str:
    """Describe a lease in messages: ``held by run X of alice since 2026-11-21 12:03:11 UTC (pid 123)``; a ticket
    ``waited for by run X of …``.
    """
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(lease.since))
    shared_login = lease.host and lease.host.rpartition("@")[0] != lease.user
    who = "%s (%s)" % (lease.user, lease.host) if shared_login else lease.user
    verb = "waited for" if lease.waits else "held"
    return "%s by run %s of %s since %s (pid %d)" % (verb, lease.run_id, who, since, lease.pid)


def resource_label(resource: str) -> str:
    """Return the name of a resource for messages: ``CUDA device 0``, ``port 29500``, ``CPUs``."""
    kind, _, number = resource.partition(":")
    return "CPUs" if kind == "cpu" else "%s %s" % ({"cuda": "CUDA device"}.get(kind, kind), number)


@contextmanager
def _folder(create: bool, patience: float | None = None) -> Iterator[Any]:
    """Lock the lease folder exclusively; yield its file descriptor, or None if it does not exist and ``create`` is
    false. patience: seconds to wait for the lock; None: ``_PATIENCE``.
    """
    path = os.environ.get("GNNFLEET_LEASES") or _FOLDER
    descriptor = None
    try:
        descriptor = _locked(path, create, _PATIENCE if patience is None else patience)
        yield descriptor
    except LeaseError:
        raise
    except PermissionError as error:
        raise LeaseError(_permission_message(path, error.filename)) from error
    except OSError as error:
        raise LeaseError("%s: %s" % (path, error.strerror or error)) from error
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _permission_message(path: str, name: str | None) -> str:
    file = os.path.join(path, name or "")
    if name and file != path and os.path.lexists(file):
        return "%s belongs to %s and was not created by gnnfleet; have it removed" % (file, _owner(file))
    if os.path.lexists(path):
        mode = stat.S_IMODE(os.lstat(path).st_mode)
        words = "%s belongs to %s and has mode %o; have it removed or made writable for all users (chmod 1777)"
        return words % (path, _owner(path), mode)
    return "%s cannot be created: permission denied" % path


def _locked(path: str, create: bool, patience: float) -> int | None:
    """Open and lock the lease folder; return its file descriptor, or None if it does not exist and ``create`` is false.

    Tries again if a cleaner of /tmp removes the folder meanwhile. Raises OSError, and LeaseError after ``patience`` s.
    """
    deadline = time.monotonic() + patience
    while True:
        descriptor = _opened(path, create)
        if descriptor is None:
            return None
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise LeaseError("%s: another process has kept it locked for %g s" % (path, patience)) from None
                    time.sleep(0.01)
            if os.fstat(descriptor).st_nlink:
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _opened(path: str, create: bool) -> int | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        if not create:
            return None
        # The mode of /tmp: all users may add files, and remove only their own.
        mask = os.umask(0)
        try:
            with suppress(FileExistsError):  # another process was faster
                os.mkdir(path, 0o1777)
        finally:
            os.umask(mask)
        return _opened(path, create)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        raise LeaseError("%s, the folder of leases on devices and ports, is not a folder; remove it" % path) from None
    status = os.fstat(descriptor)
    if status.st_uid == os.geteuid() and status.st_mode & 0o1777 != 0o1777:
        os.fchmod(descriptor, 0o1777)
    return descriptor


def _valid_leases(folder: int) -> list[Lease]:
    found = []
    for name in sorted(os.listdir(folder)):
        match = _NAME.fullmatch(name)
        lease = _read(folder, name, int(match[1])) if match else None
        if lease is not None and _alive(lease):
            found.append(lease)
        elif match and int(match[1]) == os.geteuid():
            with suppress(OSError):  # owned by another user despite its name: cannot be removed, and is ignored
                _remove(folder, name)
    return found


def _read(folder: int, name: str, uid: int) -> Lease | None:
    """Return the lease in the file ``name``; None if it is not a regular file with a lease of the user ``uid``."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:  # a link, unreadable, or gone
        return None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        text = file.read(_SIZE + 1) if stat.S_ISREG(status.st_mode) and status.st_uid == uid else b""
    try:
        values = json.loads(text.decode())
        known = {name: value for name, value in values.items() if name in Lease._fields}  # later versions have more
        lease = Lease(**{**known, "user": _user(uid), "wants": tuple(values.get("wants", ()))})
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
    return lease if _is_valid(lease) and _name(lease.resource, uid) == name else None


def _is_valid(lease: Lease) -> bool:
    texts = (lease.resource, lease.run_id, lease.user, lease.boot_id, lease.host, *lease.wants)
    numbers = (lease.node_rank, lease.pid, lease.start_ticks)
    return (
        all(isinstance(text, str) and text.isprintable() for text in texts)
        and all(type(number) is int for number in numbers)
        and lease.pid > 0
        and all(isinstance(t, (int, float)) and 0 <= t < 1e11 for t in (lease.since, lease.ends, lease.launched))
        and bool(_RUN_ID.fullmatch(lease.run_id))
    )


def _alive(lease: Lease) -> bool:
    if lease.boot_id != procs.boot_id():
        return False
    if procs.look(lease.pid) is not None:
        return procs.alive(lease.pid, lease.start_ticks)
    try:
        os.kill(lease.pid, 0)
    except PermissionError:  # it lives, but /proc hides other users' processes (hidepid)
        return True
    except (OSError, OverflowError):
        return False
    return False


def _write_all(folder: int, leases: list[Lease]) -> None:
    written = []
    try:
        for lease in leases:
            name = _name(lease.resource)
            _remove(folder, name)
            written.append(name)
            _write(folder, name, _text(lease))
    except OSError:
        for name in written:
            _remove(folder, name)
        raise


def _text(lease: Lease) -> bytes:
    # Without the fields that say nothing, so that earlier versions can read the file.
    values = lease._asdict()
    return json.dumps({k: value for k, value in values.items() if value or k in LeaseHolder._fields}).encode()


def _write(folder: int, name: str, content: bytes) -> None:
    descriptor = os.open(
        name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder
    )
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fchmod(descriptor, 0o1644)  # cleaners of /tmp spare files with the sticky bit


def _remove(folder: int, name: str) -> None:
    with suppress(FileNotFoundError):  # removed by a cleaner meanwhile
        os.unlink(name, dir_fd=folder)


def _name(resource: str, uid: int | None = None) -> str:
    return "%s.%d.json" % (resource.replace(":", "-"), os.geteuid() if uid is None else uid)


def _same(lease: Lease, holder: Lease | LeaseHolder) -> bool:
    return (lease.run_id, lease.node_rank, lease.pid) == (holder.run_id, holder.node_rank, holder.pid)


def _owner(path: str) -> str:
    return _user(os.lstat(path).st_uid)


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return "uid %d" % uid
