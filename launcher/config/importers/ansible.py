"""Converts the hosts of an Ansible inventory, an INI or YAML file with groups and variables, to nodes."""

from __future__ import annotations

import itertools
import math
import re
import shlex
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from launcher.config.importers.base import Flags, Foreign, Source, number, section, text
from launcher.errors import ConfigError, Problem
from launcher.hostlist import MOST
from launcher.yaml_tree import Origin, Scalar, Section, Tree, YamlSequence, describe, read_tree

ALL = "all"

_IMPLICIT = (ALL, "ungrouped")  #: groups that every inventory has

#: Variable of a host → key of a node.
KEYS: Mapping[str, str] = {
    "ansible_host": "host", "ansible_ssh_host": "host",
    "ansible_port": "port", "ansible_ssh_port": "port",
    "ansible_user": "user", "ansible_ssh_user": "user",
    "ansible_ssh_private_key_file": "key", "ansible_private_key_file": "key",
    "ansible_python_interpreter": "python",
}  # fmt: skip

_PASSWORDS = ("ansible_password", "ansible_ssh_pass", "ansible_ssh_password")

_JUMPS = ("ansible_ssh_common_args", "ansible_ssh_extra_args")

_RANGE = re.compile(r"\[(\w{1,18}):(\w{1,18})(?::(\d{1,18}))?\]")

_MAX_DEPTH = 32  # of nested groups

_MAX_ADDED = 16 * MOST  # hosts added to a group, including repeated ones

Variables = dict[str, Scalar]


@dataclass
class Group:
    """A group of an inventory, merged from all sections of the file that describe it."""

    hosts: dict[str, Variables] = field(default_factory=dict)  #: host → its variables, in the order of the file
    origins: dict[str, Origin] = field(default_factory=dict)  #: host → its first line
    children: dict[str, Origin] = field(default_factory=dict)
    variables: Variables = field(default_factory=dict)

    added: int = 0  #: number of ``add`` calls

    def add(self, host: str, origin: Origin, variables: Variables) -> None:
        """Add a host, or further variables of a known host. Raises ConfigError if the group has too many hosts."""
        self.added += 1
        if self.added > _MAX_ADDED or (host not in self.hosts and len(self.hosts) >= MOST):
            raise ConfigError([Problem(origin.file, origin.line, f"a group may have at most {MOST:,} hosts")])
        self.origins.setdefault(host, origin)
        self.hosts.setdefault(host, {}).update(variables)


Groups = dict[str, Group]


def inventory(source: Source, groups: Groups, flags: Flags, kind: str) -> Foreign:
    """Convert the hosts of the selected group to nodes. Raises ConfigError for an empty group or invalid variables."""
    _children_exist(source, groups)
    chosen = _choose(source, groups, flags.group)
    hosts = list(dict.fromkeys(host for name in chosen for host in _hosts(groups, name)))
    if not hosts:
        raise source.error(1, f"group {', '.join(chosen)} has no hosts")
    problems: list[Problem] = []
    notes: dict[str, None] = {}
    inner_last = _inner_last(groups)
    nodes = [_node(source, groups, _variables(groups, inner_last, host), host, problems, notes) for host in hosts]
    if problems:
        raise ConfigError(problems)
    folder = source.path.absolute().parent
    ignored = [name for name in ("group_vars", "host_vars") if (folder / name).is_dir()]
    if ignored:
        notes[f"{' and '.join(ignored)} in the inventory's folder are not read"] = None
    at = source.origin(1)
    words = f"{kind}, group {', '.join(chosen)}"
    return Foreign(words, section(at, {"nodes": YamlSequence(nodes[0].origin, tuple(nodes))}), tuple(notes))


def expand(source: Source, line: int, name: str) -> list[str]:
    """Expand ``node[01:03]`` and ``node[a:c]`` as Ansible does, including both ends.

    Raises ConfigError for an invalid range, or if there are too many hosts.
    """
    choices, end = [], 0
    for match in _RANGE.finditer(name):
        choices += [[name[end : match.start()]], _range_values(match)]
        end = match.end()
    choices.append([name[end:]])
    if not all(choices):
        raise source.error(line, f"`{name}`: expected a range such as node[01:16] or node[a:f]")
    if math.prod(map(len, choices)) > MOST:
        raise source.error(line, f"`{name}` expands to too many hosts; a range may expand to {MOST:,} at most")
    return ["".join(words) for words in itertools.product(*choices)]


def _range_values(match: re.Match[str]) -> Sequence[str]:
    """Return the values of a range such as ``[01:03]``; () if the range is invalid.

    A longer range is cut to ``MOST + 1`` values, so that ``expand`` can refuse it.
    """
    low, high, step = match[1], match[2], int(match[3] or 1) or 1
    if low.isdecimal() and high.isdecimal():
        width = len(low) if low.startswith("0") else 0
        numbers = range(int(low), int(high) + 1, step)
        return [str(n).zfill(width) for n in numbers[: MOST + 1]]
    letters = string.ascii_letters
    if len(low) == len(high) == 1 and low in letters and high in letters:
        return letters[letters.index(low) : letters.index(high) + 1 : step]
    return ()


def _choose(source: Source, groups: Groups, wanted: str | None) -> list[str]:
    """Return the groups to import: those of ``--group``, else the only top-level group; ``all`` if no group has hosts.

    Raises ConfigError if a group is unknown, or if the hosts are in several groups and ``--group`` is missing.
    """
    named = [name for name in groups if name not in _IMPLICIT]
    if wanted is not None:
        names = [name.strip() for name in wanted.split(",") if name.strip()]
        if unknown := [name for name in names if name not in groups and name != ALL]:
            raise source.error(1, f"no group `{unknown[0]}` (--group); the groups are {', '.join(named) or 'none'}")
        return names
    inside = {child for name in named for child in groups[name].children}
    top = [name for name in named if name not in inside and any(_hosts(groups, name))]
    loose = any(groups[name].hosts for name in _IMPLICIT if name in groups)
    if len(top) == 1 and not loose:
        return top
    if not top:
        return [ALL]
    raise source.error(
        1, f"several groups ({', '.join(top)}); select one, for instance --group {top[0]}, or --group all"
    )


def _hosts(groups: Groups, name: str) -> Iterator[str]:
    """Yield the hosts of a group and of its children; for `all`, the hosts of every group."""
    seen, waiting = set[str](), [name]
    while waiting:
        name = waiting.pop()
        if name == ALL:
            yield from (host for group in groups.values() for host in group.hosts)
        elif name not in seen:
            yield from groups[name].hosts
            waiting += reversed(groups[name].children)
        seen.add(name)


def _children_exist(source: Source, groups: Groups) -> None:
    for name, group in groups.items():
        for child, origin in group.children.items():
            if child not in groups:
                raise source.error(origin.line, f"{name}: no group `{child}`")


def _node(
    source: Source, groups: Groups, variables: Variables, host: str, problems: list[Problem], notes: dict[str, None]
) -> Section:
    """Convert a host and its variables to a node; append errors to ``problems`` and hints to ``notes``."""
    origin = next(group.origins[host] for group in groups.values() if host in group.origins)
    items: dict[str, Tree] = {"host": text(origin, host)}
    for name, value in variables.items():
        if "{{" in value.text:
            if name in KEYS:
                problems.append(
                    Problem(source.name, value.origin.line, f"{name} is a template; write the value instead")
                )
        elif name in KEYS and value.text:
            if not (name == "ansible_python_interpreter" and value.text.startswith("auto")):
                items[KEYS[name]] = number(value.origin, value.text) if KEYS[name] == "port" else value
        elif name in _PASSWORDS:
            items["password"] = Scalar(value.origin, "true", "bool")
            notes[f"{name} is not imported; gnnfleet asks for the password at start"] = None
        elif name == "ansible_connection" and value.text not in ("ssh", "smart", "paramiko", "paramiko_ssh"):
            problems.append(
                Problem(source.name, value.origin.line, f"ansible_connection={value.text}: gnnfleet supports only ssh")
            )
        elif name in _JUMPS:
            notes[f"{name} is not imported; put a ProxyJump into ~/.ssh/config, which gnnfleet reads"] = None
    if host == "localhost" and "host" not in {KEYS.get(name) for name in variables}:
        notes["localhost is reached by ssh; add --set transport=local to run nodes without SSH"] = None
    return section(origin, items)


def _inner_last(groups: Groups) -> list[tuple[Group, set[str]]]:
    """Return all groups except `all` with their hosts, in the order in which Ansible applies group variables."""
    depths = dict.fromkeys(groups, 1)
    for _ in range(_MAX_DEPTH):
        before = dict(depths)
        for name, group in groups.items():
            for child in group.children:
                depths[child] = max(depths[child], depths[name] + 1)
        if depths == before:
            break
    names = sorted(groups.keys() - {ALL}, key=lambda name: (depths[name], name))
    return [(groups[name], set(_hosts(groups, name))) for name in names]


def _variables(groups: Groups, inner_last: Sequence[tuple[Group, set[str]]], host: str) -> Variables:
    # Inner groups override outer ones, and the host's own variables override all groups.
    found = dict(groups[ALL].variables) if ALL in groups else {}
    for group, hosts in inner_last:
        if host in hosts:
            found |= group.variables
    for group in groups.values():
        found |= group.hosts.get(host, {})
    return found


_HEADER = re.compile(r"\[([^\[\]:\s]+)(?::(vars|children|hosts))?\]")


def read_ini(source: Source) -> Groups:
    """Parse an INI inventory. Raises ConfigError at the first invalid line."""
    groups: Groups = {}
    group, what = "ungrouped", "hosts"
    for line, words in source.lines(comment="#;"):
        if header := _HEADER.fullmatch(words):
            group, what = header[1], header[2] or "hosts"
            groups.setdefault(group, Group())
        elif what == "children":
            groups[group].children[words] = source.origin(line)
        elif what == "vars":
            name, equals, value = (word.strip() for word in words.partition("="))
            if not equals:
                raise source.error(line, f"expected name=value in [{group}:vars], found `{words}`")
            groups[group].variables[name] = text(source.origin(line), _unquoted(value))
        else:
            _host(source, line, words, groups.setdefault(group, Group()))
    return groups


def _host(source: Source, line: int, words: str, group: Group) -> None:
    try:
        pattern, *pairs = shlex.split(words)
    except ValueError as error:
        raise source.error(line, f"`{words}`: {str(error).lower()}") from None
    origin, variables = source.origin(line), {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise source.error(line, f"expected name=value after the host, found `{pair}`")
        variables[name] = text(origin, value)
    name, port = _port(pattern, origin)
    for host in expand(source, line, name):
        group.add(host, origin, {**port, **variables})


def _port(pattern: str, origin: Origin) -> tuple[str, Variables]:
    """Split ``host:2222`` into the host and the variable ansible_port. A range ``[01:03]`` contains no port."""
    match = re.fullmatch(r"([^:\[]*(?:\[[^\]]*\][^:\[]*)*):(\d+)", pattern)
    return (match[1], {"ansible_port": text(origin, match[2])}) if match else (pattern, {})


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def read_yaml(source: Source) -> Groups:
    """Parse a YAML inventory. Raises ConfigError for an invalid file."""
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
            raise source.error(line, f"{name}: expected hosts, vars or children, found `{key}`")
    hosts = _section(source, keys.items.get("hosts"), at, f"{name}.hosts")
    for pattern, variables in hosts.items.items():
        origin = hosts.keys[pattern]
        for host in expand(source, origin.line, pattern):
            group.add(host, origin, _yaml_variables(source, variables, origin, pattern))
    group.variables |= _yaml_variables(source, keys.items.get("vars"), at, f"{name}.vars")
    children = _section(source, keys.items.get("children"), at, f"{name}.children")
    for child, below in children.items.items():
        if name != ALL:
            group.children[child] = children.keys[child]
        _group(source, groups, child, below, children.keys[child])


def _yaml_variables(source: Source, tree: Tree | None, at: Origin, name: str) -> Variables:
    items = _section(source, tree, at, name).items
    return {key: value for key, value in items.items() if isinstance(value, Scalar)}


def _section(source: Source, tree: Tree | None, at: Origin, name: str) -> Section:
    if tree is None or isinstance(tree, Scalar) and tree.empty:
        return Section(at, {})
    if not isinstance(tree, Section):
        raise source.error(tree.origin.line, f"{name}: expected a section of keys, found {describe(tree)}")
    return tree
