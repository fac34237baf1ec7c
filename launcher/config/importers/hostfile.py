"""Reads lists of hosts: ip_config files of PyG and DGL, hostfiles of DeepSpeed and OpenMPI, and ``--nodes``."""

from __future__ import annotations

import posixpath
import re

from launcher.config.importers.base import (
    Flags,
    Foreign,
    Source,
    listed,
    number,
    parts_note,
    section,
    split_hosts,
    text,
    virtual_origin,
)
from launcher.config.importers.pyg_command import Remote
from launcher.errors import ConfigError, Problem
from launcher.yaml_tree import Origin, Section, Tree

HOST = r"(?:[^\s:#=,\[\]]+@)?(?:[^\s@:#=,\[\]]|\[[0-9,:-]+\])+(?::\d+)?|(?=[^\s:]*:[^\s:]*:)[0-9a-fA-F:]+"

_WITH_PORT = re.compile(rf"({HOST})(?:\s+(\d+))?")

_WITH_SLOTS = re.compile(rf"({HOST})((?:\s+[\w-]+\s*=\s*\w+)*)")

_SETTING = re.compile(r"([\w-]+)\s*=\s*(\w+)")

_EXAMPLE_SETTINGS = {"hidden": "256", "dropout": "0.0", "lr": "0.0004"}


def read_nodes(flags: Flags) -> Foreign:
    """Convert ``--nodes``, given without a file: hosts as ``a,b,c``, or ``2`` for two nodes on this machine.

    Raises ConfigError for an empty list.
    """
    origin = virtual_origin("--nodes")
    if (flags.nodes or "").isdecimal():
        tree = {"nodes": number(origin, flags.nodes or ""), "transport": text(origin, "local")}
        return Foreign("a number of nodes on this machine", section(origin, tree))
    hosts = [text(origin, host) for host in split_hosts(flags.nodes or "")]
    if not hosts:
        raise ConfigError([Problem("--nodes", 0, "expected hosts, for instance --nodes me@host1,me@host2")])
    return Foreign("a list of hosts", section(origin, {"nodes": listed(origin, hosts)}))


def read_ip_list(source: Source, flags: Flags) -> Foreign:
    """Convert a list with a host and an optional port per line: ``- 10.0.0.10 1234`` (PyG), ``10.0.0.10 1234`` (DGL).

    Raises ConfigError for lines of another form, or if ``--num_nodes`` is not the number of hosts.
    """
    dashed = any(line.startswith("- ") for _, line in source.lines())
    nodes, ports, problems = [], False, []
    for line, words in source.lines():
        match = _WITH_PORT.fullmatch(re.sub(r"^- +", "", words).strip("\"'"))
        if not match:
            problems.append(Problem(source.name, line, f"expected a host and an optional port, found `{words}`"))
            continue
        ports = ports or bool(match[2])
        nodes.append((source.origin(line), match[1]))
    if problems:
        raise ConfigError(problems)
    of_pyg = dashed or flags.remote is not None or flags.num_nodes is not None
    notes = [_port_note(of_pyg)] if ports else []
    _same_number(source, nodes, flags)
    tree = _pyg(nodes, flags, notes)
    kind = f"an ip_config of {'torch_geometric' if of_pyg else 'DGL'}"
    return Foreign(kind, tree, tuple(notes), batch_per_process=of_pyg)


def read_hostfile(source: Source) -> Foreign:
    """Convert a hostfile with lines of the form ``host slots=4``. Slots become ``procs`` of the node.

    The slots of a host that is listed several times are added up. Raises ConfigError for lines of another form.
    """
    slots: dict[str, tuple[Origin, int]] = {}
    problems = []
    for line, words in source.lines():
        match = _WITH_SLOTS.fullmatch(words)
        settings = dict(_SETTING.findall(match[2])) if match else {}
        count = settings.get("slots", "1")
        if not match or not count.isdecimal() or len(count) > 6 or not int(count):
            problems.append(Problem(source.name, line, f"expected `host slots=4`, found `{words}`"))
            continue
        origin, before = slots.get(match[1], (source.origin(line), 0))
        slots[match[1]] = (origin, before + int(count))
    if problems:
        raise ConfigError(problems)
    nodes = [
        section(origin, {"host": text(origin, host), "procs": number(origin, count)})
        for host, (origin, count) in slots.items()
    ]
    note = (
        "slots are read as training processes on the CPU (procs); if they stand for GPUs, as with DeepSpeed, "
        "add --set 'nodes.*.devices=[0,1,2,3]'"
    )
    at = source.origin(1)
    return Foreign("a hostfile of DeepSpeed or OpenMPI", section(at, {"nodes": listed(at, nodes)}), (note,))


def _port_note(of_pyg: bool) -> str:
    whose = "torch_geometric's RPC" if of_pyg else "DGL's servers"
    return f"the ports in the file are ignored: they are for {whose}, not for SSH; preflight finds free ports"


def _same_number(source: Source, nodes: list[tuple[Origin, str]], flags: Flags) -> None:
    if flags.num_nodes is not None and flags.num_nodes != len(nodes):
        line = nodes[-1][0].line if nodes else 1
        raise source.error(
            line,
            f"the file lists {len(nodes)} hosts, but --num_nodes is {flags.num_nodes}; correct one, or omit the flag",
        )


def _pyg(nodes: list[tuple[Origin, str]], flags: Flags, notes: list[str]) -> Section:
    """Return the YAML tree for a list of hosts.

    The settings come from the flags of PyG's launch.py, and from the quoted command that it runs on each host. Appends
    notes for the user to ``notes``.
    """
    remote = flags.remote or Remote("")
    common = _common_keys(remote, flags)
    entries = [section(origin, {"host": text(origin, host), **common}) for origin, host in nodes]
    at = virtual_origin("the host list")
    tree: dict[str, Tree] = {"nodes": listed(nodes[0][0] if nodes else at, entries)}
    if remote.is_example:
        tree["train"] = _example_settings(remote, flags)
        notes.append(
            f"{posixpath.basename(remote.script)} is an example of torch_geometric.distributed, which no longer "
            "works: the bundled trainer runs instead, with the same model and settings"
        )
    elif remote.words:
        notes.append(
            "launch.py's flags are not appended to the command; it is started once per process, with RANK, WORLD_SIZE, "
            "NODE_RANK, MASTER_ADDR and GNNFLEET_PARTS in its environment"
        )
    if flags.part_config or flags.dataset_root_dir:
        named = " and ".join(name for name in ("part_config", "dataset_root_dir") if getattr(flags, name))
        notes.append(parts_note(flags.parts, flags.dataset, named))
    if flags.dataset == "ogbn-product":
        notes.append("ogbn-product is read as ogbn-products, its name in OGB")
    return section(at, tree)


def _common_keys(remote: Remote, flags: Flags) -> dict[str, Tree]:
    origin = virtual_origin("the quoted command")
    kind, which = remote.interpreter
    common: dict[str, Tree] = {kind: text(origin, which)} if kind else {}
    if folder := remote.folder or _absolute(flags.workspace):
        common["workdir"] = text(origin, posixpath.join(folder, "gnnfleet-work/node{node_rank}"))
    if remote.devices:
        common["devices"] = listed(origin, [number(origin, word) for word in re.split(r"\s*,\s*", remote.devices)])
    lines = (*(f"export {pair}" for pair in flags.extra_envs), *remote.setup)
    if lines:
        common["setup"] = listed(origin, [text(origin, line) for line in lines])
    return common


def _absolute(folder: str | None) -> str:
    return folder.rstrip("/") if folder and folder.startswith(("/", "~/")) else ""


def _example_settings(remote: Remote, flags: Flags) -> Section:
    origin = virtual_origin(f"as in {posixpath.basename(remote.script)}")
    hetero = "hetero" in remote.script or flags.dataset == "ogbn-mag"
    fixed: dict[str, Tree] = {name: number(origin, value) for name, value in _EXAMPLE_SETTINGS.items()}
    return section(origin, {"model": text(origin, "rsage" if hetero else "sage"), **fixed})
