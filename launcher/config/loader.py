"""cluster.yml → ``ClusterConfig``, driven by the dataclasses in ``launcher.config.schema``.

All mistakes of a file are found in one pass and raised as one ``ConfigError``, each with file and line.
Paths written in a file are relative to that file, those in a ``--set`` to the current directory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from launcher.config.config_paths import resolve_paths
from launcher.config.consistency import check, check_nodes
from launcher.config.schema import ClusterConfig
from launcher.config.validation import FLOAT, Reader
from launcher.config.yaml_overrides import apply_override
from launcher.config.yaml_tree import Origin, Report, Scalar, Section, read_tree
from launcher.errors import ConfigError, Problem
from launcher.hostlist import fold

if TYPE_CHECKING:
    from launcher.config.importers.base import Foreign

Choose = Callable[[ClusterConfig], ClusterConfig]

_NODE = re.compile(r"\bnodes\.\d+")


def load_config(
    path: Path,
    overrides: Sequence[str] = (),
    choose: Choose = lambda config: config,
    foreign: Foreign | None = None,
) -> ClusterConfig:
    """Read, override, choose (nodes, say), check. Raises ConfigError with every mistake found.

    Nodes are checked all, what they add up to only as chosen. Files of other launchers are read as ours;
    ``foreign`` is such a file that has been read already.
    """
    problems: list[Problem] = []
    tree = overridden(path, overrides, foreign, problems.append)
    reader = Reader(problems.append)
    config = resolve_paths(reader.cluster(tree), reader)
    check_nodes(config, reader)
    chosen = config if problems else choose(config)
    check(chosen, reader)
    if problems:
        raise ConfigError(sorted(_folded(problems), key=lambda problem: (problem.line == 0, problem.line)))
    return chosen


def overridden(path: Path, overrides: Sequence[str], foreign: Foreign | None, report: Report) -> Section:
    """The file as a tree, with the overrides put in."""
    from launcher.config.importers.detect import graph_is_named, read_foreign

    foreign = foreign or read_foreign(path)
    tree = foreign.tree if foreign else _read_file(path, report)
    for override in overrides:
        tree = apply_override(tree, override, report)
    if foreign:
        graph_is_named(foreign, tree, path)
    return tree


def world_size(tree: Section, choose: Choose) -> int:
    """Training processes of the nodes chosen, as far as they can be read."""
    reader = Reader(lambda problem: None)
    nodes = {name: tree.items[name] for name in ("nodes", "defaults", "transport") if name in tree.items}
    config = reader.cluster(Section(tree.origin, nodes, tree.keys))
    return (choose(config) if not reader.bad - {("data",)} else config).world_size


def to_yaml(config: ClusterConfig) -> str:
    """``config`` as YAML that ``load_config`` reads back to an equal value."""
    return yaml.dump(_plain(config), Dumper=Dumper, sort_keys=False, allow_unicode=True)


def _folded(problems: Sequence[Problem]) -> Iterator[Problem]:
    """One of those that say the same of every node of one line, as a range or `defaults` makes them."""
    alike: dict[Problem, list[tuple[Problem, str]]] = {}
    for problem in problems:
        node = _NODE.search(problem.message)
        anyone = replace(problem, message=_NODE.sub("nodes.*", problem.message, count=1))
        alike.setdefault(anyone, []).append((problem, node[0] if node else ""))
    for (first, _), *others in alike.values():
        more = f" (and so for {fold(name for _, name in others)})" if others and others[0][1] else ""
        yield replace(first, message=first.message + more)


class Dumper(yaml.SafeDumper):
    """Quotes texts such as 1e-3, which YAML 1.1 leaves bare and ``load_config`` reads as numbers."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, "'" if FLOAT.fullmatch(text) else None)


Dumper.add_representer(str, _represent_text)


def _read_file(path: Path, report: Report) -> Section:
    """The file's top level; mistakes that leave nothing to read end here."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError([Problem(str(path), 1, f"not UTF-8 text (byte {error.start})")]) from None
    except OSError as error:
        raise ConfigError([Problem(str(path), 0, f"cannot be read: {error.strerror}")]) from None
    found: list[Problem] = []
    tree = read_tree(text, str(path), path.absolute().parent, found.append)
    if tree is None or isinstance(tree, Scalar) and tree.empty:
        raise ConfigError(found or [Problem(str(path), 1, "the file is empty; start from templates/cluster.yml")])
    if not isinstance(tree, Section):
        raise ConfigError([Problem(str(path), tree.origin.line, "expected keys such as `nodes:` and `data:`")])
    for problem in found:
        report(problem)
    return Section(Origin(str(path), 1, tree.origin.folder), tree.items, tree.keys)


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        items = ((field.name, getattr(value, field.name)) for field in fields(value))
        return {name: _plain(item) for name, item in items if item is not None}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return dict(value) if isinstance(value, dict) else value
