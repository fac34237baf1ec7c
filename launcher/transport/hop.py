"""One machine on the way to a node, with all that ssh_config says about it."""

from __future__ import annotations

import getpass
import os
import re
import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.config.schema import login_text

Options = Mapping[str, Sequence[str]]  #: values of each keyword (in lower case) in the order found

_SYSTEM_KNOWN = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")

_USER_KNOWN = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")

_USUAL_KEYS = tuple(f"~/.ssh/id_{kind}" for kind in ("rsa", "ecdsa", "ed25519"))

_METHODS = ("publickey", "keyboard-interactive", "password")

_FAMILIES = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}

_NOT_OURS = re.compile(r"%[^%dhiklLnpru]")  # tokens only OpenSSH can fill in


@dataclass(frozen=True)
class Hop:
    """Where and as whom to log in, and by what to know the host."""

    name: str  #: as the user wrote it
    host: str
    port: int
    user: str
    jumps: tuple[str, ...]  #: jump hosts in the order they are visited, as ``user@host:port``
    proxy_command: str  #: shell command whose pipes are the line; "" for none
    identity_files: tuple[str, ...]  #: private keys (or public halves of keys in the agent); need not exist
    certificate_files: tuple[str, ...]
    agent: str  #: socket of the ssh-agent, "" for none
    identities_only: bool  #: of the agent's keys only those named
    methods: tuple[str, ...]  #: kinds of login, the preferred one first
    key_name: str  #: name in known_hosts; "" when HostKeyAlias gives none
    known_hosts: tuple[Path, ...]  #: new keys are written to the first
    checking: str  #: StrictHostKeyChecking: ask, yes, accept-new or no
    family: int  #: address family, 0 for any
    bind_address: str
    connect_timeout: float  #: seconds, 0 where ssh_config has none
    only_openssh: str  #: the keyword that only OpenSSH's own client can follow, or ""
    has_control_path: bool  #: the user may keep a connection open himself (ControlMaster)

    @property
    def target(self) -> str:
        """``user@host:port`` as resolved."""
        return login_text(self.user, self.host, self.port if self.port != 22 else None)

    @property
    def as_ssh_words(self) -> str:
        """What a person types after ``ssh``."""
        port = f"-p {self.port} " if self.port != 22 else ""
        return f"{port}{self.user}@{self.host}"


def make_hop(name: str, user: str | None, port: int | None, options: Options) -> Hop:
    """``user`` and ``port`` are given for this login alone and go before what ``options`` say."""
    host, number = _one(options, "hostname", name), port or int(_one(options, "port", "22"))
    login = user or _one(options, "user", "") or getpass.getuser()
    key_name = _value(options, "hostkeyalias")
    tokens = _Tokens(name, host, number, login, key_name)
    command = _value(options, "proxycommand")
    jumps = tuple(hop.strip() for hop in _value(options, "proxyjump").split(",") if hop.strip())
    jump = _jump_in(command)
    return Hop(
        name=name,
        host=host,
        port=number,
        user=login,
        jumps=(jump,) if jump else jumps,
        proxy_command="" if jump else tokens.fill(command),
        identity_files=tokens.paths(options.get("identityfile") or _USUAL_KEYS),
        certificate_files=tokens.paths(options.get("certificatefile", ())),
        agent=_agent(tokens, _one(options, "identityagent", "SSH_AUTH_SOCK")),
        identities_only=_one(options, "identitiesonly", "no") in ("yes", "true"),
        methods=_methods(options),
        key_name=key_name,
        known_hosts=_known_files(tokens, options),
        checking=_checking(_one(options, "stricthostkeychecking", "ask")),
        family=_FAMILIES.get(_one(options, "addressfamily", "any"), 0),
        bind_address=_value(options, "bindaddress"),
        connect_timeout=_seconds(_value(options, "connecttimeout")),
        only_openssh=_only_openssh(options, "" if jump else command),
        has_control_path=bool(_value(options, "controlpath")),
    )


def _one(options: Options, key: str, default: str) -> str:
    values = options.get(key)
    return values[0] if values else default


def _value(options: Options, key: str) -> str:
    """The value; "" when it is missing or ``none``."""
    value = _one(options, key, "")
    return "" if value.lower() == "none" else value


@dataclass(frozen=True)
class _Tokens:
    """What ``%h`` and its like stand for."""

    name: str
    host: str
    port: int
    user: str
    key_name: str

    def fill(self, text: str) -> str:
        if "%" not in text:
            return text
        whole = socket.gethostname()
        values = {
            "%": "%",
            "d": os.path.expanduser("~"),
            "h": self.host,
            "i": str(os.getuid()),
            "k": self.key_name or self.name,
            "l": whole,
            "L": whole.partition(".")[0],
            "n": self.name,
            "p": str(self.port),
            "r": self.user,
            "u": getpass.getuser(),
        }
        return re.sub(r"%(.)", lambda found: values.get(found[1], found[0]), text)

    def path(self, text: str) -> str:
        variables = re.sub(r"\$\{(\w+)\}", lambda found: os.environ.get(found[1], ""), text)
        return os.path.expanduser(self.fill(variables))

    def paths(self, texts: Sequence[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.path(text) for text in texts if text.lower() != "none"))


def _jump_in(command: str) -> str:
    """The jump host of a ``ProxyCommand ssh -W %h:%p HOST``, which is ProxyJump by its older name; "" for others."""
    try:
        words = shlex.split(command)
    except ValueError:
        return ""
    if not words or os.path.basename(words.pop(0)) != "ssh":
        return ""
    user = port = host = ""
    forwards = False
    while words:
        word = words.pop(0)
        if word == "-W" and words:
            forwards = words.pop(0) in ("%h:%p", "[%h]:%p")
        elif word == "-l" and words:
            user = words.pop(0)
        elif word == "-p" and words:
            port = words.pop(0)
        elif word in ("-q", "-T", "-x", "-a"):
            continue
        elif word.startswith("-") or host or "%" in word:
            return ""
        else:
            host = word
    if not (forwards and host):
        return ""
    return (f"{user}@" if user else "") + host + (f":{port}" if port else "")


def _agent(tokens: _Tokens, value: str) -> str:
    if value == "SSH_AUTH_SOCK":
        return os.environ.get("SSH_AUTH_SOCK", "")
    if value.startswith("$") and not value.startswith("${"):
        return os.environ.get(value[1:], "")
    return "" if value.lower() == "none" else tokens.path(value)


def _methods(options: Options) -> tuple[str, ...]:
    wanted = _one(options, "preferredauthentications", "").split(",") if options.get("preferredauthentications") else ()
    methods = [method for method in (wanted or _METHODS) if method in _METHODS]
    if _one(options, "pubkeyauthentication", "yes") in ("no", "false"):
        methods = [method for method in methods if method != "publickey"]
    return tuple(methods)


def _known_files(tokens: _Tokens, options: Options) -> tuple[Path, ...]:
    files: list[Path] = []
    for key, default in (("userknownhostsfile", _USER_KNOWN), ("globalknownhostsfile", _SYSTEM_KNOWN)):
        names = [name for value in options.get(key, ()) for name in shlex.split(value)] or default
        files += [Path(os.devnull if name.lower() == "none" else tokens.path(name)) for name in names]
    return tuple(files)


def _checking(value: str) -> str:
    return {"off": "no", "false": "no", "true": "yes"}.get(value, value)


def _seconds(value: str) -> float:
    """Seconds of a time as sshd_config(5) writes it: 10, 10s, 1m30s."""
    units = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
    return float(sum(int(n) * units[unit.lower()] for n, unit in re.findall(r"(\d+)([smhdwSMHDW]?)", value)))


def _only_openssh(options: Options, command: str) -> str:
    """Why this host can only be reached by OpenSSH's client, as a keyword of ssh_config; "" when paramiko can."""
    for key, shown in (
        ("knownhostscommand", "KnownHostsCommand"),
        ("revokedhostkeys", "RevokedHostKeys"),
        ("bindinterface", "BindInterface"),
    ):
        if _value(options, key):
            return shown
    if _one(options, "proxyusefdpass", "no") in ("yes", "true"):
        return "ProxyUseFdpass"
    named = [command, *options.get("identityfile", ()), *options.get("certificatefile", ())]
    named += [*options.get("userknownhostsfile", ()), _value(options, "identityagent")]
    return "a token in ssh_config" if any(_NOT_OURS.search(text.replace("%%", "")) for text in named) else ""
