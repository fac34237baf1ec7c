"""What paramiko and the socket raise, in the words and types of this package."""

from __future__ import annotations

import errno
import os
import socket

import paramiko
from paramiko.ssh_exception import NoValidConnectionsError

from launcher.errors import AuthError, ConnectionLost, HostKeyError, PasswordRefused, TransportError, UnreachableError
from launcher.transport.hop import Hop
from launcher.transport.line import HopFailed
from launcher.transport.login import LoginRefused

__all__ = ["connect_error", "line_error", "relabelled", "was_dropped"]


def connect_error(failed: HopFailed, way: tuple[Hop, ...], timeout: float, node_rank: int | None) -> TransportError:
    """The error to raise when ``failed`` came up on the way to the last hop."""
    kind, what, remedy = _explain(failed, way, timeout)
    if failed.hop != way[-1]:
        what = f"jump host {failed.hop.target}: {what}"
    described = kind(what, host=way[-1].target, node_rank=node_rank, remedy=remedy)
    if isinstance(described, PasswordRefused):
        described.wants_more = isinstance(failed.error, LoginRefused) and failed.error.wants_password
    return described


def relabelled(error: HostKeyError, host: str, node_rank: int | None) -> HostKeyError:
    """The same, said of one node."""
    return HostKeyError(error.message, host=host, node_rank=node_rank, remedy=error.remedy)


def was_dropped(error: Exception) -> bool:
    """Whether the host hung up before login began, as a busy sshd does (``MaxStartups``)."""
    if isinstance(error, paramiko.AuthenticationException):
        return False
    if "protocol banner" in str(error):
        return not isinstance(error.__context__, TimeoutError)
    return isinstance(error, EOFError | ConnectionResetError | BrokenPipeError)


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


def _explain(failed: HopFailed, way: tuple[Hop, ...], timeout: float) -> tuple[type[TransportError], str, str]:
    error, hop = failed.error, failed.hop
    if isinstance(error, LoginRefused):
        return _refused(error, hop, is_node=hop == way[-1])
    if isinstance(error, paramiko.AuthenticationException) or failed.reached:
        return AuthError, f"the host hung up during login of {hop.user} ({error})", _by_hand(hop)
    if isinstance(error, paramiko.ChannelException):
        return UnreachableError, *_through_jump(error, hop, way)
    return UnreachableError, *_unreachable(error, hop, timeout)


def _by_hand(hop: Hop) -> str:
    return f"see what `ssh -v {hop.as_ssh_words}` says"


def _refused(error: LoginRefused, hop: Hop, is_node: bool) -> tuple[type[TransportError], str, str]:
    tried, by_hand = _tried(error, hop), _by_hand(hop)
    if error.wants_password:
        return PasswordRefused, f"the host wants a password of {hop.user} beside the key", "give it when asked"
    if error.password_tried:
        return PasswordRefused, f"password of {hop.user} was not accepted", "check user and password, then try again"
    if error.credentials.password is not None:
        only = ", ".join(error.allowed)
        return (
            AuthError,
            f"the host takes no password of {hop.user}, only {only} ({tried})",
            f"set up {only}; {by_hand}",
        )
    if error.allowed and "publickey" not in error.allowed:
        only = ", ".join(error.allowed)
        asked = is_node and {"password", "keyboard-interactive"} & set(error.allowed)
        remedy = "set `password: true` to be asked for it" if asked else f"set up {only}"
        return AuthError, f"the host accepts only {only} for {hop.user} ({tried})", f"{remedy}; {by_hand}"
    if error.locked:
        what = f"no key was accepted for {hop.user}, and {error.locked[0]} is encrypted ({tried})"
        ask = ", or set `key` and `password: true` to be asked for its passphrase" if is_node else ""
        return AuthError, what, f"`ssh-add` it to an ssh-agent{ask}; {by_hand}"
    others = "`key` or `password: true`" if is_node else "its IdentityFile in ~/.ssh/config"
    remedy = f"`ssh-copy-id {hop.as_ssh_words}`, or set {others}; {by_hand}"
    return AuthError, f"no key was accepted for {hop.user} ({tried})", remedy


def _tried(error: LoginRefused, hop: Hop) -> str:
    """What was offered at login and what was not there, for a person."""
    missing = [] if any("agent" in each for each in error.offered) else [_agent_state(hop)]
    if not (error.locked or any(os.path.sep in each for each in error.offered)):
        folders = dict.fromkeys(os.path.dirname(path) for path in hop.identity_files)
        missing += [f"no key in {folder}" for folder in folders]
    offered = ", ".join(dict.fromkeys(error.offered))
    return "tried " + ("; ".join([offered, *missing]) if offered else "nothing: " + ", ".join(missing))


def _agent_state(hop: Hop) -> str:
    return "no key in the ssh-agent" if hop.agent and os.path.exists(hop.agent) else "no ssh-agent"


def _through_jump(error: paramiko.ChannelException, hop: Hop, way: tuple[Hop, ...]) -> tuple[str, str]:
    via = way[way.index(hop) - 1]
    return (
        f"{via.target} could not open a line to {hop.host}:{hop.port} ({error.text})",
        f"try `ssh {via.as_ssh_words} nc -z {hop.host} {hop.port}`; AllowTcpForwarding must be on there",
    )


def _unreachable(error: Exception, hop: Hop, timeout: float) -> tuple[str, str]:
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
    if hop.proxy_command and (was_dropped(error) or "protocol banner" in str(error)):
        return (
            f"ProxyCommand `{hop.proxy_command}` ended without a line to an SSH server",
            "run it by hand; it must print `SSH-2.0-…`",
        )
    if "protocol banner" in str(error) and isinstance(error.__context__, TimeoutError):
        return f"port {hop.port} is open, but no SSH server speaks there", "check `port`"
    if "No existing session" in str(error):
        return f"no agreement on keys within {timeout:g} s", "is the machine overloaded? raise `run.connect_timeout`"
    if was_dropped(error):
        return (
            f"port {hop.port} answered, then hung up before login ({str(error).partition('[')[0]})",
            "is that sshd? a busy one drops newcomers (MaxStartups, fail2ban)",
        )
    return f"SSH failed: {error or type(error).__name__}", _by_hand(hop)


def _no_socket(numbers: set[int | None], error: Exception, hop: Hop) -> tuple[str, str]:
    if errno.ECONNREFUSED in numbers:
        return f"connection refused on port {hop.port}", "is sshd running there, and on that port?"
    if numbers & {errno.EHOSTUNREACH, errno.ENETUNREACH}:
        return f"no route to {hop.host}", "is the machine up and in a network you can reach?"
    return f"cannot connect to port {hop.port}: {error}", "check host and port"
