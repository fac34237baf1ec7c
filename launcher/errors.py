"""Exceptions of the launcher and their exit statuses.

::

    FleetError                    1
    ├── UsageError                2   invalid command line, or an impossible request
    ├── ConfigError               2   one or more Problems in the YAML, each with file:line
    ├── PreflightRefused          3   preflight has at least one blocking finding
    ├── NodeError                 3   one node (node_rank, host, remedy)
    │   ├── NodeCallError             its Python is missing, or a program of ``launcher/node/programs`` failed there
    │   └── TransportError            the connection to it failed
    │       ├── UnreachableError
    │       │   └── SshFailed         paramiko could not agree with the host; OpenSSH may
    │       ├── AuthError
    │       │   ├── PasswordRefused   the user is asked a second time
    │       │   └── KeyFileUnusable   the private key that the config names
    │       ├── HostKeyError
    │       ├── CommandTimeout
    │       ├── ConnectionLost
    │       └── RemoteFileError   1   a file on the node cannot be read or written
    ├── SyncError                 1   a file could not be transferred, or its digest differs
    ├── SessionError              1   a tmux session could not be started or stopped
    │   └── SessionExists
    ├── OutOfReach                1   the nodes no longer answer the launcher; the run may still be running
    └── Interrupted             130

Every message states what failed, where, and what to do. The command line prints it without a traceback.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.core.fields import CONTROLS


class FleetError(Exception):
    """Base of all errors that a user can cause or fix."""

    exit_status = 1
    code = ""  #: of its explanation (``gnnfleet explain CODE``); '' if the message says it all

    def __init__(self, message: str = "", *, code: str = ""):
        super().__init__(message)
        if code:
            self.code = code


class UsageError(FleetError):
    """The command line is invalid, or asks for something that is not possible."""

    exit_status = 2


@dataclass(frozen=True)
class Problem:
    """One mistake in a config file."""

    file: str
    line: int  #: counted from 1; 0 for a mistake without a line (a ``--set`` value)
    message: str  #: one line: control characters, as a quoted key may have them, become escapes

    def __post_init__(self) -> None:
        text = re.sub(f"[{CONTROLS}]", lambda found: repr(found[0])[1:-1], self.message)
        object.__setattr__(self, "message", text)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}" if self.line else f"{self.file}: {self.message}"


class ConfigError(FleetError):
    """A config file is invalid; ``problems`` lists all of its mistakes, not only the first."""

    exit_status = 2

    def __init__(self, problems: Sequence[Problem]):
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def node_label(node_rank: int, host: str) -> str:
    """Return the name of a node in messages: ``node1 (gnn2)``."""
    return f"node{node_rank} ({host})"


class PreflightRefused(FleetError):
    exit_status = 3


class NodeError(FleetError):
    """An operation on one node failed. ``str()`` is ``node1 (gnn2): message – remedy``.

    ``host`` may be empty; ``node_rank`` is None if it is unknown; ``remedy`` tells the user what to do.
    """

    exit_status = 3

    def __init__(self, message: str, *, host: str = "", node_rank: int | None = None, remedy: str = "", code: str = ""):
        self.host, self.node_rank, self.message, self.remedy = host, node_rank, message, remedy
        where = host if node_rank is None else node_label(node_rank, host)
        super().__init__((f"{where}: " if where else "") + message + (f" – {remedy}" if remedy else ""), code=code)


class NodeCallError(NodeError):
    """A program of ``launcher/node/programs`` could not be started on a node, or raised an exception there."""

    code = "node-python"


class TransportError(NodeError):
    pass


class UnreachableError(TransportError):
    """No TCP connection could be opened, or no SSH server answered."""

    code = "unreachable"


class SshFailed(UnreachableError):
    """The key exchange failed, for example for want of an algorithm that both know."""


class AuthError(TransportError):
    """The host was reached but accepted none of the keys and passwords offered."""

    code = "login-refused"


class PasswordRefused(AuthError):
    """A password or passphrase was wrong.

    ``wants_more``: the host accepted the key and requires a password as well.
    """

    wants_more = False


class KeyFileUnusable(AuthError):
    """The private key that the config names is missing, cannot be read, or is of a kind that no client here reads."""


class HostKeyError(TransportError):
    """The host key was revoked, differs from the known one, or is unknown and ``host_keys`` (config) refuses it."""


class CommandTimeout(TransportError):
    """A remote command did not end or answer in time."""

    code = "command-timeout"


class ConnectionLost(TransportError):
    """An open connection broke; connecting again may help."""

    code = "connection-lost"


class RemoteFileError(TransportError):
    """A file on the node cannot be read or written; ``errno`` is the system's error number, None if unknown."""

    exit_status = 1

    def __init__(self, message: str, *, errno: int | None = None, host: str = "", node_rank: int | None = None):
        self.errno = errno
        super().__init__(message, host=host, node_rank=node_rank)


class SyncError(FleetError):
    """A file could not be transferred, or its digest differs."""


class SessionError(FleetError):
    pass


class SessionExists(SessionError):
    """The node has a tmux session of this name already."""


class OutOfReach(FleetError):
    """The launcher can no longer follow a run, which may still be running."""


def reason_of(error: Exception) -> str:
    """Return the message of ``error``, without the node's name and the remedy that ``str()`` adds."""
    return error.message if isinstance(error, TransportError) else str(error)


class Interrupted(FleetError):
    exit_status = 130
