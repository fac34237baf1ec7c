"""Writes folders of .npy arrays, which the dataset `file` reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def save_arrays(folder: Path, **arrays: np.ndarray | None) -> str:
    """Write one .npy file per array that is not None. Return the folder, as the dataset option ``source``."""
    folder.mkdir(exist_ok=True, parents=True)
    for name, values in arrays.items():
        if values is not None:
            np.save(folder / f"{name}.npy", values)
    return str(folder)
