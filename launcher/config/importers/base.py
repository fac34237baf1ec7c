"""The result of reading a file of another launcher: a config tree, and flags given beside the file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.config.importers.pyg_command import Remote
from launcher.errors import ConfigError, Problem, UsageError
from launcher.yaml_tree import Origin, Scalar, Section, Tree
from launcher.yaml_tree import YamlSequence as TreeList

_LONGEST_LINE = 4096


@dataclass(frozen=True)
class Foreign:
    """A foreign file as a cluster.yml."""

    kind: str  #: what it was taken for, in words
    tree: Section  #: keys of ours; origins are places in the foreign file
    notes: tuple[str, ...] = ()
    batch_per_process: bool = False  #: what --batch_size counts there


def text(origin: Origin, value: str) -> Scalar:
    return Scalar(origin, value, "str")


@dataclass(frozen=True)
class Source:
    """A file as the user named it."""

    path: Path
    text: str

    @property
    def name(self) -> str:
        return str(self.path)

    def at(self, line: int) -> Origin:
        return Origin(self.name, line, self.path.absolute().parent)

    def wrong(self, line: int, message: str) -> ConfigError:
        """One mistake, to be raised."""
        return ConfigError([Problem(self.name, line, message)])

    def lines(self, comment: str = "#") -> list[tuple[int, str]]:
        """(line, text) of lines that say something, from 1, without comments. Raises ConfigError for very long ones."""
        bare = (re.split(rf"(?:^|\s)[{comment}]", line, maxsplit=1)[0].strip() for line in self.text.splitlines())
        found = [(number, line) for number, line in enumerate(bare, 1) if line]
        for at, line in found:
            if len(line) > _LONGEST_LINE:
                raise self.wrong(at, f"a line of {len(line):,} characters; a host with all it has takes some hundred")
        return found


def number(origin: Origin, value: int | str) -> Scalar:
    return Scalar(origin, str(value), "int")


def listed(origin: Origin, items: Sequence[Tree]) -> TreeList:
    return TreeList(origin, tuple(items))


def section(origin: Origin, items: Mapping[str, Tree]) -> Section:
    return Section(origin, dict(items), {name: item.origin for name, item in items.items()})


def said(words: str) -> Origin:
    """The origin of what stands in no file; ``words`` are shown in its place."""
    return Origin(words, 0, Path.cwd())


NODES_ONLY = Path("--nodes")  #: stands for the config file where there is none but ``--nodes a,b``

#: Flags of torch_geometric's launch.py → key of ours, where a key says the same.
FLAG_KEYS: Mapping[str, str] = {
    "num_epochs": "train.epochs",
    "learning_rate": "train.lr",
    "ddp_port": "run.master_port",
    "num_workers": "train.sampler_threads",
    "concurrency": "train.prefetch",
    "ssh_port": "nodes.*.port",
    "ssh_username": "nodes.*.user",
}

_RENAMED = {"ogbn-product": "ogbn-products"}  #: as torch_geometric's run_dist.sh calls it


@dataclass(frozen=True)
class Flags:
    """What the command line says beside a foreign file; what is a key of ours is in the overrides instead."""

    nodes: str | None = None  #: ``a,b,c``
    group: str | None = None  #: of an Ansible inventory
    dataset: str | None = None
    batch_size: str | None = None  #: seeds per step, as the foreign launcher means it
    master_addr: str | None = None
    num_nodes: int | None = None
    workspace: str | None = None
    part_config: str | None = None
    dataset_root_dir: str | None = None
    extra_envs: tuple[str, ...] = ()  #: NAME=value
    remote: Remote | None = None  #: the quoted command that torch_geometric's launch.py runs on every host


def dataset_overrides(name: str) -> tuple[str, ...]:
    """``--dataset``: another graph, so neither the options nor the parts of the file's fit. An existing path is a
    graph of one's own."""
    name = _RENAMED.get(name, name)
    here = Path(name).expanduser().exists() and (os.sep in name or "." in name)
    stem = Path(name).stem if here else re.sub(r"[^A-Za-z0-9._-]", "-", name)
    dataset, source = ("file", name) if here else (name, "null")
    return (f"data.dataset={dataset}", f"data.source={source}", "data.options={}", f"data.folder=parts/{stem}")


def node_overrides(nodes: str) -> tuple[str, ...]:
    """``--nodes a,b`` beside a config: other hosts, and the rest as it is."""
    if nodes.isdecimal():
        return (f"nodes={nodes}", "transport=local")
    hosts = ",".join(f'"{host}"' for host in split_hosts(nodes))
    return (f"nodes=[{hosts}]", "transport=ssh")


def environment_overrides(venv: str | None, conda: str | None) -> tuple[str, ...]:
    """``--venv`` and ``--conda``: for every node, in place of whatever it has. A shell has written out ~, which is
    another folder on the hosts. Raises UsageError."""
    if venv and conda:
        raise UsageError("--venv and --conda: give one of them, the one that holds torch")
    key, text = ("venv", venv) if venv else ("conda", conda)
    if not text:
        return ()
    from launcher.files import written_path

    text = written_path(Path(text)) if "/" in text else text
    given = {"python": "null", "venv": "null", "conda": "null", key: json.dumps(text, ensure_ascii=False)}
    return tuple(f"nodes.*.{name}={value}" for name, value in given.items())


def split_hosts(nodes: str) -> list[str]:
    """``a,n[1-3,7],b`` at commas outside brackets."""
    return [host.strip() for host in re.split(r",(?![^\[]*\])", nodes) if host.strip()]
