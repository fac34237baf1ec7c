"""The parts of a launch: makes them if needed, and keeps others from replacing them meanwhile."""

from __future__ import annotations

import fcntl
import os
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.text import Text

from launcher.config.resolve import ResolvedConfig
from launcher.plan.partition import PartitionFiles, ensure_parts, read_partition_files


def ensure_parts_of(config: ResolvedConfig, console: Console) -> PartitionFiles | None:
    """Return the parts of a run or serving cluster. Makes them on this machine if they do not exist yet.

    With ``data.store``, also uploads parts that the store lacks. Returns None if the launching machine does not provide
    parts (mode ``verify``, ``data.serving``). Raises FleetError.
    """
    if not config.makes_parts:
        return None
    if config.data.store is None:
        return ensure_parts(config, console)
    from launcher.sync.parts_store import ensure_stored

    return ensure_stored(config, console)


def held_parts(config: ResolvedConfig, console: Console, who: str, held: ExitStack) -> PartitionFiles | None:
    """Return the parts as ``ensure_parts_of`` does. Until ``held`` is closed, no other process replaces them.

    ``who``: this launch, for processes that wait for it (trainer/partition/work_folder.py has the other end).
    """
    path = Path(config.data.folder).expanduser()
    path = path.with_name(f".{path.name}.lock")
    while True:
        parts = ensure_parts_of(config, console)
        if parts is None or config.data.store is not None:
            return parts
        try:
            lock = held.enter_context(path.open("a+"))
        except OSError:  # a folder that this user cannot write; its parts are ready
            return parts
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            maker = path.read_text()[:200]
            console.print(Text(f"{maker} makes the parts in {config.data.folder}; waiting for it"), soft_wrap=True)
            fcntl.flock(lock, fcntl.LOCK_SH)
        found = read_partition_files(Path(parts.folder))
        if path.exists() and os.path.samestat(os.fstat(lock.fileno()), path.stat()) and found == parts:
            held.callback(_let_go, path, lock)
            lock.truncate(0)
            lock.write(who)
            lock.flush()
            return parts
        lock.close()  # another process has replaced the parts meanwhile


def _let_go(path: Path, lock: IO[str]) -> None:
    with suppress(OSError):  # another launch sends these parts, too, and deletes the file later
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
