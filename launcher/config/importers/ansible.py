"""Converts the hosts of an Ansible inventory to nodes. ``ansible-inventory`` reads the file, and its ``group_vars``."""

from __future__ import annotations

import codecs
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

from launcher.config.importers.base import Flags, Foreign, Source, number, section, text
from launcher.errors import ConfigError, Problem
from launcher.node.json_reader import loads
from launcher.yaml_tree import Scalar, Tree, YamlSequence

_IMPLICIT = ("all", "ungrouped")  #: groups that every inventory has

#: Variable of a host → key of a node.
_KEYS: Mapping[str, str] = {
    "ansible_host": "host", "ansible_ssh_host": "host",
    "ansible_port": "port", "ansible_ssh_port": "port",
    "ansible_user": "user", "ansible_ssh_user": "user",
    "ansible_ssh_private_key_file": "key", "ansible_private_key_file": "key",
    "ansible_python_interpreter": "python",
}  # fmt: skip

_PASSWORDS = ("ansible_password", "ansible_ssh_pass", "ansible_ssh_password")

_JUMPS = ("ansible_ssh_common_args", "ansible_ssh_extra_args")

#: Variables that say how many processes a host has, for whoever wrote them; a note says that they are not used.
_COUNTS = ("slots", "max_slots", "procs", "nproc", "nproc_per_node", "gpus", "num_gpus")

_WARNING = "[WARNING]: "  #: begins a line of ansible-inventory's stderr


def inventory(source: Source, plugin: str, flags: Flags) -> Foreign:
    """Convert the hosts of the selected groups to nodes.

    ``plugin``: that of Ansible for the file, ``ini`` or ``yaml``. Raises ConfigError for an invalid inventory, for
    groups without hosts, and if Ansible is not installed.
    """
    found, warnings = _listed(source, plugin)
    groups = {name: group for name, group in found.items() if name != "_meta"}

    @cache
    def hosts_of(name: str) -> tuple[str, ...]:
        group = groups.get(name, {})
        below = (host for child in group.get("children", ()) for host in hosts_of(child))
        return tuple(dict.fromkeys((*group.get("hosts", ()), *below)))

    # The groups to import: those of --group, else the only top-level group, or `all` if no group has hosts.
    if flags.group is not None:
        chosen = [name.strip() for name in flags.group.split(",") if name.strip()]
        known = dict.fromkeys((*groups, *(child for group in groups.values() for child in group.get("children", ()))))
        if unknown := [name for name in chosen if name not in known]:
            named = ", ".join(sorted(known.keys() - _IMPLICIT))
            raise source.error(1, f"no group `{unknown[0]}` (--group); the groups are {named or 'none'}")
    else:
        top = [name for name in groups["all"].get("children", ()) if name not in _IMPLICIT and hosts_of(name)]
        if len(top) > 1 or top and hosts_of("ungrouped"):
            raise source.error(
                1, f"several groups ({', '.join(top)}); select one, for instance --group {top[0]}, or --group all"
            )
        chosen = top or ["all"]
    hosts = list(dict.fromkeys(host for name in chosen for host in hosts_of(name)))
    if not hosts:
        raise source.error(1, f"group {', '.join(chosen)} has no hosts")

    lines: dict[str, int] = {}  # word of the file → its first line; a host of a range is not in the file
    for line, words in enumerate(source.text.splitlines(), 1):
        for word in re.findall(r"[\w.:-]+", words):
            lines.setdefault(word.rstrip(":"), line)
    problems: list[Problem] = []
    notes = dict.fromkeys(f"ansible-inventory: {warning}" for warning in warnings)
    variables = found["_meta"]["hostvars"]
    nodes = []
    for host in hosts:
        line, own = lines.get(host, 0), variables.get(host, {})
        origin = source.origin(line)
        items: dict[str, Tree] = {"host": text(origin, host)}
        for name, found_value in own.items():
            value = "" if found_value is None or isinstance(found_value, (list, dict)) else str(found_value)
            if "{{" in value:
                if name in _KEYS:
                    wrong = f"{host}: {name} is a template; write the value instead"
                    problems.append(Problem(source.name, line, wrong))
            elif name in _KEYS and value:
                if not (name == "ansible_python_interpreter" and value.startswith("auto")):
                    items[_KEYS[name]] = (number if _KEYS[name] == "port" else text)(origin, value)
            elif name in _PASSWORDS:
                items["password"] = Scalar(origin, "true", "bool")
                notes[f"{name} is not imported; gnnfleet asks for the password at start"] = None
            elif name == "ansible_connection" and value not in ("ssh", "smart", "paramiko", "paramiko_ssh"):
                wrong = f"{host}: ansible_connection={value}: gnnfleet supports only ssh"
                problems.append(Problem(source.name, line, wrong))
            elif name in _COUNTS:
                notes[f"{name} of hosts is not used; add --set 'nodes.*.procs=4', or write `host slots=4` lines"] = None
            elif name in _JUMPS:
                notes[f"{name} is not imported; put a ProxyJump into ~/.ssh/config, which gnnfleet reads"] = None
        if host == "localhost" and "host" not in {_KEYS.get(name) for name in own}:
            notes["localhost is reached by ssh; add --set transport=local to run nodes without SSH"] = None
        nodes.append(section(origin, items))
    if problems:
        raise ConfigError(problems)
    kind = f"an Ansible inventory{' in YAML' if plugin == 'yaml' else ''}, group {', '.join(chosen)}"
    tree = section(source.origin(1), {"nodes": YamlSequence(nodes[0].origin, tuple(nodes))})
    return Foreign(kind, tree, tuple(notes))


def _listed(source: Source, plugin: str) -> tuple[dict[str, Any], list[str]]:
    """Return the JSON of ``ansible-inventory --list``, and its warnings. Raises ConfigError."""
    name = "ansible-inventory"
    program = shutil.which(name) or shutil.which(name, path=os.path.dirname(sys.executable))
    if program is None:
        raise source.error(
            0, f"{name}, which reads Ansible inventories, is not installed here: pip install ansible-core"
        )
    settings = {
        "ANSIBLE_INVENTORY_ENABLED": plugin,  # the others run the file as a program, or ask a cloud
        "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "1",
        "ANSIBLE_NOCOLOR": "1",
        "LC_ALL": "C.UTF-8",  # Ansible requires UTF-8
    }
    done = subprocess.run(
        [program, "-i", str(source.path.absolute()), "--list"],
        env={**os.environ, **settings},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    said = [line for line in done.stderr.partition("\n\n")[0].splitlines() if line.strip()]
    if done.returncode:
        why = "; ".join(line.removeprefix(_WARNING).removeprefix("[ERROR]: ") for line in said)
        if source.path.read_bytes()[:3] == codecs.BOM_UTF8:
            why = f"{why} (the file begins with a byte order mark, which Ansible does not read: save it without)"
        raise source.error(0, f"{name}: {why or f'exit status {done.returncode}'}")
    try:
        found: dict[str, Any] = loads(done.stdout)
    except ValueError as error:
        raise source.error(0, f"{name} --list did not print JSON: {error}") from None
    return found, [line.removeprefix(_WARNING) for line in said if line.startswith(_WARNING)]
