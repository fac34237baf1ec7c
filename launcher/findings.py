"""What preflight makes of the facts: one Finding per node and check. Pure functions."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from launcher.config import ClusterConfig
from launcher.errors import NodeCallError, NodeError, node_label
from launcher.placement import interpreter, master_candidates, service_candidates

Severity = Literal["ok", "warn", "block"]

_MAX_CLOCK_OFFSET = 60.0
_PIP_NAMES = ("torch", "torch_geometric", "numba", "numpy", "pyzmq")
_EQUAL = ("torch", "torch_geometric", "numba", "numpy")
_OWN_NEEDS = ("torch",)  # what an own command cannot do without: torch.distributed.run starts it


@dataclass(frozen=True)
class Finding:
    """One check on one node."""

    node_rank: int
    host: str
    severity: Severity
    check: str
    message: str
    remedy: str = ""

    def line(self) -> str:
        return f"{node_label(self.node_rank, self.host)}: {self.message}" + (f" – {self.remedy}" if self.remedy else "")


@dataclass(frozen=True)
class Survey:
    """All that the checks look at. ``probes`` are the replies of node/probe.py by node_rank."""

    config: ClusterConfig
    probes: Mapping[int, Mapping[str, Any]]
    clock_offsets: Mapping[int, float]
    own_command: bool = False
    bytes_needed: Mapping[int, int] = field(default_factory=dict)

    def host(self, node_rank: int) -> str:
        return self.config.nodes[node_rank].host

    def finding(self, node_rank: int, severity: Severity, check: str, message: str, remedy: str = "") -> Finding:
        return Finding(node_rank, self.host(node_rank), severity, check, message, remedy)


def all_findings(survey: Survey) -> list[Finding]:
    """Every check of every node that answered."""
    found: list[Finding] = []
    for node_rank in sorted(survey.probes):
        found.append(survey.finding(node_rank, "ok", "connect", "connected"))
        for check in (_tmux, _run_id, _missing, _devices, _workdir, _disk, _data, _clock, _service_port, _interface):
            found += check(survey, node_rank)
    found += _equal_versions(survey)
    found += _same_machine(survey)
    return found


def connect_finding(config: ClusterConfig, node_rank: int, error: Exception) -> Finding:
    """Why a node cannot be worked with."""
    what, remedy = str(error), ""
    if isinstance(error, NodeError):
        what, remedy = error.message, error.remedy
    check = "python" if isinstance(error, NodeCallError) else "connect"
    return Finding(node_rank, config.nodes[node_rank].host, "block", check, what, remedy)


def _tmux(survey: Survey, k: int) -> Iterator[Finding]:
    version = survey.probes[k]["tmux"]
    if version:
        yield survey.finding(k, "ok", "tmux", f"tmux {version}")
    else:
        remedy = "`sudo apt-get install -y tmux` (or dnf, conda)"
        yield survey.finding(k, "block", "tmux", "tmux is not installed", remedy)


def _run_id(survey: Survey, k: int) -> Iterator[Finding]:
    there = survey.probes[k]["taken"]
    if there:
        message = f"the run id is taken: {there} exists"
        yield survey.finding(k, "block", "run id", message, "take another --run-id, or end that run and remove it")


def _missing(survey: Survey, k: int) -> Iterator[Finding]:
    versions = survey.probes[k]["versions"]
    lacking = [name for name in _PIP_NAMES if not versions[name]]
    needed = [name for name in lacking if name in _OWN_NEEDS or not survey.own_command]
    python = survey.probes[k]["python"]
    if lacking:
        severity: Severity = "block" if needed else "warn"
        message = f"{', '.join(lacking)} not installed for {python}"
        yield survey.finding(k, severity, "packages", message, _pip(survey, k, lacking))
    else:
        yield survey.finding(k, "ok", "packages", "all needed packages installed")


def _pip(survey: Survey, k: int, packages: Iterable[str]) -> str:
    """The line that installs ``packages`` in the versions most nodes have."""
    words = []
    for name in packages:
        usual = _usual(survey, name)
        words.append(f"{name}=={usual}" if usual else name)
    setup = "conda activate … && " if interpreter(survey.config, k).argv[0] == "python" else ""
    return f"`{setup}{shlex.quote(survey.probes[k]['python'])} -m pip install {' '.join(words)}`"


def _comparable(name: str, version: str) -> str:
    """major.minor of Python; without the build tag (+cpu, +cu126) for packages."""
    return ".".join(version.split(".")[:2]) if name == "python" else version.partition("+")[0]


def _usual(survey: Survey, name: str) -> str:
    """The version most nodes have; at a tie that of the lowest node_rank. '' when none has it."""
    found = [_comparable(name, survey.probes[k]["versions"][name]) for k in sorted(survey.probes)]
    counts = Counter(version for version in found if version)
    return counts.most_common(1)[0][0] if counts else ""


def _equal_versions(survey: Survey) -> Iterator[Finding]:
    odd: set[int] = set()
    for name in ("python", *_EQUAL):
        usual = _usual(survey, name)
        for k in sorted(survey.probes):
            version = _comparable(name, survey.probes[k]["versions"][name])
            if version and version != usual:
                odd.add(k)
                yield _odd_one(survey, k, name, version, usual)
    for k in sorted(set(survey.probes) - odd):
        versions = survey.probes[k]["versions"]
        names = [f"{name} {_comparable(name, versions[name])}" for name in ("python", *_EQUAL) if versions[name]]
        yield survey.finding(k, "ok", "versions", ", ".join(names))


def _odd_one(survey: Survey, k: int, name: str, version: str, usual: str) -> Finding:
    others = [j for j in sorted(survey.probes) if _comparable(name, survey.probes[j]["versions"][name]) == usual]
    shown = ", ".join(node_label(j, survey.host(j)) for j in others[:3]) + (", …" if len(others) > 3 else "")
    must = not survey.own_command or name in ("python", *_OWN_NEEDS)
    remedy = (
        f"use a python {usual} there: `python`, `venv` or `conda` in the config"
        if name == "python"
        else _pip(survey, k, [name])
    )
    message = f"{name} {version}, but {usual} on {shown}"
    return survey.finding(k, "block" if must else "warn", "versions", message, remedy)


def _devices(survey: Survey, k: int) -> Iterator[Finding]:
    wanted, there = survey.config.nodes[k].devices, survey.probes[k]["devices"]
    if not wanted:
        return
    lacking = [number for number in wanted if number >= len(there)]
    torch = survey.probes[k]["versions"]["torch"]
    if not there:
        message, remedy = "devices are asked for, but nvidia-smi shows none", "install the driver, or drop `devices`"
        yield survey.finding(k, "block", "devices", message, remedy)
    elif lacking:
        message = f"no CUDA device {', '.join(map(str, lacking))}; there are {len(there)}, counted from 0"
        yield survey.finding(k, "block", "devices", message, "correct `devices`")
    elif torch.endswith("+cpu"):
        remedy = f"install a CUDA build of torch {torch.partition('+')[0]}, see pytorch.org/get-started"
        yield survey.finding(k, "block", "devices", f"torch {torch} cannot use CUDA devices", remedy)
    else:
        names = sorted({there[number] for number in wanted})
        yield survey.finding(k, "ok", "devices", f"{len(wanted)} × {', '.join(names)}")


def _workdir(survey: Survey, k: int) -> Iterator[Finding]:
    probe = survey.probes[k]
    if not probe["workdir_writable"]:
        message = f"workdir {probe['workdir']}: cannot write in {probe['workdir_base']}"
        yield survey.finding(k, "block", "workdir", message, "set `workdir`, or change the folder's owner or mode")
    else:
        yield survey.finding(k, "ok", "workdir", "work folder can be written")


def _disk(survey: Survey, k: int) -> Iterator[Finding]:
    needed, free = survey.bytes_needed.get(k, 0), survey.probes[k]["disk_free"]
    if needed > free:
        base = survey.probes[k]["workdir_base"]
        message = f"{size(needed)} needed at {base}, {size(free)} free"
        yield survey.finding(k, "block", "disk", message, "make room, or set `workdir` to another disk")
    else:
        yield survey.finding(k, "ok", "disk", f"{size(needed)} needed and free" if needed else "nothing large to store")


def _data(survey: Survey, k: int) -> Iterator[Finding]:
    data = survey.config.data
    if data.mode != "verify":
        return
    folder = survey.config.nodes[k].data_folder or data.folder
    if survey.probes[k]["manifest"]:
        yield survey.finding(k, "ok", "data", "partition folder found")
    else:
        remedy = (
            "run `gnnfleet partition make --config FILE` where that folder is mounted, "
            "correct `data.folder` or the node's `data_folder`, or use `data.mode: sync`"
        )
        yield survey.finding(k, "block", "data", f"no manifest.json in {folder}", remedy)


def _clock(survey: Survey, k: int) -> Iterator[Finding]:
    offset = survey.clock_offsets[k]
    if abs(offset) > _MAX_CLOCK_OFFSET:
        way = "ahead of" if offset > 0 else "behind"
        message = f"clock is {abs(offset):.0f} s {way} this machine's"
        yield survey.finding(k, "warn", "clock", message, "set up NTP; times in logs will not agree")
    else:
        yield survey.finding(k, "ok", "clock", "clock agrees")


def _service_port(survey: Survey, k: int) -> Iterator[Finding]:
    if len(survey.config.nodes) > 1:
        yield ports_finding(survey, k, "service port", service_candidates(survey.config, k), "run.service_port")
    if k == 0:
        yield ports_finding(survey, 0, "master port", master_candidates(survey.config), "run.master_port")


def ports_finding(survey: Survey, k: int, check: str, candidates: tuple[int, ...], setting: str) -> Finding:
    """Whether at least one of ``candidates`` is free on node ``k``."""
    busy: Mapping[str, str] = survey.probes[k]["busy_ports"]
    if any(str(port) not in busy for port in candidates):
        return survey.finding(k, "ok", check, f"{check} free")
    holder = busy[str(candidates[0])] or "process unknown"
    ports = str(candidates[0]) if len(candidates) == 1 else f"{candidates[0]}–{candidates[-1]}"
    remedy = f"end that, or set `{setting}` to another"
    return survey.finding(k, "block", check, f"port {ports} in use ({holder})", remedy)


def _interface(survey: Survey, k: int) -> Iterator[Finding]:
    probe, node = survey.probes[k], survey.config.nodes[k]
    if len(survey.config.nodes) > 1 and not probe["interface"] and not node.interface:
        message = f"no network interface there has address {probe['address']}"
        remedy = "set `interface` of this node, or `address` to one of its own (see `ip addr`)"
        yield survey.finding(k, "warn", "interface", message, remedy)


def _same_machine(survey: Survey) -> Iterator[Finding]:
    first: dict[tuple[Any, ...], int] = {}
    for k in sorted(survey.probes):
        probe = survey.probes[k]
        place = tuple(probe[name] for name in ("hostname", "boot_id", "workdir", "workdir_id"))
        j = first.setdefault(place, k)
        if j != k:
            other = node_label(j, survey.host(j))
            message = f"same machine ({probe['hostname']}) and work folder {probe['workdir']} as {other}"
            yield survey.finding(k, "block", "same machine", message, "give each node its own `workdir`, or drop one")


def size(count: float) -> str:
    """Bytes for a person, e.g. ``1.5 GB``."""
    unit = "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if count < 1000:
            break
        count, unit = count / 1000, larger
    return f"{count:.1f} {unit}" if count < 10 and unit != "B" else f"{count:.0f} {unit}"
