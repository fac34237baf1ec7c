"""The request of the user to ``gnnfleet init``, and the config used to connect to the hosts."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from launcher.config.consistency import LOCAL_HOSTS, check_nodes
from launcher.config.loader import resolve_paths
from launcher.config.resolve import ResolvedConfig, resolve_run
from launcher.config.validation import Reader
from launcher.errors import ConfigError, Problem, UsageError
from launcher.files import written_path
from launcher.hostlist import RangeError, expand, is_range, split_list
from launcher.yaml_tree import Section, read_tree

_OF_NODE = re.compile(r"(?:nodes\.\d+|defaults)\.(\w+)")


@dataclass(frozen=True)
class InitRequest:
    """Flags and answers of the user. Paths on this machine are absolute or begin with ``~/``."""

    hosts: tuple[str, ...]  #: host, user@host or user@host:port, with ranges expanded
    user: str | None = None
    key: str | None = None
    password: bool = False
    venv: str | None = None
    conda: str | None = None
    python: str | None = None
    dataset: str = ""
    source: str | None = None
    shared: str | None = None  #: folder shared by all hosts; parts are read there instead of sent
    host_keys: str | None = None

    @property
    def local(self) -> bool:
        return bool(self.hosts) and all(host in LOCAL_HOSTS for host in self.hosts)

    @property
    def environment(self) -> dict[str, str]:
        """The one of ``venv``, ``conda`` and ``python`` that the user gave, as {name: value}; {} if none."""
        given = {"venv": self.venv, "conda": self.conda, "python": self.python}
        return {name: text for name, text in given.items() if text}

    def with_environment(self, key: str, path: str) -> InitRequest:
        """Return the request with ``key`` set to ``path``, and the other environment keys unset.

        ``key``: ``venv``, ``conda`` or ``python``.
        """
        chosen = {"venv": None, "conda": None, "python": None, key: path}
        return replace(self, venv=chosen["venv"], conda=chosen["conda"], python=chosen["python"])

    @property
    def login(self) -> dict[str, Any]:
        """The values that the user gave for the SSH login, by config key: ``user``, ``key`` and ``password``."""
        given = {"user": self.user, "key": self.key, "password": self.password}
        return {name: value for name, value in given.items() if value}


def split_hosts(texts: Sequence[str]) -> tuple[str, ...]:
    """Split lists and expand ranges: ``["a,b", "node[01-02]"]`` gives four hosts. Raises UsageError."""
    hosts: list[str] = []
    for text in (part for words in texts for word in words.split() for part in split_list(word)):
        try:
            hosts += expand(text) if is_range(text) else [text]
        except RangeError as error:
            raise UsageError(f"hosts: {error}") from None
    return tuple(hosts)


_TABLES = (".csv", ".tsv", ".txt", ".parquet", ".pq", ".csv.gz", ".tsv.gz", ".csv.zst", ".tsv.zst")


def dataset_of(answer: str) -> tuple[str, str | None]:
    """Return ``(dataset, source)`` for a dataset name or a path. Raises UsageError if the path does not exist."""
    path = Path(os.path.expanduser(answer))
    if path.suffix in (".pt", ".npz") or answer.startswith(("/", "./", "../", "~/")) or os.path.isdir(path):
        found = existing(answer)
        return "tables" if _has_tables(found) else "file", written_path(found)
    return answer, None


def _has_tables(folder: Path) -> bool:
    # NumPy files directly in the folder mean that the trainer reads these.
    if not folder.is_dir() or any(path.suffix in (".npy", ".npz") for path in folder.iterdir()):
        return False
    readme = ("readme", "license")
    return any(
        name.lower().endswith(_TABLES) and not (name.lower().startswith(readme) and name.lower().endswith(".txt"))
        for _, _, names in os.walk(folder)
        for name in names
    )


def existing(text: str) -> Path:
    """Return ``text`` as an absolute path. Raises UsageError if it does not exist on this machine."""
    path = Path(os.path.expanduser(text)).absolute()
    if not os.path.exists(path):
        raise UsageError(f"no file or folder {text} on this machine; the graph is read here, then sent to the hosts")
    return path


def config_of(request: InitRequest, connect_timeout: float = 10.0) -> ResolvedConfig:
    """Return the config for connecting to the hosts. Raises ConfigError, whose messages name flags, not keys."""
    plain = {
        "nodes": list(request.hosts),
        "transport": "local" if request.local else "ssh",
        "defaults": {**request.login, **request.environment},
        "data": {"dataset": request.dataset or "synthetic"},
        "run": {"connect_timeout": connect_timeout},
        **({"host_keys": request.host_keys} if request.host_keys else {}),
    }
    problems: list[Problem] = []
    tree = read_tree(yaml.safe_dump(plain), "init", Path.cwd(), problems.append)
    assert isinstance(tree, Section)
    reader = Reader(problems.append)
    config = resolve_paths(reader.cluster(tree), reader)
    check_nodes(config, reader)
    if problems:
        raise in_flags(problems)
    return resolve_run(config)


def in_flags(problems: Sequence[Problem]) -> ConfigError:
    """Return a ConfigError whose messages name flags of ``gnnfleet init`` in place of config keys.

    For example, ``nodes.0.venv`` becomes ``--venv``.
    """

    def flag(found: re.Match[str]) -> str:
        return "host" if found[1] == "host" else f"--{found[1].replace('_', '-')}"

    messages = dict.fromkeys(_OF_NODE.sub(flag, problem.message) for problem in problems)
    return ConfigError([Problem("gnnfleet init", 0, message) for message in messages])
