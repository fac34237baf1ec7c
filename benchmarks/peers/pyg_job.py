"""torch_geometric's ``NeighborLoader`` with torch-sparse, for `make bench-peers`. Run with the Python of ``envs.GLT``.

python pyg_job.py loader PLAIN SETTINGS
PLAIN is a folder from ``plain.py``. SETTINGS is JSON: fanouts, batch, warm, epochs, workers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from epochs import timed_epochs
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader

Settings = dict[str, Any]


def loader(plain: Path, settings: Settings) -> Settings:
    edges, x, y, train = (
        torch.from_numpy(np.load(plain / f"{name}.npy")) for name in ("edge_index", "x", "y", "train")
    )
    data = Data(x=x, y=y, edge_index=edges.long())
    workers = {"num_workers": settings["workers"], "persistent_workers": True} if settings["workers"] else {}
    loading = NeighborLoader(data, settings["fanouts"], train, batch_size=settings["batch"], shuffle=True, **workers)

    def look(batch: Data) -> tuple[torch.Tensor, int, int]:
        return batch.n_id[: batch.batch_size], batch.edge_index.shape[1], len(batch.x)

    return timed_epochs(loading, look, train, settings["warm"], settings["epochs"])


if __name__ == "__main__":
    result = globals()[sys.argv[1]](Path(sys.argv[2]), json.loads(sys.argv[3]))
    print(json.dumps(result), flush=True)
