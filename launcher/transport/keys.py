"""What can be offered at a login by public key: key files, certificates, the ssh-agent; in OpenSSH's order."""

from __future__ import annotations

import base64
import binascii
import copy
import os
import shlex
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import paramiko
from paramiko.agent import AgentSSH
from paramiko.pkey import PublicBlob

from launcher.command import Secret
from launcher.transport.hop import Hop

_AGENT_TIMEOUT = 60.0  # it may ask its owner

_SIGN_REQUEST, _SIGN_RESPONSE = bytes([13]), 14

_SIGN_FLAGS = {"rsa-sha2-256": 2, "rsa-sha2-512": 4}

_CERT = "-cert-v01@openssh.com"

_OPENSSH_MAGIC = b"openssh-key-v1\0"


@dataclass(frozen=True)
class Identity:
    """A key that can sign, maybe with a certificate, and its name for a person."""

    key: paramiko.PKey
    label: str


@dataclass(frozen=True)
class Agent:
    """The keys an ssh-agent holds. A context manager: the socket stays open for signing."""

    line: AgentLine | None
    keys: tuple[AgentKey, ...] = ()

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        if self.line is not None:
            self.line.close()


class AgentLine(AgentSSH):
    """paramiko's agent client on a socket of our choice."""

    _connect: Callable[[socket.socket], None]  # inherited, unknown to the type stubs
    _send_message: Callable[[paramiko.Message], tuple[int, paramiko.Message]]
    _close: Callable[[], None]

    def __init__(self, path: str):
        super().__init__()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(_AGENT_TIMEOUT)
            sock.connect(path)
            self._connect(sock.dup())

    def sign(self, blob: bytes, data: bytes, flags: int) -> bytes:
        """Raises ``SSHException`` when the agent refuses."""
        message = paramiko.Message()
        message.add_byte(_SIGN_REQUEST)
        message.add_string(blob)
        message.add_string(data)
        message.add_int(flags)
        kind, answer = self._send_message(message)
        if kind != _SIGN_RESPONSE:
            raise paramiko.SSHException("the ssh-agent did not sign")
        return answer.get_binary()

    def close(self) -> None:
        self._close()


class AgentKey(paramiko.PKey):
    """A key in the agent, asked for by exactly the blob it was listed with; paramiko's own asks for a
    certificate's plain key, which the agent need not hold."""

    def __init__(self, line: AgentLine, blob: bytes, comment: str):
        self.line, self.blob, self.comment = line, blob, comment
        self.public_blob = None
        self.name: str = paramiko.Message(blob).get_text()

    def get_name(self) -> str:
        return self.name

    def asbytes(self) -> bytes:
        return self.blob

    def sign_ssh_data(self, data: bytes, algorithm: str | None = None) -> bytes:  # type: ignore[override]
        flags = _SIGN_FLAGS.get((algorithm or "").removesuffix(_CERT), 0)
        return self.line.sign(self.blob, data, flags)


def open_agent(path: str) -> Agent:
    """The agent at ``path``; one without keys where there is none."""
    if not path:
        return Agent(None)
    try:
        line = AgentLine(path)
    except (OSError, paramiko.SSHException):  # a variable left over from an agent that is gone
        return Agent(None)
    return Agent(line, tuple(AgentKey(line, key.blob, key.comment) for key in line.get_keys()))


def identities(hop: Hop, key: str | None, passphrase: Secret | None, agent: Agent) -> Iterator[Identity]:
    """Keys to offer, as OpenSSH orders them: certificates, the agent's named keys, its others, files.

    ``key``, given in our own config, is offered first of all. Files that are missing, locked or
    no keys are passed over.
    """
    files = (key,) if key else hop.identity_files
    named = [public for public in map(public_of, files) if public is not None]
    by_public = {_plain(each.blob): each for each in agent.keys if _CERT not in each.name}
    done: set[bytes] = set()
    offers = [
        _key_files(files, passphrase) if key else iter(()),
        _certified(hop, files, passphrase, by_public),
        (Identity(by_public[public], _agent_label(by_public[public])) for public in named if public in by_public),
        (
            Identity(each, _agent_label(each))
            for each in agent.keys
            if not hop.identities_only or _plain(each.blob) in named
        ),
        iter(()) if key else _key_files(files, passphrase),
    ]
    for offer in (identity for group in offers for identity in group):
        blob = shown_blob(offer.key)
        if blob not in done:
            done.add(blob)
            yield offer


def shown_blob(key: paramiko.PKey) -> bytes:
    """What the server sees of a key: its certificate, else its public half."""
    public: PublicBlob | None = key.public_blob
    return public.key_blob if public is not None else key.asbytes()


def _agent_label(key: AgentKey) -> str:
    return f"the ssh-agent's {key.comment or key.name}"


def _key_files(files: tuple[str, ...], passphrase: Secret | None) -> Iterator[Identity]:
    """Private keys, each after the certificate that lies beside it."""
    for path in files:
        loaded = _usable(path, passphrase)
        if loaded is None:
            continue
        if certificate := _with_certificate(loaded, f"{path}-cert.pub"):
            yield Identity(certificate, f"{path}-cert.pub")
        yield Identity(loaded, path)


def _certified(
    hop: Hop, files: tuple[str, ...], passphrase: Secret | None, by_public: dict[bytes, AgentKey]
) -> Iterator[Identity]:
    """Certificates (CertificateFile, and those beside keys in the agent) with the key they belong to."""
    for path in (*hop.certificate_files, *(f"{file}-cert.pub" for file in files)):
        blob = _public_blob(path)
        if blob is None:
            continue
        public = _plain(blob.key_blob)
        holders: list[paramiko.PKey] = [by_public[public]] if public in by_public else []
        holders += [key for file in files if (key := _usable(file, passphrase)) and key.asbytes() == public]
        for key in holders[:1]:
            if certificate := _with_certificate(key, path):
                yield Identity(certificate, path)


def _with_certificate(key: paramiko.PKey, path: str) -> paramiko.PKey | None:
    if not os.path.isfile(path):
        return None
    certified = copy.copy(key)
    try:
        certified.load_certificate(path)
    except (ValueError, OSError):  # of another key
        return None
    return certified


def _public_blob(path: str) -> PublicBlob | None:
    try:
        return PublicBlob.from_file(path)
    except (OSError, ValueError, binascii.Error, paramiko.SSHException):
        return None


def _plain(blob: bytes) -> bytes:
    """The plain public key in a blob that may be a certificate: type, nonce, the key's own fields, the rest."""
    certificate = paramiko.Message(blob)
    name = certificate.get_text()
    if not name.endswith(_CERT):
        return blob
    kind = name.removesuffix(_CERT)
    certificate.get_string()
    plain = paramiko.Message()
    plain.add_string(f"{kind}@openssh.com" if kind.startswith("sk-") else kind)
    for _ in range(1 if kind == "ssh-ed25519" else 3 if kind.startswith("sk-ecdsa") else 2):
        plain.add_string(certificate.get_string())
    return plain.asbytes()


def public_of(path: str) -> bytes | None:
    """The public half of the key at ``path``, without its passphrase; None where it cannot be told."""
    for place in (f"{path}.pub", path):
        if blob := _public_blob(place):
            return _plain(blob.key_blob)
    try:
        return _openssh_public(Path(path).read_bytes())
    except (OSError, ValueError):
        key = _usable(path, None)
        return None if key is None else key.asbytes()


def _openssh_public(data: bytes) -> bytes:
    """The public key that an OpenSSH private key file shows in the clear; ValueError for other formats."""
    raw = base64.b64decode(b"".join(line for line in data.splitlines() if not line.startswith(b"-----")))
    if not raw.startswith(_OPENSSH_MAGIC):
        raise ValueError("another format")
    message = paramiko.Message(raw[len(_OPENSSH_MAGIC) :])
    for _ in ("cipher", "kdf", "kdf options"):
        message.get_string()
    message.get_int()
    public: bytes = message.get_string()
    return public


# -- private keys ----------------------------------------------------------

_loading = threading.Lock()  # a passphrase takes 0.1 s and more to apply: once, not once a node

_loaded: dict[tuple[str, int, int, str | None], paramiko.PKey | None] = {}


def load_key(path: str, passphrase: Secret | None) -> paramiko.PKey | None:
    """The private key; None when it is none or the passphrase is wrong.

    Raises ``PasswordRequiredException`` when it is locked, ``OSError`` when it cannot be read.
    """
    found = os.stat(path)
    secret = passphrase.reveal() if passphrase is not None else None
    name = (path, found.st_mtime_ns, found.st_size, secret)
    with _loading:
        if name not in _loaded:
            _loaded[name] = _load(path, secret)
        return _loaded[name]


def _load(path: str, passphrase: str | None) -> paramiko.PKey | None:
    for kind in (paramiko.RSAKey, paramiko.ECDSAKey, paramiko.Ed25519Key):
        try:
            return kind.from_private_key_file(path, passphrase)
        except paramiko.PasswordRequiredException:
            raise
        except (paramiko.SSHException, ValueError):
            continue
    return None


def _usable(path: str, passphrase: Secret | None) -> paramiko.PKey | None:
    try:
        return load_key(path, passphrase)
    except (OSError, paramiko.PasswordRequiredException):
        return None


def is_locked(path: str) -> bool:
    """Whether it is a private key that needs a passphrase."""
    try:
        load_key(path, None)
    except paramiko.PasswordRequiredException:
        return True
    except OSError:
        return False
    return False


def key_problem(path: str, passphrase: Secret | None, agent: str) -> tuple[str, str] | None:
    """(what, remedy) when the private key at ``path`` cannot be used, else None."""
    if not os.path.isfile(path):
        return f"key file {path} does not exist", "correct `key` in the config"
    if not os.access(path, os.R_OK):
        return f"key file {path} cannot be read", "check its owner and mode"
    try:
        loaded = load_key(path, passphrase)
    except paramiko.PasswordRequiredException:
        return _locked(path, agent)
    if loaded is not None:
        return None
    if passphrase is not None and is_locked(path):
        return f"wrong passphrase for key file {path}", "try again"
    hint = " (it looks like the public half)" if path.endswith(".pub") else ""
    return f"key file {path} holds no RSA, ECDSA or Ed25519 private key{hint}", "correct `key` in the config"


def _locked(path: str, agent: str) -> tuple[str, str] | None:
    if agent:
        return None
    return (
        f"key file {path} is encrypted and no ssh-agent is running",
        f"start one (`eval $(ssh-agent)`) and `ssh-add {shlex.quote(path)}`, "
        "or set `password: true` to be asked for the passphrase",
    )
