"""The partition folder as the launcher sees it: which files belong to which part."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from launcher.errors import FleetError

_FORMAT, _VERSIONS = "gnnfleet-partition", (2, 3)


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
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return parse_manifest(raw, str(folder))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        remedy = "make the parts again in another folder, or remove this one"
        raise FleetError(f"{path}: not a usable partition manifest ({error!r}); {remedy}") from error


def parse_manifest(raw: bytes, folder: str) -> PartitionFiles:
    """The files that a manifest lists, and the manifest itself."""
    manifest = json.loads(raw)
    if manifest["format"] != _FORMAT:
        raise ValueError(f"its format is {manifest['format']!r}, not {_FORMAT!r}")
    if manifest["version"] not in _VERSIONS:
        raise ValueError(f"it has format version {manifest['version']!r}, this program reads version 2 or 3")
    files = [PartFile(file["path"], file["bytes"], file["sha256"], _is_flat(file)) for file in manifest["files"]]
    files.append(PartFile("manifest.json", len(raw), hashlib.sha256(raw).hexdigest()))
    seeds = {name: int(spec.get("splits", {}).get("train", 0)) for name, spec in manifest.get("nodes", {}).items()}
    named = (manifest["dataset"], manifest["fingerprint"], manifest["num_parts"])
    return PartitionFiles(folder, *named, tuple(files), seeds)


def _is_flat(file: Mapping[str, Any]) -> bool:
    """Whether a replicated topology has it: a 1-d array of a part (docs/ARCHITECTURE.md, "Replicated topology")."""
    return file["path"].startswith("part") and len(file.get("shape", ())) == 1
