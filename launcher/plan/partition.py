"""See to it that the parts are there before they are sent: the partitioner runs here, as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from launcher.command import Command
from launcher.config.schema import ClusterConfig
from launcher.errors import FleetError
from launcher.files import write_whole
from launcher.plan.build import partition_command
from launcher.plan.codefiles import CODE_ROOT
from launcher.plan.manifest import PartitionFiles, read_partition_files

_STAMP = ".gnnfleet-made.json"  #: in the partition folder: what made it, so that torch need not be loaded to know

_ERROR = "error: "  #: begins the last message of a trainer command that failed


class PartitionFailed(FleetError):
    """The partitioner ended with an error."""


def ensure_parts(config: ClusterConfig, console: Console) -> PartitionFiles:
    """The parts of ``config.data.folder``, made now unless they are there; raises PartitionFailed.

    The stamp names the command and the manifest and source files it stands for; when any of
    them differ the partitioner itself decides, by its fingerprint, whether there is work.
    """
    folder = Path(config.data.folder).expanduser()
    manifest = read_partition_files(folder)
    if manifest is not None and _read(folder / _STAMP) == _signature(config):
        console.print(Text(f"parts in {folder} are current"), soft_wrap=True)
        return manifest
    run_partitioner(partition_command(config), console)
    manifest = read_partition_files(folder)
    if manifest is None:
        raise PartitionFailed(f"the partitioner ended well, but there is no manifest.json in {folder}")
    write_whole(folder / _STAMP, json.dumps(_signature(config)))
    return manifest


def outdated(config: ClusterConfig) -> bool:
    """Whether the parts here are known to stand for another dataset, other options or other files."""
    stamp = _read(Path(config.data.folder).expanduser() / _STAMP)
    return stamp is not None and stamp != _signature(config)


def partition_words(what: str, config: ClusterConfig | None, words: Sequence[str]) -> Command:
    """``trainer partition <what>`` for the config's graph and folder, with more words of the user's."""
    if config is not None and what == "make":
        made = partition_command(config)
        return Command((*made.argv, *words), made.env)
    folder = (str(Path(config.data.folder).expanduser()),) if config is not None else ()
    path = os.pathsep.join([str(CODE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return Command((sys.executable, "-m", "trainer", "partition", what, *folder, *words), {"PYTHONPATH": path})


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


def _signature(config: ClusterConfig) -> list[object]:
    """What the parts stand for: the partitioner's arguments, the manifest file, the source files."""
    try:
        stat = (Path(config.data.folder).expanduser() / "manifest.json").stat()
        manifest = [stat.st_size, stat.st_mtime_ns]
    except FileNotFoundError:
        manifest = []
    return [list(partition_command(config).argv[1:]), manifest, _source_state(config.data.source)]


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
