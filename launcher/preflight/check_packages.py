"""Findings about Python and its packages: too old, missing, or different between nodes, with the command that repairs
them.

A version counts up to as many of its numbers as must agree:

- python, its minor version: torch's object collectives, which scripts of one's own may call, pickle, and pickles of
  code do not cross minor versions.
- torch, its minor version: TCPStore, gloo's wire and the layout of state dicts may change with it, never with a patch.
- NCCL, all of it: ncclCommInitRank refuses ranks of another version. It only counts where devices are used.
- CUDA that torch is built for, its major version: kernels and NCCL of two major versions do not meet in one job.
- torch_geometric, its minor version: layers may get other parameters, and all ranks must hold the same ones.
- numba and numpy, their minor version: rules of integer promotion have changed between some (NEP 50), and one wrong
  bit in the hash that draws neighbours gives nodes different samples for the same seed.

The rest does no harm: msgspec reads the JSON of any other msgspec; the driver only has to be new enough; glibc and the
processor may round the logarithm of weighted sampling differently, but a vertex is always drawn by its one owner.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from launcher.node.programs import packages
from launcher.preflight.finding import Finding, Severity, Survey, listed
from launcher.text import OWN_VENV, index, new_venv

ALL = 99


@dataclass(frozen=True)
class Rule:
    """How much of one version has to be equal."""

    name: str
    numbers: int  #: leading numbers that must agree; 0: none
    needed_by: str = "all"  #: "all" runs, or the "bundled" trainer alone
    devices: bool = False  #: counts between nodes that use devices only


RULES = (
    Rule("python", 2),
    Rule("torch", 2),
    Rule("torch_geometric", 2, "bundled"),
    Rule("numba", 2, "bundled"),
    Rule("numpy", 2, "bundled"),
    Rule("msgspec", 0, "bundled"),
    Rule("cuda", 1, devices=True),
    Rule("nccl", ALL, devices=True),
    Rule("driver", 0, devices=True),
    Rule("build", 0),
    Rule("glibc", 0),
    Rule("arch", 0),
)

_SPOKEN = {"cuda": "torch's CUDA", "nccl": "NCCL", "build": "torch build", "arch": "processor"}


def usual(versions: Iterable[str]) -> str:
    """The most frequent one, at a tie the first; '' when there is none."""
    counts = Counter(version for version in versions if version)
    return counts.most_common(1)[0][0] if counts else ""


@dataclass(frozen=True)
class Difference:
    """One version of a node that most others do not have."""

    rule: Rule
    found: str
    usual: str
    others: tuple[int, ...]  #: node_ranks that have the usual one
    blocks: bool

    @property
    def name(self) -> str:
        return self.rule.name

    @property
    def spoken(self) -> str:
        return _SPOKEN.get(self.name, self.name)


def leading(version: str, numbers: int) -> str:
    """The part that must agree; without the build tag (+cpu, +cu126)."""
    return ".".join(version.partition("+")[0].split(".")[:numbers])


def differences(rule: Rule, versions: Mapping[int, str]) -> dict[int, Difference]:
    """By node_rank, where a node has another version than most. Nodes without any are passed over."""
    known = {k: version.partition("+")[0] for k, version in sorted(versions.items()) if version}
    part = usual(leading(version, rule.numbers) for version in known.values()) if rule.numbers else ""
    same_part = [k for k, version in known.items() if leading(version, rule.numbers) == part]
    whole = usual(known[k] for k in same_part)
    found = {}
    for k, version in known.items():
        if version != whole:
            others = tuple(j for j in same_part if known[j] == whole)
            found[k] = Difference(rule, version, whole, others, leading(version, rule.numbers) != part)
    return found


PACKAGES = ("torch", "torch_geometric", "numba", "numpy", "msgspec")

OLDEST_PYTHON = (3, 10)

_OWN_NEEDS = ("torch",)  # what an own command is expected to train with

_SHOWN = ("python", "torch", "torch_geometric", "numba", "numpy")

_SYSTEM = ("/usr/bin/", "/bin/")  #: of the operating system, which lets nobody install there (PEP 668)


def package_findings(survey: Survey) -> Iterator[Finding]:
    """Of all nodes."""
    odd = _odd(survey)
    for k in sorted(survey.probes):
        found = [*_python(survey, k, odd[k]), *_packages(survey, k, odd[k])]
        yield from found
        if not found:
            yield survey.finding(k, "ok", "versions", _summary(survey, k, odd[k]))


def _odd(survey: Survey) -> dict[int, list[Difference]]:
    found: dict[int, list[Difference]] = {k: [] for k in survey.probes}
    for rule in RULES:
        scope = [k for k in survey.probes if not rule.devices or survey.config.nodes[k].devices]
        for k, difference in differences(rule, {k: _version(survey, k, rule) for k in scope}).items():
            found[k].append(difference)
    return found


def _version(survey: Survey, k: int, rule: Rule) -> str:
    if rule.name == "driver":
        return str(survey.probes[k]["driver"])
    if rule.name == "build":
        cuda = survey.version(k, "cuda")
        return (f"cu{cuda}" if cuda else "cpu") if survey.version(k, "torch") else ""
    return survey.version(k, rule.name)


def _python(survey: Survey, k: int, odd: Sequence[Difference]) -> Iterator[Finding]:
    version = survey.version(k, "python")
    remedy = "there: name one by `python`, `venv` or `conda` of this node"
    if tuple(map(int, version.split(".")[:2])) < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        message = f"python {version} is too old ({survey.probes[k]['python']})"
        yield survey.finding(k, "block", "python", message, f"use a python {oldest} or newer {remedy}")
        return
    for one in odd:
        if one.name == "python" and one.blocks:
            message = f"python {one.found}, but {one.usual} on {survey.labels(one.others)}"
            yield survey.finding(k, "block", "python", message, f"use a python {leading(one.usual, 2)} {remedy}")


def _packages(survey: Survey, k: int, odd: Sequence[Difference]) -> Iterator[Finding]:
    """One finding with all that is wrong, since one command repairs it all."""
    lacking = [name for name in PACKAGES if not survey.version(k, name)]
    unlike = [one for one in odd if one.blocks and one.name != "python"]
    words = [f"{listed(lacking)} not installed for {survey.probes[k]['python']}"] if lacking else []
    words += [f"{one.spoken} {one.found}, but {one.usual} on {survey.labels(one.others)}" for one in unlike]
    blind = ["torch"] if _cannot_use_devices(survey, k) else []
    words += [f"torch {survey.version(k, 'torch')} is built without CUDA, and devices are asked for"] if blind else []
    if words:
        severity: Severity = "block" if _breaks(survey, k, lacking, unlike, blind) else "warn"
        if _bare(survey, k):
            remedy, command = _name_it(survey), _new_environment(survey, k)
        else:
            remedy, command = "", repair(survey, k, [*lacking, *(one.name for one in unlike), *blind])
        yield survey.finding(k, severity, "packages", "; ".join(words), remedy, command)


def _bare(survey: Survey, k: int) -> bool:
    """No environment was named, and the Python of the operating system is not one to install in."""
    return not survey.version(k, "torch") and survey.probes[k]["python"].startswith(_SYSTEM)


def _name_it(survey: Survey) -> str:
    if not all(_bare(survey, k) for k in survey.probes):
        return f"make an environment there, and name it in the file: `venv: {OWN_VENV}` of this node"
    own = any(node.python != "python3" for node in survey.config.nodes)  # a node's own would win over the default one
    key = "'nodes.*.venv=" + OWN_VENV + "'" if own else f"defaults.venv={OWN_VENV}"
    return f"make an environment there, and name it: --set {key}, or `venv` in the file"


def _new_environment(survey: Survey, k: int) -> str:
    pins = [_pin(survey, k, name) for name in PACKAGES]
    return "; ".join([*survey.config.nodes[k].setup, new_venv(OWN_VENV, pins, _torch_tag(survey, k))])


def _cannot_use_devices(survey: Survey, k: int) -> bool:
    installed = survey.version(k, "torch")
    return bool(survey.config.nodes[k].devices and installed and not survey.version(k, "cuda"))


def _breaks(survey: Survey, k: int, lacking: Iterable[str], unlike: Iterable[Difference], blind: Iterable[str]) -> bool:
    """An own command needs no more than torch, and may do without the devices; a server runs our code alone."""
    if not survey.own_command or survey.config.nodes[k].role == "server":
        return any([*lacking, *unlike, *blind])
    return any(name in _OWN_NEEDS for name in lacking) or any(one.rule.needed_by == "all" for one in unlike)


def _summary(survey: Survey, k: int, odd: Sequence[Difference]) -> str:
    shown = [f"{name} {leading(survey.version(k, name), 2)}" for name in _SHOWN if survey.version(k, name)]
    harmless = [f"{one.spoken} {one.found}, {one.usual} on {survey.labels(one.others)}" for one in odd]
    return listed(shown) + (f"; different without harm: {'; '.join(harmless)}" if harmless else "")


def repair(survey: Survey, k: int, names: Sequence[str]) -> str:
    """The shell line that gives node ``k`` the versions most nodes have of ``names``."""
    pip = f"{shlex.quote(survey.probes[k]['python'])} -m pip"
    wanted = dict.fromkeys("torch" if name == "cuda" else name for name in names)
    pins = [_pin(survey, k, name) for name in wanted]
    tag = _torch_tag(survey, k) if "torch" in wanted else ""
    stuck = "torch" in names and not tag and _cannot_use_devices(survey, k)  # pip takes 2.13.0+cpu for 2.13.0
    away = f"{pip} uninstall -y torch && " if stuck else ""
    lines = [*survey.config.nodes[k].setup, away + " ".join([pip, "install", *pins, *index(tag)])]
    return "; ".join(lines)


def _pin(survey: Survey, k: int, name: str) -> str:
    if name == "nccl":
        major = survey.version(k, "cuda").split(".")[0]
        return f"nvidia-nccl-cu{major}=={_most(survey, name, _like(survey, k))}"
    version = _most(survey, name, sorted(survey.probes)) or _here(survey, k, name)
    tag = _torch_tag(survey, k) if name == "torch" and version else ""
    return f"{name}=={version}" + (f"+{tag}" if tag else "") if version else name


def _here(survey: Survey, k: int, name: str) -> str:
    """What this machine has, for a node where that can be installed; it need not be there for an older Python."""
    own = _own()
    fits = _numbers(survey.version(k, "python")) >= _numbers(own["python"])
    return own.get(name, "").partition("+")[0] if fits else ""


@cache
def _own() -> dict[str, str]:
    return packages.versions()


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(word) for word in version.split(".")[:2])


def _most(survey: Survey, name: str, ranks: Sequence[int]) -> str:
    """The version most of ``ranks`` have, without its build tag."""
    rule = next(rule for rule in RULES if rule.name == name)
    versions = [survey.version(k, name).partition("+")[0] for k in ranks]
    part = usual(leading(version, rule.numbers) for version in versions)
    return usual(version for version in versions if leading(version, rule.numbers) == part)


def _like(survey: Survey, k: int) -> list[int]:
    """Nodes that use devices as ``k`` does, or do without as it does."""
    wanted = bool(survey.config.nodes[k].devices)
    return [j for j in sorted(survey.probes) if bool(survey.config.nodes[j].devices) == wanted]


def _torch_tag(survey: Survey, k: int) -> str:
    """``cu126`` or ``cpu``, as the others of its kind have it; '' takes what PyPI has."""
    like = [j for j in _like(survey, k) if survey.version(j, "torch")]
    if survey.config.nodes[k].devices:
        cuda = usual(survey.version(j, "cuda") for j in like)
        return f"cu{cuda.replace('.', '')}" if cuda else ""
    tags = [survey.version(j, "torch").partition("+")[2] for j in like]
    if not tags:
        return "" if survey.probes[k]["gpus"] else "cpu"
    return "cpu" if tags.count("cpu") * 2 >= len(tags) else ""
