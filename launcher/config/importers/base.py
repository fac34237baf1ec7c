"""Shared by the importers for files of other launchers: classes for a file and flags, functions that build YAML."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.errors import ConfigError, Problem, UsageError
from launcher.yaml_tree import Origin, Override, Scalar, Section, Tree
from launcher.yaml_tree import YamlSequence as TreeList

if TYPE_CHECKING:
    from launcher.config.importers.partition_folder import ForeignParts
    from launcher.config.importers.pyg_command import Remote

_MAX_LINE = 4096  #: characters


@dataclass(frozen=True)
class Foreign:
    """A file of another launcher, converted to a YAML tree with the keys of a cluster.yml."""

    kind: str  #: format of the file, for messages
    tree: Section  #: keys of cluster.yml; origins are lines of the other file
    notes: tuple[str, ...] = ()  #: for the user: settings that were changed or left out
    batch_per_process: bool = False  #: whether --batch_size counts seeds per process instead of globally


def text(origin: Origin, value: str) -> Scalar:
    """Return a YAML text with its origin (line in the file of another launcher)."""
    return Scalar(origin, value, "str")


@dataclass(frozen=True)
class Source:
    """Path and content of a file of another launcher."""

    path: Path  #: as the user gave it
    text: str

    @property
    def name(self) -> str:
        return str(self.path)

    def origin(self, line: int) -> Origin:
        return Origin(self.name, line, self.path.absolute().parent)

    def error(self, line: int, message: str) -> ConfigError:
        """Return, do not raise, a ConfigError for a problem in line ``line``."""
        return ConfigError([Problem(self.name, line, message)])

    def lines(self, comment: str = "#") -> list[tuple[int, str]]:
        """Return (line number, text) of the lines that are not empty, without comments.

        Raises ConfigError for a line of more than ``_MAX_LINE`` characters.
        """
        bare = (re.split(rf"(?:^|\s)[{comment}]", line, maxsplit=1)[0].strip() for line in self.text.splitlines())
        found = [(number, line) for number, line in enumerate(bare, 1) if line]
        for at, line in found:
            if len(line) > _MAX_LINE:
                raise self.error(at, f"the line has {len(line):,} characters, of at most {_MAX_LINE:,}")
        return found


def number(origin: Origin, value: int | str) -> Scalar:
    """Return a YAML number with its origin (line in the file of another launcher)."""
    return Scalar(origin, str(value), "int")


def listed(origin: Origin, items: Sequence[Tree]) -> TreeList:
    return TreeList(origin, tuple(items))


def section(origin: Origin, items: Mapping[str, Tree]) -> Section:
    """Return a YAML mapping; each key gets the origin (file and line) of its value."""
    return Section(origin, dict(items), {name: item.origin for name, item in items.items()})


def virtual_origin(words: str) -> Origin:
    """Return an origin for a value that was not read from a file. Messages show ``words`` instead of a file name."""
    return Origin(words, 0, Path.cwd())


NODES_ONLY = Path("--nodes")  #: path of the config when only ``--nodes`` and no file is given

#: Flags of torch_geometric's launch.py → config key with the same meaning.
FLAG_KEYS: Mapping[str, str] = {
    "num_epochs": "train.epochs",
    "learning_rate": "train.lr",
    "ddp_port": "run.master_port",
    "num_workers": "train.sampler_threads",
    "concurrency": "train.prefetch",
    "ssh_port": "nodes.*.port",
    "ssh_username": "nodes.*.user",
}

_RENAMED = {"ogbn-product": "ogbn-products"}  #: name in torch_geometric's run_dist.sh → name in OGB


@dataclass(frozen=True)
class Flags:
    """Command-line flags that say how to read a file of another launcher.

    Flags that correspond to a config key are applied to the config like ``--set`` instead.
    """

    nodes: str | None = None  #: ``a,b,c``, or a number of nodes on this machine
    group: str | None = None  #: of an Ansible inventory
    dataset: str | None = None
    batch_size: str | None = None  #: seeds per step, per process or globally, see ``Foreign.batch_per_process``
    master_addr: str | None = None
    num_nodes: int | None = None
    workspace: str | None = None
    part_config: str | None = None
    dataset_root_dir: str | None = None
    extra_envs: tuple[str, ...] = ()  #: NAME=value
    remote: Remote | None = None  #: the quoted command that torch_geometric's launch.py runs on every host

    @property
    def parts(self) -> ForeignParts | None:
        """The partition folder at the path in ``part_config`` or ``dataset_root_dir``; None if there is none.

        A relative path is looked up in ``workspace`` first, then in the current directory.
        """
        from launcher.config.importers.partition_folder import find_parts

        for path in filter(None, (self.part_config, self.dataset_root_dir)):
            for place in (Path(os.path.expanduser(self.workspace or ".")) / path, Path(path)):
                if (found := find_parts(place)) is not None:
                    return found
        return None


def dataset_overrides(name: str) -> tuple[Override, ...]:
    """Return the config overrides for ``--dataset``, whose value is a dataset name or an existing path.

    They also replace ``data.options`` and ``data.folder``. If the path is a partition folder of another program, its
    parts are converted.
    """
    name = _RENAMED.get(name, name)
    if os.sep in name or "." in name:
        from launcher.config.importers.partition_folder import find_parts

        if (parts := find_parts(name)) is not None:
            return parts.overrides
    here = os.path.exists(os.path.expanduser(name)) and (os.sep in name or "." in name)
    stem = Path(name).stem if here else re.sub(r"[^A-Za-z0-9._-]", "-", name)
    dataset, source = ("file", name) if here else (name, None)
    folder = f"parts/{stem}"
    return (("data.dataset", dataset), ("data.source", source), ("data.options", {}), ("data.folder", folder))


def parts_note(parts: ForeignParts | None, dataset: str | None, named: str) -> str:
    """Return a note for the user that says whether ``parts`` are used.

    ``named``: the flags or keys that name the parts, for the note.
    """
    if parts is None:
        return f"{named}: no parts on this machine; the graph is partitioned here, from the dataset"
    if parts.labelled or not dataset:
        return f"{named}: the parts of {parts.kind} in {parts.folder} are converted and kept"
    return (
        f"{named}: the parts of {parts.kind} in {parts.folder} have no labels and train seeds beside them, so the "
        "graph is partitioned again, from the dataset; to use them: gnnfleet partition convert --nodes y=FILE "
        "--nodes train_idx=FILE"
    )


def environment_overrides(venv: str | None, conda: str | None) -> tuple[Override, ...]:
    """Return the config overrides for ``--venv`` or ``--conda``, which replace the environment of every node.

    The home folder is written as ``~``. Raises UsageError if both are given.
    """
    if venv and conda:
        raise UsageError("--venv and --conda: give only the one in which torch is installed")
    key, text = ("venv", venv) if venv else ("conda", conda)
    if not text:
        return ()
    from launcher.files import written_path

    text = written_path(Path(text)) if "/" in text else text
    given = {"python": None, "venv": None, "conda": None, key: text}
    return tuple((f"nodes.*.{name}", value) for name, value in given.items())
