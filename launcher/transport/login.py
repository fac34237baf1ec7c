"""Logging in as OpenSSH would: keys, password, keyboard-interactive, and several of them where the host wants that."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import paramiko

from launcher.command import Secret
from launcher.transport.hop import Hop
from launcher.transport.keys import Identity, identities, is_locked, open_agent

_Prompts = Sequence[tuple[str, bool]]  #: text, whether the answer may be seen


@dataclass(frozen=True)
class Credentials:
    """What the config and the user give for a login, beyond ssh_config."""

    key: str | None = None  #: private key file
    password: Secret | None = None
    passphrase: Secret | None = None  #: of ``key``


class LoginRefused(paramiko.AuthenticationException):
    """Nothing that was offered opened the door."""

    def __init__(
        self, offered: Sequence[str], allowed: Collection[str], locked: Sequence[str], credentials: Credentials
    ):
        self.offered, self.allowed, self.locked = tuple(offered), tuple(allowed), tuple(locked)
        self.credentials, self.password_tried = credentials, "the password" in offered
        wanted = bool({"password", "keyboard-interactive"} & set(allowed)) and "publickey" not in allowed
        #: a key was accepted, and the host then asked for more
        self.wants_password = wanted and credentials.passphrase is not None and not self.password_tried
        super().__init__("login refused")


def log_in(line: paramiko.Transport, hop: Hop, credentials: Credentials) -> None:
    """Raises ``LoginRefused``, or ``SSHException`` when the host hangs up."""
    with open_agent(hop.agent) as agent:
        keys = identities(hop, credentials.key, credentials.passphrase, agent)
        _Login(line, hop, credentials, keys).run()


class _Login:
    """One login: which methods are left, and which of them the host takes (None: it has not said)."""

    def __init__(self, line: paramiko.Transport, hop: Hop, credentials: Credentials, keys: Iterator[Identity]):
        self.line, self.hop, self.credentials, self.keys = line, hop, credentials, keys
        self.left = _methods(hop, credentials)
        self.allowed: Collection[str] | None = None
        self.offered: list[str] = []

    def run(self) -> None:
        while method := self._next():
            attempt = self._attempt(method)
            if attempt is None:
                self.left.remove(method)
            elif self._took(method, attempt):
                return
        if not self.offered and self._took("none", lambda: self.line.auth_none(self.hop.user)):
            return
        locked = [path for path in self._files() if is_locked(path)]
        raise LoginRefused(self.offered, self.allowed or (), locked, self.credentials)

    def _files(self) -> Sequence[str]:
        return (self.credentials.key,) if self.credentials.key else self.hop.identity_files

    def _next(self) -> str | None:
        return next((each for each in self.left if self.allowed is None or each in self.allowed), None)

    def _attempt(self, method: str) -> Callable[[], Sequence[str]] | None:
        """The next try by this method; None when nothing is left to try."""
        user, password = self.hop.user, self.credentials.password
        if method == "publickey":
            if (identity := next(self.keys, None)) is None:
                return None
            self.offered.append(identity.label)
            return lambda: self.line.auth_publickey(user, identity.key)
        assert password is not None
        secret = password.reveal()
        if method == "password":
            return lambda: self.line.auth_password(user, secret, fallback=False)
        return lambda: self.line.auth_interactive(user, _answering(secret))

    def _took(self, method: str, attempt: Callable[[], Sequence[str]]) -> bool:
        """Whether the host let us in; when it wants more, or something else, ``allowed`` says so."""
        try:
            more = attempt()
        except paramiko.BadAuthenticationType as error:
            self.allowed = error.allowed_types
            return False
        except paramiko.AuthenticationException:
            if not self.line.is_active():
                raise
            self._password_is_used(method, [])
            return False
        self._password_is_used(method, ["publickey"])
        self.allowed = more or self.allowed
        return not more

    def _password_is_used(self, method: str, left: list[str]) -> None:
        """A password is shown to a host once, by whichever method; where it was wrong, no keys are tried either."""
        if method in ("password", "keyboard-interactive"):
            self.offered.append("the password")
            self.left = left


def _methods(hop: Hop, credentials: Credentials) -> list[str]:
    """Given a password and no key, that comes first: servers count wrong keys as failures.

    ``password`` goes before ``keyboard-interactive``, behind which may be a one-time code.
    """
    keys = ["publickey"] if "publickey" in hop.methods or credentials.key else []
    if credentials.password is None:
        return keys
    passwords = ["password", "keyboard-interactive"]
    return keys + passwords if credentials.key else passwords + keys


def _answering(password: str) -> Callable[[str, str, _Prompts], list[str]]:
    """Answers the first hidden prompt with the password, and any other with nothing."""
    answers = [password]

    def answer(title: str, instructions: str, prompts: _Prompts) -> list[str]:
        return [answers.pop() if answers and not shown else "" for _, shown in prompts]

    return answer
