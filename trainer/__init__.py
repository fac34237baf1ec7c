"""gnnfleet's distributed trainer: partitions, sampling, graph service, training.

It never imports ``launcher``; the two packages meet through command lines, environment
variables and the files described in ``docs/ARCHITECTURE.md``.

Scripts import these names, and more, from ``gnnfleet``: a file trainer.py beside a script would shadow this package.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.graph.open import Graph
    from trainer.loader.graph_saint import (
        DistGraphSAINTEdgeSampler,
        DistGraphSAINTNodeSampler,
        DistGraphSAINTRandomWalkSampler,
    )
    from trainer.loader.link_loader import DistLinkNeighborLoader
    from trainer.loader.neighbor_loader import DistNeighborLoader
    from trainer.loader.subgraph_loaders import DistClusterLoader, DistShaDowKHopSampler
    from trainer.loader.zip_loader import DistZipLoader
    from trainer.train.steplog import StepLog

__version__ = "0.1.0"

__all__ = [
    "DistClusterLoader",
    "DistGraphSAINTEdgeSampler",
    "DistGraphSAINTNodeSampler",
    "DistGraphSAINTRandomWalkSampler",
    "DistLinkNeighborLoader",
    "DistNeighborLoader",
    "DistShaDowKHopSampler",
    "DistZipLoader",
    "StepLog",
    "connect",
    "open",
]

#: So that ``import trainer`` alone does not import torch.
_LAZY = {
    "DistClusterLoader": "trainer.loader.subgraph_loaders",
    "DistGraphSAINTEdgeSampler": "trainer.loader.graph_saint",
    "DistGraphSAINTNodeSampler": "trainer.loader.graph_saint",
    "DistGraphSAINTRandomWalkSampler": "trainer.loader.graph_saint",
    "DistLinkNeighborLoader": "trainer.loader.link_loader",
    "DistNeighborLoader": "trainer.loader.neighbor_loader",
    "DistShaDowKHopSampler": "trainer.loader.subgraph_loaders",
    "DistZipLoader": "trainer.loader.zip_loader",
    "StepLog": "trainer.train.steplog",
}


def open(
    path: str | Path | None = None, part: int | Sequence[int] | None = None, *, cluster: str | Path | None = None,
    node_rank: int | None = None, key_file: str | Path | None = None, deadline: float = 120.0,
) -> Graph:  # fmt: skip
    """Open a partitioned graph for this process.

    Args:
        path: partition folder; default: that of the run which launch.py started.
        part: part id or ids to read from this folder; default: this node's in ``cluster``, or all.
        cluster: ``cluster.json`` that says where the other parts are served; default: GNNFLEET_CLUSTER.
        node_rank: this node's in ``cluster``; default: NODE_RANK or GROUP_RANK.
        key_file: of an encrypted service; default: GNNFLEET_SERVICE_KEY.
        deadline: seconds that any request may take.

    Besides loaders the graph serves what a script asks its ``data``: ``metadata()``, ``node_types``,
    ``edge_types``, ``num_nodes``, ``num_edges``, ``num_features``, ``num_classes``.

    Rank and world size are torchrun's, or those of the initialized process group. Raises
    ``SettingsError`` without a path outside a run and for a file or data in memory, ``PartitionError``
    for a folder or part that is missing or damaged, and ``ServiceError`` for a host that does not answer.
    """
    from trainer.graph.environment import open_any

    return open_any(path, part, cluster=cluster, node_rank=node_rank, key_file=key_file, deadline=deadline)


def connect(
    endpoint: str | Sequence[str] | None = None, key: str | Path | None = None, *, deadline: float = 60.0,
    name: str = "notebook",
) -> Graph:  # fmt: skip
    """Open the graph that graph servers hold, without a part of it here: for notebooks and remote inference.

    Args:
        endpoint: ``tcp://host:port`` of a server, or several; default: those that the key file names. The other
            servers of the cluster are learnt from the first one that answers.
        key: key file (``gnnfleet serve key NAME -o FILE``), mode 0600; None where the servers do not encrypt.
        deadline: seconds that any request may take, and that the servers may stay away.
        name: what ``serve status`` calls this process.

    All loaders work on it, with the same batches as anywhere; each batch is made by a server, the batches under way
    (``prefetch``) at once. Close the graph, or use it in a ``with`` statement. Rank and world size are as in ``open``.

    Raises ``SettingsError`` for what is no endpoint, and ``ServiceError`` naming the server and the cause when none
    can be reached, the key is not admitted, or what answers there is no graph server.
    """
    from trainer.graph.environment import this_process
    from trainer.graph.open import connect_servers

    return connect_servers(endpoint, key, this_process(), deadline=deadline, name=name)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        nearest = difflib.get_close_matches(name, __all__, 1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise AttributeError(f"module 'trainer' has no attribute {name!r}{hint}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
