"""Finds partition folders of torch_geometric, GLT and DGL, whose parts gnnfleet converts without partitioning again."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from launcher.files import read_text
from launcher.node.json_reader import loads
from launcher.yaml_tree import Override

_MOST_CONFIG = 1 << 26  #: maximum bytes of a partition config of DGL

_SUFFIX = "-partitions"


@dataclass(frozen=True)
class ForeignParts:
    """A partition folder of another program."""

    folder: Path
    kind: str  #: name of the program
    labelled: bool  #: whether labels and train seeds are in the folder, or beside it, as in the programs' examples

    @property
    def name(self) -> str:
        """Name of the folder without ``-partitions``, the suffix in the examples of torch_geometric and GLT."""
        return self.folder.absolute().name.removesuffix(_SUFFIX)

    @property
    def overrides(self) -> tuple[Override, ...]:
        """Config overrides that make a run convert these parts instead of partitioning the graph.

        They clear ``data.options``.
        """
        return (
            ("data.dataset", "partition"),
            ("data.source", str(self.folder)),
            ("data.options", {}),
            ("data.folder", f"parts/{self.name}"),
            ("data.partition.method", "keep"),
        )


def find_parts(path: str | Path) -> ForeignParts | None:
    """Return the partition folder at ``path``, or None if there is none.

    ``path`` is the folder, a file that describes the partition (META.json, DGL's part config), or a folder
    that contains one folder `NAME-partitions`.
    """
    given = Path(os.path.expanduser(path))
    try:
        if given.is_file():
            return _parts_in(given.parent) if given.name == "META.json" or _is_dgl(given) else None
        if not given.is_dir():
            return None
        is_graph = any(given.glob("*.np[yz]"))  # a folder with arrays of its own is dataset `file`
        below = () if is_graph else sorted(given.glob(f"*{_SUFFIX}"))
        found = [_parts_in(folder) for folder in (given, *below)]
    except (OSError, RuntimeError, ValueError):  # a name that no file can have; a home folder that does not exist
        return None
    parts = [each for each in found if each is not None]
    return parts[0] if parts and (len(parts) == 1 or parts[0].folder == given) else None


def _parts_in(folder: Path) -> ForeignParts | None:
    if (folder / "META.json").is_file():
        return ForeignParts(folder, "torch_geometric", _is_labelled(folder))
    if (folder / "META").is_file() and ((folder / "node_pb.pt").is_file() or (folder / "node_pb").is_dir()):
        return ForeignParts(folder, "GLT", _is_labelled(folder))
    if any(map(_is_dgl, folder.glob("*.json"))):
        return ForeignParts(folder, "DGL", True)
    return None


def _is_labelled(folder: Path) -> bool:
    places = [(folder, "")]
    if folder.name.endswith(_SUFFIX):
        places.append((folder.parent, folder.name.removesuffix(_SUFFIX) + "-"))
    return any(
        (place / f"{prefix}label/label.pt").is_file() and (place / f"{prefix}train{_SUFFIX}").is_dir()
        for place, prefix in places
    )


def _is_dgl(path: Path) -> bool:
    if path.suffix != ".json":
        return False
    try:
        meta = loads(read_text(path, _MOST_CONFIG))
    except (OSError, ValueError):
        return False
    return isinstance(meta, dict) and {"graph_name", "num_parts", "node_map", "edge_map"} <= meta.keys()
