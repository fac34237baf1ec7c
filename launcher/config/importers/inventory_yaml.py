"""Ansible's YAML inventories: groups with ``hosts``, ``vars`` and ``children``."""

from __future__ import annotations

from launcher.config.importers.ansible import ALL, Group, Groups, Variables, expand
from launcher.config.importers.base import Source
from launcher.config.yaml_tree import Origin, Scalar, Section, Tree, describe, read_tree
from launcher.errors import ConfigError, Problem


def read_yaml(source: Source) -> Groups:
    """Raises ConfigError."""
    problems: list[Problem] = []
    tree = read_tree(source.text, source.name, source.path.absolute().parent, problems.append)
    if problems or not isinstance(tree, Section):
        raise ConfigError(problems)
    groups: Groups = {}
    for name, group in tree.items.items():
        _group(source, groups, name, group, tree.keys[name])
    return groups


def _group(source: Source, groups: Groups, name: str, tree: Tree, at: Origin) -> None:
    group = groups.setdefault(name, Group())
    keys = _section(source, tree, at, name)
    for key in keys.items:
        if key not in ("hosts", "vars", "children"):
            line = keys.keys[key].line
            raise source.wrong(line, f"{name}: expected hosts, vars or children, found `{key}`")
    hosts = _section(source, keys.items.get("hosts"), at, f"{name}.hosts")
    for pattern, variables in hosts.items.items():
        origin = hosts.keys[pattern]
        for host in expand(source, origin.line, pattern):
            group.add(host, origin, _variables(source, variables, origin, pattern))
    group.variables |= _variables(source, keys.items.get("vars"), at, f"{name}.vars")
    children = _section(source, keys.items.get("children"), at, f"{name}.children")
    for child, below in children.items.items():
        if name != ALL:
            group.children[child] = children.keys[child]
        _group(source, groups, child, below, children.keys[child])


def _variables(source: Source, tree: Tree | None, at: Origin, name: str) -> Variables:
    """Plain values only; lists and sections are no concern of a launcher."""
    items = _section(source, tree, at, name).items
    return {key: value for key, value in items.items() if isinstance(value, Scalar)}


def _section(source: Source, tree: Tree | None, at: Origin, name: str) -> Section:
    if tree is None or isinstance(tree, Scalar) and tree.empty:
        return Section(at, {})
    if not isinstance(tree, Section):
        raise source.wrong(tree.origin.line, f"{name}: expected a section of keys, found {describe(tree)}")
    return tree
