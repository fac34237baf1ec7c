"""Recognises the launcher for which a file was written, by the content of the file, and converts the file."""

from __future__ import annotations

import re
from pathlib import Path

from launcher.config.importers.ansible import inventory
from launcher.config.importers.base import NODES_ONLY, Flags, Foreign, Source
from launcher.config.importers.glt import LISTS, read_glt
from launcher.config.importers.hostfile import HOST, host_lines, read_hostfile, read_ip_list, read_nodes
from launcher.errors import ConfigError, Problem, UsageError
from launcher.files import read_text
from launcher.yaml_tree import MOST_BYTES, Section

_KEY = re.compile(r"^([A-Za-z_]\w*)\s*:(?:\s|$)", re.MULTILINE)

_HEADER = re.compile(r"^\[[^\[\]\s,:]+(:(vars|children|hosts))?\]\s*([#;].*)?$", re.MULTILINE)

_INVENTORY_KEY = re.compile(r"^[ \t]+(hosts|children)\s*:(?:\s|$)", re.MULTILINE)

_ANSIBLE = re.compile(r"\bansible_\w+\s*=")

_SLOTS = re.compile(rf"(?:{HOST})(?:\s+[\w-]+\s*=\s*\S+)+")

_LISTED = re.compile(rf"(- +)?[\"']?({HOST})(\s+\d+)?[\"']?")


def read_foreign(path: Path, flags: Flags | None = None) -> Foreign | None:
    """Convert a file of another launcher; None for a cluster.yml, an unknown format or an unreadable file.

    Raises ConfigError for problems in the file, and UsageError if --group is given for another format.
    """
    flags = flags or Flags()
    if path == NODES_ONLY:
        return read_nodes(flags)
    try:
        source = Source(path, read_text(path, MOST_BYTES).removeprefix("\ufeff"))
    except (OSError, ValueError):
        return None  # ``load_config`` reports it
    found = _read(source, flags)
    if found is None or flags.group is not None and "inventory" not in found.kind:
        if flags.group is not None:
            raise UsageError(f"--group selects a group of an Ansible inventory, but {path} is not an inventory")
        return None
    return found


def _read(source: Source, flags: Flags) -> Foreign | None:
    kind = recognise(source)
    if kind == "glt":
        return read_glt(source, flags)
    if kind.startswith("inventory-"):
        return inventory(source, kind.removeprefix("inventory-"), flags)
    if kind == "hostfile":
        return read_hostfile(source)
    return read_ip_list(source, flags) if kind == "list" else None


def recognise(source: Source) -> str:
    """Return the format of a file, "" if unknown.

    Formats are ``glt``, ``inventory-yaml``, ``inventory-ini``, ``hostfile`` (hosts with slots) and ``list`` (one host
    per line).
    """
    keys = set(_KEY.findall(source.text))
    if keys:
        if len(keys & {*LISTS, "in_channel", "out_channel"}) >= 2:
            return "glt"
        ours = keys & {"nodes", "data", "train", "run", "defaults", "transport"}
        return "inventory-yaml" if not ours and _INVENTORY_KEY.search(source.text) else ""
    lines = [words for _, words in host_lines(source, comment="#;")]
    if not lines:
        return ""
    if _HEADER.search(source.text) or _ANSIBLE.search(source.text):
        return "inventory-ini"
    if any(_SLOTS.fullmatch(words) for words in lines):
        return "hostfile"
    return "list" if _is_list(lines) else ""


def _is_list(lines: list[str]) -> bool:
    # Only the first line is checked if it is certainly a host: with a port, a digit, ``.`` or ``@``.
    first = _LISTED.fullmatch(lines[0])
    if first and (first[3] or re.search(r"[0-9.@]", first[2])):
        return True
    return len(lines) > 1 and all(map(_LISTED.fullmatch, lines))


def graph_is_named(foreign: Foreign, tree: Section, path: Path) -> None:
    """Raise ConfigError if neither the file nor the command line names the graph to train on."""
    if "data" not in tree.items:
        what = f"{foreign.kind} does not name the graph to train on; add --dataset ogbn-products"
        more = "--dataset graph.pt (your own file or folder), or --dataset synthetic (a generated graph)"
        raise ConfigError([Problem(str(path), 0, f"{what}, {more}")])
