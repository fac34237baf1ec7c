"""Recognises the launcher for which a file was written, by the content of the file, and converts the file."""

from __future__ import annotations

import re
from pathlib import Path

from launcher.config.importers.ansible import inventory
from launcher.config.importers.base import NODES_ONLY, Flags, Foreign, Source
from launcher.config.importers.glt import LISTS, read_glt
from launcher.config.importers.hostfile import HOST, host_lines, read_hostfile, read_ip_list, read_nodes
from launcher.errors import UsageError
from launcher.files import read_text
from launcher.yaml_tree import MOST_BYTES

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
    kind = recognise(source)
    found: Foreign | None = None
    if kind == "glt":
        found = read_glt(source, flags)
    elif kind.startswith("inventory-"):
        found = inventory(source, kind.removeprefix("inventory-"), flags)
    elif kind == "hostfile":
        found = read_hostfile(source)
    elif kind == "list":
        found = read_ip_list(source, flags)
    if found is None or flags.group is not None and "inventory" not in found.kind:
        if flags.group is not None:
            raise UsageError(f"--group selects a group of an Ansible inventory, but {path} is not an inventory")
        return None
    return found


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
    # Only the first line is checked if it is certainly a host: with a port, a digit, ``.`` or ``@``.
    first = _LISTED.fullmatch(lines[0])
    certain = first and (first[3] or re.search(r"[0-9.@]", first[2]))
    return "list" if certain or len(lines) > 1 and all(map(_LISTED.fullmatch, lines)) else ""
