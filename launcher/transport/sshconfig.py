"""What ``ssh HOST`` would do: ~/.ssh/config and the system's, resolved for one host, with its jump hosts.

paramiko's parser is quick, but does not know all of ssh_config. Where a config holds anything that
it reads otherwise than OpenSSH does, ``ssh -G HOST`` is asked instead (4 ms a host).
"""

from __future__ import annotations

import glob
import os
import pwd
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import paramiko

from launcher.errors import TransportError
from launcher.transport.hop import Hop, make_hop

_SYSTEM_CONFIG = Path("/etc/ssh/ssh_config")

_MAX_INCLUDES = 16  # as OpenSSH

_MAX_HOPS = 16

_VALID = 30.0  # seconds; in another network, Match exec may say something else

_RESOLVE_TIMEOUT = 20.0  # Match exec and canonicalisation may ask the network

#: Keywords that paramiko's parser reads as OpenSSH does, as long as no token, quote or comment is in the value.
_READ = set(
    "hostname port user identityfile certificatefile identityagent identitiesonly proxyjump userknownhostsfile "
    "globalknownhostsfile stricthostkeychecking hostkeyalias addressfamily bindaddress connecttimeout "
    "preferredauthentications pubkeyauthentication".split()
)

#: Keywords that do not decide whether, where and as whom one gets in.
_IDLE = set(
    "addkeystoagent batchmode checkhostip ciphers clearallforwardings compression connectionattempts controlmaster "
    "controlpath controlpersist dynamicforward escapechar exitonforwardfailure fingerprinthash forwardagent forwardx11 "
    "forwardx11timeout forwardx11trusted gatewayports gssapiauthentication gssapidelegatecredentials hashknownhosts "
    "ipqos kbdinteractiveauthentication kexalgorithms localcommand localforward loglevel logverbose macs "
    "numberofpasswordprompts obscurekeystroketiming passwordauthentication permitlocalcommand rekeylimit "
    "remoteforward requesttty sendenv serveralivecountmax serveraliveinterval setenv tcpkeepalive updatehostkeys "
    "visualhostkey xauthlocation".split()
)


@dataclass(frozen=True)
class SshConfig:
    """The config files as they were when read; ``stamps`` tells when they have changed."""

    lines: tuple[str, ...]
    stamps: Mapping[Path, tuple[int, int] | None]
    resolved: dict[tuple[str, str | None, int | None], tuple[float, Hop]] = field(default_factory=dict)  #: when, what

    def is_current(self) -> bool:
        return all(_stamp(path) == stamp for path, stamp in self.stamps.items())

    @cached_property
    def parsed(self) -> paramiko.SSHConfig:
        """Raises ``paramiko.SSHException`` for a line that is none."""
        return paramiko.SSHConfig.from_text("\n".join(self.lines))

    @cached_property
    def is_plain(self) -> bool:
        """Whether paramiko's parser is good enough for it."""
        keys = {key for key, _ in map(_key_and_value, self.lines)}
        both = {"proxyjump", "proxycommand"} <= keys  # the one that comes first wins
        return not both and all(_is_plain(*_key_and_value(line)) for line in self.lines)


_lock = threading.Lock()

_current: dict[str, SshConfig] = {}  # by home folder


def read_ssh_config() -> SshConfig:
    """The user's and the system's config, ``Include`` followed; read again only when a file has changed."""
    home = os.path.expanduser("~")
    with _lock:
        known = _current.get(home)
        if known is None or not known.is_current():
            stamps: dict[Path, tuple[int, int] | None] = {}
            lines = [*_included(Path(home, ".ssh/config"), 0, stamps), "Host *"]
            known = _current[home] = SshConfig((*lines, *_included(_SYSTEM_CONFIG, 0, stamps)), stamps)
        return known


def find_way(name: str, user: str | None = None, port: int | None = None) -> tuple[Hop, ...]:
    """All machines on the way to ``name``, jump hosts first. Raises ``TransportError`` for an unusable config."""
    config = read_ssh_config()
    way = [_resolve(config, name, user, port)]
    jumps: Sequence[str] = way[0].jumps
    seen = {name}
    while jumps and len(way) < _MAX_HOPS:
        jump_user, jump, jump_port = split_destination(jumps[-1])
        if jump in seen:  # `Host *` with a ProxyJump: the jump host itself is reached directly
            break
        seen.add(jump)
        way.insert(0, _resolve(config, jump, jump_user, jump_port))
        jumps = jumps[:-1] or way[0].jumps
    return tuple(way)


@contextmanager
def labelled(node_rank: int | None) -> Iterator[None]:
    """Errors of the block name the node, too."""
    try:
        yield
    except TransportError as error:
        raise TransportError(error.message, host=error.host, node_rank=node_rank, remedy=error.remedy) from error


def split_destination(text: str) -> tuple[str | None, str, int | None]:
    """User, host and port of ``[ssh://][user@]host[:port]``."""
    user, _, rest = text.strip().removeprefix("ssh://").rpartition("@")
    host, port = rest, ""
    if rest.startswith("["):
        host, _, port = rest[1:].partition("]")
        port = port.removeprefix(":")
    elif rest.count(":") == 1:
        host, _, port = rest.partition(":")
    return user or None, host, int(port) if port.isdigit() else None


def ssh_program() -> str | None:
    """The OpenSSH client, if there is one."""
    return shutil.which("ssh")


def ssh_argv(user: str | None, port: int | None) -> list[str]:
    """The words before the host name for OpenSSH to see the same config and login as we do."""
    argv = [ssh_program() or "ssh"]
    if not is_home_of_passwd():
        config = os.path.expanduser("~/.ssh/config")
        argv += ["-F", config if os.path.isfile(config) else "none"]
    argv += ["-l", user] if user else []
    return argv + (["-p", str(port)] if port else [])


def is_home_of_passwd() -> bool:
    """Whether $HOME is the folder in which OpenSSH looks: that in /etc/passwd."""
    return os.path.expanduser("~") == _passwd_home()


def _passwd_home() -> str:
    return pwd.getpwuid(os.getuid()).pw_dir


def _resolve(config: SshConfig, name: str, user: str | None, port: int | None) -> Hop:
    key, now = (name, user, port), time.monotonic()
    plain = config.is_plain or ssh_program() is None
    if key not in config.resolved or (not plain and now - config.resolved[key][0] > _VALID):
        try:
            options = _by_paramiko(config, name) if plain else _by_openssh(name, user, port)
        except (paramiko.SSHException, OSError, ValueError, subprocess.SubprocessError) as error:
            raise TransportError(f"~/.ssh/config cannot be used: {error}", host=name) from error
        config.resolved[key] = now, make_hop(name, user, port, options)
    return config.resolved[key][1]


def _by_paramiko(config: SshConfig, name: str) -> dict[str, list[str]]:
    found = config.parsed.lookup(name)
    return {key: [value] if isinstance(value, str) else list(value) for key, value in found.items() if value}


def _by_openssh(name: str, user: str | None, port: int | None) -> dict[str, list[str]]:
    """What ``ssh -G`` prints; raises ``OSError`` with ssh's words for a config that it refuses."""
    done = subprocess.run(
        [*ssh_argv(user, port), "-T", "-G", "--", name],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_RESOLVE_TIMEOUT,
    )
    if done.returncode:
        raise OSError("; ".join(done.stderr.strip().splitlines()) or f"ssh -G exited {done.returncode}")
    options: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        options.setdefault(key.lower(), []).append(value)
    return _with_own_home(options)


def _with_own_home(options: dict[str, list[str]]) -> dict[str, list[str]]:
    """ssh expands ``~`` to the home in /etc/passwd; ours is $HOME."""
    theirs, ours = _passwd_home(), os.path.expanduser("~")
    for key in ("userknownhostsfile", "identityfile", "certificatefile") if theirs != ours else ():
        values = [" ".join(_rehomed(word, theirs, ours) for word in value.split()) for value in options.get(key, [])]
        options.update({key: values} if values else {})
    return options


def _rehomed(path: str, theirs: str, ours: str) -> str:
    return f"{ours}/.ssh/" + path.removeprefix(f"{theirs}/.ssh/") if path.startswith(f"{theirs}/.ssh/") else path


def _included(path: Path, depth: int, stamps: dict[Path, tuple[int, int] | None]) -> Iterator[str]:
    """Lines of ``path``; after an included file the block it stood in goes on."""
    stamps[path] = _stamp(path)
    if not path.is_file() or depth > _MAX_INCLUDES:
        return
    block = "Host *"
    for line in path.read_text(errors="replace").splitlines():
        key, value = _key_and_value(line)
        if key != "include":
            block = line if key in ("host", "match") else block
            yield line
            continue
        for pattern in shlex.split(value):
            place = str(_include_base(path) / Path(pattern).expanduser())
            stamps[Path(place).parent] = _stamp(Path(place).parent)  # a new file there is noticed
            for found in sorted(glob.glob(place)):
                yield from _included(Path(found), depth + 1, stamps)
        yield block


def _include_base(path: Path) -> Path:
    return path.parent if path.is_relative_to("/etc/ssh") else Path("~/.ssh").expanduser()


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _key_and_value(line: str) -> tuple[str, str]:
    """Keyword in lower case and the rest; ("", "") for a comment."""
    words = line.strip().replace("=", " ", 1).split(None, 1)
    if not words or words[0].startswith("#"):
        return "", ""
    return words[0].lower(), words[1].strip() if len(words) > 1 else ""


def _is_plain(key: str, value: str) -> bool:
    if key == "proxycommand":
        return "#" not in value and '"' not in value
    if key in ("", "host") or key in _READ:
        return not set(value) & set("\"'#%$\\")
    return key in _IDLE
