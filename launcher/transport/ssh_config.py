"""Resolves ssh_config for a host and for the jump hosts on the route to it.

The options come from ``ssh -G HOST``. Without an OpenSSH client, paramiko's parser reads the files.
"""

from __future__ import annotations

import fnmatch
import getpass
import glob
import os
import pwd
import re
import shlex
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import paramiko

from launcher.config.schema import login_text
from launcher.errors import TransportError

_SYSTEM_CONFIG = Path("/etc/ssh/ssh_config")

_MAX_INCLUDES = 16  # as OpenSSH

_MAX_HOPS = 16

_VALID = 30.0  # seconds that resolved options are cached; the result of Match exec may depend on the current network

_RESOLVE_TIMEOUT = 20.0  # seconds; Match exec and canonical names may wait for the network

Options = Mapping[str, Sequence[str]]  #: values by keyword in lower case, in the order found

_Blocks = Sequence[
    tuple[Sequence[str], Sequence[str]]
]  #: per ``Host`` line of ssh_config: its patterns, the lines below

#: OpenSSH's defaults that paramiko's parser does not add
_DEFAULTS: Options = {
    "identityfile": [f"~/.ssh/id_{kind}" for kind in ("rsa", "ecdsa", "ed25519")],
    "userknownhostsfile": ["~/.ssh/known_hosts ~/.ssh/known_hosts2"],
    "globalknownhostsfile": ["/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"],
}

_ONLY_OPENSSH = {
    "bindinterface": "BindInterface",
    "knownhostscommand": "KnownHostsCommand",
    "proxyusefdpass": "ProxyUseFdpass",
    "revokedhostkeys": "RevokedHostKeys",
}

_FAMILIES = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}

#: a ProxyCommand with ``ssh -W``, which means the same as ProxyJump
_JUMP = re.compile(
    r"(?:\S*/)?ssh (?:-[aqTx]+ )*(?:-W \[?%h]?:%p (?:-[aqTx]+ )*([^\s%-][^\s%]*)|([^\s%-][^\s%]*) -W \[?%h]?:%p)"
)


@dataclass(frozen=True)
class SshHost:
    """Options for one SSH connection, resolved from ssh_config."""

    name: str  #: as the user wrote it
    host: str
    port: int
    user: str
    jumps: tuple[str, ...]  #: jump hosts in connection order, as ``user@host:port``
    proxy_command: str  #: shell command whose stdin and stdout are the connection; "" for none
    identity_files: tuple[str, ...]  #: private keys, or public keys of keys in the agent; need not exist
    certificate_files: tuple[str, ...]
    agent: str  #: socket of the ssh-agent, "" for none
    identities_only: bool  #: of the agent's keys, only those in ``identity_files`` are offered
    uses_keys: bool
    key_alias: str  #: name in known_hosts; "" without HostKeyAlias
    known_hosts: tuple[Path, ...]  #: new keys are added to the first file
    checking: str  #: StrictHostKeyChecking: ask, yes, accept-new or no
    family: int  #: address family (``socket.AF_INET``, ``AF_INET6``), 0 for any
    bind_address: str
    connect_timeout: float  #: seconds; 0 if ssh_config sets none
    only_openssh: str  #: a keyword in use that paramiko does not support, or ""
    has_control_path: bool  #: ControlPath is set, so that the user may have an open ControlMaster

    @property
    def target(self) -> str:
        return login_text(self.user, self.host, self.port if self.port != 22 else None)

    @property
    def ssh_arguments(self) -> str:
        """Arguments of ``ssh`` to reach this host, for messages."""
        port = f"-p {self.port} " if self.port != 22 else ""
        return f"{port}{self.user}@{self.host}"


Route = tuple[SshHost, ...]  #: jump hosts first, the node last


def find_route(name: str, user: str | None = None, port: int | None = None, node_rank: int | None = None) -> Route:
    """Return all hosts on the route to ``name``. Raises TransportError for an ssh_config that cannot be used."""
    try:
        route = [_resolved(name, user, port)]
        jumps: Sequence[str] = route[0].jumps
        seen = {name}
        while jumps and len(route) < _MAX_HOPS:
            jump_user, jump, jump_port = _split_destination(jumps[-1])
            if jump in seen:  # a ProxyJump under `Host *`: the jump host itself is connected directly
                break
            seen.add(jump)
            route.insert(0, _resolved(jump, jump_user, jump_port))
            jumps = jumps[:-1] or route[0].jumps
    except (paramiko.SSHException, OSError, ValueError, subprocess.SubprocessError) as error:
        raise TransportError(f"~/.ssh/config cannot be used: {error}", host=name, node_rank=node_rank) from error
    return tuple(route)


def ssh_program() -> str | None:
    """Return the path of the OpenSSH client; None if it is not installed."""
    return shutil.which("ssh")


def ssh_argv(user: str | None, port: int | None) -> list[str]:
    """Return the ssh command with user and port, without the host name.

    If ssh would not find the user's config file itself, the command names it (``-F``).
    """
    argv = [ssh_program() or "ssh"]
    if not is_home_of_passwd():
        argv += ["-F", str(_user_config()) if _user_config().is_file() else "none"]
    argv += ["-l", user] if user else []
    return argv + (["-p", str(port)] if port else [])


def is_home_of_passwd() -> bool:
    """Whether $HOME is the home folder in /etc/passwd, the only one that OpenSSH uses."""
    return os.path.expanduser("~") == _passwd_home()


def config_lines(path: Path | None = None, depth: int = 0) -> Iterator[str]:
    """Yield the lines of the config file ``path`` (default: ~/.ssh/config) and of the files that it includes.

    An ``Include`` below a ``Host`` or ``Match`` line applies only to the hosts of that line. Therefore the ``Include``
    line is yielded as well, before the included lines, and the ``Host`` or ``Match`` line is repeated after them.
    ``depth``: how deep ``path`` is nested in includes.
    """
    path = path or _user_config()
    if not path.is_file() or depth > _MAX_INCLUDES:
        return
    base, block = path.parent if path.is_relative_to("/etc/ssh") else _user_config().parent, "Host *"
    for line in path.read_text(errors="replace").splitlines():
        keyword, _, value = line.strip().replace("=", " ", 1).partition(" ")
        if keyword.lower() != "include" or block != "Host *":
            yield line
        if keyword.lower() != "include":
            block = line if keyword.lower() in ("host", "match") else block
            continue
        for pattern in shlex.split(value):
            for found in sorted(glob.glob(str(base / Path(pattern).expanduser()))):
                yield from config_lines(Path(found), depth + 1)
        yield block


# -- one host --------------------------------------------------------------


@dataclass
class _Entry:
    """Cached ssh options of hosts to which the same lines of ssh_config apply."""

    when: float = 0.0  #: monotonic time of the lookup
    options: Options | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)  #: held during ``ssh -G``, which runs once


_entries: dict[tuple[object, ...], _Entry] = {}

_entries_lock = threading.Lock()


def _resolved(name: str, user: str | None, port: int | None) -> SshHost:
    config = _user_config()
    stamp = (config.stat().st_mtime_ns, config.stat().st_size) if config.is_file() else None
    host, key = _lookup_key(name, _blocks(config, stamp))
    with _entries_lock:
        entry = _entries.setdefault((config, stamp, key, user, port), _Entry())
    with entry.lock:
        if entry.options is None or time.monotonic() - entry.when > _VALID:
            if ssh_program():
                entry.options = _by_openssh(name, user, port)
            else:
                text = "\n".join([*config_lines(), "Host *", *config_lines(_SYSTEM_CONFIG)])
                found = paramiko.SSHConfig.from_text(text).lookup(name)
                given = {key: [value] if isinstance(value, str) else value for key, value in found.items() if value}
                entry.options = {**_DEFAULTS, **given}
            entry.when = time.monotonic()
    return _ssh_host(name, user, port, {**entry.options, "hostname": [host]} if host else entry.options)


def _lookup_key(name: str, blocks: _Blocks | None) -> tuple[str, object]:
    """Return the HostName for ``name`` in ssh_config (default: ``name``), and a cache key for the output of ``ssh -G``.

    Names whose options differ only in HostName have the same key. If this cannot be determined, returns ("", name):
    no other name has this key.
    """
    if blocks is None or name != name.lower() or ssh_program() is None:
        return "", name
    lines = [line.split(None, 1) for patterns, lines in blocks if host_matches(name, patterns) for line in lines]
    hosts = [value for keyword, value in lines if keyword.lower() == "hostname"]
    return (hosts or [name])[0], tuple(f"{key} {value}" for key, value in lines if key.lower() != "hostname")


@lru_cache(maxsize=16)
def _blocks(config: Path, stamp: object) -> _Blocks | None:
    """Return the ``Host`` blocks of ssh_config; None if options may depend on more than ``Host`` patterns."""
    blocks: list[tuple[list[str], list[str]]] = [(["*"], [])]
    for line in (*config_lines(), "Host *", *config_lines(_SYSTEM_CONFIG)):
        keyword, *values = line.replace("=", " ", 1).replace('"', " ").split() or ["#"]
        if keyword.lower() == "host":
            blocks.append((values, []))
        elif keyword.lower() in ("match", "include", "canonicalizehostname"):
            return None
        elif not keyword.startswith("#") and keyword.lower() != "controlpath":
            if "%" in line or not values:
                return None
            blocks[-1][1].append(" ".join([keyword, *values]))
    return blocks


def host_matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a line of ssh_config or known_hosts with these patterns applies to a host.

    Only ``*`` and ``?`` are wildcards; ``!`` excludes.
    """
    found = [
        each for each in patterns if fnmatch.fnmatchcase(name.lower(), each.lower().lstrip("!").replace("[", "[[]"))
    ]
    return bool(found) and not any(each.startswith("!") for each in found)


def _by_openssh(name: str, user: str | None, port: int | None) -> Options:
    """Return the options printed by ``ssh -G``. Raises OSError with its error message for an invalid config."""
    argv = [*ssh_argv(user, port), "-T", "-G", "--", name]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_RESOLVE_TIMEOUT)
    if done.returncode:
        raise OSError("; ".join(done.stderr.strip().splitlines()) or f"ssh -G exited {done.returncode}")
    # ssh expands ~ to the home folder in /etc/passwd; gnnfleet uses $HOME
    text = done.stdout.replace(f" {_passwd_home()}/.ssh/", f" {os.path.expanduser('~')}/.ssh/")
    options: dict[str, list[str]] = {}
    for line in text.splitlines():
        keyword, _, value = line.partition(" ")
        options.setdefault(keyword.lower(), []).append(value)
    return options


def _ssh_host(name: str, user: str | None, port: int | None, options: Options) -> SshHost:
    def value(keyword: str, default: str = "") -> str:
        found = (options.get(keyword) or [default])[0]
        return default if found.lower() == "none" else found

    host, number = value("hostname", name), port or int(value("port", "22"))
    login = user or value("user", getpass.getuser())
    # Tokens such as ``%h``, without those that only OpenSSH supports.
    machine = socket.gethostname()
    tokens = {
        "%": "%",
        "d": os.path.expanduser("~"),
        "h": host,
        "i": str(os.getuid()),
        "k": value("hostkeyalias") or name,
        "l": machine,
        "L": machine.partition(".")[0],
        "n": name,
        "p": str(number),
        "r": login,
        "u": getpass.getuser(),
    }

    def paths(*keywords: str, split: bool = False) -> tuple[str, ...]:
        texts = [text for keyword in keywords for text in options.get(keyword, ())]
        words = [word for text in texts for word in shlex.split(text)] if split else texts
        return tuple(dict.fromkeys(_path(word, tokens) for word in words if split or word.lower() != "none"))

    agent = options.get("identityagent", ["SSH_AUTH_SOCK"])[0]  # a path, ``$VARIABLE``, ``SSH_AUTH_SOCK`` or ``none``
    if agent == "SSH_AUTH_SOCK" or re.fullmatch(r"\$\w+", agent):
        agent = os.environ.get(agent.lstrip("$"), "")
    else:
        agent = "" if agent.lower() == "none" else _path(agent, tokens)
    command = value("proxycommand")
    jump = _JUMP.fullmatch(command)
    resolved = SshHost(
        name=name,
        host=host,
        port=number,
        user=login,
        jumps=tuple(filter(None, jump.groups() if jump else value("proxyjump").replace(" ", "").split(","))),
        proxy_command="" if jump else _filled(command, tokens),
        identity_files=paths("identityfile"),
        certificate_files=paths("certificatefile"),
        agent=agent,
        identities_only=value("identitiesonly") in ("yes", "true"),
        uses_keys=value("pubkeyauthentication", "yes") not in ("no", "false")
        and "publickey" in value("preferredauthentications", "publickey").split(","),
        key_alias=value("hostkeyalias"),
        known_hosts=tuple(map(Path, paths("userknownhostsfile", "globalknownhostsfile", split=True))),
        checking={"off": "no", "false": "no", "true": "yes"}.get(found := value("stricthostkeychecking", "ask"), found),
        family=_FAMILIES.get(value("addressfamily"), 0),
        bind_address=value("bindaddress"),
        connect_timeout=float(seconds) if (seconds := value("connecttimeout")).isdigit() else 0.0,
        only_openssh=next((shown for key, shown in _ONLY_OPENSSH.items() if value(key) not in ("", "no")), ""),
        has_control_path=bool(value("controlpath")),
    )
    filled = [resolved.proxy_command, *resolved.identity_files, *resolved.certificate_files, resolved.agent]
    if any(re.search("%[a-zA-Z]", text) for text in [*filled, *map(str, resolved.known_hosts)]):
        return replace(resolved, only_openssh=resolved.only_openssh or "a token in ssh_config")
    return resolved


def _filled(text: str, tokens: Mapping[str, str]) -> str:
    return re.sub(r"%(.)", lambda found: tokens.get(found[1], found[0]), text)


def _path(text: str, tokens: Mapping[str, str]) -> str:
    if text.lower() == "none":
        return os.devnull
    variables = re.sub(r"\$\{(\w+)\}", lambda found: os.environ.get(found[1], ""), text)
    return os.path.expanduser(_filled(variables, tokens))


def _split_destination(text: str) -> tuple[str | None, str, int | None]:
    """Split ``[ssh://][user@]host[:port]`` into user, host and port."""
    user, _, rest = text.removeprefix("ssh://").rpartition("@")
    found = re.fullmatch(r"\[(.*)\](?::(\d+))?|([^:]*):(\d+)", rest)
    if found is None:
        return user or None, rest, None
    port = found[2] or found[4]
    return user or None, found[1] or found[3], int(port) if port else None


def _user_config() -> Path:
    return Path(os.path.expanduser("~"), ".ssh/config")


def _passwd_home() -> str:
    return pwd.getpwuid(os.getuid()).pw_dir
