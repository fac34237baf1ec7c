"""Connections to the nodes by subprocesses, paramiko or the OpenSSH client. Each is a ``Transport``."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

from launcher.command import Secret
from launcher.config.schema import ClusterConfig, NodeConfig
from launcher.errors import PasswordRefused, TransportError
from launcher.node.procs import allow_open_files
from launcher.transport.base import Completed, Talk, Transport
from launcher.transport.fanout import on_nodes
from launcher.transport.local import LocalTransport

if TYPE_CHECKING:
    from launcher.transport.auth import AskPassword, Credentials, Passwords

__all__ = [
    "Completed",
    "Talk",
    "Transport",
    "ask_password",
    "close_all",
    "connect_all",
    "login_words",
    "open_transport",
]

_FILES_PER_NODE = 16  # the pipes of ssh processes with the OpenSSH client; paramiko needs one socket per node

Opened = dict[int, Transport | TransportError]  #: by node_rank: an open connection, or the error that prevented it


def ask_password(prompt: str) -> Secret:
    """Ask for a secret on the terminal, without echo. Raises UsageError without a terminal."""
    from launcher.transport import auth  # imported late: paramiko takes 0.3 s to import

    return auth.ask_password(prompt)


def open_transport(config: ClusterConfig, node_rank: int, credentials: Credentials | None = None) -> Transport:
    if config.transport == "local":
        return LocalTransport(node_rank)
    if config.transport == "slurm":
        from launcher.transport.slurm import open_slurm

        return open_slurm(config.slurm_job, config.nodes[node_rank].host, node_rank)
    from launcher.transport.fallback import open_over_ssh

    return open_over_ssh(config, node_rank, credentials)


def login_words(config: ClusterConfig, node: NodeConfig, *options: str) -> tuple[str, ...]:
    """Return the words of the command that runs a command on a node, as ``ssh gnn2``; () for transport ``local``."""
    if config.transport == "local":
        return ()
    if config.transport == "slurm":
        from launcher.transport.slurm import step_words

        return step_words(config.slurm_job or "", node.host)
    port = ("-p", str(node.port)) if node.port else ()
    key = ("-i", node.key) if node.key else ()
    return ("ssh", *options, *port, *key, f"{node.user}@{node.host}" if node.user else node.host)


def connect_all(config: ClusterConfig, ask: AskPassword = ask_password) -> Opened:
    """Connect to all nodes in parallel; return a transport or a TransportError for each node_rank.

    Asks for passwords first, once per user, and again for nodes that refused them.
    """
    ranks = range(len(config.nodes))
    if config.transport == "local":
        return {rank: LocalTransport(rank) for rank in ranks}
    if config.transport == "slurm":
        from launcher.transport.slurm import open_job

        return {**open_job(config.slurm_job, [node.host for node in config.nodes])}
    from launcher.transport.auth import Passwords

    passwords = Passwords(config, ask)
    results = _connect(config, passwords, ranks)
    refused = {rank: error for rank, error in results.items() if isinstance(error, PasswordRefused)}
    if refused:
        more = [rank for rank, error in refused.items() if error.wants_more]
        try:
            passwords.ask_again([rank for rank in refused if rank not in more], more)
            results |= _connect(config, passwords, refused)
        except BaseException:
            close_all(results)
            raise
    return results


def _connect(config: ClusterConfig, passwords: Passwords, ranks: Iterable[int]) -> Opened:
    results: Opened = {}

    def connect(node_rank: int) -> None:
        try:
            results[node_rank] = open_transport(config, node_rank, passwords.credentials(node_rank))
        except TransportError as error:
            results[node_rank] = error

    wanted = list(ranks)
    allow_open_files(_FILES_PER_NODE * len(wanted))
    try:
        on_nodes(wanted, connect).or_raise()  # returns on Ctrl-C without waiting for hosts that do not answer
    except BaseException:
        close_all(dict(results))
        raise
    return {node_rank: results[node_rank] for node_rank in wanted}


def close_all(transports: Opened) -> None:
    """Close all transports in parallel; errors in the mapping are skipped."""
    opened = [transport for transport in transports.values() if isinstance(transport, Transport)]
    if opened:
        with ThreadPoolExecutor(len(opened), "close") as pool, suppress(TransportError):  # lost anyway
            list(pool.map(lambda transport: transport.close(), opened))
