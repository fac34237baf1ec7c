"""Which differences between the environments of two nodes break a run, and which do no harm.

A version counts up to as many of its numbers as must agree:

- python, its minor version: torch's object collectives pickle, and pickles of code do not cross minor versions.
- torch, its minor version: TCPStore, gloo's wire and the layout of state dicts may change with it, never with a patch.
- NCCL, all of it: ncclCommInitRank refuses ranks of another version. It only counts where devices are used.
- CUDA that torch is built for, its major version: kernels and NCCL of two major versions do not meet in one job.
- torch_geometric, its minor version: layers may get other parameters, and all ranks must hold the same ones.
- numba and numpy, their minor version: rules of integer promotion have changed between some (NEP 50), and one wrong
  bit in the hash that draws neighbours gives nodes different samples for the same seed.

The rest does no harm: pyzmq speaks ZMTP with any other pyzmq; the driver only has to be new enough; glibc and the
processor may round the logarithm of weighted sampling differently, but a vertex is always drawn by its one owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

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
    Rule("pyzmq", 0, "bundled"),
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
