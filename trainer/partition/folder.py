"""Replaces a partition folder atomically: staged beside it, then renamed."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trainer.core.errors import PartitionError
from trainer.core.files import sync_path
from trainer.store.manifest import FORMAT, MANIFEST, Manifest, read_manifest

_AT_FDCWD = -100

_RENAME_EXCHANGE = 2

_SYNCS = 8  #: at once: a file system commits together what is waiting

_OUR_NOTES = "gnnfleet-"  #: begins the names, after dots, of the launcher's caches and of ``PartFiles``'s note


def reusable(folder: Path, fingerprint: str) -> Manifest | None:
    """The manifest of a complete folder with this fingerprint; None when there is work to do.

    Completeness is judged by file sizes; digests are `verify`'s business.
    Raises ``PartitionError`` when something that is no partition folder is in the way, or a folder
    that would have to be replaced holds files of others.
    """
    _check_kind(folder)
    with contextlib.suppress(PartitionError):
        manifest = read_manifest(folder)
        if manifest.fingerprint == fingerprint and all(_has_size(folder / f.path, f.bytes) for f in manifest.files):
            return manifest
    _check_only_ours(folder)
    return None


def replaced(folder: Path) -> str | None:
    """The partition in ``folder`` in words, ``4 parts of cora (metis)``; None when there is none."""
    found = _raw_manifest(folder)
    if found is None:
        return None
    return f"{found.get('num_parts')} parts of {found.get('dataset')} ({found.get('algorithm')})"


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def check_replaceable(folder: Path) -> None:
    """Raise ``PartitionError`` unless ``folder`` is absent, empty, or holds a partition and nothing else."""
    _check_kind(folder)
    _check_only_ours(folder)


def _check_kind(folder: Path) -> None:
    if not folder.exists() and not folder.is_symlink():
        return
    if not folder.is_dir():
        raise PartitionError(f"{folder} is in the way and not a folder; move it away or choose another folder")
    if any(folder.iterdir()) and _raw_manifest(folder) is None:
        raise PartitionError(f"{folder} holds something that is not a partition; move it away or choose another folder")


def _check_only_ours(folder: Path) -> None:
    """Replacing a folder removes all that is in it; nobody else's file may go that way."""
    raw = _raw_manifest(folder)
    if raw is None:
        return
    listed = raw.get("files")
    entries = listed if isinstance(listed, list) else []
    ours = {MANIFEST, *(entry.get("path") for entry in entries if isinstance(entry, dict))}
    for name in sorted(files_below(folder, folder)):
        if name not in ours and not is_note(name):
            raise PartitionError(
                f"{folder / name} is not a file of the partition in {folder} that would be replaced; "
                "move it away or choose another folder"
            )


def files_below(folder: Path, top: Path) -> Iterator[str]:
    """Paths, relative to ``folder``, of everything under ``top`` that is not a folder; links to folders too."""
    for below, folders, files in os.walk(top):
        links = [name for name in folders if Path(below, name).is_symlink()]
        yield from (Path(below, name).relative_to(folder).as_posix() for name in (*files, *links))


def is_note(name: str) -> bool:
    """Whether a file is one of our notes, or one being written, which may lie in any partition folder."""
    last = Path(name).name
    return last.startswith(".") and last.lstrip(".").startswith(_OUR_NOTES)


def _raw_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest as it stands, of whatever version; None when there is none of ours."""
    try:
        raw = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return raw if isinstance(raw, dict) and raw.get("format") == FORMAT else None


@contextlib.contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A new folder beside ``folder`` that takes its name on success and is removed on any error.

    What a killed process left behind is removed on the way. Raises ``PartitionError``.
    """
    staging = folder.parent / f".{folder.name}.{socket.gethostname()}.{os.getpid()}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        staging.mkdir()
        yield staging
        _sync_folders(staging)
        _install(staging, folder)
    except OSError as error:
        place = error.filename or staging
        raise PartitionError(
            f"{place}: cannot write the partition: {error.strerror}; nothing was left behind"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    """Staging folders of processes of this host that are gone."""
    prefix = f".{folder.name}.{socket.gethostname()}."
    for path in folder.parent.glob(f"{_glob_escaped(prefix)}*"):
        pid = path.name.removeprefix(prefix)
        if pid.isdigit() and (int(pid) == os.getpid() or not Path(f"/proc/{pid}").exists()):
            shutil.rmtree(path)


def _glob_escaped(text: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in text)


def _sync_folders(root: Path) -> None:
    with ThreadPoolExecutor(_SYNCS) as pool:
        list(pool.map(sync_path, [path for path, _, _ in os.walk(root)]))


def _install(staging: Path, folder: Path) -> None:
    """Give ``staging`` the final name; an old partition there changes places with it, to be removed."""
    check_replaceable(folder)
    if not folder.exists() or not any(folder.iterdir()):
        staging.rename(folder)
    elif not _exchange(staging, folder):
        aside = staging.with_name(f"{staging.name}0")  # a leftover by its name, should we be killed between the two
        folder.rename(aside)
        staging.rename(folder)
        shutil.rmtree(aside)
    sync_path(folder.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; False where kernel or file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    status: int = renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    return status == 0
