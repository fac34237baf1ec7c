"""Renders a commented cluster.yml from a config that was imported from a file of another launcher."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import yaml

from launcher.config.importers.base import Foreign
from launcher.text import OWN_VENV
from launcher.yaml_tree import Dumper, Origin, Scalar, Section, Tree, YamlSequence

_LOCAL_PATHS = {"key", "source", "folder", "resume"}  #: keys whose values are paths on this machine

_ENVIRONMENT = {"python", "venv", "conda"}

_ORDER = ("name", "transport", "defaults", "nodes", "data", "train", "run")

_NUMBERS = re.compile(r"-?\d+(,-?\d+)+")


def cluster_yml(foreign: Foreign, tree: Section, name: str, folder: Path) -> str:
    """Return the config ``tree`` as text of a cluster.yml that will be in ``folder``.

    Relative paths start from ``folder``. A comment behind each value names the line it was read from. ``name``: the
    imported file, for the first comment.
    """
    first = f"Written by gnnfleet import from {name}, read as {foreign.kind}."
    head = [*_comment(first), *(line for note in foreign.notes for line in _comment(f"- {note}"))]
    moved = _moved(tree, folder, "")
    assert isinstance(moved, Section)
    kept = _with_defaults(moved)
    items = {key: kept.items[key] for key in (*_ORDER, *kept.items) if key in kept.items}
    body = _with_venv_hint(list(_section(Section(kept.origin, items, kept.keys), 0)), kept)

    # Comments stand in one column, behind all lines but the longest.
    lines, column = [], min(48, max((len(line) for line, comment in body if comment), default=0))
    for place, (line, comment) in enumerate(body):
        if place and not line.startswith(" ") and line.endswith(":"):
            lines.append("")
        lines.append(f"{line:<{column}}  # {comment}" if comment else line)
    return "\n".join([*head, "", *lines]) + "\n"


def _comment(words: str) -> list[str]:
    return textwrap.wrap(words, 110, initial_indent="# ", subsequent_indent="#   " if words[:2] == "- " else "# ")


def _moved(tree: Tree, folder: Path, key: str) -> Tree:
    """Return the tree without empty values; relative paths of local files are changed to start from ``folder``."""
    if isinstance(tree, Section):
        items = {name: _moved(item, folder, name) for name, item in tree.items.items() if not _empty(item)}
        return replace(tree, items=items)
    if isinstance(tree, YamlSequence):
        return replace(tree, items=tuple(_moved(item, folder, key) for item in tree.items))
    if key not in _LOCAL_PATHS or not tree.text or tree.text.startswith(("/", "~")):
        return tree
    path = os.path.relpath(tree.origin.folder / tree.text, folder.absolute())
    return replace(tree, text=path, tag="str")


def _empty(tree: Tree) -> bool:
    return isinstance(tree, Scalar) and tree.empty or isinstance(tree, Section) and not tree.items


def _with_defaults(tree: Section) -> Section:
    nodes = tree.items.get("nodes")
    if not isinstance(nodes, YamlSequence) or len(nodes.items) < 2:
        return tree
    entries = [node for node in nodes.items if isinstance(node, Section)]
    if len(entries) < len(nodes.items):
        return tree
    first = entries[0].items
    same = [
        key
        for key in first
        if key != "host" and len({_one_line(node.items[key]) if key in node.items else "" for node in entries}) == 1
    ]
    if not same:
        return tree
    left = tuple(replace(node, items={k: v for k, v in node.items.items() if k not in same}) for node in entries)
    defaults = Section(entries[0].origin, {key: first[key] for key in same}, {})
    return replace(tree, items={**tree.items, "nodes": replace(nodes, items=left), "defaults": defaults})


def _with_venv_hint(lines: list[tuple[str, str]], tree: Section) -> list[tuple[str, str]]:
    nodes, transport = tree.items.get("nodes"), tree.items.get("transport")
    if isinstance(transport, Scalar) and transport.text == "local":
        return lines
    entries = [tree.items.get("defaults"), *(nodes.items if isinstance(nodes, YamlSequence) else ())]
    if any(isinstance(one, Section) and _ENVIRONMENT & one.items.keys() for one in entries):
        return lines
    hint = (f"  # venv: {OWN_VENV}", "environment on the hosts; without it their python3 is used")
    if ("defaults:", "") not in lines:
        return [("defaults:", ""), hint, *lines]
    at = lines.index(("defaults:", "")) + 1
    return [*lines[:at], hint, *lines[at:]]


def _section(tree: Section, depth: int) -> Iterator[tuple[str, str]]:
    """Yield (text, comment) for each line of a section; ``depth`` is its indentation level."""
    before = "  " * depth
    for key, item in tree.items.items():
        if isinstance(item, Section):
            yield f"{before}{key}:", ""
            yield from _section(item, depth + 1)
        elif isinstance(item, YamlSequence) and any(not isinstance(one, Scalar) for one in item.items):
            yield f"{before}{key}:", ""
            for one in item.items:
                yield from _entry(one, depth + 1)
        elif key == "nodes" and isinstance(item, YamlSequence):
            yield f"{before}{key}:", ""
            yield from ((f"{before}  - {_one_line(one)}", _where(one.origin)) for one in item.items)
        else:
            yield f"{before}{key}: {_one_line(item)}", _where(item.origin)


def _entry(tree: Tree, depth: int) -> Iterator[tuple[str, str]]:
    before = "  " * depth
    if not isinstance(tree, Section):
        yield f"{before}- {_one_line(tree)}", _where(tree.origin)
        return
    if [*tree.items] == ["host"]:
        yield f"{before}- {_one_line(tree.items['host'])}", _where(tree.items["host"].origin)
        return
    first = tree.items.get("host", tree)
    for place, (line, comment) in enumerate(_section(tree, depth + 1)):
        where = _where(first.origin)
        yield (f"{before}- {line.strip()}", where) if not place else (line, "" if comment == where else comment)


def _one_line(tree: Tree) -> str:
    if isinstance(tree, YamlSequence):
        return f"[{', '.join(map(_one_line, tree.items))}]"
    if isinstance(tree, Section):
        return "{" + ", ".join(f"{key}: {_one_line(item)}" for key, item in tree.items.items()) + "}"
    if tree.plain and tree.tag != "str":
        return tree.text
    if _NUMBERS.fullmatch(tree.text):
        return f"[{tree.text.replace(',', ', ')}]"
    dumped = yaml.dump([tree.text], Dumper=Dumper, default_flow_style=True, width=1_000_000, allow_unicode=True)
    return str(dumped).strip()[1:-1]


def _where(origin: Origin) -> str:
    if origin.line:
        return f"line {origin.line}"
    return "from the command line" if origin.file.startswith("--") else origin.file
