"""Reads the manifest of a partition folder, and runs the partitioner (``trainer partition``)."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import msgspec
from rich.console import Console
from rich.text import Text

from launcher.command import Command
from launcher.config.resolve import ResolvedConfig, resolve
from launcher.config.schema import ClusterConfig
from launcher.errors import FleetError, UsageError
from launcher.files import CODE_ROOT, is_plain_path, write_whole
from launcher.node.json_reader import read_json
from launcher.node.regular_file import open_regular
from launcher.plan.model import Partitioning
from trainer.core.typed import parse_json


def partitioning(config: ResolvedConfig) -> Partitioning:
    """Return the ``trainer partition make`` command of a config; it runs with the launcher's Python."""
    data, folder = config.data, os.path.expanduser(config.data.folder)
    cut = ["--dataset", data.dataset, "--num-parts", str(config.num_parts)]
    settings = data.partition
    cut += ["--method", settings.method, "--seed", str(settings.seed)]
    cut += ["--balance", settings.balance] if settings.method not in ("random", "hash") else []
    cut += ["--fanouts", ",".join(map(str, config.train.fanouts))] if settings.method == "frequency" else []
    cut += ["--memory", settings.memory] if settings.memory else []
    cut += ["--clusters", str(settings.clusters)] if settings.clusters else []
    cut += ["--rows", settings.rows] if settings.rows != "stored" else []
    options = ["--source", data.source] if data.source else []
    for name, value in data.options.items():
        options += ["--option", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    command = local_trainer("partition", "make", *cut, "--out", folder, *options)
    graph = (*cut, *options)
    return Partitioning(command, folder, data.source or data.dataset, settings.method, graph, data.store or "")


def local_trainer(*words: str) -> Command:
    """Return the command ``python -m trainer`` with arguments ``words``, for this machine."""
    path = [str(CODE_ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return Command((sys.executable, "-m", "trainer", *words), {"PYTHONPATH": os.pathsep.join(path)})


def runnable(command: Command) -> tuple[str, ...]:
    """Return the argv by which a command of ``local_trainer`` is run in any folder.

    ``-m`` would import modules of the current folder first, such as the user's trainer.py or numpy.py.
    """
    if command.argv[1:3] != ("-m", "trainer"):
        return command.argv
    return (command.argv[0], str(CODE_ROOT / "trainer/__main__.py"), *command.argv[3:])


_FORMAT, _VERSION = "gnnfleet-partition", 3

_HELD_OUT = "held_out_type"  # graph attribute that the partitioner writes with option hold_out

MOST_MANIFEST = 1 << 28  #: maximum bytes of a manifest.json; a thousand parts need about ten million


class _NodesSpec(msgspec.Struct):
    """What a manifest says of the nodes of a type."""

    splits: dict[str, int] = {}  #: number of seeds by split
    attrs: dict[str, Any] = {}
    num_classes: int | None = None  #: 0: no class labels; None: unknown


class _EdgesSpec(msgspec.Struct):
    """What a manifest says of the edges of a type."""

    attrs: dict[str, Any] = {}


class PartFile(msgspec.Struct, frozen=True):
    """A file of a partition folder, as its manifest lists it."""

    path: Annotated[str, msgspec.Meta(pattern=r"^(shared|part[0-9]+)/")]  #: relative; or ``manifest.json``
    bytes: Annotated[int, msgspec.Meta(ge=0)]
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    shape: tuple[int, ...] = ()

    @property
    def flat(self) -> bool:
        """Whether it is a 1-d array of a part (edges, ids, times, labels), which a replicated topology needs."""
        return len(self.shape) == 1 and self.path.startswith("part")


@dataclass(frozen=True)
class PartitionFiles:
    """All files of a partition folder, as listed in its manifest. In mode ``verify`` the folder is on a node."""

    folder: str
    dataset: str
    fingerprint: str
    num_parts: int
    files: tuple[PartFile, ...]  #: manifest.json included, last
    nodes: Mapping[str, _NodesSpec] = field(default_factory=dict)  #: by node type; empty: unknown
    edges: Mapping[str, _EdgesSpec] = field(default_factory=dict)  #: by edge type
    links_held_out: bool = False  #: whether links are held out to be predicted (dataset option ``hold_out``)
    hetero: bool | None = None  #: whether the graph is heterogeneous; None: unknown

    def of_parts(self, parts: Iterable[int], *, replicated: bool = False) -> tuple[PartFile, ...]:
        """Return the files that a node with ``parts`` needs: those of the parts, the shared files and the manifest.

        ``replicated``: also the 1-d arrays of all other parts.
        """
        tops = {f"part{part}" for part in parts} | {"shared", "manifest.json"}
        places = {i for top in tops for i in self._below.get(top, ())}
        return tuple(self.files[place] for place in sorted(places.union(self._flat if replicated else ())))

    @property
    def topology_files(self) -> int:
        return len(self._flat)

    @cached_property
    def topology_bytes(self) -> int:
        """Total bytes of the 1-d arrays in all parts; 0 if unknown."""
        return sum(self.files[place].bytes for place in self._flat)

    def topology_bytes_except(self, parts: Iterable[int]) -> int:
        places = (i for part in set(parts) for i in self._below.get(f"part{part}", ()))
        return self.topology_bytes - sum(self.files[i].bytes for i in places if self.files[i].flat)

    @cached_property
    def _flat(self) -> list[int]:
        return [i for i, file in enumerate(self.files) if file.flat]

    @cached_property
    def _below(self) -> dict[str, list[int]]:
        """Indices in ``files``, grouped by the first component of the path: ``shared``, ``part0``, …"""
        found: dict[str, list[int]] = {}
        for place, file in enumerate(self.files):
            found.setdefault(file.path.split("/", 1)[0], []).append(place)
        return found


def read_partition_files(folder: Path) -> PartitionFiles | None:
    """Read ``folder/manifest.json``; None if there is none. Raises FleetError if the file is damaged."""
    path = folder / "manifest.json"
    try:
        with open_regular(str(path)) as file:
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
    """Parse ``raw``, the content of a ``manifest.json``. Raises ValueError if it is invalid.

    A manifest may come from a node, so its paths and its fingerprint are checked. The result also lists the manifest.
    """
    if len(raw) > MOST_MANIFEST:
        raise ValueError(f"the file is larger than {MOST_MANIFEST:,} bytes")
    try:
        kind = parse_json(raw, _ManifestKind)
        if kind.format != _FORMAT:
            raise ValueError(f"the format is {kind.format!r}, not {_FORMAT!r}")
        if kind.version != _VERSION:
            raise ValueError(f"the file has format version {kind.version!r}, this program reads version {_VERSION}")
        manifest = parse_json(raw, _Manifest)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    for file in manifest.files:
        if not is_plain_path(file.path):
            raise ValueError(f"the path {file.path!r} leads out of the folder")
    files = (*manifest.files, PartFile("manifest.json", len(raw), hashlib.sha256(raw).hexdigest()))
    held_out = _HELD_OUT in manifest.graph_attrs
    return PartitionFiles(
        folder, manifest.dataset, manifest.fingerprint, manifest.num_parts, files, manifest.nodes, manifest.edges,
        held_out, manifest.hetero,
    )  # fmt: skip


class _ManifestKind(msgspec.Struct):
    format: str
    version: int


class _Manifest(msgspec.Struct):
    """The fields of a manifest that the launcher uses."""

    dataset: str
    fingerprint: Annotated[str, msgspec.Meta(pattern="^[0-9A-Za-z]{1,128}$")]
    num_parts: Annotated[int, msgspec.Meta(ge=1)]
    files: tuple[PartFile, ...]
    nodes: dict[str, _NodesSpec] = {}
    edges: dict[str, _EdgesSpec] = {}
    graph_attrs: dict[str, Any] = {}
    hetero: bool | None = None


_STAMP = ".gnnfleet-made.json"  # in the partition folder; tells whether parts are up to date without loading torch

_ERROR = "error: "  # prefix of the last message of a trainer command that failed


class PartitionFailed(FleetError):
    pass


def ensure_parts(config: ResolvedConfig, console: Console) -> PartitionFiles:
    """Return the parts in ``config.data.folder``; runs the partitioner first, unless the parts are up to date.

    A stamp file has the last partitioner command, and size and mtime of the manifest and the source files. If any of
    them has changed, the partitioner runs; it keeps parts whose fingerprint is the same. Raises PartitionFailed.
    """
    folder = Path(os.path.expanduser(config.data.folder))
    manifest = read_partition_files(folder)
    if manifest is not None and _read(folder / _STAMP) == _signature(config):
        console.print(Text(f"parts in {folder} are up to date"), soft_wrap=True)
        return manifest
    run_partitioner(partitioning(config).command, console)
    manifest = read_partition_files(folder)
    if manifest is None:
        raise PartitionFailed(f"the partitioner succeeded, but {folder} has no manifest.json")
    write_whole(folder / _STAMP, json.dumps(_signature(config)))
    return manifest


def outdated(config: ResolvedConfig) -> bool:
    """Whether dataset, options or files changed after the stamp file was written; False if there is no stamp file."""
    stamp = _read(Path(os.path.expanduser(config.data.folder)) / _STAMP)
    return stamp is not None and stamp != _signature(config)


def partition_command(action: str, config: ClusterConfig | None, words: Sequence[str]) -> Command:
    """Return the command ``trainer partition <action>`` with the arguments ``words``.

    ``config``: its partition folder is inserted before ``words``. ``tables`` gets the folder of the tables instead;
    ``make`` also gets the options of the graph.
    """
    if config is not None and action == "make":
        made = partitioning(resolve(config)).command
        return Command((*made.argv, *words), made.env)
    place = None if config is None else config.data.source if action == "tables" else config.data.folder
    folder = (os.path.expanduser(place),) if place is not None else ()
    return local_trainer("partition", action, *folder, *words)


def drafted_tables(folder: str) -> dict[str, Any]:
    """Return ``data.options`` for the tables in ``folder``, as ``trainer partition tables`` drafts them.

    Raises UsageError with the trainer's message.
    """
    found: dict[str, Any] = json.loads(
        trainer_output("partition", "tables", str(Path(os.path.expanduser(folder))), "--json")
    )
    return found


def trainer_output(*words: str) -> str:
    """Run ``python -m trainer`` with arguments ``words`` and return its output.

    Raises UsageError with the trainer's message.
    """
    command = local_trainer(*words)
    done = subprocess.run(
        runnable(command),
        env={**os.environ, **command.env},
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        raise UsageError(lines[-1].removeprefix(_ERROR).strip())
    return done.stdout


def run_trainer(command: Command) -> int:
    """Run a trainer command on the launcher's terminal; return its exit status."""
    return subprocess.run(runnable(command), env={**os.environ, **command.env}, check=False).returncode


def run_partitioner(command: Command, console: Console) -> None:
    """Run the partitioner and print its output. If it fails, raise PartitionFailed with its error message."""
    reason: list[str] = []
    process = subprocess.Popen(
        runnable(command),
        env={**os.environ, **command.env, "PYTHONUNBUFFERED": "1"},
        cwd=command.cwd or None,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # on Ctrl-C the launcher terminates it
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
        if reason:
            raise PartitionFailed("\n".join(reason).removeprefix(_ERROR))
        if status < 0:
            raise PartitionFailed(
                f"partitioning was killed by signal {-status} ({signal.Signals(-status).name}); if memory ran out, set "
                "data.partition.memory to less than the free memory, and launch again",
                code="partitioning-killed",
            )
        raise PartitionFailed(f"partitioning failed (exit status {status}): see its output above")
    for line in reason:
        _show(line, console)


def _show(line: str, console: Console) -> None:
    console.print(Text("partition | ", "dim") + Text(line.rstrip()), soft_wrap=True)


def _signature(config: ResolvedConfig) -> list[object]:
    try:
        stat = (Path(os.path.expanduser(config.data.folder)) / "manifest.json").stat()
        manifest = [stat.st_size, stat.st_mtime_ns]
    except FileNotFoundError:
        manifest = []
    source: list[list[object]] = []  # path, size in bytes and mtime in ns of each file of the graph
    if config.data.source is not None:
        top = Path(os.path.expanduser(config.data.source))
        files = [file for file in (sorted(top.rglob("*")) if top.is_dir() else [top]) if file.is_file()]
        source = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    return [list(partitioning(config).command.argv[1:]), manifest, source]


def _read(stamp: Path) -> object:
    try:
        return read_json(str(stamp))
    except (OSError, ValueError):
        return None
