"""The ``data`` and ``train`` sections for a graph: what its files and its name tell of it."""

from __future__ import annotations

import pickletools
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_HETERO_NAMES = ("synthetic-hetero", "ogbn-mag", "OGB_MAG", "DBLP", "IMDB", "AMiner")

_READ = 16 << 20  #: bytes of a pickle that are looked through; tensors lie outside of it


@dataclass(frozen=True)
class GraphDraft:
    """What is written of a graph; ``about`` are remarks on its keys."""

    dataset: str
    source: str | None = None
    hetero: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    about: str = ""

    @property
    def short_name(self) -> str:
        """For the folder of its parts."""
        name = Path(self.source).stem if self.source else self.dataset
        return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.").lower() or "graph"


def graph_of(dataset: str, source: str | None) -> GraphDraft:
    """Looks into ``source`` as far as that is quick; nothing is unpickled."""
    if dataset == "synthetic":
        about = "made on the spot; else `file`, ogbn-products, Planetoid:Cora …"
        return GraphDraft(dataset, source, options={"num_nodes": 100_000, "avg_degree": 15}, about=about)
    if dataset == "file" and source:
        path = Path(source).expanduser()
        hetero = _typed_names(path) if path.is_dir() else _pickled_hetero(path)
        return GraphDraft(dataset, source, hetero, about="your own arrays, or a Data or HeteroData (docs/data.md)")
    return GraphDraft(dataset, source, dataset.rpartition(":")[2] in _HETERO_NAMES)


def _typed_names(folder: Path) -> bool:
    """Files such as paper__cites__paper.npy, and no plain edge_index: how the trainer reads a folder, too."""
    names = {path.stem for path in folder.iterdir()}
    return "edge_index" not in names and any(re.fullmatch(r"[^_].*?__.+?__.+", name) for name in names)


def _pickled_hetero(path: Path) -> bool:
    """Whether a .pt holds a HeteroData, or its to_dict(): by the names in its pickle."""
    try:
        with zipfile.ZipFile(path) as archive:
            pickled = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            with archive.open(pickled) as file:
                words = [str(word) for _, word, _ in pickletools.genops(file.read(_READ)) if isinstance(word, str)]
    except (OSError, ValueError, StopIteration, zipfile.BadZipFile):
        return False  # the trainer says what is wrong with it
    return "_global_store" in words or any(word.endswith(" HeteroData") for word in words)
