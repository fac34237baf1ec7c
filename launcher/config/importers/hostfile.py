"""Reads lists of hosts: ip_config files of PyG and DGL, hostfiles of MPI, DeepSpeed and batch systems, ``--nodes``."""

from __future__ import annotations

import difflib
import posixpath
import re
from collections.abc import Sequence

from launcher.config.importers.base import (
    Flags,
    Foreign,
    Source,
    listed,
    number,
    parts_note,
    section,
    text,
    virtual_origin,
)
from launcher.config.importers.pyg_command import Remote
from launcher.errors import ConfigError, Problem, UsageError
from launcher.hostlist import PORTS_FROM, SSH_PORT, RangeError, expand, split_list
from launcher.yaml_tree import Origin, Section, Tree

_IPV6 = r"(?=[^\s:\]]*:[^\s:\]]*:)[0-9a-fA-F:.]+(?:%\w+)?"

_NAME = r"(?!(?:\d+|\[[0-9,-]+\])(?![^\s:]))(?:[^\s@:#=,/+*()\[\]]|\[[0-9,:-]+\])+"  # a number alone is no name

HOST = rf"(?:[^\s:#=,\[\]]+@)?(?:\[{_IPV6}\]|{_NAME})(?::\d+)?|{_IPV6}"

_WITH_PORT = re.compile(rf"({HOST})(?:\s+(\d+))?")

_WITH_SLOTS = re.compile(rf"({HOST})((?:\s+[\w-]+\s*=\s*\w+)*)")

_SETTING = re.compile(r"([\w-]+)\s*=\s*(\w+)")

_COUNTED = re.compile(r"([^:]+|[^:\[]*\[[^\]]+\]):(\d{1,6})")  # host:8

_SGE = re.compile(rf"({HOST})\s+(\d+)\s+\S+\s+(?!\d+$)\S+")  # host 8 all.q@host UNDEFINED

_PAIRS = re.compile(rf"(?:(?:{HOST})\s+\d+\s+)+(?:{HOST})\s+\d+")  # host 8 host2 4

_SLOTS_OF_PBS = r"[^\s:/+*,=]+/(?:\d+\*\d+|\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)"

_EXEC_HOST = re.compile(rf"{_SLOTS_OF_PBS}(?:\+{_SLOTS_OF_PBS})*")  # host/0*8+host2/0*4, host/0-7+host2/0,2

#: What may say how many processes the host before it has, and is no host then.
_AMOUNT = re.compile(r"(?i:[x×np]|np|ppn|slots?|n?procs?|process(?:es)?|ranks?|tasks?|cores?|[cg]pus?):?\d+|\d+[a-z]*")

_MOST_SLOTS = ("max_slots", "max-slots", "slots_max")

_WORDS = ("slots", *_MOST_SLOTS)

_EXAMPLE_SETTINGS = {"hidden": "256", "dropout": "0.0", "lr": "0.0004"}


def read_nodes(flags: Flags) -> Foreign:
    """Convert ``--nodes``, given without a file: hosts as ``a,b,c``, or ``2`` for two nodes on this machine.

    Raises ConfigError for an empty list.
    """
    origin = virtual_origin("--nodes")
    if (flags.nodes or "").isdecimal():
        tree = {"nodes": number(origin, flags.nodes or ""), "transport": text(origin, "local")}
        return Foreign("a number of nodes on this machine", section(origin, tree))
    hosts = [text(origin, host) for host in split_list(flags.nodes or "")]
    if not hosts:
        raise ConfigError([Problem("--nodes", 0, "expected hosts, for instance --nodes me@host1,me@host2")])
    return Foreign("a list of hosts", section(origin, {"nodes": listed(origin, hosts)}))


def host_lines(source: Source, comment: str = "#") -> list[tuple[int, str]]:
    """Return the lines of a list of hosts, with one host on each; forms of batch systems become ``host slots=8``."""
    given = source.lines(comment)
    found = []
    for line, words in given:
        pieces = [words]
        if match := _SGE.fullmatch(words):
            pieces = [f"{match[1]} slots={match[2]}"]
        elif _PAIRS.fullmatch(words):
            each = words.split()
            pieces = [f"{host} slots={count}" for host, count in zip(each[::2], each[1::2], strict=True)]
        elif _EXEC_HOST.fullmatch(words) and not re.fullmatch(r"[^/]+/0*[1-9]\d*", words):  # ``gnn1/8`` may mean 8
            chunks = [chunk.partition("/") for chunk in words.split("+")]
            pieces = [f"{host} slots={_slots_of_pbs(slots)}" for host, _, slots in chunks]
        elif "," in words and not _has_amount(split_list(words)):
            pieces = split_list(words)
        elif len(given) == 1 and _is_host_words(words.split()):
            pieces = words.split()
        found += [(line, piece) for piece in pieces]
    return found


def _slots_of_pbs(slots: str) -> int:
    """Return the number of slots in ``0*8``, ``0-7`` or ``0,2-4``."""
    if "*" in slots:
        return int(slots.partition("*")[2])
    spans = [[int(end) for end in span.split("-")] for span in slots.split(",")]
    return sum(span[-1] - span[0] + 1 for span in spans)


def _has_amount(words: Sequence[str]) -> bool:
    """Whether some words, but not all, may be numbers of processes, as in ``gnn1 x8`` and ``gnn1,8``."""
    return len({bool(_AMOUNT.fullmatch(re.sub(r"\[[0-9,-]+\]", "1", word))) for word in words}) == 2


def _is_host_words(words: Sequence[str]) -> bool:
    """Whether words of one line are hosts, and not the address and names of one host, as in /etc/hosts."""
    hosts = [word for word in words if re.fullmatch(HOST, word) and word[0] != "-"]
    same = len({bool(re.fullmatch(rf"[0-9.]+|{_IPV6}", word)) for word in words}) == 1
    return same and len(hosts) == len(words) and not _has_amount(words)


def read_ip_list(source: Source, flags: Flags) -> Foreign:
    """Convert a list with one host per line.

    ``- 10.0.0.10 1234`` (torch_geometric) and ``10.0.0.10 1234`` (DGL) have a port, which is not used. In other lists
    ``host:8`` (MPICH, Intel MPI) and eight lines with one host (PBS, LSF) are a node with 8 processes; ``host:2222``,
    with a number of 1024 or more, has an SSH port. Raises ConfigError for lines of another form or with two meanings,
    or if ``--num_nodes`` is not the number of hosts.
    """
    lines = host_lines(source)
    dashed = any(line.startswith("- ") for _, line in lines)
    of_pyg = dashed or flags.remote is not None or flags.num_nodes is not None
    nodes: list[tuple[Origin, str]] = []
    counts: list[tuple[Origin, str, int]] = []
    ports, ssh_ports, problems = False, False, []
    for line, words in lines:
        match = _WITH_PORT.fullmatch(re.sub(r"^- +", "", words).strip("\"'"))
        if not match:
            problems.append(Problem(source.name, line, f"expected a host and an optional port, found `{words}`"))
            continue
        origin, host, port = source.origin(line), match[1], match[2]
        ports = ports or port is not None
        nodes.append((origin, host))
        after = None if of_pyg else _COUNTED.fullmatch(host)
        if port and not of_pyg and int(port) < PORTS_FROM:
            wrong = f"`{words}`: {port} is no port of a DGL server; for {port} processes write `{host} slots={port}`"
            problems.append(Problem(source.name, line, wrong))
        elif after and int(after[2]) in (0, SSH_PORT):
            wrong = f"`{words}` is a number of processes for MPICH, and an SSH port elsewhere; for processes write "
            wrong += f"`{after[1]} slots={int(after[2]) or 1}`, for the port `{after[1]}`"
            problems.append(Problem(source.name, line, wrong))
        elif after and int(after[2]) < PORTS_FROM:
            counts.append((origin, after[1], int(after[2])))
        else:
            ssh_ports = ssh_ports or bool(after)
            counts.append((origin, host, 1))
    counted = any(count > 1 or host != name for (_, host, count), (_, name) in zip(counts, nodes, strict=False))
    if counted and ssh_ports:
        line = next(origin.line for origin, name in nodes if _COUNTED.fullmatch(name))
        wrong = f"`host:N` is a number of processes below {PORTS_FROM} and an SSH port above, and the file has both; "
        problems.append(Problem(source.name, line, f"{wrong}write `host slots=N`, and ports into ~/.ssh/config"))
    if problems:
        raise ConfigError(problems)
    hosts = [host for _, host, _ in _each(counts)]
    if not of_pyg and not ports and (counted or len({*hosts}) < len(hosts)):
        kind = "hostfile of MPICH or Intel MPI" if counted else "hostfile of PBS or LSF, with a line per process"
        return _with_counts(source, counts, f"a {kind}")
    whose = "torch_geometric's RPC" if of_pyg else "DGL's servers"
    ignored = f"the ports in the file are ignored: they are for {whose}, not for SSH; preflight finds free ports"
    notes = [ignored] if ports else []
    if ssh_ports:
        notes.append("`host:N` is read as an SSH port, as N is too large for a number of processes")
    if flags.num_nodes is not None and flags.num_nodes != len(nodes):
        line = nodes[-1][0].line if nodes else 1
        raise source.error(
            line,
            f"the file lists {len(nodes)} hosts, but --num_nodes is {flags.num_nodes}; correct one, or omit the flag",
        )
    tree = _pyg(nodes, flags, notes)
    kind = f"an ip_config of {'torch_geometric' if of_pyg else 'DGL'}"
    return Foreign(kind, tree, tuple(notes), batch_per_process=of_pyg)


def read_hostfile(source: Source) -> Foreign:
    """Convert a hostfile with lines of the form ``host slots=4 max_slots=8``. Slots become ``procs`` of the node.

    The slots of a host that is listed several times are added up. Raises ConfigError for lines of another form, for
    unknown words, and for a line without ``slots``, whose number MPI, Horovod and DeepSpeed understand differently.
    """
    counts, problems = [], []
    for line, words in host_lines(source):
        match = _WITH_SLOTS.fullmatch(words)
        settings = dict(_SETTING.findall(match[2])) if match else {}
        unknown = next((name for name in settings if name not in _WORDS), None)
        after = match and _COUNTED.fullmatch(match[1])
        slots = settings.get("slots")
        most = next((settings[name] for name in _MOST_SLOTS if name in settings), slots)
        if match and len(settings) < len(_SETTING.findall(match[2])):
            wrong = f"`{words}` has the same word twice; leave one"
        elif not match or not all(_is_count(settings.get(name, "1")) for name in ("slots", *_MOST_SLOTS)):
            wrong = f"expected `host slots=4`, found `{words}`"
        elif unknown is not None:
            near = difflib.get_close_matches(unknown.lower(), _WORDS, 1) or [] if slots else ["slots"]
            wrong = f"unknown word `{unknown}`; "
            if near and _is_count(settings[unknown]):
                wrong += f"did you mean `{match[1]} {near[0]}={settings[unknown]}`?"
            else:
                wrong += "only slots and max_slots are read; leave it out, or write a cluster.yml (gnnfleet import)"
        elif not slots and not most and after and int(after[2]) < PORTS_FROM:
            wrong = f"`{words}` is no line of a file with slots; write `{after[1]} slots={int(after[2]) or 1}`"
        elif slots is None:
            number_of = f"{most} slots or fewer" if most else "one slot, or one per core"
            wrong = f"`{words}` may mean {number_of}; write `{match[1]} slots={most or 1}`"
        elif after and int(after[2]) < PORTS_FROM:
            wrong = f"`{after[0]}` and slots={slots} are two numbers of processes; write `{after[1]} slots={slots}`"
        elif int(most or slots) < int(slots):
            wrong = f"slots={slots} is more than {most}, the maximum on this line"
        else:
            counts.append((source.origin(line), match[1], int(slots)))
            continue
        problems.append(Problem(source.name, line, wrong))
    if problems:
        raise ConfigError(problems)
    of = "DeepSpeed or OpenMPI" if host_lines(source) == source.lines() else "a batch system"
    return _with_counts(source, counts, f"a hostfile of {of}")


def _is_count(text: str) -> bool:
    return text.isdecimal() and len(text) <= 6 and int(text) > 0


def _each(counts: Sequence[tuple[Origin, str, int]]) -> list[tuple[Origin, str, int]]:
    """Return ``counts`` with a tuple for each host of a range; ranges that are wrong are reported later."""
    found = []
    for origin, host, count in counts:
        try:
            found += [(origin, name, count) for name in expand(host)]
        except RangeError:
            found.append((origin, host, count))
    return found


def _with_counts(source: Source, counts: Sequence[tuple[Origin, str, int]], kind: str) -> Foreign:
    """Return a config with one node per host; the processes of a host that is listed several times are added up."""
    slots: dict[str, tuple[Origin, int]] = {}
    for origin, host, count in _each(counts):
        first, before = slots.get(host, (origin, 0))
        slots[host] = (first, before + count)
    nodes = [
        section(origin, {"host": text(origin, host), "procs": number(origin, count)})
        for host, (origin, count) in slots.items()
    ]
    note = (
        "slots are read as training processes on the CPU (procs); if they stand for GPUs, as with DeepSpeed, "
        "add --set 'nodes.*.devices=[0,1,2,3]'"
    )
    at = source.origin(1)
    return Foreign(kind, section(at, {"nodes": listed(at, nodes)}), (note,))


def _pyg(nodes: list[tuple[Origin, str]], flags: Flags, notes: list[str]) -> Section:
    """Return the YAML tree for a list of hosts.

    The settings come from the flags of PyG's launch.py, and from the quoted command that it runs on each host. Appends
    notes for the user to ``notes``.
    """
    remote = flags.remote or Remote("")
    origin = virtual_origin("the quoted command")
    kind, which = remote.interpreter
    common: dict[str, Tree] = {kind: text(origin, which)} if kind else {}
    workspace = flags.workspace if flags.workspace and flags.workspace.startswith(("/", "~/")) else ""
    if folder := remote.folder or workspace.rstrip("/"):
        common["workdir"] = text(origin, posixpath.join(folder, "gnnfleet-work/node{node_rank}"))
    if remote.devices:
        common["devices"] = listed(origin, [number(origin, word) for word in re.split(r"\s*,\s*", remote.devices)])
    exports = []
    for pair in flags.extra_envs:
        name, _, value = pair.partition("=")
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(f"--extra_envs {pair}: give variables as NAME=value")
        if not re.fullmatch(
            r"([\w@%+=:,./~-]|\$\w+|\$\{\w+\})*", value
        ):  # more than a word; variables of the host are replaced
            value = '"' + re.sub(r'(["\\`]|\$(?![A-Za-z_{]))', r"\\\1", value) + '"'
        exports.append(f"export {name}={value}")
    if lines := (*exports, *remote.setup):
        common["setup"] = listed(origin, [text(origin, line) for line in lines])
    entries = [section(origin, {"host": text(origin, host), **common}) for origin, host in nodes]
    at = virtual_origin("the host list")
    tree: dict[str, Tree] = {"nodes": listed(nodes[0][0] if nodes else at, entries)}
    if remote.is_example:
        there = virtual_origin(f"as in {posixpath.basename(remote.script)}")
        hetero = "hetero" in remote.script or flags.dataset == "ogbn-mag"
        fixed: dict[str, Tree] = {name: number(there, value) for name, value in _EXAMPLE_SETTINGS.items()}
        tree["train"] = section(there, {"model": text(there, "rsage" if hetero else "sage"), **fixed})
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
