"""Ansible inventories: groups of hosts with variables, in INI or YAML, as nodes."""

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

_OF_ALL = (ALL, "ungrouped")

#: Variable of a host → key of a node. Later names are Ansible's older ones.
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

_DEEPEST = 32  # groups around a group

_MOST_ADDED = 16 * MOST  # hosts of a group, those that it is given again counted again

Variables = dict[str, Scalar]


@dataclass
class Group:
    """One group as written, its parts perhaps spread over the file."""

    hosts: dict[str, Variables] = field(default_factory=dict)  #: in order
    origins: dict[str, Origin] = field(default_factory=dict)  #: of hosts
    children: dict[str, Origin] = field(default_factory=dict)
    variables: Variables = field(default_factory=dict)

    added: int = 0  #: hosts, with repetitions

    def add(self, host: str, origin: Origin, variables: Variables) -> None:
        """One more host, or more of one. Raises ConfigError for more than any cluster has."""
        self.added += 1
        if self.added > _MOST_ADDED or len(self.hosts) > MOST:
            raise ConfigError([Problem(origin.file, origin.line, f"a group may have {MOST:,} hosts at most")])
        self.origins.setdefault(host, origin)
        self.hosts.setdefault(host, {}).update(variables)


Groups = dict[str, Group]


def inventory(source: Source, groups: Groups, flags: Flags, kind: str) -> Foreign:
    """The hosts of the chosen group as nodes. Raises ConfigError."""
    _children_exist(source, groups)
    chosen = _choose(source, groups, flags.group)
    hosts = list(dict.fromkeys(host for name in chosen for host in _hosts(groups, name)))
    if not hosts:
        raise source.wrong(1, f"group {', '.join(chosen)} has no hosts")
    problems: list[Problem] = []
    notes: dict[str, None] = {}
    inner_last = _inner_last(groups)
    nodes = [_node(source, groups, _variables(groups, inner_last, host), host, problems, notes) for host in hosts]
    if problems:
        raise ConfigError(problems)
    folder = source.path.absolute().parent
    beside = [name for name in ("group_vars", "host_vars") if (folder / name).is_dir()]
    if beside:
        notes[f"{' and '.join(beside)} beside it are not read"] = None
    at = source.at(1)
    words = f"{kind}, group {', '.join(chosen)}"
    return Foreign(words, section(at, {"nodes": YamlSequence(nodes[0].origin, tuple(nodes))}), tuple(notes))


def expand(source: Source, line: int, name: str) -> list[str]:
    """``node[01:03]`` and ``node[a:c]`` as Ansible counts them, both ends included. Raises ConfigError."""
    choices, end = [], 0
    for match in _RANGE.finditer(name):
        choices += [[name[end : match.start()]], _middle(match)]
        end = match.end()
    choices.append([name[end:]])
    if not all(choices):
        raise source.wrong(line, f"`{name}`: expected a range such as node[01:16] or node[a:f]")
    if math.prod(map(len, choices)) > MOST:
        raise source.wrong(line, f"`{name}` stands for too many hosts; a range may stand for {MOST:,} at most")
    return ["".join(words) for words in itertools.product(*choices)]


def _middle(match: re.Match[str]) -> Sequence[str]:
    """What one range stands for, one more than ``MOST`` at most; nothing where it is none."""
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
    """The groups asked for; else the only one that is in no other, all hosts where there are no groups."""
    named = [name for name in groups if name not in _OF_ALL]
    if wanted is not None:
        names = [name.strip() for name in wanted.split(",") if name.strip()]
        if unknown := [name for name in names if name not in groups and name != ALL]:
            raise source.wrong(1, f"there is no group `{unknown[0]}` (--group); there are {', '.join(named) or 'none'}")
        return names
    inside = {child for name in named for child in groups[name].children}
    top = [name for name in named if name not in inside and any(_hosts(groups, name))]
    loose = any(groups[name].hosts for name in _OF_ALL if name in groups)
    if len(top) == 1 and not loose:
        return top
    if not top:
        return [ALL]
    raise source.wrong(1, f"it has several groups ({', '.join(top)}); choose by --group {top[0]}, or --group all")


def _hosts(groups: Groups, name: str) -> Iterator[str]:
    """A group's hosts and those of its children; `all` has everybody's."""
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
                raise source.wrong(origin.line, f"{name}: there is no group `{child}`")


def _node(
    source: Source, groups: Groups, variables: Variables, host: str, problems: list[Problem], notes: dict[str, None]
) -> Section:
    """One host with the variables that hold for it."""
    origin = next(group.origins[host] for group in groups.values() if host in group.origins)
    items: dict[str, Tree] = {"host": text(origin, host)}
    for name, value in variables.items():
        if "{{" in value.text:
            if name in KEYS:
                problems.append(Problem(source.name, value.origin.line, f"{name} is a template; write its value"))
        elif name in KEYS and value.text:
            if not (name == "ansible_python_interpreter" and value.text.startswith("auto")):
                items[KEYS[name]] = number(value.origin, value.text) if KEYS[name] == "port" else value
        elif name in _PASSWORDS:
            items["password"] = Scalar(value.origin, "true", "bool")
            notes[f"{name} is not taken over; the password is asked for at start"] = None
        elif name == "ansible_connection" and value.text not in ("ssh", "smart", "paramiko", "paramiko_ssh"):
            problems.append(
                Problem(source.name, value.origin.line, f"ansible_connection={value.text}: nodes are reached by ssh")
            )
        elif name in _JUMPS:
            notes[f"{name} has no counterpart; a ProxyJump belongs in ~/.ssh/config, which is read"] = None
    if host == "localhost" and "host" not in {KEYS.get(name) for name in variables}:
        notes["localhost is reached by ssh; --set transport=local runs nodes on this machine"] = None
    return section(origin, items)


def _inner_last(groups: Groups) -> list[tuple[Group, set[str]]]:
    """The groups but `all`, each with its hosts: outer groups before inner ones, those of one depth by name."""
    depths = dict.fromkeys(groups, 1)
    for _ in range(_DEEPEST):
        before = dict(depths)
        for name, group in groups.items():
            for child in group.children:
                depths[child] = max(depths[child], depths[name] + 1)
        if depths == before:
            break
    names = sorted(groups.keys() - {ALL}, key=lambda name: (depths[name], name))
    return [(groups[name], set(_hosts(groups, name))) for name in names]


def _variables(groups: Groups, inner_last: Sequence[tuple[Group, set[str]]], host: str) -> Variables:
    """Those of `all`, of outer groups, of inner groups, of the host; the last one holds."""
    found = dict(groups[ALL].variables) if ALL in groups else {}
    for group, hosts in inner_last:
        if host in hosts:
            found |= group.variables
    for group in groups.values():
        found |= group.hosts.get(host, {})
    return found


_HEADER = re.compile(r"\[([^\[\]:\s]+)(?::(vars|children|hosts))?\]")


def read_ini(source: Source) -> Groups:
    """Raises ConfigError at the first line that is none of an inventory's."""
    groups: Groups = {}
    group, what = "ungrouped", "hosts"
    for line, words in source.lines(comment="#;"):
        if header := _HEADER.fullmatch(words):
            group, what = header[1], header[2] or "hosts"
            groups.setdefault(group, Group())
        elif what == "children":
            groups[group].children[words] = source.at(line)
        elif what == "vars":
            name, equals, value = (word.strip() for word in words.partition("="))
            if not equals:
                raise source.wrong(line, f"expected name=value in [{group}:vars], found `{words}`")
            groups[group].variables[name] = text(source.at(line), _unquoted(value))
        else:
            _host(source, line, words, groups.setdefault(group, Group()))
    return groups


def _host(source: Source, line: int, words: str, group: Group) -> None:
    try:
        pattern, *pairs = shlex.split(words)
    except ValueError as error:
        raise source.wrong(line, f"`{words}`: {str(error).lower()}") from None
    origin, variables = source.at(line), {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise source.wrong(line, f"expected name=value after the host, found `{pair}`")
        variables[name] = text(origin, value)
    name, port = _port(pattern, origin)
    for host in expand(source, line, name):
        group.add(host, origin, {**port, **variables})


def _port(pattern: str, origin: Origin) -> tuple[str, Variables]:
    """``host:2222``, but not ``node[01:03]``."""
    match = re.fullmatch(r"([^:\[]*(?:\[[^\]]*\][^:\[]*)*):(\d+)", pattern)
    return (match[1], {"ansible_port": text(origin, match[2])}) if match else (pattern, {})


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


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
            group.add(host, origin, _yaml_variables(source, variables, origin, pattern))
    group.variables |= _yaml_variables(source, keys.items.get("vars"), at, f"{name}.vars")
    children = _section(source, keys.items.get("children"), at, f"{name}.children")
    for child, below in children.items.items():
        if name != ALL:
            group.children[child] = children.keys[child]
        _group(source, groups, child, below, children.keys[child])


def _yaml_variables(source: Source, tree: Tree | None, at: Origin, name: str) -> Variables:
    """Plain values only; lists and sections are no concern of a launcher."""
    items = _section(source, tree, at, name).items
    return {key: value for key, value in items.items() if isinstance(value, Scalar)}


def _section(source: Source, tree: Tree | None, at: Origin, name: str) -> Section:
    if tree is None or isinstance(tree, Scalar) and tree.empty:
        return Section(at, {})
    if not isinstance(tree, Section):
        raise source.wrong(tree.origin.line, f"{name}: expected a section of keys, found {describe(tree)}")
    return tree
