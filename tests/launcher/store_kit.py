"""Test kit for ``data.store``: partition folders in a folder that serves as a store, and stores with faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launcher.node.remote_folder import RemoteFolder, StoreError
from launcher.node.store.fetch import StoredFile, fetch
from launcher.node.store.progress_lines import ProgressLines
from launcher.plan.partition import PartitionFiles, read_partition_files
from run_kit import make_parts

X0 = "part0/nodes/node/attrs/x.npy"


class RecordedLines(ProgressLines):
    """Keeps the lines instead of printing them."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, Any]] = []

    def _print(self, kind: str, **more: Any) -> None:
        self.lines.append({"kind": kind, **more})


class FaultyStore(RemoteFolder):
    """A store on this machine that records all reads. The next ``cuts`` reads fail."""

    def __init__(self, folder: Path, cuts: int = 0):
        super().__init__(f"file://{folder}", {})
        self.cuts = cuts
        self.reads: list[tuple[str, int, int]] = []

    def read(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        self.reads.append((path, start or 0, end or 0))
        if self.cuts:
            self.cuts -= 1
            raise StoreError(f"{self.url}/{path} cannot be read (ConnectionError)", retry=True)
        return super().read(path, start, end)


def parts_in(folder: Path, size: int = 50_000) -> PartitionFiles:
    """Create a partition folder with two parts. Their files have about ``size`` bytes each."""
    found = read_partition_files(make_parts(folder, 2, size))
    assert found is not None
    return found


def wanted(parts: PartitionFiles, part: int) -> list[StoredFile]:
    return [StoredFile(file.path, file.bytes, file.sha256) for file in parts.of_parts([part])]


def fetch_into(folder: Path, store: RemoteFolder, files: list[StoredFile]) -> RecordedLines:
    lines = RecordedLines()
    fetch(store, str(folder), files, lines)
    return lines


def flip_byte(path: Path, place: int = 1000) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def visible_files(folder: Path) -> set[str]:
    """Return the relative paths of the files in a folder, without gnnfleet's hidden ones."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return {path for path in found if not Path(path).name.startswith(".")}


def note_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / ".gnnfleet-store.json").read_text()))
