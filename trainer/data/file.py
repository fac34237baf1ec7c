"""Graphs in files: a folder of .npy/.npz, one .npz, or a PyG ``Data`` saved as .pt.

Names: ``edge_index`` [2, E]; ``x`` [N, F]; ``y`` [N]; ``train_idx``/``val_idx``/``test_idx`` (ids) or
``train_mask``/… (booleans); any other array of N rows is kept as a node attribute of its name.
Number of nodes: option ``num_nodes``, else rows of ``x``, else rows of ``y``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trainer.arrays import Array
from trainer.data.build import RawGraph
from trainer.errors import DataError

_EXPECTED = "a folder of .npy/.npz files, an .npz file or a .pt file"


def source_files(source: str | None) -> list[Path]:
    """Files that dataset `file` reads, sorted. Raises ``DataError`` when there are none."""
    if not source:
        raise DataError("dataset file: no source; give the folder of .npy/.npz files, or the .pt file")
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.suffix in (".npy", ".npz") and p.is_file())
        if not files:
            raise DataError(f"{path}: no .npy or .npz file; expected at least edge_index.npy and x.npy or y.npy")
        return files
    if not path.exists():
        raise DataError(f"{path} does not exist; expected {_EXPECTED}")
    if path.suffix not in (".npz", ".pt"):
        raise DataError(f"{path}: unknown kind of file; expected {_EXPECTED}")
    return [path]


def read_files(source: str | None) -> RawGraph:
    """Arrays of a folder, .npz or .pt; .npy files are memory-mapped, not read."""
    files = source_files(source)
    if files[0].suffix == ".pt":
        from trainer.data.pyg import read_pt  # torch is heavy, and only .pt files need it

        return read_pt(files[0])
    arrays: dict[str, Array] = {}
    places: dict[str, str] = {}
    for path in files:
        for name, values in _read(path).items():
            place = str(path) if path.suffix == ".npy" else f"{path} [{name}]"
            if name in arrays:
                raise DataError(f"{place}: {name} is also in {places[name]}; remove one")
            arrays[name], places[name] = values, place
    return RawGraph(Path(str(source)).expanduser().resolve().stem, arrays, places)


def _read(path: Path) -> dict[str, Array]:
    try:
        loaded = np.load(path, mmap_mode="r", allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return {path.stem: loaded.view(np.ndarray)}
        with loaded:
            return {name: loaded[name] for name in loaded.files}
    except (OSError, ValueError, EOFError) as error:
        objects = (
            "; it holds Python objects: save plain numeric arrays"
            if "allow_pickle" in str(error) or "Python objects" in str(error)
            else ""
        )
        raise DataError(f"{path} cannot be read as a numpy array{objects or f': {error}'}") from error
