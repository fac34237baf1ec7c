"""Replaces a partition folder atomically: writes new files to a staging folder beside it, then renames that folder."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trainer.core.errors import PartitionError
from trainer.core.files import read_json, sync_path
from trainer.data.dataset import Dataset
from trainer.store.digest_check import sha256_of
from trainer.store.manifest import FORMAT, MANIFEST, MOST_BYTES, FileEntry, Manifest, read_manifest

_AT_FDCWD = -100

_RENAME_EXCHANGE = 2

_SYNCS = 8  #: threads that call fsync; a file system commits concurrent calls together

_READERS = 4  #: files read at the same time to compare digests

_COMPARED = 4 << 30  #: bytes of a partition up to which `make` compares digests before it reuses the files

_OUR_NOTES = "gnnfleet-"  #: prefix, after leading dots, of hidden files that the launcher and ``PartFiles`` write


def reusable(folder: Path, fingerprint: str, say: Callable[[str], None] = lambda line: None) -> Manifest | None:
    """Return the manifest of ``folder`` if the partition is complete and has this fingerprint, else None.

    In a complete partition, each file has the size that the manifest states. Partitions of up to 4 GiB must also have
    the digests that the manifest states. ``say`` is called with a message about damaged files.

    Raises ``PartitionError`` if ``folder`` is no partition folder. If the partition cannot be reused, also raises
    ``PartitionError`` for other files in ``folder``, because they would be deleted when the folder is replaced.
    """
    _check_kind(folder)
    with contextlib.suppress(PartitionError):
        manifest = read_manifest(folder)
        sizes = {folder / entry.path: entry.bytes for entry in manifest.files}
        if manifest.fingerprint == fingerprint and all(
            path.is_file() and path.stat().st_size == size for path, size in sizes.items()
        ):
            damaged = _damaged(folder, manifest) if is_compared(manifest) else []
            if not damaged:
                return manifest
            say(f"damaged in {folder}: {', '.join(damaged[:3])}{', …' if len(damaged) > 3 else ''}; made again")
    _check_only_ours(folder)
    return None


def is_compared(manifest: Manifest) -> bool:
    """Return whether ``reusable`` compares digests: only for partitions of up to 4 GiB."""
    return sum(entry.bytes for entry in manifest.files) <= _COMPARED


def _damaged(folder: Path, manifest: Manifest) -> list[str]:
    def differs(entry: FileEntry) -> bool:
        try:
            return sha256_of(folder / entry.path) != entry.sha256
        except OSError:
            return True

    with ThreadPoolExecutor(_READERS) as pool:
        return [
            entry.path for entry, wrong in zip(manifest.files, pool.map(differs, manifest.files), strict=True) if wrong
        ]


def check_same_graph(folder: Path, dataset: Dataset) -> None:
    """Raise ``PartitionError`` if ``folder`` holds a partition of a graph with another name or number of nodes."""
    raw = _raw_manifest(folder)
    if raw is None:
        return
    ours = {of: nodes.num_nodes for of, nodes in dataset.nodes.items()}
    theirs: Mapping[str, int] = ours
    with contextlib.suppress(PartitionError):
        theirs = {of: spec.num_nodes for of, spec in read_manifest(folder).nodes.items()}
    if raw.get("dataset") != dataset.name or theirs != ours:
        raise PartitionError(
            f"{folder} holds {describe_partition(folder)}, {sum(theirs.values()):,} nodes: another graph than "
            f"{dataset.name}, {sum(ours.values()):,} nodes. Choose another folder (data.folder), or replace these "
            "parts by `gnnfleet partition make` with --force"
        )


def describe_partition(folder: Path) -> str | None:
    """Describe the partition in ``folder``, such as ``4 parts of cora (metis)``, or None when it holds no partition."""
    found = _raw_manifest(folder)
    if found is None:
        return None
    return f"{found.get('num_parts')} parts of {found.get('dataset')} ({found.get('algorithm')})"


def _check_kind(folder: Path) -> None:
    if not folder.exists() and not folder.is_symlink():
        return
    if not folder.is_dir():
        raise PartitionError(f"{folder} exists and is not a folder; move it away or choose another folder")
    if any(folder.iterdir()) and _raw_manifest(folder) is None:
        raise PartitionError(f"{folder} holds files but no partition; move it away or choose another folder")


def _check_only_ours(folder: Path) -> None:
    raw = _raw_manifest(folder)
    if raw is None:
        return
    listed = raw.get("files")
    entries = listed if isinstance(listed, list) else []
    ours = {MANIFEST, *(entry.get("path") for entry in entries if isinstance(entry, dict))}
    for name in sorted(files_below(folder, folder)):
        if name not in ours and not is_note(name):
            raise PartitionError(
                f"{folder / name} would be deleted, as the partition in {folder} is replaced; "
                "move it away or choose another folder"
            )


def files_below(folder: Path, top: Path) -> Iterator[str]:
    """Yield the paths, relative to ``folder``, of all files and symbolic links under ``top``."""
    for below, folders, files in os.walk(top):
        links = [name for name in folders if Path(below, name).is_symlink()]
        yield from (Path(below, name).relative_to(folder).as_posix() for name in (*files, *links))


def is_note(name: str) -> bool:
    """Return whether ``name`` is a hidden file that gnnfleet writes to partition folders, or a partial copy of one."""
    last = Path(name).name
    return last.startswith(".") and last.lstrip(".").startswith(_OUR_NOTES)


def _raw_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the parsed JSON of a manifest of any version, or None if ``folder`` holds no partition manifest."""
    try:
        raw = read_json(folder / MANIFEST, MOST_BYTES)
    except (OSError, ValueError):
        return None
    return raw if isinstance(raw, dict) and raw.get("format") == FORMAT else None


@contextlib.contextmanager
def staged(folder: Path, kept: Path | None = None) -> Iterator[Path]:
    """Yield a staging folder, which replaces ``folder`` at the end of the ``with`` block.

    By default, the staging folder is a new folder beside ``folder``, and is removed after an error. With ``kept``, the
    staging folder is ``kept``, and remains after an error. Staging folders that killed processes left are removed.
    Raises ``PartitionError`` when the disk cannot be written, or ``folder`` holds files other than a partition.
    """
    prefix = f".{folder.name}.{socket.gethostname()}."
    staging = kept or folder.parent / f"{prefix}{os.getpid()}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for path in folder.parent.glob(f"{glob.escape(prefix)}*"):
            pid = path.name.removeprefix(prefix)
            if pid.isdigit() and (int(pid) == os.getpid() or not Path(f"/proc/{pid}").exists()):
                shutil.rmtree(path)
        staging.mkdir(exist_ok=kept is not None)
        yield staging
        with ThreadPoolExecutor(_SYNCS) as pool:
            list(pool.map(sync_path, [path for path, _, _ in os.walk(staging)]))

        # Another process may have written files to the folder in the meantime.
        _check_kind(folder)
        _check_only_ours(folder)
        if not folder.exists() or not any(folder.iterdir()):
            staging.rename(folder)
        elif not _exchange(staging, folder):
            aside = staging.with_name(f"{staging.name}0")  # named so that the next call finds it if we are killed
            folder.rename(aside)
            staging.rename(folder)
            shutil.rmtree(aside)
        sync_path(folder.parent)
    except OSError as error:
        place = error.filename or staging
        raise PartitionError(
            f"{place}: cannot write the partition: {error.strerror}; nothing was left behind"
        ) from error
    finally:
        if kept is None:
            shutil.rmtree(staging, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names atomically. Returns False if the kernel or the file system does not support this."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    status: int = renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    return status == 0
