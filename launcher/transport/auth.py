"""SSH authentication with the keys, certificates, agent and passwords that OpenSSH would offer, in its order.

``SshLogin`` is a paramiko ``AuthStrategy`` that supports more than fabric's ``OpenSSHAuthStrategy``.
"""

from __future__ import annotations

import binascii
import copy
import os
import shlex
import socket
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial

import click
import paramiko
from paramiko.agent import AgentKey, AgentSSH
from paramiko.auth_strategy import AuthResult, AuthSource, AuthStrategy, SourceResult
from paramiko.pkey import PublicBlob

from launcher.command import Secret
from launcher.config.schema import ClusterConfig, NodeConfig
from launcher.errors import AuthError, HostKeyError, KeyFileUnusable, PasswordRefused, TransportError, UsageError
from launcher.transport.ssh_config import SshHost, find_route

AskPassword = Callable[[str], Secret]  #: asks the user for a secret; its argument is the prompt, without a colon

_AGENT_TIMEOUT = 60.0  # seconds; an agent may ask the user to confirm each use of a key

_CERT = "-cert-v01@openssh.com"

_SHOWN = 3  # hosts named in a prompt


@dataclass(frozen=True)
class Credentials:
    """Key and secrets for one login, from the config and the user."""

    key: str | None = None  #: private key file
    password: Secret | None = None
    passphrase: Secret | None = None  #: of ``key``


class LoginRefused(paramiko.AuthenticationException):
    """The host accepted none of the keys and passwords offered.

    ``tried``: labels of what was offered. ``allowed``: methods that the host allows, empty if unknown. ``locked``:
    encrypted key files without a passphrase.
    """

    def __init__(self, tried: Sequence[str], allowed: Collection[str], locked: Sequence[str], credentials: Credentials):
        super().__init__("login refused")
        self.tried, self.allowed, self.locked, self.credentials = tried, tuple(allowed), locked, credentials
        self.password_tried = "the password" in tried
        only_password = bool({"password", "keyboard-interactive"} & set(allowed)) and "publickey" not in allowed
        #: the host accepted a key and then asked for a password
        self.wants_password = only_password and credentials.passphrase is not None and not self.password_tried


class _Offer(AuthSource):
    """One key or password to log in with.

    ``attempt`` tries to log in. It returns [] if the login is complete, else the methods that the host also requires.
    ``label`` names the key or password in messages.
    """

    def __init__(self, username: str, method: str, label: str, attempt: Callable[[paramiko.Transport], list[str]]):
        super().__init__(username)
        self.method, self.label, self._attempt = method, label, attempt

    def authenticate(self, transport: paramiko.Transport) -> list[str]:
        return self._attempt(transport)


class SshLogin(AuthStrategy):
    """Authentication of one SSH login. ``authenticate`` raises LoginRefused, or SSHException for a closed connection.

    ``distrust`` returns an error if the host's key is not trusted, else None. A host that is not trusted gets no
    password. If the login to such a host needs a password, ``authenticate`` raises the error of ``distrust``.
    """

    def __init__(self, host: SshHost, credentials: Credentials, distrust: Callable[[], HostKeyError | None]):
        super().__init__(ssh_config=paramiko.SSHConfig())
        self.host, self.credentials, self._distrust = host, credentials, distrust
        self.files = (credentials.key,) if credentials.key else host.identity_files
        self._agent_keys: Sequence[AgentKey] = ()

    def get_sources(self) -> Iterator[_Offer]:
        # Unless the config names a key, a password comes first: servers count each refused key as a failure.
        # Of passwords, ``keyboard-interactive`` is last, as the host may use it to ask for a one-time code.
        user, passwords = self.host.user, list[_Offer]()
        if self.credentials.password is not None:
            secret = self.credentials.password.reveal()
            for method, attempt in (
                ("password", lambda ssh: ssh.auth_password(user, secret, fallback=False)),
                ("keyboard-interactive", lambda ssh: ssh.auth_interactive(user, _answering(secret))),
            ):
                passwords.append(_Offer(user, method, "the password", attempt))
        yield from () if self.credentials.key else passwords
        if self.host.uses_keys or self.credentials.key:
            for key, label in self._keys():
                yield _Offer(
                    user, "publickey", label, partial(paramiko.Transport.auth_publickey, username=user, key=key)
                )
        yield from passwords if self.credentials.key else ()

    def authenticate(self, transport: paramiko.Transport) -> list[SourceResult]:
        distrust = self._distrust()
        with closing(_Agent(self.host.agent)) as agent:  # stays open, as the agent signs during the login
            self._agent_keys = agent.get_keys()
            offers = [each for each in self.get_sources() if distrust is None or each.method == "publickey"]
            try:
                offer = self._try_offers(transport, offers)
            except LoginRefused as refused:
                if distrust is not None and (self.credentials.password is not None or refused.wants_password):
                    raise distrust from refused
                raise
        result = AuthResult(self)
        result.append(SourceResult(offer, []))
        return result

    def _try_offers(self, transport: paramiko.Transport, offers: list[_Offer]) -> _Offer:
        """Try ``offers`` until the host accepts the login; return the last offer. Raises LoginRefused."""
        tried: list[str] = []
        postponed: list[_Offer] = []  # their method was not allowed yet; it may be the host's second factor
        allowed: Collection[str] | None = None  # None: unknown
        while offer := next((each for each in offers if allowed is None or each.method in allowed), None):
            is_key = offer.method == "publickey"
            tried += [offer.label] if is_key else []
            try:
                allowed = offer.authenticate(transport)
                if not allowed:
                    return offer
            except paramiko.BadAuthenticationType as error:
                allowed = error.allowed_types
                if offer in postponed:
                    offers.remove(offer)
                postponed.append(offer)
                continue
            except paramiko.AuthenticationException:
                if not transport.is_active():
                    raise
                if not is_key:  # a wrong password is sent once, and no key is tried after it
                    offers.clear()
            tried += [] if is_key else [offer.label]
            offers = [each for each in offers if each is not offer and (is_key or each.method == "publickey")]
        if not tried:
            nothing = _Offer(self.host.user, "none", "nothing", lambda ssh: ssh.auth_none(self.host.user))
            try:
                nothing.authenticate(transport)
                return nothing
            except paramiko.BadAuthenticationType as error:
                allowed = error.allowed_types
            except paramiko.AuthenticationException:
                if not transport.is_active():
                    raise
        raise LoginRefused(tried, allowed or (), [path for path in self.files if is_locked(path)], self.credentials)

    def _keys(self) -> Iterator[tuple[paramiko.PKey, str]]:
        """Yield the keys to offer, each with its label.

        Order: certificates; the ``key`` of cluster.yml; agent keys whose key file cluster.yml or ssh_config names;
        other agent keys; key files of ssh_config, unless cluster.yml has a ``key``. Files without a usable private key
        are skipped.
        """
        by_blob = {key.blob: key for key in self._agent_keys}
        signers: dict[bytes, paramiko.PKey] = dict(by_blob)
        named, loaded, publics = [], [], set()
        for path in self.files:
            key = _usable(path, self.credentials.passphrase)
            public = key.asbytes() if key else _public_blob(f"{path}.pub") or _public_blob(path) or b""
            publics.add(public)
            if public in by_blob:
                named.append((by_blob[public], _agent_label(by_blob[public])))
            if key:
                loaded.append((key, path))
                signers.setdefault(public, key)
        certificates: list[tuple[paramiko.PKey, str]] = []
        for path in (*self.host.certificate_files, *(f"{path}-cert.pub" for path in self.files)):
            blob = _public_blob(path)
            if blob and _plain(blob) in signers:
                signer = signers[_plain(blob)]
                if isinstance(signer, AgentKey):
                    copied: paramiko.PKey = AgentKey(signer.agent, signer.blob, signer.comment)
                else:
                    copied = copy.copy(signer)
                copied.load_certificate(path)
                certificates.append((copied, path))
        others = [
            (key, _agent_label(key))
            for key in self._agent_keys
            if not self.host.identities_only or _plain(key.blob) in publics
        ]
        own = self.credentials.key is not None
        done: set[bytes] = set()
        for key, label in (*certificates, *(loaded if own else ()), *named, *others, *(() if own else loaded)):
            shown = key.public_blob.key_blob if key.public_blob else key.asbytes()
            if shown not in done:
                done.add(shown)
                yield key, label


def _answering(password: str) -> Callable[[str, str, Sequence[tuple[str, bool]]], list[str]]:
    """Return a keyboard-interactive handler that answers the first hidden prompt with the password, others with ""."""
    answers = [password]

    def answer(title: str, instructions: str, prompts: Sequence[tuple[str, bool]]) -> list[str]:
        return [answers.pop() if answers and not shown else "" for _, shown in prompts]

    return answer


# -- keys ------------------------------------------------------------------


class _Agent(AgentSSH):
    """paramiko's agent client on the socket at ``path``; it has no keys if no agent listens there."""

    def __init__(self, path: str):
        super().__init__()
        with socket.socket(socket.AF_UNIX) as sock, suppress(OSError, paramiko.SSHException):
            sock.settimeout(_AGENT_TIMEOUT)
            sock.connect(path)
            self._connect(sock.dup())  # type: ignore[attr-defined]
        for key in self.get_keys():
            if key.name.endswith(_CERT):
                # otherwise paramiko signs with the plain key, which the agent may not have
                key.inner_key = None  # type: ignore[attr-defined]

    def close(self) -> None:
        self._close()  # type: ignore[attr-defined]


def _agent_label(key: AgentKey) -> str:
    return f"the ssh-agent's {key.comment or key.name}"


def _public_blob(path: str) -> bytes | None:
    """Return the public key or certificate in a file; None for other files."""
    try:
        return PublicBlob.from_file(path).key_blob
    except (OSError, ValueError, binascii.Error, paramiko.SSHException):
        return None


def _plain(blob: bytes) -> bytes:
    """Return the public key. ``blob``: the key itself or a certificate of it."""
    kind = paramiko.Message(blob).get_text().removesuffix(_CERT)
    try:
        return paramiko.PKey.from_type_string(kind, blob).asbytes()
    except Exception:  # an unknown type; of a damaged file, paramiko raises almost any
        return blob


_loading = threading.Lock()  # decrypting a key takes 0.1 s and more: done once, not once per node

_loaded: dict[tuple[str, int, int, str | None], paramiko.PKey | None] = {}


def _load_key(path: str, passphrase: Secret | None) -> paramiko.PKey | None:
    """Return the private key in a file; None if the file has none or the passphrase is wrong.

    Raises PasswordRequiredException if it is encrypted and no passphrase is given, OSError if it cannot be read.
    """
    found = os.stat(path)
    secret = passphrase.reveal() if passphrase is not None else None
    name = (path, found.st_mtime_ns, found.st_size, secret)
    with _loading:
        if name not in _loaded:
            _loaded[name] = _parse_key(path, secret)
        return _loaded[name]


def _parse_key(path: str, passphrase: str | None) -> paramiko.PKey | None:
    for kind in (paramiko.RSAKey, paramiko.ECDSAKey, paramiko.Ed25519Key):
        try:
            return kind.from_private_key_file(path, passphrase)
        except (paramiko.PasswordRequiredException, OSError):
            raise
        except Exception:  # of a damaged file, paramiko raises almost any
            continue
    return None


def _usable(path: str, passphrase: Secret | None) -> paramiko.PKey | None:
    try:
        return _load_key(path, passphrase)
    except (OSError, paramiko.PasswordRequiredException):
        return None


def is_locked(path: str) -> bool:
    """Whether the file is a private key that needs a passphrase."""
    try:
        _load_key(path, None)
    except paramiko.PasswordRequiredException:
        return True
    except OSError:
        return False
    return False


def key_problem(path: str, passphrase: Secret | None, agent: str) -> tuple[type[AuthError], str, str] | None:
    """Return the error's class, message and remedy if the private key at ``path`` cannot be used, else None.

    ``agent``: path of the socket of ssh-agent, "" without one.
    """
    if not os.path.isfile(path):
        return KeyFileUnusable, f"key file {path} does not exist", "correct `key` in the config"
    if not os.access(path, os.R_OK):
        return KeyFileUnusable, f"key file {path} cannot be read", "check its owner and mode"
    if _usable(path, passphrase) is not None:
        return None
    if not is_locked(path):
        hint = " (it looks like a public key)" if path.endswith(".pub") else ""
        what = f"key file {path} holds no RSA, ECDSA or Ed25519 private key{hint}"
        return KeyFileUnusable, what, "correct `key` in the config"
    if passphrase is not None:
        return PasswordRefused, f"wrong passphrase for key file {path}", "try again"
    if agent:
        return None
    return (
        AuthError,
        f"key file {path} is encrypted and no ssh-agent is running",
        f"start one (`eval $(ssh-agent)`) and `ssh-add {shlex.quote(path)}`, "
        "or set `password: true` to be asked for the passphrase",
    )


# -- passwords -------------------------------------------------------------


def ask_password(prompt: str) -> Secret:
    """Ask for a secret on the terminal, without echo. Raises UsageError without a terminal."""
    if not _at_terminal():
        raise UsageError(
            f"the config asks for a password (`password: true`), but there is no terminal to ask on: {prompt}; "
            "start from a terminal, or set `key` to a private key that needs no password"
        )
    return Secret(click.prompt(prompt, hide_input=True, err=True))


def _at_terminal() -> bool:
    # click asks at the controlling terminal or standard input.
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return sys.stdin.isatty()
    return True


@dataclass(frozen=True)
class _Question:
    """A question for a password or a passphrase, asked once for all nodes with the same user or key file."""

    kind: str  #: ``Password`` or ``Passphrase``
    about: str  #: user name or path

    def prompt(self, hosts: Iterable[str]) -> str:
        names = list(dict.fromkeys(hosts))
        shown = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
        where = names[0] if len(names) == 1 else f"{len(names)} nodes ({shown})"
        if self.kind == "Passphrase":
            return f"Passphrase for key {self.about}, for {where}"
        return f"Password for {self.about} on {where}"


class Passwords:
    """Asks for passwords and passphrases, once for all nodes that need them; keeps them in memory only."""

    def __init__(self, config: ClusterConfig, ask: AskPassword):
        self._config, self._ask = config, ask
        wanted = [rank for rank, node in enumerate(config.nodes) if node.password and not config.shares_files]
        self._questions: dict[int, tuple[_Question, ...]] = {}
        for rank in wanted:
            node = config.nodes[rank]
            if node.key and is_locked(os.path.expanduser(node.key)):
                self._questions[rank] = (_Question("Passphrase", node.key),)
            else:
                self._questions[rank] = (_password_of(node),)
        self._answers: dict[tuple[int, _Question], Secret] = {}
        self._ask_for(wanted, lambda rank: "")

    def credentials(self, node_rank: int) -> Credentials:
        node = self._config.nodes[node_rank]
        questions = self._questions.get(node_rank, ())
        secrets = {question.kind: self._answers[node_rank, question] for question in questions}
        key = os.path.expanduser(node.key) if node.key else None
        return Credentials(key, secrets.get("Password"), secrets.get("Passphrase"))

    def ask_again(self, refused: Collection[int], wants_password: Collection[int]) -> None:
        """Ask again for the passwords or passphrases of the nodes in ``refused``, whose hosts did not accept them.

        Also asks for the passwords of the nodes in ``wants_password``, whose hosts accepted the key and require a
        password as well.
        """
        for rank in wants_password:
            self._questions[rank] = (*self._questions[rank], _password_of(self._config.nodes[rank]))
        self._ask_for(sorted({*refused, *wants_password}), lambda rank: "Not accepted. " if rank in refused else "")

    def _ask_for(self, ranks: Sequence[int], before: Callable[[int], str]) -> None:
        # Nodes with equal questions share one answer. ``before``: text before the prompt of a rank.
        for question in dict.fromkeys(self._questions[rank][-1] for rank in ranks):
            sharing = [rank for rank in ranks if self._questions[rank][-1] == question]
            prefix = max(before(rank) for rank in sharing)
            answer = self._ask(prefix + question.prompt(self._config.nodes[rank].host for rank in sharing))
            self._answers |= {(rank, question): answer for rank in sharing}


def _password_of(node: NodeConfig) -> _Question:
    try:
        user = find_route(node.host, node.user, node.port)[-1].user
    except TransportError:  # reported later, by connect
        user = node.user or "you"
    return _Question("Password", user)
