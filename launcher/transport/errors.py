"""Translates exceptions of paramiko and sockets into ``TransportError``, with the host and a remedy."""

from __future__ import annotations

import errno
import os
import socket

import paramiko

from launcher.errors import AuthError, ConnectionLost, PasswordRefused, SshFailed, TransportError, UnreachableError
from launcher.transport.auth import LoginRefused
from launcher.transport.ssh_config import Route, SshHost

CONNECTION_ERRORS = (paramiko.SSHException, EOFError, OSError)


class HopFailed(Exception):
    """A connection to ``host`` failed with ``error``. ``host`` is the node or one of its jump hosts.

    ``reached``: whether the key exchange was complete and the connection still open.
    """

    def __init__(self, host: SshHost, error: Exception, reached: bool):
        super().__init__(str(error))
        self.host, self.error, self.reached = host, error, reached


def connect_error(failed: HopFailed, route: Route, timeout: float, node_rank: int | None) -> TransportError:
    """Return the TransportError for a failure at any host on the route to a node; ``timeout`` in seconds."""
    kind, what, remedy = _explain(failed, route, timeout)
    if failed.host != route[-1]:
        what = f"jump host {failed.host.target}: {what}"
    described = kind(what, host=route[-1].target, node_rank=node_rank, remedy=remedy)
    if isinstance(described, PasswordRefused):
        described.wants_more = isinstance(failed.error, LoginRefused) and failed.error.wants_password
    return described


def was_dropped(error: Exception) -> bool:
    """Whether the host closed the connection before login began, as a busy sshd does (``MaxStartups``)."""
    if isinstance(error, paramiko.AuthenticationException):
        return False
    if "protocol banner" in str(error):
        return not isinstance(error.__context__, TimeoutError)
    return isinstance(error, EOFError | ConnectionResetError | BrokenPipeError)


def session_error(error: Exception, alive: bool, target: str, node_rank: int | None) -> TransportError:
    """Return the TransportError for an error on an open connection.

    ``alive``: whether the connection still works. If so, an SSHException means that the host refused a command or SFTP
    session. All other errors mean that the connection is lost.
    """
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
        remedy="check that the machine is up, then try again; a run on it continues without the connection",
    )


def _explain(failed: HopFailed, route: Route, timeout: float) -> tuple[type[TransportError], str, str]:
    error, host = failed.error, failed.host
    if isinstance(error, LoginRefused):
        return _refused(error, host, is_node=host == route[-1])
    if isinstance(error, paramiko.AuthenticationException) or failed.reached:
        return AuthError, f"the host closed the connection during login of {host.user} ({error})", _by_hand(host)
    if isinstance(error, paramiko.ChannelException):
        via = route[route.index(host) - 1]
        return (
            UnreachableError,
            f"{via.target} could not open a connection to {host.host}:{host.port} ({error.text})",
            f"try `ssh {via.ssh_arguments} nc -z {host.host} {host.port}`; "
            f"sshd on {via.host} needs `AllowTcpForwarding yes`",
        )
    if isinstance(error, socket.gaierror):
        return UnreachableError, f"host name {host.host} cannot be resolved", "check `host`, /etc/hosts or DNS"
    if isinstance(error, TimeoutError):
        return (
            UnreachableError,
            f"no answer on port {host.port} within {timeout:g} s",
            "check that the machine is up and that no firewall blocks the port, or raise `run.connect_timeout`",
        )
    if isinstance(error, ConnectionRefusedError):
        what = f"connection refused on port {host.port}"
        return UnreachableError, what, "check that sshd runs there and listens on that port"
    if isinstance(error, OSError) and error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        what = f"no route to {host.host}"
        return UnreachableError, what, "check that the machine is up and in a network that you can reach"
    if host.proxy_command and (was_dropped(error) or "protocol banner" in str(error)):
        return (
            UnreachableError,
            f"ProxyCommand `{host.proxy_command}` ended without a connection to an SSH server",
            "run it in a shell; it must print `SSH-2.0-…`",
        )
    if "protocol banner" in str(error) and isinstance(error.__context__, TimeoutError):
        return UnreachableError, f"port {host.port} is open, but no SSH server answers there", "check `port`"
    if "No existing session" in str(error):
        remedy = "the machine may be overloaded; raise `run.connect_timeout`"
        return UnreachableError, f"the SSH key exchange took more than {timeout:g} s", remedy
    if was_dropped(error):
        return (
            UnreachableError,
            f"port {host.port} accepted the connection, then closed it before login "
            f"({str(error).partition('[')[0].strip()})",
            "check that sshd listens there; a busy sshd refuses more logins (MaxStartups), and fail2ban may block you",
        )
    return SshFailed, f"SSH failed: {error or type(error).__name__}", _by_hand(host)


def _by_hand(host: SshHost) -> str:
    return f"for details run `ssh -v {host.ssh_arguments}`"


def _refused(error: LoginRefused, host: SshHost, is_node: bool) -> tuple[type[TransportError], str, str]:
    # What was tried, and what could not be, as ``tried the ssh-agent's key; no key in /home/alice/.ssh``.
    agent = "no key in the ssh-agent" if host.agent and os.path.exists(host.agent) else "no ssh-agent"
    missing = [] if any("agent" in each for each in error.tried) else [agent]
    if not (error.locked or any(os.path.sep in each for each in error.tried)):
        folders = dict.fromkeys(os.path.dirname(path) for path in host.identity_files)
        missing += [f"no key in {folder}" for folder in folders]
    offered = ", ".join(dict.fromkeys(error.tried))
    tried = "tried " + ("; ".join([offered, *missing]) if offered else "nothing: " + ", ".join(missing))

    by_hand = _by_hand(host)
    if error.wants_password:
        what = f"the host accepted the key of {host.user} and also requires a password"
        return PasswordRefused, what, "enter it when asked"
    if error.password_tried:
        return PasswordRefused, f"password of {host.user} was not accepted", "check user and password, then try again"
    if error.credentials.password is not None:
        only = ", ".join(error.allowed)
        return (
            AuthError,
            f"the host does not accept a password for {host.user}, only {only} ({tried})",
            f"set up {only}; {by_hand}",
        )
    if error.allowed and "publickey" not in error.allowed:
        only = ", ".join(error.allowed)
        asked = is_node and {"password", "keyboard-interactive"} & set(error.allowed)
        remedy = "set `password: true` to be asked for it" if asked else f"set up {only}"
        return AuthError, f"the host accepts only {only} for {host.user} ({tried})", f"{remedy}; {by_hand}"
    if error.locked:
        what = f"no key was accepted for {host.user}, and {error.locked[0]} is encrypted ({tried})"
        ask = ", or set `key` and `password: true` to be asked for its passphrase" if is_node else ""
        return AuthError, what, f"`ssh-add` it to an ssh-agent{ask}; {by_hand}"
    others = "`key` or `password: true`" if is_node else "its IdentityFile in ~/.ssh/config"
    remedy = f"`ssh-copy-id {host.ssh_arguments}`, or set {others}; {by_hand}"
    return AuthError, f"no key was accepted for {host.user} ({tried})", remedy
