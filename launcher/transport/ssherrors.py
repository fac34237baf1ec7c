"""What paramiko and the socket raise, in the words and types of this package."""

from __future__ import annotations

import errno
import os
import socket

import paramiko
from fabric import Connection
from paramiko.ssh_exception import NoValidConnectionsError

from launcher.errors import AuthError, ConnectionLost, TransportError, UnreachableError
from launcher.transport.sshconfig import connection_target, hops

LINE_ERRORS = (paramiko.SSHException, EOFError, OSError)


def connect_error(error: Exception, connection: Connection, timeout: float, node_rank: int | None) -> TransportError:
    """The error to raise when ``connection.open()`` raised ``error``."""
    hop = failed_hop(connection)
    kind, what, remedy = _explain(error, hop, timeout)
    if hop is not connection:
        what = f"jump host {connection_target(hop)}: {what}"
    return kind(what, host=connection_target(connection), node_rank=node_rank, remedy=remedy)


def was_dropped(error: Exception) -> bool:
    """Whether the host hung up before login began, as a busy sshd does (``MaxStartups``)."""
    if isinstance(error, paramiko.AuthenticationException):
        return False
    if "protocol banner" in str(error):
        return not isinstance(error.__context__, TimeoutError)
    return isinstance(error, EOFError | ConnectionResetError | BrokenPipeError)


def failed_hop(connection: Connection) -> Connection:
    """The first machine on the way that is not connected."""
    chain = list(hops(connection))
    return next((hop for hop in reversed(chain) if not hop.is_connected), connection)


def line_error(error: Exception, alive: bool, target: str, node_rank: int | None) -> TransportError:
    """The error to raise when an open line broke with ``error``, or still stands but refused."""
    why = str(error) or type(error).__name__
    if alive and isinstance(error, paramiko.SSHException):
        return TransportError(
            f"the host refused a command or SFTP session ({why})",
            host=target,
            node_rank=node_rank,
            remedy="its sshd must allow both: no ForceCommand, `Subsystem sftp` set, MaxSessions 4 or more",
        )
    return ConnectionLost(
        f"connection lost ({why})",
        host=target,
        node_rank=node_rank,
        remedy="is the machine still up? what runs there goes on; try again",
    )


def _explain(error: Exception, hop: Connection, timeout: float) -> tuple[type[TransportError], str, str]:
    if isinstance(error, paramiko.AuthenticationException) or _during_login(error, hop):
        return AuthError, *_auth(error, hop)
    if isinstance(error, paramiko.ChannelException):
        return UnreachableError, *_through_jump(error, hop)
    return UnreachableError, *_unreachable(error, hop, timeout)


def _during_login(error: Exception, hop: Connection) -> bool:
    """Whether all but the login worked. paramiko may then raise what its last key parser said."""
    line = hop.client.get_transport()
    return isinstance(error, paramiko.SSHException) and line is not None and line.is_active() and line.initial_kex_done


def _auth(error: Exception, hop: Connection) -> tuple[str, str]:
    by_hand = f"see what `ssh -v {_ssh_words(hop)}` says"
    if isinstance(error, paramiko.PasswordRequiredException):
        return (
            f"no key was accepted; one is encrypted and was not usable (tried {tried(hop)})",
            f"`ssh-add` it to an ssh-agent, or set `key` and `password: true`; {by_hand}",
        )
    if isinstance(error, paramiko.BadAuthenticationType):
        allowed = ", ".join(error.allowed_types)
        return f"the host accepts only {allowed} for {hop.user} (tried {tried(hop)})", f"set up {allowed}; {by_hand}"
    if "saw EOF" in str(error) or "timeout" in str(error).lower():
        return f"the host hung up during login of {hop.user} ({error})", by_hand
    if hop.connect_kwargs.get("password"):
        return f"password of {hop.user} was not accepted", "check user and password, then try again"
    return (
        f"no key was accepted for {hop.user} (tried {tried(hop)})",
        f"`ssh-copy-id {_ssh_words(hop)}`, or set `key` or `password: true`; {by_hand}",
    )


def tried(hop: Connection) -> str:
    """What was offered at login, for a person."""
    options = hop.connect_kwargs
    offered = [str(path) for path in options.get("key_filename", [])]
    if options.get("allow_agent", True):
        keys = len(paramiko.Agent().get_keys()) if "SSH_AUTH_SOCK" in os.environ else 0
        offered.append(f"{keys} keys of the ssh-agent" if keys else "no ssh-agent")
    if options.get("look_for_keys", True):
        home = os.path.expanduser("~/.ssh")
        usual = [f"{home}/id_{kind}" for kind in ("rsa", "ecdsa", "ed25519")]
        offered += [path for path in usual if os.path.isfile(path)] or [f"no key in {home}"]
    if options.get("password"):
        offered.append("the password")
    return ", ".join(dict.fromkeys(offered))


def _through_jump(error: paramiko.ChannelException, hop: Connection) -> tuple[str, str]:
    via = connection_target(hop.gateway) if isinstance(hop.gateway, Connection) else "the jump host"
    return (
        f"{via} could not open a line to {hop.host}:{hop.port} ({error.text})",
        f"try `ssh {via} nc -z {hop.host} {hop.port}`; AllowTcpForwarding must be on there",
    )


def _unreachable(error: Exception, hop: Connection, timeout: float) -> tuple[str, str]:
    if isinstance(error, socket.gaierror):
        return f"name {hop.host} cannot be resolved", "check `host`, /etc/hosts or DNS"
    if isinstance(error, TimeoutError):
        return (
            f"no answer on port {hop.port} within {timeout:g} s",
            "is the machine up, is a firewall in between? else raise `run.connect_timeout`",
        )
    if isinstance(error, NoValidConnectionsError):
        return _no_socket({e.errno for e in error.errors.values() if isinstance(e, OSError)}, error, hop)
    if isinstance(error, OSError) and error.errno in (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH):
        return _no_socket({error.errno}, error, hop)
    if "protocol banner" in str(error) and isinstance(error.__context__, TimeoutError):
        return f"port {hop.port} is open, but no SSH server speaks there", "check `port`"
    if "No existing session" in str(error):
        return f"no agreement on keys within {timeout:g} s", "is the machine overloaded? raise `run.connect_timeout`"
    if was_dropped(error):
        return (
            f"port {hop.port} answered, then hung up before login ({error})",
            "is that sshd? a busy one drops newcomers (MaxStartups, fail2ban)",
        )
    return f"SSH failed: {error or type(error).__name__}", f"see what `ssh -v {_ssh_words(hop)}` says"


def _no_socket(numbers: set[int | None], error: Exception, hop: Connection) -> tuple[str, str]:
    if errno.ECONNREFUSED in numbers:
        return f"connection refused on port {hop.port}", "is sshd running there, and on that port?"
    if numbers & {errno.EHOSTUNREACH, errno.ENETUNREACH}:
        return f"no route to {hop.host}", "is the machine up and in a network you can reach?"
    return f"cannot connect to port {hop.port}: {error}", "check host and port"


def _ssh_words(hop: Connection) -> str:
    port = f"-p {hop.port} " if hop.port != 22 else ""
    return f"{port}{hop.user}@{hop.host}"
