"""Lines to the nodes: ``local`` (subprocess) and ``ssh`` (fabric/paramiko) behind one type."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import click

from launcher.config import ClusterConfig
from launcher.errors import TransportError, UsageError
from launcher.script import Secret
from launcher.transport.base import Completed, Transport
from launcher.transport.local import LocalTransport

__all__ = ["Completed", "Transport", "ask_password", "close_all", "connect_all", "make_transport", "open_transport"]

AskPassword = Callable[[str], Secret]


def ask_password(target: str) -> Secret:
    """Ask on the terminal, without echo; raises UsageError where there is none."""
    if not _at_terminal():
        raise UsageError(
            f"the config asks for a password of {target} (`password: true`), but there is no terminal to ask on; "
            "start from a terminal, or set `key` to a private key that needs no password"
        )
    return Secret(click.prompt(f"Password for {target}", hide_input=True, err=True))


def _at_terminal() -> bool:
    """Whether somebody can be asked: getpass uses the controlling terminal, else standard input."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return sys.stdin.isatty()
    return True


def make_transport(config: ClusterConfig, node_rank: int, password: Secret | None = None) -> Transport:
    """The node's transport, not yet connected."""
    if config.transport == "local":
        return LocalTransport(node_rank)
    from launcher.transport.ssh import SshTransport  # paramiko takes 0.3 s to import

    return SshTransport(config.nodes[node_rank], config.host_keys, password, node_rank)


def open_transport(config: ClusterConfig, node_rank: int, password: Secret | None = None) -> Transport:
    """The node's transport, connected. Raises ``TransportError``."""
    transport = make_transport(config, node_rank, password)
    transport.connect(config.run.connect_timeout)
    return transport


def connect_all(config: ClusterConfig, ask: AskPassword = ask_password) -> dict[int, Transport | TransportError]:
    """Connect to every node at once: its transport, or why there is none, by node_rank."""
    passwords = ask_passwords(config, ask)
    results: dict[int, Transport | TransportError] = {}

    def connect(node_rank: int) -> None:
        try:
            results[node_rank] = open_transport(config, node_rank, passwords.get(node_rank))
        except TransportError as error:
            results[node_rank] = error

    ranks = range(len(config.nodes))
    try:
        with ThreadPoolExecutor(len(config.nodes), "connect") as pool:
            list(pool.map(connect, ranks))
    except BaseException:
        close_all(results)
        raise
    return {node_rank: results[node_rank] for node_rank in ranks}


def ask_passwords(config: ClusterConfig, ask: AskPassword) -> dict[int, Secret]:
    """A password for each node that wants one; nodes of one login are asked for once."""
    answers: dict[str, Secret] = {}
    passwords: dict[int, Secret] = {}
    for node_rank, node in enumerate(config.nodes):
        if node.password and config.transport == "ssh":
            if node.login not in answers:
                answers[node.login] = ask(node.login)
            passwords[node_rank] = answers[node.login]
    return passwords


def close_all(transports: dict[int, Transport | TransportError]) -> None:
    """Close those that are open, at once."""
    opened = [transport for transport in transports.values() if isinstance(transport, Transport)]
    if opened:
        with ThreadPoolExecutor(len(opened), "close") as pool, suppress(TransportError):
            list(pool.map(lambda transport: transport.close(), opened))
