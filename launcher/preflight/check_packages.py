"""Preflight checks of Python and packages: too old, missing, or different between nodes, with a command as remedy.

How much of a version must be equal on all nodes:

- python: the minor version. torch's object collectives, which users' scripts may call, use pickle, and pickled code
  does not work across minor versions.
- torch: the minor version. TCPStore, gloo's protocol and the layout of state dicts may change with it, but not with a
  patch release.
- NCCL: the full version, as ncclCommInitRank fails if it differs. Checked between nodes with devices only.
- CUDA that torch is built for: the major version, as kernels and NCCL of two major versions do not work in one job.
- torch_geometric: the minor version. Parameters of layers may differ, and must be equal on all ranks.
- numba and numpy: the minor version. Integer promotion differs between versions (NEP 50), and one different bit in
  the hash that draws neighbours gives nodes different samples for the same seed.

Other differences are harmless. JSON that one version of msgspec writes can be read by every other; the driver only has
to be new enough; glibc and the processor may round the logarithm of weighted sampling differently, but the neighbours
of a vertex are always drawn by the node that owns the vertex.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from launcher.config.roles import extra_packages
from launcher.node.programs import packages
from launcher.preflight.finding import Finding, Severity
from launcher.preflight.survey import Survey
from launcher.text import OWN_VENV, index
from trainer.core.train_config import TRACKERS

_TRACKERS = tuple(tracker.package.replace("-", "_") for tracker in TRACKERS.values())

_ALL = 99  #: all numbers of a version


@dataclass(frozen=True)
class _Rule:
    """How many leading numbers of one package's version must be equal on all nodes."""

    name: str
    numbers: int  #: leading numbers of the version that must be equal; 0: none
    needed_by: str = "all"  #: "all" runs, or only the "bundled" trainer
    devices: bool = False  #: applies only to nodes that use devices


RULES = (
    _Rule("python", 2),
    _Rule("torch", 2),
    _Rule("torch_geometric", 2, "bundled"),
    _Rule("numba", 2, "bundled"),
    _Rule("numpy", 2, "bundled"),
    _Rule("msgspec", 0, "bundled"),
    _Rule("click", 0, "bundled"),
    _Rule("rich", 0, "bundled"),
    _Rule("cuda", 1, devices=True),
    _Rule("nccl", _ALL, devices=True),
    _Rule("driver", 0, devices=True),
    _Rule("build", 0),
    _Rule("glibc", 0),
    _Rule("arch", 0),
    _Rule("fsspec", 0),
    _Rule("s3fs", 0),
    _Rule("gcsfs", 0),
    _Rule("prometheus_client", 0),
    *(_Rule(package, 0) for package in _TRACKERS),
)

_SPOKEN = {"cuda": "torch's CUDA", "nccl": "NCCL", "build": "torch build", "arch": "processor"}


def _usual(versions: Iterable[str]) -> str:
    """Return the most frequent version, the first of equally frequent ones; '' if there is none."""
    counts = Counter(version for version in versions if version)
    return counts.most_common(1)[0][0] if counts else ""


@dataclass(frozen=True)
class _Difference:
    """A package version on one node, and the different version on most nodes."""

    rule: _Rule
    found: str  #: version on the node
    usual: str  #: version on most nodes
    others: tuple[int, ...]  #: node_ranks with the usual version
    blocks: bool  #: the numbers that must be equal differ

    @property
    def name(self) -> str:
        return self.rule.name

    @property
    def spoken(self) -> str:
        return _SPOKEN.get(self.name, self.name)


def leading(version: str, numbers: int) -> str:
    """Return the first ``numbers`` numbers of a version, without its build tag (+cpu, +cu126)."""
    return ".".join(version.partition("+")[0].split(".")[:numbers])


def differences(rule: _Rule, versions: Mapping[int, str]) -> dict[int, _Difference]:
    """Return the difference of each node whose version differs from that on most nodes, by node_rank.

    ``versions``: version by node_rank; nodes with '' are skipped.
    """
    known = {k: version.partition("+")[0] for k, version in sorted(versions.items()) if version}
    compatible = _usual(leading(version, rule.numbers) for version in known.values()) if rule.numbers else ""
    agreeing = [k for k, version in known.items() if leading(version, rule.numbers) == compatible]
    most = _usual(known[k] for k in agreeing)
    found = {}
    for k, version in known.items():
        if version != most:
            others = tuple(j for j in agreeing if known[j] == most)
            found[k] = _Difference(rule, version, most, others, leading(version, rule.numbers) != compatible)
    return found


OLDEST_PYTHON = (3, 10)

_OWN_NEEDS = ("torch",)  # packages that every user's own command is assumed to need

_SHOWN = ("python", "torch", "torch_geometric", "numba", "numpy")

_SYSTEM = ("/usr/bin/", "/bin/")  # Pythons of the operating system, in which pip may not install (PEP 668)


def package_findings(survey: Survey) -> Iterator[Finding]:
    odd: dict[int, list[_Difference]] = {k: [] for k in survey.probes}
    for rule in RULES:
        scope = [k for k in survey.probes if not rule.devices or survey.config.nodes[k].devices]
        for k, difference in differences(rule, {k: _version(survey, k, rule) for k in scope}).items():
            odd[k].append(difference)
    for k in sorted(survey.probes):
        version = survey.version(k, "python")
        check, remedy = "python", "set `python`, `venv` or `conda` of this node to Python"
        if survey.config.nodes[k].wrap:
            check, remedy = "container", "take an image, or set `python` to an interpreter inside, with Python"
        found: list[Finding] = []
        if tuple(map(int, version.split(".")[:2])) < OLDEST_PYTHON:
            message = f"python {version} is too old ({survey.python(k)})"
            remedy += f" {'.'.join(map(str, OLDEST_PYTHON))} or newer"
            found.append(survey.finding(k, "block", check, message, remedy))
        else:
            for one in odd[k]:
                if one.name == "python" and one.blocks:
                    message = f"python {one.found}, but {one.usual} on {survey.labels(one.others)}"
                    found.append(survey.finding(k, "block", check, message, f"{remedy} {leading(one.usual, 2)}"))
        found += _packages(survey, k, odd[k])
        yield from found
        if not found:
            shown = [f"{name} {leading(survey.version(k, name), 2)}" for name in _SHOWN if survey.version(k, name)]
            harmless = [f"{one.spoken} {one.found}, {one.usual} on {survey.labels(one.others)}" for one in odd[k]]
            more = f"; harmless differences: {'; '.join(harmless)}" if harmless else ""
            yield survey.finding(k, "ok", "versions", ", ".join(shown) + more)


def _version(survey: Survey, k: int, rule: _Rule) -> str:
    if rule.name == "driver":
        return str(survey.probes[k]["driver"])
    if rule.name == "build":
        cuda = survey.version(k, "cuda")
        return (f"cu{cuda}" if cuda else "cpu") if survey.version(k, "torch") else ""
    return survey.version(k, rule.name)


def _packages(survey: Survey, k: int, odd: Sequence[_Difference]) -> Iterator[Finding]:
    missing = [name for name in _needed(survey, k) if not survey.version(k, name)]
    differing = [one for one in odd if one.blocks and one.name != "python"]
    words = [f"{', '.join(missing)} not installed for {survey.python(k)}"] if missing else []
    words += [f"{one.spoken} {one.found}, but {one.usual} on {survey.labels(one.others)}" for one in differing]
    without_cuda = ["torch"] if _cannot_use_devices(survey, k) else []
    if without_cuda:
        words.append(f"torch {survey.version(k, 'torch')} is built without CUDA, but `devices` is set")
    if words:
        severity: Severity = "block" if _breaks(survey, k, missing, differing, without_cuda) else "warn"
        check = "packages"
        if survey.config.nodes[k].wrap:
            check = "container"  # `gnnfleet setup` cannot help
            wanted = [*missing, *(one.name for one in differing), *without_cuda]
            remedy, command = f"add to the container's image: `{_repair(survey, k, wanted)}`", ""
        elif _has_system_python(survey, k):
            pins = [_pin(survey, k, name) for name in _needed(survey, k)]
            remedy = f"create a virtual environment, and set `venv: {OWN_VENV}` of this node"
            if all(_has_system_python(survey, j) for j in survey.probes):
                own = any(node.python != "python3" for node in survey.config.nodes)  # it overrides the default
                key = "'nodes.*.venv=" + OWN_VENV + "'" if own else f"defaults.venv={OWN_VENV}"
                remedy = f"create a virtual environment, and use it by `--set {key}` or by `venv` in the cluster file"
            install = " ".join([f"{OWN_VENV}/bin/pip", "install", *pins, *index(_torch_tag(survey, k))])
            command = "; ".join([*survey.config.nodes[k].setup, f"python3 -m venv {OWN_VENV} && {install}"])
        else:
            remedy, command = "", _repair(survey, k, [*missing, *(one.name for one in differing), *without_cuda])
        if missing and (replaced := survey.config.nodes[k].replaces):
            words.insert(0, replaced)
            given = "delete that key of the node if the environment of `defaults` is on the host"
            remedy = f"{given}, else {remedy}" if remedy else given
        yield survey.finding(k, severity, check, "; ".join(words), remedy, command, "package-missing")


def _needed(survey: Survey, k: int) -> tuple[str, ...]:
    return (*packages.PACKAGES, *extra_packages(survey.config, k))


def _has_system_python(survey: Survey, k: int) -> bool:
    # pip should not install packages into the operating system's Python.
    return not survey.version(k, "torch") and survey.probes[k]["python"].startswith(_SYSTEM)


def _cannot_use_devices(survey: Survey, k: int) -> bool:
    installed = survey.version(k, "torch")
    return bool(survey.config.nodes[k].devices and installed and not survey.version(k, "cuda"))


def _breaks(
    survey: Survey, k: int, missing: Iterable[str], differing: Iterable[_Difference], without_cuda: Iterable[str]
) -> bool:
    """Return whether the problems of a node's packages block the run.

    For the bundled trainer and graph servers every problem blocks. For a user's own command, two kinds of problems
    block:

    - torch, or a package of ``extra_packages``, is missing.
    - A package that every command needs (``Rule.needed_by``) has a differing version.

    missing: packages that are not installed. without_cuda: packages built without CUDA on a node with ``devices``.
    """
    if not survey.own_command or survey.config.nodes[k].role == "server":
        return any([*missing, *differing, *without_cuda])
    needed = (*_OWN_NEEDS, *extra_packages(survey.config, k))
    return any(name in needed for name in missing) or any(one.rule.needed_by == "all" for one in differing)


def _repair(survey: Survey, k: int, names: Sequence[str]) -> str:
    """Return the shell command that installs the packages ``names`` on node ``k`` in the versions of most nodes."""
    python = survey.probes[k].get("inside", survey.probes[k])["python"]
    pip = f"{shlex.quote(python)} -m pip"
    wanted = dict.fromkeys("torch" if name == "cuda" else name for name in names)
    pins = [_pin(survey, k, name) for name in wanted]
    tag = _torch_tag(survey, k) if "torch" in wanted else ""
    # pip accepts an installed 2.13.0+cpu as 2.13.0, so that it has to be removed first
    cpu_build = "torch" in names and not tag and _cannot_use_devices(survey, k)
    uninstall = f"{pip} uninstall -y torch && " if cpu_build else ""
    node = survey.config.nodes[k]
    lines = [*(() if node.wrap else node.setup), uninstall + " ".join([pip, "install", *pins, *index(tag)])]
    return "; ".join(lines)


def _pin(survey: Survey, k: int, name: str) -> str:
    if name == "nccl":
        major = survey.version(k, "cuda").split(".")[0]
        return f"nvidia-nccl-cu{major}=={_most_frequent_version(survey, name, _nodes_like(survey, k))}"
    version = _most_frequent_version(survey, name, sorted(survey.probes))
    # Else the launching machine's, which may not exist for a node with an older Python.
    if not version and _numbers(survey.version(k, "python")) >= _numbers(_own()["python"]):
        version = _own().get(name, "").partition("+")[0]
    tag = _torch_tag(survey, k) if name == "torch" and version else ""
    return f"{name}=={version}" + (f"+{tag}" if tag else "") if version else name


@cache
def _own() -> dict[str, str]:
    return packages.versions(("fsspec", "s3fs", "gcsfs", "prometheus_client", *_TRACKERS))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(word) for word in version.split(".")[:2])


def _most_frequent_version(survey: Survey, name: str, ranks: Sequence[int]) -> str:
    """Return the version of package ``name`` that most of the nodes ``ranks`` have, without its build tag."""
    rule = next(rule for rule in RULES if rule.name == name)
    versions = [survey.version(k, name).partition("+")[0] for k in ranks]
    compatible = _usual(leading(version, rule.numbers) for version in versions)
    return _usual(version for version in versions if leading(version, rule.numbers) == compatible)


def _nodes_like(survey: Survey, k: int) -> list[int]:
    wanted = bool(survey.config.nodes[k].devices)
    return [j for j in sorted(survey.probes) if bool(survey.config.nodes[j].devices) == wanted]


def _torch_tag(survey: Survey, k: int) -> str:
    """Return the build tag of the torch for node ``k``: ``cu126``, ``cpu``, or '' for the build on PyPI.

    The tag follows the torch that most nodes of the same kind have. There are two kinds: nodes with and without
    devices.
    """
    like = [j for j in _nodes_like(survey, k) if survey.version(j, "torch")]
    if survey.config.nodes[k].devices:
        cuda = _usual(survey.version(j, "cuda") for j in like)
        return f"cu{cuda.replace('.', '')}" if cuda else ""
    tags = [survey.version(j, "torch").partition("+")[2] for j in like]
    if not tags:
        return "" if survey.probes[k]["gpus"] else "cpu"
    return "cpu" if tags.count("cpu") * 2 >= len(tags) else ""
