"""The partition folder as the launcher sees it: its manifest, and the partitioner that makes it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated

import msgspec
from rich.console import Console
from rich.text import Text

from launcher.command import Command
from launcher.config.resolve import ResolvedConfig, resolve
from launcher.config.schema import ClusterConfig
from launcher.errors import FleetError, UsageError
from launcher.files import CODE_ROOT, is_plain_path, write_whole
from launcher.plan.model import Partitioning


def partitioning(config: ResolvedConfig) -> Partitioning:
    """``trainer partition make`` with this machine's own python; it does nothing when the parts are there."""
    data, folder = config.data, os.path.expanduser(config.data.folder)
    cut = ["--dataset", data.dataset, "--num-parts", str(config.num_parts), *_method_words(config)]
    options = ["--source", data.source] if data.source else []
    for name, value in data.options.items():
        options += ["--option", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    command = _trainer_partition("make", *cut, "--out", folder, *options)
    return Partitioning(command, folder, data.source or data.dataset, data.partition.method, (*cut, *options))


def _trainer_partition(*words: str) -> Command:
    path = os.pathsep.join([str(CODE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return Command((sys.executable, "-m", "trainer", "partition", *words), {"PYTHONPATH": path})


def _method_words(config: ClusterConfig) -> list[str]:
    how = config.data.partition
    words = ["--method", how.method, "--seed", str(how.seed)]
    if how.method in ("metis", "frequency"):
        words += ["--balance", how.balance]
    if how.method == "frequency":
        words += ["--fanouts", ",".join(map(str, config.train.fanouts))]
    words += ["--clusters", str(how.clusters)] if how.clusters else []
    return [*words, *(["--rows", how.rows] if how.rows != "stored" else [])]


_FORMAT, _VERSIONS = "gnnfleet-partition", (2, 3)

MOST_MANIFEST = 1 << 28  #: bytes of a manifest.json; one of a thousand parts has some ten million


@dataclass(frozen=True)
class PartFile:
    """One file of a partition folder."""

    path: str  #: relative, begins with ``shared/`` or ``part<p>/``; or ``manifest.json``
    bytes: int
    sha256: str
    flat: bool = False  #: holds a 1-d array: edges, ids, times, labels, weights; no features


@dataclass(frozen=True)
class PartitionFiles:
    """A complete partition folder on this machine (or, in mode verify, its description)."""

    folder: str
    dataset: str
    fingerprint: str
    num_parts: int
    files: tuple[PartFile, ...]  #: manifest.json included, last
    train_seeds: Mapping[str, int] = field(default_factory=dict)  #: by node type; empty: the manifest does not tell

    def of_parts(self, parts: Iterable[int], *, replicated: bool = False) -> tuple[PartFile, ...]:
        """What a node that owns ``parts`` needs: its parts, the shared files, the manifest; with a ``replicated``
        topology also what is 1-d of the other parts."""
        tops = {f"part{part}" for part in parts} | {"shared", "manifest.json"}
        places = {i for top in tops for i in self._below.get(top, ())}
        return tuple(self.files[place] for place in sorted(places.union(self._flat if replicated else ())))

    @property
    def topology_files(self) -> int:
        """How many those are."""
        return len(self._flat)

    @cached_property
    def topology_bytes(self) -> int:
        """Of all that a replicated topology has on every node; 0 where the manifest does not tell."""
        return sum(self.files[place].bytes for place in self._flat)

    def topology_beside(self, parts: Iterable[int]) -> int:
        """The same, less what a node that owns ``parts`` has anyway."""
        places = (i for part in set(parts) for i in self._below.get(f"part{part}", ()))
        return self.topology_bytes - sum(self.files[i].bytes for i in places if self.files[i].flat)

    @cached_property
    def _flat(self) -> list[int]:
        """Places in ``files`` of what is 1-d in any part."""
        return [i for i, file in enumerate(self.files) if file.flat]

    @cached_property
    def _below(self) -> dict[str, list[int]]:
        """Places in ``files`` by first word of the path, so that a plan looks at each file once, not once per node."""
        found: dict[str, list[int]] = {}
        for place, file in enumerate(self.files):
            found.setdefault(file.path.split("/", 1)[0], []).append(place)
        return found


def read_partition_files(folder: Path) -> PartitionFiles | None:
    """Read ``folder/manifest.json``; None when there is none. Raises FleetError when it is damaged."""
    path = folder / "manifest.json"
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_MANIFEST + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise FleetError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        return parse_manifest(raw, str(folder))
    except ValueError as error:
        remedy = "make the parts again in another folder, or remove this one"
        raise FleetError(f"{path}: not a usable partition manifest ({error}); {remedy}") from error


def parse_manifest(raw: bytes, folder: str) -> PartitionFiles:
    """The files that a manifest lists, and the manifest itself. Raises ValueError for what is none.

    It may come from a node: its paths become paths here and there, its fingerprint the name of a folder.
    """
    if len(raw) > MOST_MANIFEST:
        raise ValueError(f"it is larger than {MOST_MANIFEST:,} bytes")
    try:
        kind = msgspec.json.decode(raw, type=_ManifestKind)
        if kind.format != _FORMAT:
            raise ValueError(f"its format is {kind.format!r}, not {_FORMAT!r}")
        if kind.version not in _VERSIONS:
            raise ValueError(f"it has format version {kind.version!r}, this program reads version 2 or 3")
        manifest = msgspec.json.decode(raw, type=_Manifest)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    for file in manifest.files:
        if not is_plain_path(file.path):
            raise ValueError(f"the path {file.path!r} leads out of the folder")
    files = [PartFile(file.path, file.bytes, file.sha256, _is_flat(file)) for file in manifest.files]
    files.append(PartFile("manifest.json", len(raw), hashlib.sha256(raw).hexdigest()))
    seeds = {name: spec.splits.get("train", 0) for name, spec in manifest.nodes.items()}
    return PartitionFiles(
        folder, manifest.dataset, manifest.fingerprint, manifest.num_parts, tuple(files), seeds
    )  # fmt: skip


class _ManifestKind(msgspec.Struct):
    format: str
    version: int


class _ManifestFile(msgspec.Struct):
    path: Annotated[str, msgspec.Meta(pattern=r"^(shared|part[0-9]+)/")]
    bytes: Annotated[int, msgspec.Meta(ge=0)]
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    shape: tuple[int, ...] = ()


class _ManifestNodes(msgspec.Struct):
    splits: dict[str, int] = {}


class _Manifest(msgspec.Struct):
    """What the launcher reads of a manifest (docs/ARCHITECTURE.md has all of it)."""

    dataset: str
    fingerprint: Annotated[str, msgspec.Meta(pattern="^[0-9A-Za-z]{1,128}$")]
    num_parts: Annotated[int, msgspec.Meta(ge=1)]
    files: tuple[_ManifestFile, ...]
    nodes: dict[str, _ManifestNodes] = {}


def _is_flat(file: _ManifestFile) -> bool:
    """Whether a replicated topology has it: a 1-d array of a part (docs/ARCHITECTURE.md, "Replicated topology")."""
    return file.path.startswith("part") and len(file.shape) == 1


_STAMP = ".gnnfleet-made.json"  #: in the partition folder: what made it, so that torch need not be loaded to know

_ERROR = "error: "  #: begins the last message of a trainer command that failed


class PartitionFailed(FleetError):
    """The partitioner ended with an error."""


def ensure_parts(config: ResolvedConfig, console: Console) -> PartitionFiles:
    """The parts of ``config.data.folder``, made now unless they are there; raises PartitionFailed.

    The stamp names the command and the manifest and source files it stands for; when any of
    them differ the partitioner itself decides, by its fingerprint, whether there is work.
    """
    folder = Path(config.data.folder).expanduser()
    manifest = read_partition_files(folder)
    if manifest is not None and _read(folder / _STAMP) == _signature(config):
        console.print(Text(f"parts in {folder} are current"), soft_wrap=True)
        return manifest
    run_partitioner(partitioning(config).command, console)
    manifest = read_partition_files(folder)
    if manifest is None:
        raise PartitionFailed(f"the partitioner ended well, but there is no manifest.json in {folder}")
    write_whole(folder / _STAMP, json.dumps(_signature(config)))
    return manifest


def outdated(config: ResolvedConfig) -> bool:
    """Whether the parts here are known to stand for another dataset, other options or other files."""
    stamp = _read(Path(config.data.folder).expanduser() / _STAMP)
    return stamp is not None and stamp != _signature(config)


def partition_words(what: str, config: ClusterConfig | None, words: Sequence[str]) -> Command:
    """``trainer partition <what>`` for the config's graph and folder, with more words of the user's."""
    if config is not None and what == "make":
        made = partitioning(resolve(config)).command
        return Command((*made.argv, *words), made.env)
    folder = (str(Path(config.data.folder).expanduser()),) if config is not None else ()
    return _trainer_partition(what, *folder, *words)


def run_trainer(command: Command) -> int:
    """Run it in place of this program's own work, on the same terminal; its exit status."""
    return subprocess.run(command.argv, env={**os.environ, **command.env}, check=False).returncode


def run_partitioner(command: Command, console: Console) -> None:
    """Run it with its output shown; raises PartitionFailed with its ``error:`` message, which is not shown before."""
    reason: list[str] = []
    process = subprocess.Popen(
        command.argv,
        env={**os.environ, **command.env, "PYTHONUNBUFFERED": "1"},
        cwd=command.cwd or None,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C is ours to pass on, once
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if reason or line.startswith(_ERROR):
                reason.append(line.rstrip())
            else:
                _show(line, console)
        status = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if status:
        if reason:  # what, where and what to do, in the partitioner's own words
            raise PartitionFailed("\n".join(reason).removeprefix(_ERROR))
        raise PartitionFailed(f"partitioning failed (exit status {status}): its output stands above")
    for line in reason:
        _show(line, console)


def _show(line: str, console: Console) -> None:
    console.print(Text("partition | ", "dim") + Text(line.rstrip()), soft_wrap=True)


def _signature(config: ResolvedConfig) -> list[object]:
    """What the parts stand for: the partitioner's arguments, the manifest file, the source files."""
    try:
        stat = (Path(config.data.folder).expanduser() / "manifest.json").stat()
        manifest = [stat.st_size, stat.st_mtime_ns]
    except FileNotFoundError:
        manifest = []
    return [list(partitioning(config).command.argv[1:]), manifest, _source_state(config.data.source)]


def _source_state(source: str | None) -> list[list[object]]:
    """Path, size and mtime of every source file."""
    if source is None:
        return []
    top = Path(source).expanduser()
    files = sorted(top.rglob("*")) if top.is_dir() else [top]
    return [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files if file.is_file()]


def _read(stamp: Path) -> object:
    try:
        return json.loads(stamp.read_text())
    except (OSError, ValueError):
        return None


def check_train_seeds(config: ClusterConfig, parts: PartitionFiles) -> None:
    """Raises UsageError for parts without train seeds (of ``train.target``, where that is set)."""
    target = config.train.target
    if target is not None and target in parts.train_seeds:
        seeds, whose, where = parts.train_seeds[target], f"node type {target} has", f" of {target}"
    else:  # a type that is not there is for the trainer to refuse, who lists those that are
        seeds, whose, where = sum(parts.train_seeds.values()), "the graph has", ""
    if seeds or not parts.train_seeds:
        return
    raise UsageError(
        f"{config.data.source or parts.dataset}: {whose} no train split, which the bundled trainer needs (parts in "
        f"{parts.folder}); nothing was sent. Add train_idx or train_mask{where} to the graph (docs/data.md), or run a "
        "script of your own on these parts: gnnfleet launch -- python SCRIPT"
    )
