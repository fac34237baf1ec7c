"""The error tree of the launcher, with the exit status of each error.

::

    FleetError                    1
    ├── UsageError                2   bad command line
    ├── ConfigError               2   one or more Problems in the YAML, each with file:line
    ├── PreflightRefused          3   findings that would break the run, per node
    ├── NodeError                 3   one node (node_rank, host, remedy)
    │   ├── NodeCallError             its python is missing, or failed at one of our small programs
    │   └── TransportError            the line to it
    │       ├── UnreachableError
    │       ├── AuthError
    │       │   └── PasswordRefused   asked for once more
    │       ├── HostKeyError
    │       ├── CommandTimeout
    │       ├── ConnectionLost
    │       └── RemoteFileError   1   a file on the node cannot be read or written
    ├── SyncError                 1   a file could not be brought over, or differs
    ├── SessionError              1   a tmux session could not be started or stopped
    ├── OutOfReach                1   no node answers any more; the run goes on without us
    └── Interrupted             130

Every message says what, where and what to do; the command line prints it without a traceback.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class FleetError(Exception):
    """Base of all errors a user can cause or can act on."""

    exit_status = 1


class UsageError(FleetError):
    """The command line asks for something that cannot be."""

    exit_status = 2


@dataclass(frozen=True)
class Problem:
    """One mistake in a config file."""

    file: str
    line: int  #: counted from 1; 0 when the mistake has no line (a --set value)
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}" if self.line else f"{self.file}: {self.message}"


class ConfigError(FleetError):
    """All mistakes of one config, found in one pass."""

    exit_status = 2

    def __init__(self, problems: Sequence[Problem]):
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def node_label(node_rank: int, host: str) -> str:
    """``node1 (gnn2)``, as messages name a node."""
    return f"node{node_rank} ({host})"


class PreflightRefused(FleetError):
    """At least one finding blocks the run."""

    exit_status = 3


class NodeError(FleetError):
    """Something is wrong with one node, or the way to it."""

    exit_status = 3

    def __init__(self, message: str, *, host: str = "", node_rank: int | None = None, remedy: str = ""):
        self.host, self.node_rank, self.message, self.remedy = host, node_rank, message, remedy
        where = host if node_rank is None else node_label(node_rank, host)
        super().__init__((f"{where}: " if where else "") + message + (f" – {remedy}" if remedy else ""))


class NodeCallError(NodeError):
    """A small program of ours could not run on a node, or raised there."""


class TransportError(NodeError):
    """The line to one node failed."""


class UnreachableError(TransportError):
    """No TCP connection or no SSH banner."""


class AuthError(TransportError):
    """Reached, but no key, agent or password was accepted."""


class PasswordRefused(AuthError):
    """A password or passphrase was wrong; or (``wants_more``) the key was taken, and a password is wanted, too."""

    wants_more = False


class HostKeyError(TransportError):
    """The host's key is unknown under ``strict``, or differs from the known one."""


class CommandTimeout(TransportError):
    """A remote command outlived its deadline."""


class ConnectionLost(TransportError):
    """An open line broke; retrying may help."""


class RemoteFileError(TransportError):
    """A file on the node cannot be read or written; ``errno`` says why (ENOENT: not there)."""

    exit_status = 1

    def __init__(self, message: str, *, errno: int | None = None, host: str = "", node_rank: int | None = None):
        self.errno = errno
        super().__init__(message, host=host, node_rank=node_rank)


class SyncError(FleetError):
    """A file could not be transferred, or its digest differs."""


class SessionError(FleetError):
    """A node's tmux session could not be started or stopped."""


class OutOfReach(FleetError):
    """A run that goes on cannot be followed any more."""


def reason_of(error: Exception) -> str:
    """An error's message, without the name of the node that a TransportError puts before it."""
    return error.message if isinstance(error, TransportError) else str(error)


class Interrupted(FleetError):
    """Ctrl-C."""

    exit_status = 130
