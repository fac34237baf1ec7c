"""Ansible's INI inventories: ``[gpu]``, ``[gpu:vars]``, ``[cluster:children]``, hosts with ``name=value``."""

from __future__ import annotations

import re
import shlex

from launcher.config.importers.ansible import Group, Groups, Variables, expand
from launcher.config.importers.base import Source, text
from launcher.config.yaml_tree import Origin

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
    match = re.fullmatch(r"([^:]*(?:\[[^\]]*\][^:]*)*):(\d+)", pattern)
    return (match[1], {"ansible_port": text(origin, match[2])}) if match else (pattern, {})


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
