"""From a node of the config to a fabric ``Connection``: ~/.ssh/config, jump hosts, keys."""

from __future__ import annotations

import glob
import logging
import os
import shlex
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import paramiko
from fabric import Config, Connection
from fabric.connection import derive_shorthand

from launcher.config import HostKeys, NodeConfig, login_text
from launcher.errors import AuthError, TransportError
from launcher.script import Secret
from launcher.transport.hostkeys import HostKeyCheck

# its tracebacks would go to the terminal; what they say is in our errors
logging.getLogger("paramiko").addHandler(logging.NullHandler())

_SYSTEM_CONFIG = Path("/etc/ssh/ssh_config")
_SYSTEM_KNOWN = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")
_USER_KNOWN = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")
_MAX_INCLUDES = 16  # as OpenSSH
# authenticated ciphers first: 145 against 75 MB/s up on loopback, as no separate MAC is computed in Python
_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com")


def load_ssh_config() -> paramiko.SSHConfig:
    """The user's and the system's ssh config, in that order, with ``Include`` followed."""
    lines = [*_included(Path("~/.ssh/config").expanduser(), 0), "Host *", *_included(_SYSTEM_CONFIG, 0)]
    return paramiko.SSHConfig.from_text("\n".join(lines))


def _included(path: Path, depth: int) -> Iterator[str]:
    """Lines of ``path``; after an included file the block it stood in goes on."""
    if not path.is_file() or depth > _MAX_INCLUDES:
        return
    block = "Host *"
    for line in path.read_text().splitlines():
        words = line.replace("=", " ", 1).split()
        if not words or words[0].lower() != "include":
            if words and words[0].lower() in ("host", "match"):
                block = line
            yield line
            continue
        for pattern in words[1:]:
            for found in sorted(glob.glob(str(_include_base(path) / Path(pattern.strip('"')).expanduser()))):
                yield from _included(Path(found), depth + 1)
        yield block


def _include_base(path: Path) -> Path:
    return path.parent if path.is_relative_to("/etc/ssh") else Path("~/.ssh").expanduser()


def make_connection(
    node: NodeConfig, host_keys: HostKeys, password: Secret | None, *, node_rank: int | None, timeout: float
) -> Connection:
    """A connection, not yet open. Raises ``AuthError`` for a key file that cannot be used."""
    try:
        config = Config(lazy=True, ssh_config=load_ssh_config())
    except (paramiko.SSHException, OSError) as error:
        raise TransportError(f"~/.ssh/config cannot be used: {error}", host=node.host, node_rank=node_rank) from error
    # the banner's is shorter than the handshake's, so that it is the one that speaks
    limits = {"banner_timeout": 0.8 * timeout, "auth_timeout": timeout, "channel_timeout": timeout}
    connection = Connection(
        node.host,
        user=node.user,
        port=node.port,
        config=config,
        gateway=_gateway(node.host, config, (node.host,)),
        forward_agent=False,
        connect_timeout=max(1, round(timeout)),
        connect_kwargs={**limits, **_explicit_auth(node, password)},
    )
    check_key_files(connection, node, password, node_rank)
    for hop in hops(connection):
        if hop is not connection:
            hop.connect_timeout = connection.connect_timeout
            hop.connect_kwargs = {**limits, "key_filename": _existing(hop)}
        _arm(hop, host_keys, connection_target(connection), node_rank)
    return connection


def connection_target(connection: Connection) -> str:
    """``user@host:port`` as resolved."""
    return login_text(connection.user, connection.host, connection.port if connection.port != 22 else None)


def hops(connection: Connection) -> Iterator[Connection]:
    """The connection, then the jump hosts behind it."""
    hop: Any = connection
    while isinstance(hop, Connection):
        yield hop
        hop = hop.gateway


def _gateway(host: str, config: Config, seen: tuple[str, ...]) -> Connection | str | bool:
    """What ``ProxyJump``/``ProxyCommand`` ask for; jump hosts are visited in the order written."""
    options = config.base_ssh_config.lookup(host)
    jump, command = options.get("proxyjump", "none"), options.get("proxycommand", "none")
    if jump.lower() == "none":
        return False if command.lower() == "none" else command
    gateway: Connection | str | bool = False
    for number, hop in enumerate(jump.split(",")):
        hop = hop.strip().removeprefix("ssh://")
        name = derive_shorthand(hop)["host"]
        if name in seen:  # `Host *` with a ProxyJump: the jump host itself is reached directly
            return gateway
        if number == 0:
            gateway = _gateway(name, config, (*seen, name))
        gateway = Connection(hop, config=config.clone(), gateway=gateway, forward_agent=False)
    return gateway


def _explicit_auth(node: NodeConfig, password: Secret | None) -> dict[str, Any]:
    """With a password and no key, only the password is tried: servers count wrong keys as failures.

    What unlocks a key is a passphrase, which must not be shown to the server as a password.
    """
    key = Path(node.key).expanduser() if node.key else None
    auth: dict[str, Any] = {"key_filename": [str(key)] if key else []}
    if password is not None:
        name = "passphrase" if key and key.is_file() and _encrypted(key) else "password"
        auth |= {name: password.reveal(), "allow_agent": False, "look_for_keys": False}
    elif node.key:
        auth["look_for_keys"] = False
    return auth


def check_key_files(connection: Connection, node: NodeConfig, password: Secret | None, node_rank: int | None) -> None:
    """Say before connecting what is wrong with ``key``; pass over what ssh config names in vain, as ssh does."""
    if node.key:
        if problem := key_problem(Path(node.key).expanduser(), password):
            raise AuthError(problem[0], host=connection_target(connection), node_rank=node_rank, remedy=problem[1])
        connection.connect_kwargs["key_filename"] = connection.connect_kwargs["key_filename"][:1]
    else:
        connection.connect_kwargs["key_filename"] = [] if password is not None else _existing(connection)


def _existing(connection: Connection) -> list[str]:
    named = connection.ssh_config.get("identityfile", [])
    return [path for path in map(os.path.expanduser, named) if os.access(path, os.R_OK)]


def key_problem(path: Path, password: Secret | None) -> tuple[str, str] | None:
    """(what, remedy) when the private key at ``path`` cannot be used, else None."""
    if not path.is_file():
        return f"key file {path} does not exist", "correct `key` in the config"
    if not os.access(path, os.R_OK):
        return f"key file {path} cannot be read", "check its owner and mode"
    try:
        unlocked = _unlocks(path, password.reveal() if password is not None else None)
    except paramiko.PasswordRequiredException:
        if "SSH_AUTH_SOCK" in os.environ:
            return None
        return (
            f"key file {path} is encrypted and no ssh-agent is running",
            f"start one (`eval $(ssh-agent)`) and `ssh-add {shlex.quote(str(path))}`, "
            "or set `password: true` to be asked for the passphrase",
        )
    if unlocked:
        return None
    if password is not None and _encrypted(path):
        return f"wrong passphrase for key file {path}", "try again"
    hint = " (it looks like the public half)" if path.suffix == ".pub" else ""
    return f"key file {path} holds no RSA, ECDSA or Ed25519 private key{hint}", "correct `key` in the config"


def _unlocks(path: Path, passphrase: str | None) -> bool:
    """Whether paramiko can read the private key; raises ``PasswordRequiredException`` when it is locked."""
    for kind in (paramiko.RSAKey, paramiko.ECDSAKey, paramiko.Ed25519Key):
        try:
            kind.from_private_key_file(str(path), passphrase)
        except paramiko.PasswordRequiredException:
            raise
        except (paramiko.SSHException, ValueError):
            continue
        return True
    return False


def _encrypted(path: Path) -> bool:
    try:
        _unlocks(path, None)
    except paramiko.PasswordRequiredException:
        return True
    return False


def _arm(connection: Connection, host_keys: HostKeys, target: str, node_rank: int | None) -> None:
    """Give one hop its host key check and our preferred algorithms."""
    options = connection.ssh_config
    files = [*_known_files(options, "userknownhostsfile", _USER_KNOWN)]
    files += _known_files(options, "globalknownhostsfile", _SYSTEM_KNOWN)
    alias = options.get("hostkeyalias")
    name, port = (alias, 22) if alias else (connection.host, connection.port)
    check = HostKeyCheck(host_keys, name, port, files, target, node_rank)
    connection.client.set_missing_host_key_policy(check)
    connection.connect_kwargs["transport_factory"] = partial(_transport, check.key_types())


def _known_files(options: paramiko.SSHConfigDict, option: str, default: tuple[str, ...]) -> list[Path]:
    names = shlex.split(options.get(option, "")) or default
    return [Path(os.devnull if name.lower() == "none" else name).expanduser() for name in names]


def _transport(known_types: list[str], sock: Any, **kwargs: Any) -> paramiko.Transport:
    if isinstance(sock, socket.socket):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else each command waits 40 ms for an ACK
    transport = paramiko.Transport(sock, **kwargs)
    options = transport.get_security_options()
    options.ciphers = sorted(options.ciphers, key=lambda name: name not in _CIPHERS)
    usable = [name for name in known_types if name in options.key_types]
    options.key_types = [*usable, *(name for name in options.key_types if name not in usable)]
    return transport
