"""The parts in ``data.store``: finds them, or makes and uploads them."""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from launcher.command import Command
from launcher.config.resolve import ResolvedConfig
from launcher.errors import FleetError, UsageError
from launcher.files import CODE_ROOT
from launcher.node.remote_folder import NotStored, RemoteFolder, StoreError
from launcher.node.store.fetch import MANIFEST
from launcher.node.store.push_parts import pushed_note
from launcher.plan.build import check_source
from launcher.plan.partition import (
    MOST_MANIFEST,
    PartFile,
    PartitionFiles,
    ensure_parts,
    parse_manifest,
    partitioning,
    read_partition_files,
)
from launcher.sync.progress import transfer_progress
from launcher.sync.store_progress import StoreProgress
from launcher.text import count
from launcher.transport.local import LocalTransport

_LEFT_OUT = ("--source", "--memory")  # may differ between machines that make the same parts


def ensure_stored(config: ResolvedConfig, console: Console) -> PartitionFiles:
    """Return the parts of ``data.store``; makes them on this machine, and uploads them, if the store lacks them."""
    url, options = config.data.store or "", config.data.store_options
    local = read_partition_files(Path(config.data.folder).expanduser())
    stored, made = stored_parts(url, options)
    if local is None and stored is not None:
        if stored.num_parts != config.num_parts:
            raise UsageError(
                f"data.store: {stored.folder} has {count(stored.num_parts, 'part')}, but the config needs "
                f"{config.num_parts}; set data.num_parts, or use another folder of the store"
            )
        wanted = made_from(config)
        if made and list(made) != wanted:
            raise UsageError(
                f"data.store: the parts in {stored.folder} were made with other options: {_unlike(made, wanted)} in "
                f"the store, {_unlike(wanted, made)} in the config; correct the config, use another folder of the "
                "store, or run `gnnfleet partition push --config FILE --force` to replace the parts in the store"
            )
        console.print(Text(f"parts are in {url}"), soft_wrap=True)
        return stored
    check_source(config)
    local = ensure_parts(config, console)
    if stored is None:
        push_parts(local, url, options, made_from(config), console)
    else:
        if local.files[-1].sha256 != stored.files[-1].sha256:
            raise FleetError(
                f"{stored.folder} has other parts than {local.folder} on this machine "
                f"({count(stored.num_parts, 'part')} of {stored.dataset}, and {count(local.num_parts, 'part')} of "
                f"{local.dataset}). Move {local.folder} away to use the parts in the store, or run `gnnfleet partition "
                "push --config FILE --force` to replace the parts in the store"
            )
    return replace(local, folder=url)


def stored_parts(url: str, options: Mapping[str, Any]) -> tuple[PartitionFiles | None, list[str]]:
    """Return the files that the manifest of a store lists, and the arguments that the parts were made with.

    Without a manifest, the files are None and there are no arguments.

    Raises FleetError if the store cannot be read.
    """
    try:
        store = RemoteFolder(url, dict(options))
        try:
            raw = store.read(MANIFEST, 0, MOST_MANIFEST + 1)
        except NotStored:
            return None, []
        made = pushed_note(store).get("made")
    except StoreError as error:
        raise FleetError(str(error)) from None
    try:
        return parse_manifest(raw, store.url), [str(word) for word in made] if isinstance(made, list) else []
    except ValueError as error:
        raise FleetError(
            f"{store.url}/{MANIFEST}: not a usable partition manifest ({error}); push the parts again with `gnnfleet "
            "partition push --config FILE --force`, or use another folder"
        ) from None


def made_from(config: ResolvedConfig) -> list[str]:
    """Return the partitioner's arguments that determine the parts and are the same on all machines."""
    words = partitioning(config).graph
    pairs = zip(words[::2], words[1::2], strict=True)
    return [word for name, value in pairs if name not in _LEFT_OUT for word in (name, value)]


def _unlike(one: Sequence[str], other: Sequence[str]) -> str:
    """Return the options, with their values, that ``one`` has and ``other`` has not, for a message."""
    pairs = set(zip(other[::2], other[1::2], strict=False))
    found = [" ".join(pair) for pair in zip(one[::2], one[1::2], strict=False) if pair not in pairs]
    return f"`{' '.join(found)}`" if found else "nothing"


def push_parts(
    parts: PartitionFiles,
    url: str,
    options: Mapping[str, Any],
    made: Sequence[str],
    console: Console,
    *,
    replace_others: bool = False,
) -> None:
    """Upload a partition folder of this machine; an interrupted upload of the same parts is continued.

    ``made``: arguments that the parts were made with; () if unknown. ``replace_others``: replace the parts of another
    partition in the store. Raises FleetError.
    """
    spec = {
        "url": url,
        "options": dict(options),
        "folder": parts.folder,
        "files": _file_list(parts.files),
        "made": list(made),
        "replace": replace_others,
    }
    done = _run_here("push_parts", spec, url, console)
    console.print(Text(f"parts uploaded to {url}: {decimal(done.bytes)} sent, {decimal(done.present)} already there"))


def fetch_parts(
    parts: PartitionFiles, files: Sequence[PartFile], options: Mapping[str, Any], folder: Path, console: Console
) -> None:
    """Fetch ``files`` of the parts in a store into a folder of this machine. Raises FleetError."""
    spec = {
        "url": parts.folder,
        "options": dict(options),
        "folder": str(folder.absolute()),
        "files": _file_list(files),
        "run_dir": "",
        "limit": None,
    }
    done = _run_here("fetch_parts", spec, parts.folder, console)
    console.print(Text(f"parts fetched into {folder}: {decimal(done.bytes)}, {decimal(done.present)} already there"))


def _file_list(files: Sequence[PartFile]) -> list[tuple[str, int, str]]:
    return [(file.path, file.bytes, file.sha256) for file in files]


def _run_here(program: str, spec: Mapping[str, Any], label: str, console: Console) -> StoreProgress:
    """Run ``launcher/node/store/<program>.py`` on this machine; return its progress. Raises FleetError.

    The program runs in a new process, which can be killed even while fsspec waits for the store. ``spec``: input of the
    program. ``label``: name of the transfer in the progress display.
    """
    script, stop = CODE_ROOT / "launcher/node/store" / f"{program}.py", threading.Event()
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(spec, file)
        file.flush()
        command = Command((sys.executable, str(script), file.name), {"PYTHONPATH": str(CODE_ROOT)}, cwd=str(Path.cwd()))
        with transfer_progress(console, {0: label}) as progress:
            followed = StoreProgress(0, progress)
            followed.follow(LocalTransport(), command, stop)
    return followed
